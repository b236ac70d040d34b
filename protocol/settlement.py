"""Settlement: what an epoch's verdicts come to in money, as a pure function of the ledger.

Every verifier computes the same cumulative Merkle root of earnings, the same burn and the same slashes once everything
about the epoch is said. Unknown means unpaid: what has no outcome earns nothing. What was delivered in time but never
judged is burned rather than refunded, so that nobody gains by starving the verifiers. A canary is neither paid nor burned;
who called it good is slashed when its defect is confirmed (protocol.canaries).
"""

from __future__ import annotations

from typing import NamedTuple

from protocol.canaries import is_confirmed
from protocol.errors import Fault
from protocol.ledger.state import LedgerState, Task
from protocol.merkle import compute_earning_leaf, compute_proof, compute_root
from protocol.rounds import (
    get_committee,
    get_end_round,
    get_left_out,
    get_outcomes,
    get_quotas,
    get_rows,
    get_said,
    get_times,
)
from protocol.task import compute_leaf_pay_max
from protocol.verdict import Status


class SettlementResult(NamedTuple):
    """What is voted for on the ledger, and the leaves behind its root.

    Attributes:
        earnings: cumulative earnings by account over all settled epochs, zero entries left out.
        paid_total / burned_total: cumulative, in token units.
        slashed: nodes with a confirmed cheat that no earlier epoch slashed, and verifiers that called a canary of this epoch
            good; sorted. Those beyond `SLASHED_MAX` come first in the next epoch's list.
    """

    epoch: int
    root: bytes
    paid_total: int
    burned_total: int
    slashed: tuple[bytes, ...]
    earnings: dict[bytes, int]


#: Most accounts one settlement can slash; the others come with the next epoch.
SLASHED_MAX = 64


def compute_submission_pay(task: Task, groups: int, tokens: int) -> int:
    """Pay of a good submission: base pay of every rollout plus the rate of every token."""
    economics = task.spec.economics
    return groups * task.spec.group_size * economics.reward_base + tokens * economics.reward_token


def get_epoch_deadline(task: Task, epoch: int) -> int:
    """Last block in which anything can be said about this epoch: reveals, openings and votes on canaries are over."""
    last_round = min((epoch + 1) * task.spec.schedule.epoch_rounds, get_end_round(task)) - 1
    return get_times(task, last_round).confirm_deadline


def get_lazy(state: LedgerState, task: Task, round_index: int) -> set[bytes]:
    """Verifiers of a round's committee that called a canary good whose defect is confirmed."""
    canaries = task.canaries.get(round_index)
    if not canaries:
        return set()
    block = get_times(task, round_index).verdict_reveal_deadline
    committee, said = get_committee(state, task, round_index), get_rows(state, task, round_index)
    lazy: set[bytes] = set()
    for node, canary in canaries.items():
        rows = said.get(node, [])
        if is_confirmed(state, task, canary, [row for _, row in rows], committee, block):
            lazy |= {verifier for verifier, row in rows if row.status == Status.GOOD}
    return lazy


class _Epoch(NamedTuple):
    """What one epoch's rounds came to, while they are added up."""

    earned: dict[bytes, int]
    cheats: set[bytes]
    lazy: set[bytes]


def _earn_round(state: LedgerState, task: Task, round_index: int, epoch: _Epoch) -> int:
    """Add one round's earnings, cheats and lazy verifiers; returns what it burns.

    Nothing is paid or burned beyond a node's quota, whatever was committed or said, so a round never costs more than
    its reserve and a settlement can always be covered by the deposit.
    """
    burned = 0
    earned = epoch.earned
    outcomes, quotas = get_outcomes(state, task, round_index), get_quotas(state, task, round_index)
    said = get_said(state, task, round_index) if round_index in task.canaries else {}
    canaries = get_left_out(state, task, round_index, said)
    lazy = get_lazy(state, task, round_index)
    for account in task.receipts.get(round_index, {}):
        outcome, quota = outcomes.get(account), quotas.get(account, 0)
        if account in canaries:
            continue
        if outcome is None:
            leaves = min(task.commitments[round_index][account].leaves, quota)
            burned += leaves * compute_leaf_pay_max(task.spec)
        elif outcome.row.status == Status.GOOD:
            groups = min(outcome.row.groups, quota)
            tokens = min(outcome.row.tokens, groups * task.spec.group_size * task.spec.sampling.max_tokens)
            earned[account] = earned.get(account, 0) + compute_submission_pay(task, groups, tokens)
        elif outcome.row.status == Status.CHEAT:
            epoch.cheats.add(account)
    judged = [*outcomes.values(), *(outcome for outcome in canaries.values() if outcome is not None)]
    for verifier in {verifier for outcome in judged for verifier in outcome.agreed} - lazy:
        earned[verifier] = earned.get(verifier, 0) + task.spec.economics.verifier_fee
    epoch.lazy.update(lazy)
    return burned


def compute_settlement(state: LedgerState, task: Task, epoch: int) -> SettlementResult:
    """The settlement of `epoch`, cumulative over all epochs up to it.

    A confirmed cheat forfeits everything the node had not yet been settled for: its earnings of this epoch are dropped.
    Earnings of epochs that are final stay. A node is slashed once in a task, because it is suspended then; a verifier once
    in every epoch in which it called a canary good, and it loses the fees of those rounds.

    Raises:
        Fault: before everything about the epoch is said (the answer could still change).
    """
    deadline = get_epoch_deadline(task, epoch)
    if state.block_number <= deadline:
        raise Fault(f"epoch {epoch} cannot be settled yet: observed block {state.block_number}, limit after {deadline}")
    earnings: dict[bytes, int] = {}
    burned_total = 0
    slashed: tuple[bytes, ...] = ()
    known: set[bytes] = set()
    late: list[bytes] = []  # due since an epoch whose list was full
    for index in range(epoch + 1):
        epoch_rounds = task.spec.schedule.epoch_rounds
        current = _Epoch({}, set(), set())
        for round_index in range(index * epoch_rounds, min((index + 1) * epoch_rounds, get_end_round(task))):
            burned_total += _earn_round(state, task, round_index, current)
        for account, amount in current.earned.items():
            if amount and account not in current.cheats:
                earnings[account] = earnings.get(account, 0) + amount
        due = late + sorted(((current.cheats - known) | current.lazy) - set(late))
        known |= current.cheats
        slashed, late = tuple(sorted(due[:SLASHED_MAX])), due[SLASHED_MAX:]
    leaves = compute_leaves(task.task, earnings)
    return SettlementResult(epoch, compute_root(leaves), sum(earnings.values()), burned_total, slashed, earnings)


def compute_leaves(task: bytes, earnings: dict[bytes, int]) -> list[bytes]:
    """Leaf hashes in account order."""
    return [compute_earning_leaf(task, account, earnings[account]) for account in sorted(earnings)]


def compute_claim(task: bytes, earnings: dict[bytes, int], account: bytes) -> tuple[int, tuple[bytes, ...]]:
    """Cumulative earnings of `account` and the proof to claim them with.

    Raises:
        Fault: when the account earned nothing.
    """
    if account not in earnings:
        raise Fault(f"account 0x{account.hex()} has no earnings in this settlement")
    index = sorted(earnings).index(account)
    return earnings[account], compute_proof(compute_leaves(task, earnings), index)
