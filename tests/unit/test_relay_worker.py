"""What a relay takes onto its shelf, from whom, and when it writes receipts: real records, a real node's bundle."""

from __future__ import annotations

import asyncio
import hashlib

import pytest
from msgspec.structs import replace

from inference.engine import TorchEngine
from inference.worker import NodeWorker
from protocol.codec import PROTOCOL_VERSION, decode, encode
from protocol.errors import Ignore, Reason, Reject
from protocol.ledger import calls, events
from protocol.messages import (
    LINEAGE_BYTES_MAX,
    REPORT_BYTES_MAX,
    Bundle,
    NodeRecord,
    Signed,
    compute_bundle_key,
    compute_lineage_key,
    compute_report_key,
    make_domain,
    seal,
)
from protocol.rounds import get_times
from tests.support.scenario import STAKE, Scenario, make_account, make_key, make_model, make_spec
from tests.support.twins import MemoryLedger
from troth.directory import Directory
from troth.relay import LINEAGE_AHEAD_MAX, RelayWorker

ROLES = {
    "relay": events.Role.RELAY,
    "trainer": events.Role.TRAINER,
    "verifier": events.Role.VERIFIER,
    "node": events.Role.NODE,
    "other-node": events.Role.NODE,
}


def curve_of(name):
    return hashlib.sha256(b"curve/" + name.encode()).digest()


class Town:
    """A task with one round committed by `node`, whose bundle waits to be stored. Everybody has a signed record."""

    def __init__(self, directory, base):
        self.world = Scenario(directory, make_spec(base), base)
        self.world.blobs.down = True
        self.task = self.world.task_id
        for name, role in ROLES.items():
            record = NodeRecord(PROTOCOL_VERSION, make_account(name), curve_of(name), "tcp://127.0.0.1:1", 1)
            chain = self.world.chain
            domain = make_domain(chain.chain_id, chain.address, bytes(32), NodeRecord)
            register = calls.Register(role, make_key(name).public, seal(make_key(name), domain, record), STAKE)
            assert self.world.call(name, register) == ""
        asyncio.run(self._commit_round_0())
        [(self.round, self.root)] = [(r, c[make_account("node")].root) for r, c in self.world.task.commitments.items()]

    async def _commit_round_0(self):
        ledger = MemoryLedger(self.world.chain, make_account("node"))
        node = NodeWorker(
            ledger=ledger,
            task=self.task,
            environment=self.world.environment,
            engine=TorchEngine(),
            policies=self.world.policies,
            blobs=self.world.blobs,
            key=make_key("node"),
            directory=self.world.directory / "node",
            events=lambda kind, fields: None,
        )
        while not self.world.task.commitments:
            await ledger.poll()
            await node.step()
            await asyncio.sleep(0)
            self.world.chain.advance()
        await node.close()
        [path] = [p for p in (self.world.directory / "node").rglob("*") if p.is_file() and self._is_bundle(p)]
        self.bundle = path.read_bytes()

    @staticmethod
    def _is_bundle(path):
        try:
            decode(Bundle, decode(Signed, path.read_bytes(), bytes_max=1 << 20).body, bytes_max=1 << 20)
        except Reject:
            return False
        return True

    def seal(self, bundle, name="node"):
        chain = self.world.chain
        return seal(make_key(name), make_domain(chain.chain_id, chain.address, self.task, Bundle), bundle)

    def open_bundle(self):
        return decode(Bundle, decode(Signed, self.bundle, bytes_max=1 << 20).body, bytes_max=1 << 20)

    def key(self, round_index=None, name="node"):
        return compute_bundle_key(self.task, self.round if round_index is None else round_index, make_account(name))


class Relay:
    """A relay with a replica of its own, at a block of the test's choice."""

    def __init__(self, town, block=None):
        self.ledger = MemoryLedger(town.world.chain, make_account("relay"))
        self.seen, self.shelf, self.block = [], set(), block
        self.worker = RelayWorker(
            ledger=self.ledger,
            directory=Directory(self.ledger),
            has_blob=self.shelf.__contains__,
            policies=town.world.policies,
            events=lambda kind, fields: self.seen.append((kind, fields)),
        )
        self.poll()

    def poll(self):
        asyncio.run(self.ledger.poll())
        if self.block is not None:
            self.ledger.state.block_number = self.block

    def accept(self, name, key, data):
        self.worker.accept(curve_of(name), key, data)

    def step(self):
        asyncio.run(self.worker.step())

    def receipts(self):
        return [call for _, call in self.ledger.submitted if isinstance(call, calls.ReceiptBundles)]


@pytest.fixture(scope="module")
def town(tmp_path_factory):
    directory = tmp_path_factory.mktemp("town")
    return Town(directory, make_model(directory / "base", 0))


@pytest.fixture
def own_town(tmp_path):
    """A town that the test may write history in."""
    return Town(tmp_path, make_model(tmp_path / "base", 0))


# Bundles


def test_the_committed_bundle_of_its_own_node_is_taken(town):
    relay = Relay(town)
    relay.accept("node", town.key(), town.bundle)
    assert [(kind, fields["round"], fields["account"]) for kind, fields in relay.seen] == [
        ("bundle", town.round, make_account("node"))
    ]


def test_a_sender_that_is_not_on_the_ledger_is_rejected_and_told_to_register(town):
    with pytest.raises(Reject, match="register on the ledger") as caught:
        Relay(town).worker.accept(bytes(32), town.key(), town.bundle)
    assert caught.value.reason == Reason.UNREGISTERED


@pytest.mark.parametrize("sender", ["other-node", "verifier", "trainer"])
def test_nobody_stores_a_bundle_for_another(town, sender):
    with pytest.raises(Ignore):
        Relay(town).accept(sender, town.key(), town.bundle)


def test_a_key_that_names_no_commitment_is_ignored(town):
    relay = Relay(town)
    for key in (bytes(32), town.key(town.round + 1), town.key(name="other-node")):
        with pytest.raises(Ignore, match="commit first"):
            relay.accept("node", key, town.bundle)


def test_a_bundle_before_its_commitment_is_ignored_and_taken_after(town):
    relay = Relay(town)
    commitment = relay.ledger.state.tasks[town.task].commitments.pop(town.round)
    with pytest.raises(Ignore):
        relay.accept("node", town.key(), town.bundle)
    relay.ledger.state.tasks[town.task].commitments[town.round] = commitment
    relay.accept("node", town.key(), town.bundle)


def test_the_receipt_deadline_is_the_last_block(town):
    deadline = get_times(town.world.task, town.round).receipt_deadline
    Relay(town, deadline).accept("node", town.key(), town.bundle)
    with pytest.raises(Reject, match=f"observed block {deadline + 1}; limit block {deadline}") as caught:
        Relay(town, deadline + 1).accept("node", town.key(), town.bundle)
    assert caught.value.reason == Reason.LATE


def test_other_content_than_was_committed_is_rejected(town):
    bundle = town.open_bundle()
    sample = bundle.groups[0].samples[0]
    edited = replace(sample, reward_micro=sample.reward_micro ^ 1)
    group = replace(bundle.groups[0], samples=(edited, *bundle.groups[0].samples[1:]))
    for forged in (replace(bundle, groups=(group, *bundle.groups[1:])), replace(bundle, groups=bundle.groups[:-1])):
        with pytest.raises(Reject) as caught:
            Relay(town).accept("node", town.key(), town.seal(forged))
        assert caught.value.reason in (Reason.ROOT_MISMATCH, Reason.MALFORMED)


def test_a_bundle_of_another_round_under_this_key_is_rejected(town):
    forged = replace(town.open_bundle(), round=town.round + 1)
    with pytest.raises(Reject):
        Relay(town).accept("node", town.key(), town.seal(forged))


def test_a_bundle_signed_by_another_key_is_rejected(town):
    with pytest.raises(Reject) as caught:
        Relay(town).accept("node", town.key(), town.seal(town.open_bundle(), "other-node"))
    assert caught.value.reason == Reason.SIGNATURE


@pytest.mark.parametrize("spoil", [lambda d: b"", lambda d: d[:-1], lambda d: d + b"\0", lambda d: b"\xff" * len(d)])
def test_bytes_that_are_no_bundle_are_rejected(town, spoil):
    with pytest.raises(Reject):
        Relay(town).accept("node", town.key(), spoil(town.bundle))


# Reports


def reveal(town, data):
    relay = Relay(town)
    digest = hashlib.sha256(data).digest()
    town.world.chain.emit(events.VerdictRevealed(town.task, town.round, make_account("verifier"), b"", digest))
    relay.poll()
    return relay, compute_report_key(town.task, town.round, make_account("verifier"))


def test_a_report_is_taken_once_its_hash_is_revealed(own_town):
    key = compute_report_key(own_town.task, own_town.round, make_account("verifier"))
    with pytest.raises(Ignore):
        Relay(own_town).accept("verifier", key, b"report")
    relay, key = reveal(own_town, b"report")
    relay.accept("verifier", key, b"report")
    with pytest.raises(Reject, match="not the one revealed") as caught:
        relay.accept("verifier", key, b"other report")
    assert caught.value.reason == Reason.ROOT_MISMATCH
    for sender in ("node", "trainer", "relay"):
        with pytest.raises((Ignore, Reject)):
            relay.accept(sender, key, b"report")


def test_a_report_that_is_too_long_is_rejected_though_it_was_revealed(own_town):
    data = bytes(REPORT_BYTES_MAX + 1)
    relay, key = reveal(own_town, data)
    with pytest.raises(Reject):
        relay.accept("verifier", key, data)


# Lineage


def test_the_trainer_stores_lineage_a_little_ahead_of_the_ledger(town):
    relay = Relay(town)
    known = len(town.world.task.policies)
    for version in range(known, known + LINEAGE_AHEAD_MAX):
        relay.accept("trainer", compute_lineage_key(town.task, version), b"lineage")
    with pytest.raises(Ignore):
        relay.accept("trainer", compute_lineage_key(town.task, known + LINEAGE_AHEAD_MAX), b"lineage")
    with pytest.raises(Reject) as caught:
        relay.accept("trainer", compute_lineage_key(town.task, known), bytes(LINEAGE_BYTES_MAX + 1))
    assert caught.value.reason == Reason.MALFORMED


@pytest.mark.parametrize("sender", ["node", "verifier"])
def test_only_the_trainer_stores_lineage(town, sender):
    with pytest.raises(Ignore):
        Relay(town).accept(sender, compute_lineage_key(town.task, 1), b"lineage")


def test_a_recorded_lineage_is_the_one_that_was_recorded(own_town):
    digest = hashlib.sha256(b"lineage").digest()
    own_town.world.chain.emit(events.PolicyRecorded(own_town.task, 1, bytes(32), bytes(32), bytes(32), digest))
    relay, key = Relay(own_town), compute_lineage_key(own_town.task, 1)
    relay.accept("trainer", key, b"lineage")
    with pytest.raises(Reject) as caught:
        relay.accept("trainer", key, b"another")
    assert caught.value.reason == Reason.ROOT_MISMATCH


# Receipts


def test_no_receipt_for_what_is_not_on_the_shelf(town):
    relay = Relay(town)
    for block in range(town.world.task.start_block, get_times(town.world.task, town.round).receipt_deadline + 1):
        relay.ledger.state.block_number = block
        relay.step()
    assert relay.receipts() == []


def test_everybodys_bundles_are_receipted_at_the_commit_deadline(town):
    times = get_times(town.world.task, town.round)
    relay = Relay(town, times.commit_deadline)
    relay.shelf.add(town.key())
    relay.step()
    assert relay.receipts() == [calls.ReceiptBundles(town.task, town.round, (make_account("node"),))]


def test_when_others_are_missing_one_block_of_patience_is_enough(own_town):
    own_town.world.chain.emit(
        events.RootCommitted(own_town.task, own_town.round, make_account("other-node"), bytes(32), 1, bytes(32))
    )
    times = get_times(own_town.world.task, own_town.round)
    relay = Relay(own_town, times.commit_deadline - 2)
    relay.shelf.add(own_town.key())
    relay.step()
    assert relay.receipts() == []
    relay.ledger.state.block_number += 1
    relay.step()
    relay.step()
    assert relay.receipts() == [calls.ReceiptBundles(own_town.task, own_town.round, (make_account("node"),))]


def test_nothing_is_receipted_from_the_deadline_on(town):
    relay = Relay(town, get_times(town.world.task, town.round).receipt_deadline)
    relay.shelf.add(town.key())
    relay.step()
    assert relay.receipts() == []


def test_a_record_that_its_owner_did_not_sign_is_no_record(own_town):
    chain = own_town.world.chain
    record = NodeRecord(PROTOCOL_VERSION, make_account("other-node"), curve_of("thief"), "tcp://127.0.0.1:1", 2)
    domain = make_domain(chain.chain_id, chain.address, bytes(32), NodeRecord)
    chain.emit(events.RecordChanged(make_account("other-node"), seal(make_key("thief"), domain, record)))
    with pytest.raises(Reject) as caught:
        Relay(own_town).worker.accept(curve_of("thief"), bytes(32), b"")
    assert caught.value.reason == Reason.UNREGISTERED


def test_resealing_the_same_bundle_gives_the_same_bytes(town):
    assert town.seal(town.open_bundle()) == town.bundle
    assert encode(decode(Signed, town.bundle, bytes_max=1 << 20)) == town.bundle
