"""Chores that keep a task going and that anybody may do: recording beacons.

Doing them twice costs gas and changes nothing, so participants take turns: a hash ranks them for each chore, the first
acts at once, the next two a little later, the next four later still, each only if it is still needed. Nobody in particular
has to be there, and with twice as many a turn everybody's comes before a round's deadline, however many are silent.
"""

from __future__ import annotations

from collections.abc import Iterator

from protocol.codec import tagged_hash
from protocol.ledger.calls import RecordBeacon
from protocol.ledger.events import Role
from protocol.ledger.state import LedgerState, Task
from protocol.ports import Ledger
from protocol.rounds import get_end_round, get_open_round, get_times

#: Blocks between two turns: enough for the first one's transaction to be seen.
TURN_BLOCKS = 2
_KEEPERS = (Role.VERIFIER, Role.RELAY, Role.TRAINER)


def get_turn(state: LedgerState, account: bytes, label: bytes) -> int:
    """Our place in the queue for a chore, 0 first; one past the end for roles that do no chores."""
    keepers = [p.account for p in state.participants.values() if p.role in _KEEPERS and p.bonded > 0]
    ranked = sorted(keepers, key=lambda other: tagged_hash("turn", label, other))
    return ranked.index(account) if account in ranked else len(ranked)


def get_wait_blocks(turn: int) -> int:
    """Blocks that place `turn` of the queue waits: places 0, 1-2, 3-6, 7-14, ... act together."""
    return TURN_BLOCKS * ((turn + 1).bit_length() - 1)


def get_due_beacons(task: Task, block_number: int) -> Iterator[int]:
    """Blocks whose hash some round needs now: round beacons until the commit deadline, audit beacons until the verdict
    commit deadline."""
    newest = get_open_round(task, block_number)
    newest = get_end_round(task) - 1 if newest is None and block_number >= task.start_block else newest
    if newest is None:
        return
    span = task.spec.schedule
    reach = span.commit_blocks + span.receipt_blocks + span.finality_blocks + span.verdict_commit_blocks
    for round_index in range(max(0, newest - reach // span.round_blocks), newest + 1):
        times = get_times(task, round_index)
        if times.start <= block_number < times.commit_deadline:
            yield times.start
        if times.audit_block <= block_number < times.verdict_commit_deadline and task.commitments.get(round_index):
            yield times.audit_block


class BeaconDuty:
    """Records due beacons when it is our turn."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    async def step(self) -> None:
        """Submit every beacon that is due, unrecorded and ours to record."""
        state = self._ledger.state
        for task in state.tasks.values():
            if task.closed:
                continue
            for block in get_due_beacons(task, state.block_number):
                if block in state.beacons:
                    continue
                turn = get_turn(state, self._ledger.account, block.to_bytes(8, "big"))
                if state.block_number >= block + get_wait_blocks(turn):
                    await self._ledger.submit(f"beacon/{block}", RecordBeacon(block))
