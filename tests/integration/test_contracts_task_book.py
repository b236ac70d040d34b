"""`TaskBook`: membership, commitments, receipts and policies, with every deadline at +-1 block."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from protocol.ledger.events import (
    BundlesReceipted,
    NodeJoined,
    NodeLeft,
    PolicyAttested,
    PolicyRecorded,
    Role,
    RootCommitted,
)
from tests.support.evm_ledger import STAKE, TERMS, EvmLedger, fresh_ledger

ROOT, POLICY = b"\x33" * 32, b"\x01" * 32
UNKNOWN = b"\x99" * 32
EPOCH_BLOCKS = TERMS.round_blocks * TERMS.epoch_rounds


@pytest.fixture
def ledger() -> Iterator[EvmLedger]:
    yield from fresh_ledger()


@pytest.fixture
def task(ledger: EvmLedger) -> bytes:
    return ledger.publish()


def _start(ledger: EvmLedger, task: bytes) -> int:
    return ledger.times(task, 0)[0]


def test_round_times_follow_the_terms(ledger: EvmLedger, task: bytes) -> None:
    start = ledger.view("book", "stateOf", task)[1]
    assert start == ledger.block - 1 + TERMS.start_delay_blocks
    assert ledger.times(task, 0) == (start, start + 6, start + 10, start + 11, start + 14, start + 16)
    assert ledger.times(task, 5)[0] == start + 20
    assert ledger.error("stranger", "book", "openRound", task, 6) == ("PastTheEnd", 6, 6)
    assert ledger.view("book", "openRound", task, 0)[6:] == (start + 18, start + 21)
    assert ledger.view("book", "lastRevealOf", task, 0) == start + 4 + 16
    assert ledger.view("book", "lastConfirmOf", task, 0) == start + 4 + 21
    assert ledger.view("book", "termsOf", task) == ledger.terms()


def test_join_counts_from_the_next_epoch(ledger: EvmLedger, task: bytes) -> None:
    """The last block in which an epoch can be joined is the one before its first beacon."""
    start, node, node2 = _start(ledger, task), ledger.address("node"), ledger.address("node2")
    ledger.mine_until(start - 1)
    assert ledger.send("node", "book", "join", task, 2) == [NodeJoined(task, node, 2, 0)]
    assert ledger.send("node2", "book", "join", task, 1) == [NodeJoined(task, node2, 1, 1)]
    assert ledger.view("book", "memberOf", task, node2)[:2] == (1, 1)


def test_join_refuses(ledger: EvmLedger, task: bytes) -> None:
    start = _start(ledger, task)
    assert ledger.error("node", "book", "join", UNKNOWN, 1) == ("UnknownTask", UNKNOWN)
    for slots in (0, 5):
        assert ledger.error("node", "book", "join", task, slots) == ("SlotsOutOfRange", slots, 4)
    assert ledger.error("relay", "book", "join", task, 1) == ("WrongRole", ledger.address("relay"), Role.RELAY)
    ledger.send("node2", "registry", "startUnbond", 1)
    assert ledger.error("node2", "book", "join", task, 1) == (
        "StakeTooLow", ledger.address("node2"), STAKE - 1, STAKE,
    )  # fmt: skip
    ledger.send("node", "book", "join", task, 1)
    assert ledger.error("node", "book", "join", task, 2) == ("StillMember", 2**64 - 1)
    ledger.mine_until(start + 2 * EPOCH_BLOCKS - 1)
    ledger.send("node2", "registry", "addStake", 1)
    assert ledger.error("node2", "book", "join", task, 1) == ("PastTheEnd", 3, 3)


def test_leave_and_come_back(ledger: EvmLedger, task: bytes) -> None:
    start, node = _start(ledger, task), ledger.address("node")
    assert ledger.error("node", "book", "leave", task) == ("NotMember", task, node)
    assert ledger.error("node", "book", "leave", UNKNOWN) == ("UnknownTask", UNKNOWN)
    ledger.send("node", "book", "join", task, 1)
    ledger.mine_until(start)
    assert ledger.send("node", "book", "leave", task) == [NodeLeft(task, node, 1)]
    assert ledger.error("node", "book", "leave", task) == ("NotMember", task, node)
    assert ledger.error("node", "book", "join", task, 1) == ("StillMember", 1)
    ledger.commit(task, 0)  # its last epoch is not over
    ledger.mine_until(start + EPOCH_BLOCKS)
    assert ledger.send("node", "book", "join", task, 3) == [NodeJoined(task, node, 3, 2)]


def test_leave_before_the_first_epoch_leaves_no_trace(ledger: EvmLedger, task: bytes) -> None:
    node = ledger.address("node")
    ledger.send("node", "book", "join", task, 4)
    assert ledger.view("book", "reservedOf", node) == 4 * 100 * 2 * 2
    assert ledger.send("node", "book", "leave", task) == [NodeLeft(task, node, 0)]
    assert ledger.view("book", "reservedOf", node) == 0
    assert ledger.send("node", "book", "join", task, 2) == [NodeJoined(task, node, 2, 0)]


def test_commit_keeps_the_first_root(ledger: EvmLedger, task: bytes) -> None:
    node = ledger.address("node")
    ledger.send("node", "book", "join", task, 2)
    ledger.record_beacon(_start(ledger, task))
    emitted = ledger.send("node", "book", "commit", task, 0, ROOT, 2, POLICY)
    assert emitted == [RootCommitted(task, 0, node, ROOT, 2, POLICY)]
    assert ledger.view("book", "commitmentOf", task, 0, node) == (ROOT, 2, False)
    assert ledger.error("node", "book", "commit", task, 0, b"\x34" * 32, 1, POLICY) == ("AlreadyCommitted", ROOT)


def test_commit_deadline(ledger: EvmLedger, task: bytes) -> None:
    start, deadline = ledger.times(task, 0)[:2]
    ledger.send("node", "book", "join", task, 1)
    for block in range(start - 1, start + 1):
        ledger.mine_until(block)
        assert ledger.error("node", "book", "commit", task, 0, ROOT, 1, POLICY) == ("BeaconMissing", start)
    ledger.record_beacon(start)
    ledger.mine_until(deadline)
    ledger.call("node", "book", "commit", task, 0, ROOT, 1, POLICY)
    ledger.mine_until(deadline + 1)
    assert ledger.error("node", "book", "commit", task, 0, ROOT, 1, POLICY) == ("TooLate", deadline + 1, deadline)


def test_commit_refuses(ledger: EvmLedger, task: bytes) -> None:
    start, node, node2 = _start(ledger, task), ledger.address("node"), ledger.address("node2")
    ledger.send("node", "book", "join", task, 2)
    ledger.mine_until(start)
    ledger.send("node2", "book", "join", task, 1)  # from epoch 1
    ledger.send("stranger", "beacons", "record", start)

    def error(who: str, *arguments: object) -> tuple[object, ...]:
        return ledger.error(who, "book", "commit", *arguments)

    assert error("node", UNKNOWN, 0, ROOT, 1, POLICY) == ("UnknownTask", UNKNOWN)
    assert error("node", task, 6, ROOT, 1, POLICY) == ("PastTheEnd", 6, 6)
    assert error("node", task, 0, bytes(32), 1, POLICY) == ("ZeroValue",)
    for leaves in (0, 3):
        assert error("node", task, 0, ROOT, leaves, POLICY) == ("SlotsOutOfRange", leaves, 2)
    assert error("node2", task, 0, ROOT, 1, POLICY) == ("NotMemberInEpoch", node2, 0)
    stranger = ledger.address("stranger")
    assert error("stranger", task, 0, ROOT, 1, POLICY) == ("NotMemberInEpoch", stranger, 0)
    ledger.send("node", "registry", "startUnbond", 1)
    assert error("node", task, 0, ROOT, 1, POLICY) == ("StakeTooLow", node, STAKE - 1, STAKE)


def test_commit_after_leaving(ledger: EvmLedger, task: bytes) -> None:
    ledger.send("node", "book", "join", task, 1)
    ledger.mine_until(_start(ledger, task))
    ledger.send("node", "book", "leave", task)
    ledger.record_beacon(ledger.times(task, 2)[0])
    node = ledger.address("node")
    assert ledger.error("node", "book", "commit", task, 2, ROOT, 1, POLICY) == ("NotMemberInEpoch", node, 1)


def test_receipt_counts_once_for_each_bundle(ledger: EvmLedger, task: bytes) -> None:
    node, node2, relay = (ledger.address(name) for name in ("node", "node2", "relay"))
    ledger.send("node", "book", "join", task, 4)
    ledger.send("node2", "book", "join", task, 3)
    ledger.commit(task, 0, "node", leaves=4)
    assert ledger.send("relay", "book", "receipt", task, 0, (node, node)) == [BundlesReceipted(task, 0, relay, (node,))]
    assert ledger.view("book", "pendingPayOf", task, 0) == 400
    ledger.send("node2", "book", "commit", task, 0, ROOT, 3, POLICY)
    assert ledger.send("relay", "book", "receipt", task, 0, (node, node2)) == [
        BundlesReceipted(task, 0, relay, (node2,))
    ]
    assert ledger.view("book", "pendingPayOf", task, 0) == 700
    assert ledger.send("relay", "book", "receipt", task, 0, (node, node2)) == []
    assert ledger.send("relay", "book", "receipt", task, 0, ()) == []
    assert ledger.view("book", "commitmentOf", task, 0, node) == (ROOT, 4, True)


def test_pending_pay_of_an_epoch_is_bounded_by_what_it_can_cost(ledger: EvmLedger, task: bytes) -> None:
    for name in ("node", "node2"):
        ledger.send(name, "book", "join", task, 4)
    for round_index in range(2):
        for name in ("node", "node2"):
            if name == "node":
                ledger.commit(task, round_index, name, leaves=4)
            else:
                ledger.send(name, "book", "commit", task, round_index, ROOT, 4, POLICY)
        ledger.send("relay", "book", "receipt", task, round_index, (ledger.address("node"), ledger.address("node2")))
    assert ledger.view("book", "pendingPayOf", task, 0) == TERMS.epoch_pay_max


def test_receipt_deadline(ledger: EvmLedger, task: bytes) -> None:
    start, _, deadline = ledger.times(task, 0)[:3]
    ledger.mine_until(start)
    assert ledger.error("relay", "book", "receipt", task, 0, ()) == ("TooEarly", start, start + 1)
    ledger.mine_until(start + 1)
    ledger.call("relay", "book", "receipt", task, 0, ())
    ledger.mine_until(deadline)
    ledger.call("relay", "book", "receipt", task, 0, ())
    ledger.mine_until(deadline + 1)
    assert ledger.error("relay", "book", "receipt", task, 0, ()) == ("TooLate", deadline + 1, deadline)


def test_receipt_refuses(ledger: EvmLedger, task: bytes) -> None:
    ledger.mine_until(_start(ledger, task) + 1)
    node, verifier = ledger.address("node"), ledger.address("verifier")
    assert ledger.error("relay", "book", "receipt", task, 0, (node,)) == ("NotCommitted", node)
    assert ledger.error("relay", "book", "receipt", task, 0, (node,) * 257) == ("TooLong", 257, 256)
    assert ledger.error("relay", "book", "receipt", task, 6, ()) == ("PastTheEnd", 6, 6)
    assert ledger.error("relay", "book", "receipt", UNKNOWN, 0, ()) == ("UnknownTask", UNKNOWN)
    assert ledger.error("verifier", "book", "receipt", task, 0, ()) == ("WrongRole", verifier, Role.VERIFIER)


def test_policies_are_recorded_in_order(ledger: EvmLedger, task: bytes) -> None:
    hashes = tuple(bytes([n]) * 32 for n in range(3, 7))
    trainer, node = ledger.address("trainer"), ledger.address("node")
    for version in (0, 2):
        error = ledger.error("trainer", "book", "recordPolicy", task, version, *hashes)
        assert error == ("WrongPolicyVersion", version, 1)
    assert ledger.error("trainer", "book", "recordPolicy", task, 1, bytes(32), *hashes[1:]) == ("ZeroValue",)
    assert ledger.error("trainer", "book", "recordPolicy", UNKNOWN, 1, *hashes) == ("UnknownTask", UNKNOWN)
    assert ledger.error("node", "book", "recordPolicy", task, 1, *hashes) == ("Unauthorized", node, trainer)
    assert ledger.send("trainer", "book", "recordPolicy", task, 1, *hashes) == [PolicyRecorded(task, 1, *hashes)]
    assert ledger.error("trainer", "book", "recordPolicy", task, 1, *hashes) == ("WrongPolicyVersion", 1, 2)


def test_two_attestations_are_recorded(ledger: EvmLedger, task: bytes) -> None:
    relay, verifier, node = (ledger.address(name) for name in ("relay", "verifier", "node"))
    assert ledger.error("relay", "book", "attestPolicy", task, 1) == ("UnknownPolicy", 1, 0)
    assert ledger.error("relay", "book", "attestPolicy", UNKNOWN, 0) == ("UnknownTask", UNKNOWN)
    ledger.send("trainer", "book", "recordPolicy", task, 1, ROOT, ROOT, ROOT, ROOT)
    assert ledger.error("node", "book", "attestPolicy", task, 1) == ("WrongRole", node, Role.NODE)
    assert ledger.send("relay", "book", "attestPolicy", task, 1) == [PolicyAttested(task, 1, relay)]
    assert ledger.error("relay", "book", "attestPolicy", task, 1) == ("AlreadyAttested", relay)
    assert ledger.send("verifier", "book", "attestPolicy", task, 1) == [PolicyAttested(task, 1, verifier)]
    assert ledger.send("verifier2", "book", "attestPolicy", task, 1) == []
    assert ledger.view("book", "attestationsOf", task, 1) == 2


def test_statements_of_a_relay_need_a_verifiers_stake(ledger: EvmLedger, task: bytes) -> None:
    node, relay = ledger.address("node"), ledger.address("relay")
    ledger.send("node", "book", "join", task, 4)
    ledger.commit(task, 0, "node", leaves=4)
    ledger.send("relay", "registry", "startUnbond", 1)
    refused = ("StakeTooLow", relay, STAKE - 1, STAKE)
    assert ledger.error("relay", "book", "receipt", task, 0, (node,)) == refused
    assert ledger.error("relay", "book", "attestPolicy", task, 0) == refused
    assert ledger.view("book", "pendingPayOf", task, 0) == 0


def test_nothing_is_stated_about_a_closed_task(ledger: EvmLedger, task: bytes) -> None:
    ledger.send("node", "book", "join", task, 1)
    ledger.send("initiator", "book", "cancel", task)
    ledger.send("stranger", "book", "close", task)
    refused = ("TaskIsClosed", task)
    assert ledger.error("node2", "book", "join", task, 1) == refused
    assert ledger.error("node", "book", "commit", task, 0, ROOT, 1, POLICY) == refused
    assert ledger.error("relay", "book", "receipt", task, 0, ()) == refused
    assert ledger.error("trainer", "book", "recordPolicy", task, 1, ROOT, ROOT, ROOT, ROOT) == refused
    assert ledger.error("relay", "book", "attestPolicy", task, 0) == refused
    assert ledger.error("verifier", "court", "commitVerdict", task, 0, ROOT) == refused
    assert ledger.error("verifier", "court", "revealVerdict", task, 0, b"", ROOT, ROOT) == refused
    assert ledger.error("verifier", "court", "voteSettlement", task, 0, ROOT, 0, 0, ()) == refused
    ledger.send("node", "book", "leave", task)  # a reservation is always given back
    assert ledger.view("book", "reservedOf", ledger.address("node")) == 0
