"""Finished slots of a round in progress, on disk: a killed node goes on where it was instead of starting the round again.

A part is a run of groups from one call of the engine, written whole (temp, fsync, rename, directory fsync) before the
next call. It is bound to (task, round, beacon, policy, account, quota, and what made it: engine and numeric type) and is
never read for anything else; a part that is bound elsewhere, torn or damaged is removed and its slots are made again.
Parts hold what was sampled, never what a cheat makes of it later: a bundle is only ever built from them once.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from inference.journal import write_atomic
from protocol.checks import Assignment
from protocol.codec import Message, decode, encode, tagged_hash
from protocol.errors import Reject
from protocol.messages import Group

#: Largest part that is read back, in bytes.
PART_BYTES_MAX = 1 << 30
_DIGEST_BYTES = 32


class Part(Message, frozen=True):
    """Groups of consecutive slots. `hidden` is the hidden size of the policy that made them."""

    binding: bytes
    hidden: int
    groups: tuple[Group, ...]


def compute_binding(assignment: Assignment, made_by: str) -> bytes:
    """What a part belongs to, as one hash.

    Args:
        made_by: engine and numeric settings in words; work of another engine is not continued.
    """
    seed = assignment.seed(0)  # covers chain, ledger, task, round, beacon, policy and account
    return tagged_hash("part", seed, assignment.quota.to_bytes(8, "big"), made_by.encode())


class Parts:
    """Part files in a node's folder: `<round>.<first slot>.part`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def read(self, assignment: Assignment, made_by: str) -> tuple[dict[int, Group], int]:
        """Groups by slot that are here for an assignment, and the hidden size (0 for none)."""
        binding, groups, hidden = compute_binding(assignment, made_by), dict[int, Group](), 0
        for path in sorted(self._directory.glob(f"{assignment.round_index}.*.part")):
            part = _read(path)
            if part is None or part.binding != binding or (hidden and part.hidden != hidden):
                path.unlink(missing_ok=True)
                continue
            hidden = part.hidden
            groups |= {group.slot: group for group in part.groups if group.slot < assignment.quota}
        return groups, hidden

    def add(self, assignment: Assignment, made_by: str, groups: tuple[Group, ...], hidden: int) -> None:
        """Make groups durable. Raises `Fault` when the disk refuses."""
        body = encode(Part(compute_binding(assignment, made_by), hidden, groups))
        path = self._directory / f"{assignment.round_index}.{groups[0].slot}.part"
        write_atomic(path, hashlib.sha256(body).digest() + body)

    def drop(self, round_index: int) -> None:
        """Forget a round: its bundle is on disk, or it is given up."""
        for path in self._directory.glob(f"{round_index}.*.part"):
            path.unlink(missing_ok=True)

    def forget(self, oldest: int) -> None:
        """Forget every round before `oldest`, also of earlier runs."""
        for path in self._directory.glob("*.part"):
            number = path.name.partition(".")[0]
            if not number.isdecimal() or int(number) < oldest:
                path.unlink(missing_ok=True)


def _read(path: Path) -> Part | None:
    """A whole and undamaged part, else None."""
    try:
        if path.stat().st_size > PART_BYTES_MAX + _DIGEST_BYTES:
            return None
        data = path.read_bytes()
        digest, body = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
        return decode(Part, body, bytes_max=PART_BYTES_MAX) if hashlib.sha256(body).digest() == digest else None
    except (OSError, Reject):
        return None
