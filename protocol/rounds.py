"""What the ledger says about a round: its policy, who may work in it, its committee, its outcomes.

All of these are pure functions of the replica at or after a stated block, so every participant computes the same answer.
Outcomes are derived in round order, because each adds its evidence to the trial of its node (protocol.evidence), and kept on
the task; what a committee said does not depend on earlier outcomes, so no rule here asks itself. What was opened as a canary
(protocol.canaries) has no outcome, so an outcome is known when the openings of its round are over, not before.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from typing import NamedTuple

from protocol.canaries import is_left_out
from protocol.codec import tagged_hash
from protocol.errors import Reason, Reject
from protocol.evidence import NO_TRIAL, Step, Trial, compute_median, compute_next, is_alarm
from protocol.ledger.events import Role
from protocol.ledger.state import LedgerState, Policy, Task
from protocol.lottery import PPM, compute_audited_leaves, compute_committee
from protocol.task import RoundTimes, compute_epoch_pay_max, compute_round_times
from protocol.verdict import Row, Status, unpack_rows


class Outcome(NamedTuple):
    """What at least 2/3 of a round's committee said about one submission, and what it comes to.

    Attributes:
        row: what they agree on; its evidence is the lower median of theirs. A `CHEAT` for `EVIDENCE` when the node's trial
            has come to an alarm, whatever they said about this round alone.
        agreed: verifiers whose revealed row agrees.
        trial: of the node, after this round.
    """

    row: Row
    agreed: tuple[bytes, ...]
    trial: Trial = NO_TRIAL


def get_times(task: Task, round_index: int) -> RoundTimes:
    """Deadlines of a round of this task."""
    return compute_round_times(task.spec.schedule, task.start_block, round_index)


def get_epoch(task: Task, round_index: int) -> int:
    """The epoch a round belongs to: the one in which it opened."""
    return round_index // task.spec.schedule.epoch_rounds


def get_end_round(task: Task) -> int:
    """First round that never opens: the funded epochs, or an earlier cancellation."""
    funded = min(task.spec.schedule.num_epochs, task.deposit // compute_epoch_pay_max(task.spec))
    end = funded * task.spec.schedule.epoch_rounds
    return end if task.cancelled_end is None else min(end, task.cancelled_end)


def get_num_epochs(task: Task) -> int:
    """Epochs that can be settled, given funding and cancellation."""
    epoch_rounds = task.spec.schedule.epoch_rounds
    return (get_end_round(task) + epoch_rounds - 1) // epoch_rounds


def get_open_round(task: Task, block_number: int) -> int | None:
    """The newest round that started at or before `block_number`, None before round 0 and after the last round."""
    if block_number < task.start_block:
        return None
    index = (block_number - task.start_block) // task.spec.schedule.round_blocks
    return index if index < get_end_round(task) else None


def get_round_policy(task: Task, round_index: int) -> Policy | None:
    """The one policy of a round: the newest that was eligible `grace_blocks` before the round started.

    Version 0 serves from the task's own publication on, so a round always has a policy.
    """
    limit = get_times(task, round_index).start - task.spec.schedule.grace_blocks
    for policy in reversed(task.policies):
        if policy.eligible_block is not None and (policy.version == 0 or policy.eligible_block <= limit):
            return policy
    return None


def get_round_beacon(state: LedgerState, task: Task, round_index: int) -> bytes | None:
    """Hash of the round's start block. None means not recorded (yet, or for ever: then the round is void)."""
    return state.beacons.get(get_times(task, round_index).start)


def get_committee(state: LedgerState, task: Task, round_index: int) -> tuple[bytes, ...]:
    """Verifiers drawn for a round by its audit beacon; empty when the beacon is missing.

    Candidates held the minimum stake at the audit block.
    """
    times = get_times(task, round_index)
    beacon = state.beacons.get(times.audit_block)
    if beacon is None:
        return ()
    candidates = [
        p.account
        for p in state.participants.values()
        if p.role == Role.VERIFIER and p.bonded_at(times.audit_block) >= task.spec.economics.verifier_stake_min
    ]
    return compute_committee(
        task=task.task,
        round_index=round_index,
        beacon=beacon,
        candidates=candidates,
        size=task.spec.verifiers_per_round,
    )


def _agree(rows: list[tuple[bytes, Row]], needed: int) -> Outcome | None:
    """The row that `needed` verifiers share, reasons and evidence aside; None when there is none."""
    tally: dict[tuple[int, int, int], list[tuple[bytes, Row]]] = {}
    for verifier, row in rows:
        tally.setdefault((row.status, row.groups, row.tokens), []).append((verifier, row))
    for matching in tally.values():
        if len(matching) >= needed:
            row = min(row._replace(evidence=0) for _, row in matching)
            evidence = compute_median([row.evidence for _, row in matching])
            return Outcome(row._replace(evidence=evidence), tuple(sorted(verifier for verifier, _ in matching)))
    return None


def get_rows(state: LedgerState, task: Task, round_index: int) -> dict[bytes, list[tuple[bytes, Row]]]:
    """What the committee of a round revealed about each receipted submission: rows with their verifiers, by account."""
    receipts = task.receipts.get(round_index)
    if not receipts:
        return {}
    said: dict[bytes, list[tuple[bytes, Row]]] = {}
    for verifier in get_committee(state, task, round_index):
        reveal = task.reveals.get(round_index, {}).get(verifier)
        if reveal is None:
            continue
        try:
            rows = unpack_rows(reveal.rows)
        except Reject:
            continue
        for row in rows:
            if row.account in receipts:
                said.setdefault(row.account, []).append((verifier, row))
    return said


def get_said(state: LedgerState, task: Task, round_index: int) -> dict[bytes, Outcome]:
    """What the committee of a round agrees on about each submission, trials and canaries aside. Empty until its reveals are
    over; final then."""
    if state.block_number <= get_times(task, round_index).verdict_reveal_deadline:
        return {}
    rows = get_rows(state, task, round_index)
    needed = -(-2 * max(len(get_committee(state, task, round_index)), 1) // 3) if rows else 0
    return {account: found for account, said in rows.items() if (found := _agree(said, needed))}


def get_left_out(
    state: LedgerState, task: Task, round_index: int, said: Mapping[bytes, Outcome]
) -> dict[bytes, Outcome | None]:
    """Opened canaries of a round that count for nothing whatever was said of them, with what was said."""
    block = get_times(task, round_index).verdict_reveal_deadline
    left_out = {}
    for node, canary in task.canaries.get(round_index, {}).items():
        outcome = said.get(node)
        if is_left_out(state, task, canary, node, None if outcome is None else outcome.row.status, block):
            left_out[node] = outcome
    return left_out


def _try_round(task: Task, round_index: int, said: dict[bytes, Outcome]) -> dict[bytes, Outcome]:
    """Add a round's evidence to the trials of its nodes; an alarm makes the round's outcome a cheat."""
    outcomes = {}
    for account, (row, agreed, _) in said.items():
        steps = task.trials.setdefault(account, [])
        trial = compute_next(steps[-1].trial if steps else NO_TRIAL, row.evidence)
        steps.append(Step(round_index, row.evidence, trial))
        if is_alarm(trial) and row.status != Status.CHEAT:
            row = row._replace(status=Status.CHEAT, reason=int(Reason.EVIDENCE), tokens=0)
        outcomes[account] = Outcome(row, agreed, trial)
    return outcomes


def get_outcomes(state: LedgerState, task: Task, round_index: int) -> dict[bytes, Outcome]:
    """Judged submissions of a round, by account. Empty until the openings of its canaries are over.

    A submission counts only if it was committed and receipted, and if at least 2/3 of the drawn committee revealed
    rows that agree on it. Anything else, and a canary, has no outcome: it is unpaid, nobody is slashed for it, and no trial
    counts it.
    """
    if round_index not in task.commitments:
        return {}
    if state.block_number <= get_times(task, round_index).opening_deadline:
        return {}
    if not task.outcomes:
        task.trials.clear()
    while (index := len(task.outcomes)) <= round_index:  # earlier rounds' openings were over earlier
        said = get_said(state, task, index)
        for node in get_left_out(state, task, index, said):
            said.pop(node, None)
        task.outcomes[index] = _try_round(task, index, said)
    return task.outcomes[round_index]  # type: ignore[no-any-return]


def get_trial(state: LedgerState, task: Task, account: bytes, block_number: int) -> list[Step]:
    """The steps of a node's trial in rounds whose openings were over before `block_number`, in round order."""
    _fold_judged(state, task)
    steps: list[Step] = task.trials.get(account, [])
    deadlines = (get_times(task, step.round_index).opening_deadline for step in steps)
    return [step for step, deadline in zip(steps, deadlines, strict=True) if deadline < block_number]


def _fold_judged(state: LedgerState, task: Task) -> None:
    """Add rounds whose openings are over to the accounts' histories; each round is folded once."""
    newest = max(task.commitments, default=-1)
    while task.judged_rounds <= newest:
        deadline = get_times(task, task.judged_rounds).opening_deadline
        if state.block_number <= deadline:
            return
        for account, outcome in get_outcomes(state, task, task.judged_rounds).items():
            task.judged.setdefault(account, []).append((deadline, outcome.row))
        task.judged_rounds += 1


def get_history(state: LedgerState, task: Task, account: bytes, block_number: int) -> list[Row]:
    """A node's judged rows whose openings were over before `block_number`, oldest first."""
    _fold_judged(state, task)
    rows = task.judged.get(account, [])
    return [row for _, row in rows[: bisect_left(rows, block_number, key=lambda entry: entry[0])]]


def is_suspended(state: LedgerState, task: Task, account: bytes, block_number: int) -> bool:
    """A node with a confirmed cheat gets no more slots in this task."""
    return any(row.status == Status.CHEAT for row in get_history(state, task, account, block_number))


def get_audit_ppm(state: LedgerState, task: Task, account: bytes, round_index: int) -> int:
    """Audit probability of a node in a round, in millionths.

    p = 1 until `probation_groups` groups were judged good since the node's beginning or its last failure.
    """
    good = 0
    for row in get_history(state, task, account, get_times(task, round_index).audit_block):
        if row.status == Status.GOOD:
            good += row.groups
        elif row.status != Status.SHORT:
            good = 0
    return PPM if good < task.spec.economics.probation_groups else task.spec.economics.audit_ppm


def get_members(state: LedgerState, task: Task, round_index: int) -> dict[bytes, int]:
    """Nodes that may work in a round and the slots each declared: joined for its epoch, staked, not suspended."""
    epoch, start = get_epoch(task, round_index), get_times(task, round_index).start
    members = {}
    for account, history in task.members.items():
        current = [m for m in history if m.from_epoch <= epoch and (m.to_epoch is None or epoch < m.to_epoch)]
        staked = state.participants[account].bonded_at(start) >= task.spec.economics.node_stake_min
        if current and staked and not is_suspended(state, task, account, start):
            members[account] = current[-1].slots
    return members


def get_quotas(state: LedgerState, task: Task, round_index: int) -> dict[bytes, int]:
    """Groups each node must make and may be paid for in a round; empty before the round's beacon is recorded.

    The round's groups are shared evenly, the remainder goes to the nodes a hash of the beacon ranks first. A node that
    last delivered fewer than its quota gets what it delivered.
    """
    start = get_times(task, round_index).start
    beacon = get_round_beacon(state, task, round_index)
    if beacon is None:
        return {}
    if round_index not in task.quotas:
        quotas = _compute_quotas(state, task, round_index, beacon)
        if state.block_number < start:
            return quotas
        task.quotas[round_index] = quotas
    return task.quotas[round_index]


def _compute_quotas(state: LedgerState, task: Task, round_index: int, beacon: bytes) -> dict[bytes, int]:
    members = get_members(state, task, round_index)
    if not members:
        return {}
    ranked = sorted(members, key=lambda account: tagged_hash("quota", task.task, beacon, account))
    share, extra = divmod(task.spec.groups_per_round, len(ranked))
    start = get_times(task, round_index).start
    quotas = {}
    for rank, account in enumerate(ranked):
        quota = min(share + (rank < extra), members[account], task.spec.slots_max)
        history = get_history(state, task, account, start)
        if history and history[-1].status == Status.SHORT:
            quota = min(quota, max(history[-1].groups, 1))
        if quota:
            quotas[account] = quota
    return quotas


def get_audited(
    state: LedgerState, task: Task, round_index: int, account: bytes, *, chain_id: int, ledger: bytes
) -> tuple[int, ...]:
    """Leaf indices of a submission that the lottery drew; empty before the audit beacon is recorded."""
    beacon = state.beacons.get(get_times(task, round_index).audit_block)
    commitment = task.commitments.get(round_index, {}).get(account)
    if beacon is None or commitment is None:
        return ()
    return compute_audited_leaves(
        chain_id=chain_id,
        ledger=ledger,
        task=task.task,
        round_index=round_index,
        account=account,
        root=commitment.root,
        num_leaves=commitment.leaves,
        beacon=beacon,
        audit_ppm=get_audit_ppm(state, task, account, round_index),
    )
