"""There is no moment without a reason: after every step of a node in every kind of trouble, the status is there and true."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from inference.schedule import get_open_rounds
from inference.status import REJECTIONS_MAX, STATES, Condition, StatusFile, read_status
from protocol.errors import Fault, Reason, Reject
from protocol.ledger import calls, events
from protocol.rounds import get_end_round, get_members, get_round_beacon, get_times
from tests.support.node_kit import Node, run
from tests.support.scenario import Scenario, make_account, make_model, make_spec


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("models") / "base", 0)


@pytest.fixture
def world(tmp_path, base):
    return Scenario(tmp_path, make_spec(base), base)


def check(node):
    """What the status says, against what the replica says; an independent reading of both."""
    status, state = node.status, node.ledger.state
    kind, said = status["state"], status["round"]
    assert kind in STATES
    assert len(status["reason"]) > 5, status
    assert len(status["ends"]) > 5, status
    task = state.tasks.get(node.world.task_id)
    if task is None:
        assert kind == "waiting_task"
        return
    assert kind != "waiting_task"
    assert status["block"] == state.block_number
    account, block = node.ledger.account, state.block_number
    open_rounds = get_open_rounds(task, block)
    if kind == "committed":
        mine = task.commitments.get(said, {}).get(account)
        assert said in open_rounds
        assert mine is not None or node.ledger.outcome(f"commit/{task.task.hex()}/{said}").status == "pending"
    elif kind == "waiting_registration":
        assert account not in task.members
        joined = node.ledger.outcome(f"join/{task.task.hex()}").status
        assert ("joining" in status["reason"]) == (joined == "pending")
    elif kind == "fetching":
        assert said in open_rounds
        assert get_round_beacon(state, task, said) is not None
        assert said not in task.commitments or account not in task.commitments[said]
    elif kind == "idle":
        if said >= 0:
            assert said == open_rounds.stop - 1
            assert account not in task.commitments.get(said, {})
        else:
            over = block > get_times(task, get_end_round(task) - 1).commit_deadline
            outside = account not in get_members(state, task, max(open_rounds.stop - 1, 0))
            assert over or outside or not open_rounds, status
        if "no recorded beacon" in status["reason"]:
            assert get_round_beacon(state, task, said) is None
    elif kind == "working":
        assert said in open_rounds
        assert account not in task.commitments.get(said, {})


TROUBLES = ("policy", "relay", "beacon", "grader", "relay says no", "engine", "unstaked", "twin")


class Troubled:
    """A world whose parts break and mend by a schedule."""

    def __init__(self, world, base):
        self.world, self.broken = world, set()
        self.reward = world.environment.reward
        self.environment = world.environment

    def set(self, trouble, broken):
        (self.broken.add if broken else self.broken.discard)(trouble)
        world = self.world
        world.policies.missing = {0} if "policy" in self.broken else set()
        world.blobs.down = "relay" in self.broken
        world.blobs.refuse = self.refuse if "relay says no" in self.broken else None
        world.chain.auto_beacons = "beacon" not in self.broken
        if trouble == "unstaked" and broken and make_account("node") in world.chain.state.participants:
            world.chain.emit(events.StakeChanged(make_account("node"), 0, 10**9))
        if trouble == "twin" and broken:
            self.commit_elsewhere()

    def refuse(self, key, data):
        raise Reject(Reason.LATE, "bundle came after its deadline", observed="block 9", limit="block 8")

    def commit_elsewhere(self):
        """Another machine with the node's keys puts a root on the ledger."""
        task, chain = self.world.task, self.world.chain
        for index in get_open_rounds(task, chain.block_number):
            if make_account("node") not in task.commitments.get(index, {}):
                call = calls.CommitRoot(task.task, index, bytes([7]) * 32, 1, task.spec.base_policy)
                chain.mempool.insert(0, (make_account("node"), call, lambda *_: None))


class FragileEnvironment:
    def __init__(self, inner, troubled):
        self.inner, self.troubled = inner, troubled
        self.num_prompts, self.vocab_size, self.prompt = inner.num_prompts, inner.vocab_size, inner.prompt
        self.respond = inner.respond

    def reward(self, index, completion):
        if "grader" in self.troubled.broken:
            raise Fault("the grader is not reachable")
        return self.inner.reward(index, completion)


class FragileEngine:
    def __init__(self, troubled):
        from inference.engine import TorchEngine

        self.inner, self.troubled = TorchEngine(), troubled

    def load(self, folder):
        self.inner.load(folder)

    def generate(self, requests, **options):
        if "engine" in self.troubled.broken:
            raise Fault("the device went away")
        return self.inner.generate(requests, **options)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32))
def test_after_every_step_in_any_trouble_the_status_is_true(tmp_path_factory, base, seed):
    rng = random.Random(seed)
    world = Scenario(tmp_path_factory.mktemp("world"), make_spec(base, groups_per_round=2, slots_max=2), base)
    troubled = Troubled(world, base)
    options = {"environment": FragileEnvironment(world.environment, troubled), "engine": FragileEngine(troubled)}

    async def scenario():
        node = Node(world, after=check, **options)
        for _ in range(45):
            if rng.random() < 0.25:
                trouble = rng.choice(TROUBLES)
                troubled.set(trouble, trouble not in troubled.broken)
            if rng.random() < 0.05:
                node = Node(world, after=check, **options)
            await node.step()
            world.chain.advance(rng.choice((1, 1, 1, 2)))

    run(scenario())


def test_a_whole_quiet_task_is_told_from_beginning_to_end(world):
    async def scenario():
        node = Node(world, after=check)
        await node.run_until(get_times(world.task, get_end_round(world.task) - 1).commit_deadline + 1)
        states = [condition.state for condition in node.conditions]
        assert {"waiting_registration", "idle", "working", "committed"} <= set(states)
        assert "last round" in node.status["reason"]
        assert node.status["tokens_per_s"] > 0

    run(scenario(), 120)


def test_a_reason_from_outside_holds_work_and_is_shown(world):
    async def scenario():
        lag = ["the ledger node is behind: its newest block 9 is 300 s old, limit 60 s"]
        node = Node(world, hold=lambda: lag[0], after=check)
        await node.run_until(get_times(world.task, 0).start + 2)
        assert (node.status["state"], node.status["reason"]) == ("idle", lag[0])
        assert world.task.commitments == {}
        lag[0] = ""
        await node.run_until(get_times(world.task, 0).start + 5)
        assert node.status["state"] == "committed"

    run(scenario())


def test_rejections_outlive_a_restart_and_are_bounded(tmp_path):
    path = tmp_path / "status.json"
    status = StatusFile(path, wall=lambda: 5.0)
    for number in range(REJECTIONS_MAX + 3):
        status.add_rejection({"round": number, "text": "replay"})
    again = StatusFile(path)
    again.set(Condition("idle", "nothing to do", "something comes"))
    rounds = [row["round"] for row in read_status(path)["rejections"]]
    assert rounds == list(range(3, REJECTIONS_MAX + 3))


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version": 1}', '{"version": 1, "state": "asleep"}', "null"])
def test_a_damaged_status_file_is_said_and_does_not_stop_a_node(tmp_path, text):
    path = tmp_path / "status.json"
    path.write_text(text)
    with pytest.raises(Fault, match="status"):
        read_status(path)
    StatusFile(path)
    assert read_status(path)["state"] == "starting"


def test_since_is_when_the_state_began(tmp_path):
    now = [100.0]
    status = StatusFile(tmp_path / "status.json", wall=lambda: now[0])
    status.set(Condition("working", "0 of 8 groups made", "the round is made", 3))
    now[0] = 110.0
    status.set(Condition("working", "4 of 8 groups made", "the round is made", 3))
    table = json.loads((tmp_path / "status.json").read_text())
    assert (table["since"], table["reason"]) == (100.0, "4 of 8 groups made")


def test_a_full_disk_does_not_stop_a_node(tmp_path, monkeypatch):
    status = StatusFile(tmp_path / "status.json")

    def full(self, *args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    status.set(Condition("idle", "nothing to do", "something comes"))
    assert "No space left" in status.error
