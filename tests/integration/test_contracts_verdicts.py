"""`Court`: verdicts are committed, then revealed, with every deadline at +-1 block."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from protocol.ledger.events import Role, VerdictCommitted, VerdictRevealed
from protocol.verdict import compute_verdict_commitment
from tests.support.evm_ledger import STAKE, EvmLedger, fresh_ledger

ROWS, REPORT, SALT = b"\x05" * 64, b"\x06" * 32, b"\x07" * 32
UNKNOWN = b"\x99" * 32


@pytest.fixture
def ledger() -> Iterator[EvmLedger]:
    yield from fresh_ledger()


@pytest.fixture
def task(ledger: EvmLedger) -> bytes:
    return ledger.publish()


def _commitment(ledger: EvmLedger, task: bytes, rows: bytes = ROWS, who: str = "verifier") -> bytes:
    return compute_verdict_commitment(
        task=task, round_index=0, verifier=ledger.address(who), rows=rows, report=REPORT, salt=SALT
    )


def test_verdict_is_committed_then_revealed(ledger: EvmLedger, task: bytes) -> None:
    _, _, _, audit, commit_deadline, reveal_deadline = ledger.times(task, 0)
    verifier, commitment = ledger.address("verifier"), _commitment(ledger, task)
    ledger.mine_until(audit + 1)
    assert ledger.error("verifier", "court", "commitVerdict", task, 0, commitment) == ("BeaconMissing", audit)
    ledger.record_beacon(audit)
    assert ledger.send("verifier", "court", "commitVerdict", task, 0, commitment) == [
        VerdictCommitted(task, 0, verifier, commitment)
    ]
    again = ledger.error("verifier", "court", "commitVerdict", task, 0, UNKNOWN)
    assert again == ("VerdictAlreadyCommitted", commitment)
    reveal = ("verifier", "court", "revealVerdict", task, 0, ROWS, REPORT, SALT)
    ledger.mine_until(commit_deadline)
    assert ledger.error(*reveal) == ("TooEarly", commit_deadline, commit_deadline + 1)
    ledger.mine_until(commit_deadline + 1)
    ledger.call(*reveal)
    ledger.mine_until(reveal_deadline)
    assert ledger.send(*reveal) == [VerdictRevealed(task, 0, verifier, ROWS, REPORT)]
    assert ledger.view("court", "verdictCommitmentOf", task, 0, verifier) == bytes(32)
    ledger.mine_until(reveal_deadline + 1)
    assert ledger.error(*reveal) == ("TooLate", reveal_deadline + 1, reveal_deadline)


def test_commit_verdict_refuses(ledger: EvmLedger, task: bytes) -> None:
    _, _, _, audit, deadline, _ = ledger.times(task, 0)
    ledger.record_beacon(audit)

    def error(who: str, *arguments: object) -> tuple[object, ...]:
        return ledger.error(who, "court", "commitVerdict", *arguments)

    assert error("verifier", task, 0, bytes(32)) == ("ZeroValue",)
    assert error("verifier", UNKNOWN, 0, UNKNOWN) == ("UnknownTask", UNKNOWN)
    assert error("verifier", task, 6, UNKNOWN) == ("PastTheEnd", 6, 6)
    assert error("node", task, 0, UNKNOWN) == ("WrongRole", ledger.address("node"), Role.NODE)
    assert error("stranger", task, 0, UNKNOWN) == ("WrongRole", ledger.address("stranger"), 0)
    ledger.send("verifier2", "registry", "startUnbond", 2 * STAKE + 1)
    assert error("verifier2", task, 0, UNKNOWN) == ("StakeTooLow", ledger.address("verifier2"), STAKE - 1, STAKE)
    ledger.mine_until(deadline)
    ledger.call("verifier", "court", "commitVerdict", task, 0, UNKNOWN)
    ledger.mine_until(deadline + 1)
    assert error("verifier", task, 0, UNKNOWN) == ("TooLate", deadline + 1, deadline)


def test_reveal_refuses(ledger: EvmLedger, task: bytes) -> None:
    _, _, _, audit, deadline, _ = ledger.times(task, 0)
    ledger.record_beacon(audit)
    committed = _commitment(ledger, task)
    ledger.send("verifier", "court", "commitVerdict", task, 0, committed)
    ledger.mine_until(deadline + 1)

    def error(who: str, rows: bytes, report: bytes = REPORT, salt: bytes = SALT) -> tuple[object, ...]:
        return ledger.error(who, "court", "revealVerdict", task, 0, rows, report, salt)

    assert error("verifier", b"x" * 33) == ("RowsMisaligned", 33)
    assert error("verifier", b"x" * 32 * 1025) == ("TooLong", 32 * 1025, 32 * 1024)
    for change in ((ROWS[:32],), (ROWS, UNKNOWN), (ROWS, REPORT, UNKNOWN)):
        assert error("verifier", *change)[:2] == ("CommitmentMismatch", committed)
    mine = _commitment(ledger, task, who="verifier2")
    assert error("verifier2", ROWS) == ("CommitmentMismatch", bytes(32), mine)
    assert ledger.send("verifier", "court", "revealVerdict", task, 0, ROWS, REPORT, SALT) != []
    assert error("verifier", ROWS) == ("CommitmentMismatch", bytes(32), committed)


@pytest.mark.parametrize("rows", [0, 1024])
def test_reveal_takes_no_rows_and_the_most(ledger: EvmLedger, task: bytes, rows: int) -> None:
    _, _, _, audit, deadline, _ = ledger.times(task, 0)
    ledger.record_beacon(audit)
    data = b"\x05" * 32 * rows
    ledger.send("verifier", "court", "commitVerdict", task, 0, _commitment(ledger, task, data))
    ledger.mine_until(deadline + 1)
    ledger.send("verifier", "court", "revealVerdict", task, 0, data, REPORT, SALT)
