"""A round in chunks: what is resumed, what never is, which policy makes it, and when a node does not even begin."""

from __future__ import annotations

import asyncio
import shutil
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference.engine import TorchEngine
from inference.journal import Journal
from inference.making import Maker
from inference.pace import Pace
from inference.parts import Part, Parts, compute_binding
from inference.rollouts import Made
from protocol.checks import Assignment
from protocol.codec import decode
from protocol.errors import Fault
from protocol.ledger import calls
from protocol.ledger.events import BeaconRecorded, Logged
from protocol.messages import Bundle, Group, Sample, Signed, compute_bundle_key
from protocol.rounds import get_times
from tests.support.node_kit import Node, run
from tests.support.scenario import Scenario, make_model, make_spec
from tests.support.twins import hash_policy

ASSIGNMENT = Assignment(1, bytes(20), bytes(32), 4, bytes(20), b"b" * 32, b"p" * 32, 2, 6)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("models") / "base", 0)


@pytest.fixture
def world(tmp_path, base):
    return Scenario(tmp_path, make_spec(base), base)


def make_group(slot):
    return Group(slot, slot + 10, (Sample((3, 1), 0, (b"proof",)), Sample((1,), 5, (b"other",))))


def test_parts_come_back_for_their_own_round_only(tmp_path):
    parts = Parts(tmp_path)
    parts.add(ASSIGNMENT, "torch", (make_group(0), make_group(1)), 64)
    parts.add(ASSIGNMENT, "torch", (make_group(3),), 64)
    assert parts.read(ASSIGNMENT, "torch") == ({slot: make_group(slot) for slot in (0, 1, 3)}, 64)
    assert parts.read(ASSIGNMENT._replace(round_index=5), "torch") == ({}, 0)


@pytest.mark.parametrize(
    "change",
    [
        {"beacon": b"c" * 32},
        {"policy": b"q" * 32},
        {"task": b"t" * 32},
        {"account": b"a" * 20},
        {"chain_id": 2},
        {"ledger": b"l" * 20},
        {"quota": 7},
    ],
)
def test_parts_bound_to_anything_else_are_removed(tmp_path, change):
    parts = Parts(tmp_path)
    parts.add(ASSIGNMENT._replace(**change), "torch", (make_group(0),), 64)
    assert parts.read(ASSIGNMENT, "torch") == ({}, 0)
    assert list(tmp_path.iterdir()) == []


def test_parts_of_another_engine_or_dtype_are_removed(tmp_path):
    parts = Parts(tmp_path)
    parts.add(ASSIGNMENT, "dtype=bfloat16", (make_group(0),), 64)
    assert parts.read(ASSIGNMENT, "dtype=float32") == ({}, 0)


@given(data=st.data())
def test_a_part_with_any_byte_changed_or_cut_is_not_read(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("parts")
    parts = Parts(folder)
    parts.add(ASSIGNMENT, "torch", (make_group(0), make_group(1)), 64)
    [path] = folder.iterdir()
    content = bytearray(path.read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        content[place] ^= data.draw(st.integers(1, 255))
    else:
        del content[place:]
    path.write_bytes(content)
    assert parts.read(ASSIGNMENT, "torch") == ({}, 0)
    assert not path.exists()


def test_old_parts_and_foreign_files_are_forgotten(tmp_path):
    parts = Parts(tmp_path)
    for index in (2, 3, 4):
        parts.add(ASSIGNMENT._replace(round_index=index), "torch", (make_group(0),), 64)
    (tmp_path / "x.part").write_bytes(b"")
    (tmp_path / "3.bundle").write_bytes(b"")
    parts.forget(4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["3.bundle", "4.0.part"]


def test_a_binding_is_no_part_of_what_is_signed(tmp_path):
    assert Part(compute_binding(ASSIGNMENT, "a"), 64, ()).binding != compute_binding(ASSIGNMENT, "b")


class Interrupted(BaseException):
    """Stands for a kill between two chunks."""


class CountingEngine(TorchEngine):
    """Counts prompts generated for; can be interrupted at a call."""

    def __init__(self, die_at=None):
        super().__init__()
        self.calls, self.rollouts, self.die_at = 0, 0, die_at

    def generate(self, requests, **options):
        self.calls += 1
        if self.calls == self.die_at:
            raise Interrupted
        self.rollouts += len(requests)
        return super().generate(requests, **options)


def bundle_of(world, node, round_index=0):
    return world.blobs.blobs[compute_bundle_key(world.task_id, round_index, node.ledger.account)]


def test_only_what_is_missing_is_made_again(tmp_path, base):
    """8 groups of 4 in chunks of two groups: killed in the third call, the next process makes four groups, not eight."""
    bundles, made = [], []
    for die_at in (None, 3):
        world = Scenario(tmp_path / f"at-{die_at}", make_spec(base), base)
        engines = [CountingEngine(die_at), CountingEngine()]

        async def scenario(world=world, engines=engines, die_at=die_at):
            node = Node(world, engine=engines[0], chunk_rollouts=8)
            node.worker._maker._chunk_rollouts = 8
            if die_at is not None:
                with pytest.raises(Interrupted):
                    await node.run_until(get_times(world.task, 0).start + 3)
                node = Node(world, engine=engines[1], chunk_rollouts=8)
            await node.run_until(get_times(world.task, 0).start + 4)
            bundles.append(bundle_of(world, node))
            made.append([fields["resumed"] for fields in node.texts("round_made")])

        run(scenario())
        if die_at is not None:
            first = engines[0].rollouts
            assert 0 < first < 32
            assert engines[1].rollouts == 32 - first
    assert bundles[0] == bundles[1]
    assert made[0] == [0]
    assert made[1][0] > 0
    assert not list(tmp_path.rglob("*.part"))


def test_another_beacon_or_policy_means_starting_over(world):
    """What is on disk belongs to the round as it was: a reorganised chain gives another beacon, so other prompts."""

    async def scenario():
        node = Node(world, engine=CountingEngine(die_at=2), chunk_rollouts=8)
        with pytest.raises(Interrupted):
            await node.run_until(get_times(world.task, 0).start + 3)
        block = get_times(world.task, 0).start
        world.chain.state.beacons[block] = b"\5" * 32
        world.chain.logs[:] = [
            Logged(log.block_number, log.log_index, BeaconRecorded(block, b"\5" * 32))
            if isinstance(log.event, BeaconRecorded) and log.event.block_number == block
            else log
            for log in world.chain.logs
        ]
        world.task.quotas.clear()
        engine = CountingEngine()
        again = Node(world, engine=engine, chunk_rollouts=8)
        await again.run_until(get_times(world.task, 0).start + 5)
        assert engine.rollouts == 32
        assert [fields["resumed"] for fields in again.texts("round_made")][:1] == [0]

    run(scenario())


def test_chunks_grow_while_they_are_quick(world):
    engine = CountingEngine()

    async def scenario():
        node = Node(world, engine=engine, chunk_rollouts=4)
        await node.run_until(get_times(world.task, 0).start + 3)
        first = engine.calls
        await node.run_until(get_times(world.task, 1).start + 3)
        assert 2 <= first <= 4  # 1, 2, 4 groups, and the one that is left
        assert engine.calls - first == 1  # a whole round at once

    run(scenario())


def test_chunks_shrink_to_a_group_where_they_take_long(tmp_path, monkeypatch):
    now, sizes = [0.0], []
    monkeypatch.setattr("inference.making.time.monotonic", lambda: now[0])
    maker = Maker(None, tmp_path, "torch", lambda folder, assignment: None, chunk_rollouts=8)
    assignment = ASSIGNMENT._replace(quota=9)
    maker._loaded = (tmp_path, assignment.policy)
    work = maker.open(assignment, 0)

    def make(slots):
        sizes.append(len(slots))
        now[0] += 300.0
        return Made(tuple(make_group(slot) for slot in slots), 64, 1.0, 0.0)

    while work.missing:
        maker.make_chunk(work, tmp_path, make, 2)
    assert sizes == [4, 2, 1, 1, 1]
    assert len(list(tmp_path.glob("4.*.part"))) == 5


class SwappingEngine(CountingEngine):
    """An engine in which, by somebody's mistake, another policy is loaded between two chunks."""

    worker = None

    def generate(self, requests, **options):
        made = super().generate(requests, **options)
        if self.calls == 1:
            self.worker._maker._loaded = (None, b"another")
            self.worker._maker.load = lambda work, folder: None
        return made


def test_chunks_of_one_round_never_mix_policies(world):
    engine = SwappingEngine()

    async def scenario():
        node = Node(world, engine=engine, chunk_rollouts=8)
        engine.worker = node.worker
        await node.run_until(get_times(world.task, 0).start + 5)
        assert world.task.commitments == {}
        assert "of round 0 is not loaded" in node.texts("fault")[0]["text"]

    run(scenario())


class BrokenLoad(CountingEngine):
    """Fails to load the policies in `broken`; keeps the old one usable, as engines do."""

    def __init__(self, broken):
        super().__init__()
        self.broken, self.loads = broken, []

    def load(self, folder):
        self.loads.append(folder.name)
        if folder.name in self.broken:
            raise Fault(f"policy folder {folder} is not a usable model")
        super().load(folder)


def test_a_policy_that_does_not_load_costs_its_rounds_and_no_more(world, tmp_path):
    async def scenario():
        engine = BrokenLoad({"v1"})
        node = Node(world, engine=engine)
        await node.run_until(get_times(world.task, 1).start - 3)
        world.record_policy(1, make_model(tmp_path / "v1", 1))
        await node.run_until(get_times(world.task, 2).start - 3)
        world.record_policy(2, make_model(tmp_path / "v2", 2))
        await node.run_until(get_times(world.task, 3).start - 1)
        assert sorted(world.task.commitments) == [0, 2]  # never round 1 with the policy of round 0
        [skipped] = [f for f in node.texts("idle") if f["round"] == 1 and "gave up" in f["reason"]]
        assert "is not a usable model" in skipped["reason"]
        account = node.ledger.account
        assert world.task.commitments[2][account].policy == world.task.policies[2].policy

    run(scenario())


class CopyingPolicies:
    """Fetches into a folder of its own, like a real store; a folder that is gone is made again."""

    def __init__(self, inner, root):
        self.inner, self.root, self.fetches = inner, root, 0

    async def fetch(self, task, version):
        source = await self.inner.fetch(task, version)
        target = self.root / str(version)
        if not target.exists():
            self.fetches += 1
            shutil.copytree(source, target)
        return target


def verify_or_remove(folder, expected):
    if hash_policy(folder) != expected:
        shutil.rmtree(folder)
        raise Fault(f"{folder} is not policy {expected.hex()[:16]}: a file changed on disk")


def test_a_file_changed_between_fetch_and_load_is_refused_and_fetched_again(world, tmp_path):
    async def scenario():
        policies = CopyingPolicies(world.policies, tmp_path / "fetched")
        engine = CountingEngine()
        node = Node(world, engine=engine, policies=policies, verify_policy=verify_or_remove)
        while not (tmp_path / "fetched" / "0").exists():
            await node.step()
        weights = tmp_path / "fetched" / "0" / "model.safetensors"
        data = bytearray(weights.read_bytes())
        data[-3] ^= 1  # the mantissa of one weight: it loads, and nobody would see it
        weights.write_bytes(data)
        await node.run_until(get_times(world.task, 0).start + 5)
        assert "a file changed on disk" in node.texts("fault")[0]["text"]
        assert policies.fetches == 2
        assert list(world.task.commitments[0]) == [node.ledger.account]
        assert engine.rollouts == 32  # nothing was generated with the changed file

    run(scenario())


class SlowPolicies:
    """Takes until it is let go to fetch a version."""

    def __init__(self, inner, slow):
        self.inner, self.slow, self.gate, self.waiting = inner, slow, asyncio.Event(), 0

    async def fetch(self, task, version):
        if version == self.slow:
            self.waiting += 1
            await self.gate.wait()
        return await self.inner.fetch(task, version)


def test_generation_does_not_wait_for_the_next_policy(world, tmp_path):
    """A store that is slow with version 1: every round under version 0 is made meanwhile."""

    async def scenario():
        policies = SlowPolicies(world.policies, 1)
        node = Node(world, policies=policies)
        await node.run_until(get_times(world.task, 0).start - 2)
        folder = make_model(tmp_path / "v1", 1)
        await node.run_until(get_times(world.task, 1).start)
        world.record_policy(1, folder)  # too late for round 1, in time for round 2
        await node.run_until(get_times(world.task, 2).start + 2)
        assert policies.waiting == 1
        assert sorted(world.task.commitments) == [0, 1]
        assert node.status["state"] == "fetching"
        assert "policy version 1" in node.status["reason"]
        policies.gate.set()
        await node.run_until(get_times(world.task, 2).start + 5)
        assert sorted(world.task.commitments) == [0, 1, 2]

    run(scenario())


class BlockingEngine(CountingEngine):
    """Does not return before the download has gone on."""

    def __init__(self, progress):
        super().__init__()
        self.progress = progress

    def generate(self, requests, **options):
        assert self.progress.wait(20), "the download stood still while rollouts were generated"
        return super().generate(requests, **options)


def test_a_download_goes_on_while_rollouts_are_generated(world, tmp_path):
    async def scenario():
        progress = threading.Event()

        class Slow:
            async def fetch(self, task, version):
                if version == 1:
                    for _ in range(3):
                        await asyncio.sleep(0.01)
                    progress.set()
                return await world.policies.fetch(task, version)

        folder = make_model(tmp_path / "v1", 1)
        node = Node(world, engine=BlockingEngine(progress), policies=Slow())
        await node.run_until(get_times(world.task, 0).start)
        world.record_policy(1, folder)  # round 0 is made with version 0 while this one comes
        await node.run_until(get_times(world.task, 0).start + 3)
        assert list(world.task.commitments[0]) == [node.ledger.account]

    run(scenario())


@given(st.lists(st.tuples(st.integers(1, 500), st.integers(0, 40)), min_size=1, max_size=20))
def test_predictions_stay_within_what_was_measured(measured):
    pace = Pace()
    for rollouts, blocks in measured:
        pace.add_work(rollouts, blocks)
    rates = [blocks / rollouts for rollouts, blocks in measured]
    assert min(rates) - 1e-9 <= pace.blocks_per_rollout <= max(rates) + 1e-9
    assert pace.predict_blocks(100) >= pace.predict_blocks(10)


def test_more_slots_than_fit_are_seen_before_the_work(world):
    """Speed is per rollout: a quota twice as large as the last is predicted to take twice as long."""
    pace = Pace()
    pace.add_work(32, 4)
    assert (pace.predict_blocks(32), pace.predict_blocks(64), pace.predict_blocks(0)) == (4, 8, 0)
    pace.relax()
    assert pace.predict_blocks(32) == 3


def test_a_round_that_cannot_be_finished_is_given_up_between_chunks(world):
    """Blocks run faster than expected: after the first chunk the node sees that the deadline cannot be met, and stops."""
    engine = CountingEngine()

    async def scenario():
        node = Node(world, engine=engine, chunk_rollouts=4)
        make = node.worker._make_groups

        def slow(spec, assignment, slots):
            world.chain.advance(4)
            return make(spec, assignment, slots)

        node.worker._make_groups = slow
        await node.run_until(get_times(world.task, 0).start + 1)
        assert 0 < engine.rollouts < 32
        [skip] = [f for f in node.texts("idle") if f["round"] == 0 and "no time left" in f["reason"]]
        assert "more blocks of work" in skip["reason"]
        assert not [call for _, call in node.ledger.submitted if isinstance(call, calls.CommitRoot)]

    run(scenario())


def test_a_journal_of_an_older_version_is_read(tmp_path):
    journal = Journal(tmp_path, bytes(32), bytes(20))
    journal.first_round = 3
    journal.save()
    text = journal._path.read_text().replace(', "foreign_round": -1, "foreign_record": -1', "")
    assert "foreign" not in text
    journal._path.write_text(text)
    again = Journal(tmp_path, bytes(32), bytes(20))
    assert (again.first_round, again.foreign_round, again.foreign_record) == (3, -1, -1)


def test_what_is_committed_is_what_was_resumed(tmp_path, base):
    """A part whose group was changed, digest and all, is still only as good as the check before the commitment."""
    world = Scenario(tmp_path, make_spec(base), base)

    async def scenario():
        node = Node(world, engine=CountingEngine(die_at=2), chunk_rollouts=8)
        with pytest.raises(Interrupted):
            await node.run_until(get_times(world.task, 0).start + 3)
        maker = node.worker._maker
        [path] = node.directory.rglob("0.0.part")
        part = decode(Part, path.read_bytes()[32:], bytes_max=1 << 20)
        group = part.groups[0]
        lie = Group(group.slot, group.prompt_index, (replace_reward(group.samples[0]), *group.samples[1:]))
        assignment = replace_nothing(node, world)
        maker._parts.add(assignment, "", (lie, *part.groups[1:]), part.hidden)
        again = Node(world, chunk_rollouts=8)
        await again.run_until(get_times(world.task, 0).start + 5)
        assert 0 not in world.task.commitments
        assert any("own check refused" in f["reason"] for f in again.texts("idle"))
        data = again.ledger.submitted
        assert not [call for _, call in data if isinstance(call, calls.CommitRoot) and call.round == 0]

    run(scenario())


def replace_reward(sample):
    return Sample(sample.tokens, 999_999, sample.proofs)


def replace_nothing(node, world):
    from inference.schedule import get_own_assignment

    return get_own_assignment(node.ledger, node.ledger.state.tasks[world.task_id], 0)


def test_bundles_are_still_what_decoders_read(world):
    async def scenario():
        node = Node(world, chunk_rollouts=4)
        await node.run_until(get_times(world.task, 0).start + 4)
        bundle = decode(Bundle, decode(Signed, bundle_of(world, node), bytes_max=1 << 20).body, bytes_max=1 << 20)
        assert [group.slot for group in bundle.groups] == list(range(8))

    run(scenario())
