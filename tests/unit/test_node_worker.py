"""The node against an in-memory ledger, relay and policy store: a round end to end, restarts, and what it refuses to do."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import pathlib

import pytest

from inference.engine import TorchEngine
from inference.reports import describe_finding
from inference.worker import NodeWorker
from protocol.checks import get_assignment, open_bundle, validate_groups, validate_quota
from protocol.codec import PROTOCOL_VERSION, decode
from protocol.errors import ConfigError, Fault, Reason, Reject
from protocol.ledger import calls, events
from protocol.messages import (
    Bundle,
    Finding,
    Report,
    Signed,
    compute_bundle_key,
    compute_bundle_root,
    compute_report_key,
    make_domain,
    seal,
)
from protocol.rounds import get_committee, get_times
from protocol.verdict import Row, Status, compute_verdict_commitment, pack_rows
from tests.support.scenario import Scenario, make_account, make_key, make_model, make_spec
from troth.explain import parse_rollout


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("models") / "base", 0)


@pytest.fixture
def world(tmp_path, base):
    return Scenario(tmp_path, make_spec(base), base)


class Node:
    """A node worker, its events, and a loop that mines a block per step."""

    def __init__(self, world, name="node", kind=NodeWorker, directory=None, environment=None):
        self.world, self.seen = world, []
        self.ledger = world.register(name, events.Role.NODE)
        self.worker = kind(
            ledger=self.ledger,
            task=world.task_id,
            environment=environment or world.environment,
            engine=TorchEngine(),
            policies=world.policies,
            blobs=world.blobs,
            key=make_key(name),
            directory=directory or world.directory / name,
            events=lambda event, fields: self.seen.append((event, fields)),
        )

    async def step(self):
        await self.ledger.poll()
        await self.worker.step()
        await asyncio.sleep(0)

    async def run_until(self, block):
        while self.world.chain.block_number < block:
            await self.step()
            self.world.chain.advance()
        await self.step()
        await self.step()

    def texts(self, kind):
        return [fields for event, fields in self.seen if event == kind]


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 60))


def test_a_round_from_joining_to_a_bundle_that_passes_every_check(world):
    node = Node(world)
    times = get_times(world.task, 0)
    run(node.run_until(times.start + 4))
    commitment = world.task.commitments[0][node.ledger.account]
    state = node.ledger.state
    task = state.tasks[world.task_id]
    assignment = get_assignment(
        state, task, 0, node.ledger.account, chain_id=world.chain.chain_id, ledger=world.chain.address
    )
    data = world.blobs.blobs[compute_bundle_key(world.task_id, 0, node.ledger.account)]
    bundle = open_bundle(world.spec, assignment, commitment, data, make_key("node").public)
    validate_quota(assignment, bundle)
    validate_groups(world.spec, world.environment, assignment, bundle, 64)
    assert len(bundle.groups) == world.spec.groups_per_round
    [made] = node.texts("round_made")
    assert made["rollouts"] == 32
    assert made["cpu_generation"] > 0
    assert made["cpu_commitment"] > 0


def test_uploads_only_after_the_root_is_on_the_ledger(world):
    node = Node(world)

    def refuse(key, data):
        assert node.ledger.account in world.task.commitments.get(0, {})

    world.blobs.refuse = refuse
    run(node.run_until(get_times(world.task, 0).start + 4))
    assert len(node.texts("uploaded")) == 1


def test_restart_at_every_step_makes_one_root_and_uploads_its_bytes(world):
    async def scenario():
        roots = set()
        while world.chain.block_number < get_times(world.task, 0).commit_deadline:
            node = Node(world)  # a new process at every block: memory is lost, directory and outbox are not
            await node.step()
            await node.step()
            roots |= {c.root for c in world.task.commitments.get(0, {}).values()}
            world.chain.advance()
        await node.step()
        commits = [call for _, call in node.ledger.submitted if isinstance(call, calls.CommitRoot) and call.round == 0]
        assert commits == []
        assert len(roots) == 1
        assert compute_bundle_key(world.task_id, 0, node.ledger.account) in world.blobs.blobs

    run(scenario())


def test_a_crash_between_disk_and_ledger_is_finished_by_the_next_start(world, monkeypatch):
    async def scenario():
        node = Node(world)

        async def crash(task, record):
            raise KeyboardInterrupt

        monkeypatch.setattr(node.worker._delivery, "commit", crash)
        with pytest.raises(KeyboardInterrupt):
            await node.run_until(get_times(world.task, 0).commit_deadline)
        [path] = (world.directory / "node").glob("*/0.bundle")
        data = path.read_bytes()
        again = Node(world)
        await again.run_until(world.chain.block_number + 3)
        assert world.blobs.blobs[compute_bundle_key(world.task_id, 0, node.ledger.account)] == data
        assert again.texts("round_made") == [] or again.texts("round_made")[0]["round"] != 0

    run(scenario())


class Killed(BaseException):
    """Stands for SIGKILL: nothing in the code under test may catch it."""


@pytest.mark.parametrize("boundary", range(1, 7))
def test_a_crash_at_any_disk_boundary_loses_nothing_and_makes_one_root(world, monkeypatch, boundary):
    """The journal's first save has three boundaries, each bundle has three: fsync, rename, fsync of the folder."""
    calls_made = []

    def dying(original):
        def call(*arguments):
            calls_made.append(original)
            if len(calls_made) == boundary:
                raise Killed
            return original(*arguments)

        return call

    async def scenario():
        node = Node(world)
        with monkeypatch.context() as patch:
            patch.setattr("inference.journal.os.fsync", dying(os.fsync))
            patch.setattr(pathlib.Path, "replace", dying(pathlib.Path.replace))
            with pytest.raises(Killed):
                await node.run_until(get_times(world.task, 1).start)
        again = Node(world)
        await again.run_until(get_times(world.task, 1).start + 4)
        account = node.ledger.account
        assert sorted(world.task.commitments) == [0, 1]
        for index in range(2):
            data = world.blobs.blobs[compute_bundle_key(world.task_id, index, account)]
            bundle = decode(Bundle, decode(Signed, data, bytes_max=1 << 20).body, bytes_max=1 << 20)
            assert compute_bundle_root(bundle) == world.task.commitments[index][account].root
        assert not any(s.status == "reverted" for s in again.ledger.intents.values())

    run(scenario())


def test_a_new_directory_of_a_known_account_waits_one_round(world):
    async def scenario():
        await Node(world).run_until(get_times(world.task, 0).commit_deadline - 1)
        assert list(world.task.commitments) == [0]
        twin = Node(world, directory=world.directory / "elsewhere")  # a restored machine, or a second one
        world.chain.advance()
        await twin.run_until(get_times(world.task, 3).start + 4)
        assert [f["round"] for f in twin.texts("round_made")] == [3]  # round 2, the first it saw begin, was watched
        assert sorted(world.task.commitments) == [0, 3]
        assert any("new directory" in f["reason"] for f in twin.texts("idle"))
        again = Node(world, directory=world.directory / "elsewhere")  # by now it is known: no more waiting
        await again.run_until(get_times(world.task, 4).start + 4)
        assert [f["round"] for f in again.texts("round_made")] == [4]

    run(scenario())


def test_another_machine_with_the_same_keys_is_noticed(world):
    async def scenario():
        node = Node(world)
        times = get_times(world.task, 0)
        await node.run_until(times.start)
        world.chain.advance()
        await node.step()
        call = calls.CommitRoot(world.task_id, 0, b"\7" * 32, 8, world.spec.base_policy)
        world.chain.mempool.insert(0, (node.ledger.account, call, lambda *_: None))
        await node.run_until(times.start + 4)
        [told] = [f for f in node.texts("other_root") if f["round"] == 0]
        assert "another machine" in told["text"]
        assert compute_bundle_key(world.task_id, 0, node.ledger.account) not in world.blobs.blobs

    run(scenario())


def test_lacking_the_policy_skips_the_round_and_says_so(world):
    node = Node(world)
    world.policies.missing = {0}
    run(node.run_until(get_times(world.task, 0).commit_deadline + 1))
    assert world.task.commitments == {}
    [idle] = [f for f in node.texts("idle") if f["round"] == 0]
    assert "policy version 0: no peer has policy 0" in idle["reason"]
    assert "was not here by block" in idle["reason"]
    assert len(node.texts("policy_missing")) == 1


def test_a_policy_that_arrives_late_is_used(world):
    node = Node(world)

    async def scenario():
        world.policies.missing = {0}
        await node.run_until(get_times(world.task, 0).start + 3)
        world.policies.missing = set()
        await node.run_until(get_times(world.task, 0).commit_deadline)

    run(scenario())
    assert list(world.task.commitments[0]) == [node.ledger.account]


def test_every_round_uses_the_ledgers_policy(world, tmp_path):
    async def scenario():
        node = Node(world)
        await node.run_until(get_times(world.task, 1).start - 3)
        world.record_policy(1, make_model(tmp_path / "v1", 1))
        await node.run_until(get_times(world.task, 1).start + 4)
        policies = [world.task.commitments[r][node.ledger.account].policy for r in (0, 1)]
        assert policies == [world.task.policies[0].policy, world.task.policies[1].policy]
        assert [f["version"] for f in node.texts("round_made")] == [0, 1]

    run(scenario())


def test_no_beacon_means_no_work(world):
    node = Node(world)
    world.chain.auto_beacons = False
    run(node.run_until(get_times(world.task, 0).commit_deadline + 1))
    assert world.task.commitments == {}
    assert any("no recorded beacon" in f["reason"] for f in node.texts("idle"))


def test_an_unregistered_account_does_not_join_and_says_why(world):
    node = Node(world)
    world.chain.state.participants.clear()
    world.chain.logs[:] = [log for log in world.chain.logs if not isinstance(log.event, events.ParticipantRegistered)]
    run(node.run_until(get_times(world.task, 0).start + 1))
    assert world.task.members == {}
    assert "register" in node.texts("idle")[0]["reason"]


class LyingEnvironment:
    """Gives rewards that nobody may claim."""

    def __init__(self, inner):
        self.inner, self.num_prompts, self.vocab_size, self.prompt = (
            inner,
            inner.num_prompts,
            inner.vocab_size,
            inner.prompt,
        )
        self.calls = 0
        self.respond = inner.respond

    def reward(self, index, completion):
        self.calls += 1
        return self.inner.reward(index, completion) if self.calls > 32 else 500_000


def test_work_that_breaks_a_rule_is_never_committed(world):
    node = Node(world, environment=LyingEnvironment(world.environment))
    run(node.run_until(get_times(world.task, 0).start + 4))
    assert world.task.commitments == {}
    assert any("own check refused" in f["reason"] and "reward" in f["reason"] for f in node.texts("idle"))


class FailingEnvironment(LyingEnvironment):
    def reward(self, index, completion):
        raise Fault("the grader is not reachable")


def test_an_infrastructure_error_is_no_reward_and_no_root(world):
    node = Node(world, environment=FailingEnvironment(world.environment))
    run(node.run_until(get_times(world.task, 0).start + 5))
    assert world.task.commitments == {}
    assert [f["text"] for f in node.texts("fault")] == ["the grader is not reachable"] * 2


def test_a_relays_refusal_is_told_with_its_reason(world):
    node = Node(world)

    def refuse(key, data):
        raise Reject(Reason.LATE, "bundle came after its deadline", observed="block 9", limit="block 8")

    world.blobs.refuse = refuse
    run(node.run_until(get_times(world.task, 0).receipt_deadline + 1))
    texts = [f["text"] for f in node.texts("upload_refused") if f["round"] == 0]
    assert texts == ["late: bundle came after its deadline; observed block 9; limit block 8"]


def test_an_upload_is_repeated_until_a_relay_answers(world):
    async def scenario():
        node = Node(world)
        world.blobs.down = True
        await node.run_until(get_times(world.task, 0).commit_deadline)
        assert node.texts("upload_failed")[0]["text"] == "no relay answers"
        world.blobs.down = False
        await node.run_until(get_times(world.task, 0).commit_deadline + 1)
        assert compute_bundle_key(world.task_id, 0, node.ledger.account) in world.blobs.blobs

    run(scenario())


FINDING = "replay: slot 3 sample 1 position 2; observed gap 4.2; limit 0.001; sample as assigned"


def _judge(world, node, status, reason, evidence=0):
    """Have three verifiers agree on the node's row of round 0 and publish a report about it, unless it is good."""
    times = get_times(world.task, 0)
    row = Row(node.ledger.account, status, reason, 8, 100, 1, evidence)
    names = {make_account(name): name for name in ("v0", "v1", "v2")}
    finding = Finding(node.ledger.account, reason, FINDING, (3, 1, 2))

    async def judge():
        while world.chain.block_number < times.verdict_commit_deadline:
            await node.step()
            world.chain.advance()
        assert set(get_committee(world.chain.state, world.task, 0)) == set(names)
        for account, name in names.items():
            domain = make_domain(world.chain.chain_id, world.chain.address, world.task_id, Report)
            report = Report(PROTOCOL_VERSION, world.task_id, 0, account, (finding,) if reason else ())
            data = seal(make_key(name), domain, report)
            digest, salt, rows = hashlib.sha256(data).digest(), bytes(32), pack_rows([row])
            commitment = compute_verdict_commitment(
                task=world.task_id, round_index=0, verifier=account, rows=rows, report=digest, salt=salt
            )
            world.chain.emit(events.VerdictCommitted(world.task_id, 0, account, commitment))
            world.chain.emit(events.VerdictRevealed(world.task_id, 0, account, rows, digest))
            world.blobs.blobs[compute_report_key(world.task_id, 0, account)] = data
        await node.run_until(times.opening_deadline + 1)

    return judge()


async def _receipted(world, node):
    for name in ("v0", "v1", "v2"):
        world.register(name, events.Role.VERIFIER)
    world.register("relay", events.Role.RELAY)
    await node.run_until(get_times(world.task, 0).start + 3)
    error = world.call("relay", calls.ReceiptBundles(world.task_id, 0, (node.ledger.account,)))
    assert error == ""


def test_reads_why_a_round_was_refused(world):
    async def scenario():
        node = Node(world)
        await _receipted(world, node)
        await _judge(world, node, Status.CHEAT, int(Reason.REPLAY))
        [verdict] = node.texts("verdict")
        assert (verdict["status"], verdict["pay"]) == ("cheat", 0)
        [why] = node.texts("rejected")
        assert why["text"] == "replay: slot 3 sample 1 position 2; observed gap 4.2; limit 0.001; sample as assigned"
        assert (why["reason"], why["observed"], why["limit"]) == ("replay", "gap 4.2", "0.001")
        assert why["where"] == [3, 1, 2]
        account = "0x" + node.ledger.account.hex()
        assert why["reproduce"] == f"troth explain {world.task_id.hex()[:12]}/0/{account}/3/1"
        assert parse_rollout(why["reproduce"].split()[-1])[1][2:] == (3, 1)
        [kept] = json.loads((world.directory / "node" / "status.json").read_text())["rejections"]
        assert (kept["round"], kept["reproduce"]) == (0, why["reproduce"])

    run(scenario())


def test_sees_its_evidence_and_reads_the_alarm_although_every_verifier_said_good(world):
    async def scenario():
        node = Node(world)
        await _receipted(world, node)
        await _judge(world, node, Status.GOOD, 0, evidence=20 * 256)
        [verdict] = node.texts("verdict")
        assert (verdict["status"], verdict["pay"], verdict["reason"]) == ("cheat", 0, Reason.EVIDENCE)
        [why] = node.texts("rejected")
        assert (why["reason"], why["limit"]) == ("evidence", "below 6.0")
        assert why["observed"] == "log10 of R is 8.385"  # exp(20) / 2
        assert "nats added by round: 0 +20.000" in why["text"]
        assert parse_rollout(why["reproduce"].split()[-1])[1][0] == 0
        shown = json.loads((world.directory / "node" / "status.json").read_text())
        assert shown["evidence"] == {"log10": 8.385, "alarm_log10": 6.0, "rounds": 1, "nats_by_round": {"0": 20.0}}
        assert [row["reason"] for row in shown["rejections"]] == ["evidence"]

    run(scenario())


@pytest.mark.parametrize(
    ("text", "observed", "limit"),
    [
        (str(Reject(Reason.REWARD, "claimed reward", observed=5, limit=0, todo="do better")), "5", "0"),
        (str(Reject(Reason.NEAR_TIES, "too many", observed=9)), "9", ""),
        (str(Reject(Reason.LATE, "too late")), "", ""),
        ("a stranger's text; observed ; limit", "", ""),
        ("; limit x; observed y" * 500, "y", "x"),
    ],
)
def test_numbers_are_read_out_of_a_finding(text, observed, limit):
    found = describe_finding(bytes(32), 7, Finding(bytes(20), 14, text, (1,)))
    assert (found["observed"], found["limit"].split(";")[0]) == (observed, limit)
    assert found["reproduce"].endswith("/7/0x" + "00" * 20 + "/1/0")
    assert len(found["text"]) <= 2000
    assert describe_finding(bytes(32), 7, Finding(bytes(20), 999, "x", ()))["reason"] == "999"
    hostile = describe_finding(bytes(32), 7, Finding(bytes(20), 14, "\x1b]0;x\x07ä; observed \x1b[2J; limit 1\n", ()))
    assert (hostile["text"], hostile["observed"]) == ("?]0;x?ä; observed ?[2J; limit 1?", "?[2J")


def _flip(world, key, data):
    return data[:-1] + bytes([data[-1] ^ 1])


def _say_something_else(world, key, data):
    """A relay and a verifier together replace a report by another signed one."""
    for name in ("v0", "v1", "v2"):
        account = make_account(name)
        if key == compute_report_key(world.task_id, 0, account):
            domain = make_domain(world.chain.chain_id, world.chain.address, world.task_id, Report)
            return seal(make_key(name), domain, Report(PROTOCOL_VERSION, world.task_id, 0, account, ()))
    return data


@pytest.mark.parametrize("forge", [_flip, _say_something_else])
def test_a_forged_report_is_not_believed(world, forge):
    async def scenario():
        node = Node(world)
        await _receipted(world, node)
        original = world.blobs.get

        async def forged(key):
            return forge(world, key, await original(key))

        world.blobs.get = forged
        await _judge(world, node, Status.UNPAID, int(Reason.REPLAY))
        assert node.texts("rejected") == []
        assert len(node.texts("report_missing")) == 3

    run(scenario())


def test_bundles_are_deleted_when_their_settlement_is_final(world):
    async def scenario():
        node = Node(world)
        await _receipted(world, node)
        await _judge(world, node, Status.GOOD, 0)
        [verdict] = node.texts("verdict")
        assert verdict["pay"] == 8 * world.spec.group_size * 1000 + 100 * 100
        [path] = (world.directory / "node").glob("*/0.bundle")
        totals = (bytes(32), 1, 0)
        world.chain.emit(events.SettlementPending(world.task_id, 0, *totals, (), world.chain.block_number))
        world.chain.emit(events.SettlementFinal(world.task_id, 0, *totals))
        await node.step()
        assert not path.exists()

    run(scenario())


def test_a_directory_of_another_node_is_refused(world):
    async def scenario():
        await Node(world).step()
        with pytest.raises(ConfigError, match="belongs to another node"):
            await Node(world, name="other", directory=world.directory / "node").step()

    run(scenario())


def test_a_slow_node_skips_rounds_it_cannot_commit_in_time(world):
    node = Node(world)
    make = node.worker._make_groups

    def slow(spec, assignment, slots):
        world.chain.advance(world.spec.schedule.commit_blocks)
        return make(spec, assignment, slots)

    node.worker._make_groups = slow
    run(node.run_until(get_times(world.task, 2).start))
    assert 0 not in world.task.commitments
    reverted = [s for s in node.ledger.intents.values() if s.status == "reverted"]
    assert all("CommitTooLate" in s.error for s in reverted)
    assert any("no time left" in f["reason"] for f in node.texts("idle")) or node.texts("commit_refused")
