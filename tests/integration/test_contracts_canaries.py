"""Canaries on the real contract: what is accepted, when, what it costs; and the same calls on the rules in memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from protocol.canaries import compute_seal
from protocol.ledger.events import CanaryOpened, CanarySealed, CanaryVoted, Role
from tests.support.evm_ledger import STAKE, EvmLedger, fresh_ledger

SALT = b"\x5a" * 32
BOND = 700


@pytest.fixture
def ledger() -> Iterator[EvmLedger]:
    yield from fresh_ledger()


@pytest.fixture
def task(ledger: EvmLedger) -> bytes:
    task = ledger.publish()
    ledger.send("node", "book", "join", task, 2)
    return task


def _seal(ledger: EvmLedger, task: bytes, *, round_index: int = 0, node: str = "node", salt: bytes = SALT) -> bytes:
    return compute_seal(task=task, round_index=round_index, node=ledger.address(node), salt=salt)


def _times(ledger: EvmLedger, task: bytes, round_index: int = 0) -> tuple[int, ...]:
    times: tuple[int, ...] = ledger.view("book", "openRound", task, round_index)
    return times


def _open(ledger: EvmLedger, task: bytes) -> int:
    """Seal by a stranger, commit, open as soon as reveals are over; returns the block of the seal."""
    sealed_block = ledger.block
    ledger.send("stranger", "canaries", "seal", _seal(ledger, task), BOND)
    ledger.commit(task, 0)
    ledger.mine_until(_times(ledger, task)[5] + 1)
    ledger.send("node", "canaries", "open", task, 0, SALT)
    return sealed_block


def test_a_canary_is_sealed_opened_voted_on_and_its_bond_withdrawn(ledger: EvmLedger, task: bytes) -> None:
    node, stranger, seal = ledger.address("node"), ledger.address("stranger"), _seal(ledger, task)
    before, block = ledger.balance("stranger"), ledger.block
    assert ledger.send("stranger", "canaries", "seal", seal, BOND) == [CanarySealed(seal, stranger, BOND)]
    assert ledger.view("canaries", "sealOf", seal) == (stranger, BOND, block)
    assert (ledger.balance("canaries"), ledger.balance("stranger")) == (BOND, before - BOND)
    ledger.commit(task, 0)
    times = _times(ledger, task)
    ledger.mine_until(times[5])
    assert ledger.error("node", "canaries", "open", task, 0, SALT) == ("TooEarly", times[5], times[5] + 1)
    ledger.mine_until(times[5] + 1)
    assert ledger.error("verifier", "canaries", "confirm", task, 0, node, True) == ("NotOpened", task, 0, node)
    assert ledger.send("node", "canaries", "open", task, 0, SALT) == [CanaryOpened(task, 0, node, block, BOND)]
    voted = CanaryVoted(task, 0, node, ledger.address("verifier"), True)
    assert ledger.send("verifier", "canaries", "confirm", task, 0, node, True) == [voted]
    again = ledger.error("verifier", "canaries", "confirm", task, 0, node, False)
    assert again == ("AlreadyConfirmed", ledger.address("verifier"))
    ledger.send("stranger", "canaries", "withdraw")
    assert (ledger.balance("canaries"), ledger.balance("stranger")) == (0, before)
    assert ledger.error("stranger", "canaries", "withdraw") == ("NoBondToWithdraw", stranger)


def test_windows_end_with_their_last_block(ledger: EvmLedger, task: bytes) -> None:
    ledger.send("stranger", "canaries", "seal", _seal(ledger, task), BOND)
    ledger.commit(task, 0)
    times = _times(ledger, task)
    ledger.mine_until(times[6])
    ledger.call("node", "canaries", "open", task, 0, SALT)
    ledger.mine_until(times[6] + 1)
    assert ledger.error("node", "canaries", "open", task, 0, SALT) == ("TooLate", times[6] + 1, times[6])
    assert ledger.balance("canaries") == BOND  # for ever
    ledger.mine_until(times[7] + 1)
    error = ledger.error("verifier", "canaries", "confirm", task, 0, ledger.address("node"), True)
    assert error == ("TooLate", times[7] + 1, times[7])


def test_an_epoch_is_not_settled_before_its_canaries_are(ledger: EvmLedger, task: bytes) -> None:
    last = _times(ledger, task, 1)[7]
    assert ledger.view("book", "lastConfirmOf", task, 0) == last
    ledger.mine_until(last)
    arguments = (task, 0, bytes(32), 0, 0, ())
    assert ledger.error("verifier", "court", "voteSettlement", *arguments) == ("TooEarly", last, last + 1)


def test_v1_a_seal_is_copied_reused_and_opened_by_nobody_else(ledger: EvmLedger, task: bytes) -> None:
    stranger, seal = ledger.address("stranger"), _seal(ledger, task)
    ledger.send("stranger", "canaries", "seal", seal, BOND)
    assert ledger.error("node2", "canaries", "seal", seal, 0) == ("SealTaken", stranger)
    ledger.commit(task, 0)
    ledger.mine_until(_times(ledger, task)[5] + 1)
    others = _seal(ledger, task, node="node2")
    assert ledger.error("node2", "canaries", "open", task, 0, SALT) == ("NothingSealed", others)
    assert ledger.error("node", "canaries", "open", task, 0, b"\x01" * 32)[0] == "NothingSealed"
    ledger.send("node", "canaries", "open", task, 0, SALT)
    assert ledger.error("node", "canaries", "open", task, 0, SALT) == ("NothingSealed", seal)
    assert ledger.error("stranger", "canaries", "seal", seal, BOND) == ("SealTaken", bytes(20))
    assert ledger.view("canaries", "bondOf", stranger) == BOND


def test_v1_a_second_seal_of_the_same_work_says_nothing_new(ledger: EvmLedger, task: bytes) -> None:
    ledger.send("node2", "canaries", "seal", _seal(ledger, task, salt=b"\x02" * 32), 9_000)
    _open(ledger, task)
    assert ledger.send("node", "canaries", "open", task, 0, b"\x02" * 32) == []
    assert ledger.view("canaries", "bondOf", ledger.address("node2")) == 9_000


def test_v1_sealing_when_the_audit_beacon_can_be_known_is_too_late(ledger: EvmLedger, task: bytes) -> None:
    ledger.commit(task, 0)
    times = _times(ledger, task)
    ledger.mine_until(times[3])
    ledger.send("stranger", "canaries", "seal", _seal(ledger, task), BOND)
    ledger.mine_until(times[5] + 1)
    assert ledger.error("node", "canaries", "open", task, 0, SALT) == ("SealedTooLate", times[3], times[3])


def test_only_verifiers_with_stake_vote(ledger: EvmLedger, task: bytes) -> None:
    _open(ledger, task)
    node = ledger.address("node")
    assert ledger.error("node2", "canaries", "confirm", task, 0, node, True) == (
        "WrongRole", ledger.address("node2"), Role.NODE,
    )  # fmt: skip
    ledger.send("verifier3", "registry", "startUnbond", 2 * STAKE + 1)
    error = ledger.error("verifier3", "canaries", "confirm", task, 0, node, True)
    assert error == ("StakeTooLow", ledger.address("verifier3"), STAKE - 1, STAKE)


def test_seal_refuses(ledger: EvmLedger) -> None:
    assert ledger.error("stranger", "canaries", "seal", bytes(32), BOND) == ("ZeroValue",)
    assert ledger.error("stranger", "canaries", "seal", b"\x07" * 32, 2**96)[0] == "SafeCastOverflowedUintDowncast"
