"""A verifier's part in the money loop: vote for what it computed, challenge what differs, finalise.

Every answer comes from `protocol.settlement.compute_settlement` on the verifier's own replica. Nothing here decides
anything; a verifier that is away simply does not vote.
"""

from __future__ import annotations

from collections.abc import Callable

from protocol.codec import tagged_hash
from protocol.ledger.calls import Call, Challenge, Finalize, VoteChallenge, VoteSettlement
from protocol.ledger.events import Role
from protocol.ledger.state import LedgerState, Settlement, Task
from protocol.ports import Ledger
from protocol.rounds import get_num_epochs
from protocol.settlement import SettlementResult, compute_settlement, get_epoch_deadline

#: Blocks between two verifiers' turns to finalise.
TURN_BLOCKS = 2
#: Times a refused call is tried again while the ledger still says it is due.
ATTEMPTS_MAX = 5


def get_turn(state: LedgerState, account: bytes, task: bytes, epoch: int) -> int:
    """Our place in the queue to finalise, 0 first."""
    verifiers = [p.account for p in state.participants.values() if p.role is Role.VERIFIER and p.bonded]
    ranked = sorted(verifiers, key=lambda other: tagged_hash("finalise", task, epoch.to_bytes(8, "big"), other))
    return ranked.index(account) if account in ranked else len(ranked)


def is_same(settlement: Settlement, own: SettlementResult) -> bool:
    """Whether a pending settlement is what we computed."""
    return (
        settlement.root == own.root
        and settlement.paid_total == own.paid_total
        and settlement.burned_total == own.burned_total
        and settlement.slashed == own.slashed
    )


class Settler:
    """Settles the epochs of a task, one after the other."""

    def __init__(self, *, ledger: Ledger, events: Callable[[str, dict[str, object]], None]) -> None:
        self._ledger = ledger
        self._events = events
        self._computed: dict[tuple[bytes, int], SettlementResult] = {}

    async def step(self, task: Task) -> None:
        """Do what is due for the next unsettled epoch."""
        state, final = self._ledger.state, task.final
        epoch = 0 if final is None else final.epoch + 1
        if task.closed or epoch >= get_num_epochs(task) or state.block_number <= get_epoch_deadline(task, epoch):
            return
        own = self._compute(task, epoch)
        name = f"{task.task.hex()}/{epoch}/{task.voids.get(epoch, 0)}"
        pending = task.settlements.get(epoch)
        if pending is None:
            await self._vote(task, own, name)
            return
        if not pending.challenged and not is_same(pending, own) and state.block_number < pending.challenge_end:
            self._events("challenge", {"epoch": epoch, "root": pending.root, "own": own.root})
            await self._send(f"challenge/{name}", Challenge(task.task, epoch))
        if pending.challenged and state.block_number < pending.vote_end:
            uphold = is_same(pending, own)
            await self._send(f"challenge-vote/{name}", VoteChallenge(task.task, epoch, uphold))
        end = max(pending.challenge_end, pending.vote_end)
        if state.block_number > end + get_turn(state, self._ledger.account, task.task, epoch) * TURN_BLOCKS:
            await self._send(f"finalize/{name}", Finalize(task.task, epoch))

    def _compute(self, task: Task, epoch: int) -> SettlementResult:
        key = (task.task, epoch)
        if key not in self._computed:
            self._computed = {key: compute_settlement(self._ledger.state, task, epoch)}
        return self._computed[key]

    async def _vote(self, task: Task, own: SettlementResult, name: str) -> None:
        if self._ledger.account in task.votes.get(own.epoch, {}):
            return
        vote = VoteSettlement(task.task, own.epoch, own.root, own.paid_total, own.burned_total, own.slashed)
        if await self._send(f"settle/{name}", vote):
            self._events("settlement", {"epoch": own.epoch, "root": own.root.hex(), "paid_total": own.paid_total})

    async def _send(self, name: str, call: Call) -> bool:
        """Submit a call unless it is under way; one that was refused although it is still due is tried again, a bounded
        number of times. Returns whether something was submitted."""
        for attempt in range(ATTEMPTS_MAX):
            status = self._ledger.outcome(f"{name}/{attempt}").status
            if status == "unknown":
                await self._ledger.submit(f"{name}/{attempt}", call)
                return True
            if status != "reverted":
                return False
        return False
