"""Verdict rows: what a verifier says on the ledger about each submission of a round, packed to one word per node.

Layout of a row, 32 bytes: account (20) | status (1) | reason (1) | groups (2) | tokens (4) | audited leaves (2) | zeros (2),
integers big-endian, rows sorted by account. Rows travel inside the reveal transaction, so that settlement can be
recomputed from the chain alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

from protocol.errors import Reason, Reject
from protocol.merkle import keccak

ROW_BYTES = 32


class Status(IntEnum):
    """How a submission was judged."""

    #: Passed every check on all of it and every drawn audit: payable.
    GOOD = 1
    #: Fewer groups than the node's quota: unpaid, and its next quota is what it delivered.
    SHORT = 2
    #: Above a first numeric limit: unpaid, and the node is back at p = 1.
    UNPAID = 3
    #: A deterministic failure or far above a numeric limit: forfeits unsettled pay, slashed after the challenge window.
    CHEAT = 4


class Row(NamedTuple):
    """One submission's verdict.

    Attributes:
        reason: a `Reason`, 0 when the status is GOOD.
        groups: groups judged.
        tokens: completion tokens in them.
        audited: leaves that were drawn and prefilled.
        evidence: what the audit adds to the sequential test of the account, in units of 1/256 nat (protocol.evidence).
    """

    account: bytes
    status: Status
    reason: int
    groups: int
    tokens: int
    audited: int
    evidence: int = 0


def pack_rows(rows: Sequence[Row]) -> bytes:
    """Pack rows in account order."""
    return b"".join(
        row.account
        + bytes((row.status, row.reason))
        + row.groups.to_bytes(2, "big")
        + row.tokens.to_bytes(4, "big")
        + row.audited.to_bytes(2, "big")
        + row.evidence.to_bytes(2, "big", signed=True)
        for row in sorted(rows, key=lambda row: row.account)
    )


def unpack_rows(data: bytes) -> tuple[Row, ...]:
    """Parse packed rows.

    Raises:
        Reject: `MALFORMED` for a wrong length, an unknown status, or accounts out of order.
    """
    if len(data) % ROW_BYTES:
        raise Reject(Reason.MALFORMED, "verdict rows", observed=len(data), limit=f"a multiple of {ROW_BYTES}")
    rows: list[Row] = []
    for start in range(0, len(data), ROW_BYTES):
        word = data[start : start + ROW_BYTES]
        try:
            status = Status(word[20])
        except ValueError:
            raise Reject(Reason.MALFORMED, "unknown verdict status", observed=word[20]) from None
        row = Row(
            word[:20],
            status,
            word[21],
            int.from_bytes(word[22:24], "big"),
            int.from_bytes(word[24:28], "big"),
            int.from_bytes(word[28:30], "big"),
            int.from_bytes(word[30:], "big", signed=True),
        )
        if rows and rows[-1].account >= row.account:
            raise Reject(Reason.MALFORMED, "verdict rows are not canonical", observed=word.hex())
        rows.append(row)
    return tuple(rows)


def compute_verdict_commitment(
    *, task: bytes, round_index: int, verifier: bytes, rows: bytes, report: bytes, salt: bytes
) -> bytes:
    """keccak(abi.encode(task, round, verifier, keccak(rows), report, salt)), as the Court contract computes it.

    The verifier's own address is inside: a copied commitment can never be revealed by the copier.
    """
    return keccak(task + round_index.to_bytes(32, "big") + verifier.rjust(32, b"\0") + keccak(rows) + report + salt)
