"""Where a node stands in a task's calendar, in words: which rounds it can work in, and why it has nothing to do.

Pure reads of the replica. Neighbours: inference.worker acts on it, inference.status keeps what is said here.
"""

from __future__ import annotations

from collections.abc import Callable

from inference.status import Condition, State
from protocol.checks import Assignment, get_assignment
from protocol.errors import Ignore, Reject
from protocol.ledger.events import Role
from protocol.ledger.state import Task
from protocol.ports import Ledger
from protocol.rounds import get_end_round, get_epoch, get_times, is_suspended


def get_open_rounds(task: Task, block: int) -> range:
    """Rounds that have started and still take commitments at a block."""
    schedule = task.spec.schedule
    newest = min((block - task.start_block) // schedule.round_blocks, get_end_round(task) - 1)
    oldest = -((task.start_block + schedule.commit_blocks - block) // schedule.round_blocks)
    return range(max(oldest, 0), newest + 1)


def get_oldest_version(task: Task, oldest_open: int) -> int:
    """Version of the oldest round a node can still work on; the newest eligible before the first round."""
    limit = task.start_block + max(oldest_open, 0) * task.spec.schedule.round_blocks
    usable = [p.version for p in task.policies if p.eligible_block is not None and p.eligible_block <= limit]
    return max(usable, default=0)


def get_own_assignment(ledger: Ledger, task: Task, round_index: int) -> Assignment:
    """What the ledger says this account has to do in a round; raises like `protocol.checks.get_assignment`."""
    return get_assignment(
        ledger.state, task, round_index, ledger.account, chain_id=ledger.chain_id, ledger=ledger.address
    )


def describe_membership(ledger: Ledger, task: Task) -> Condition | None:
    """Why this account cannot join a task; None when it can."""
    participant = ledger.state.participants.get(ledger.account)
    stake_min = task.spec.economics.node_stake_min
    if participant is not None and participant.role == Role.NODE and participant.bonded >= stake_min:
        return None
    if participant is None:
        seen = "no registration as a node"
    elif participant.role != Role.NODE:
        seen = f"a registration as {participant.role.name.lower()}"
    else:
        seen = f"stake {participant.bonded}"
    text = f"cannot join: observed {seen}, limit {stake_min}; register with enough stake"
    return Condition("waiting_registration", text, f"a node is registered here with a stake of {stake_min} or more")


def describe_rest(ledger: Ledger, task: Task, open_rounds: range) -> Condition | None:
    """Why there is nothing to do whatever the round: the task is over or has not begun, or the node is not part of it.
    None when the newest open round may be this node's."""
    block, account, end = ledger.state.block_number, ledger.account, get_end_round(task)
    last = get_times(task, end - 1) if end else None
    if task.closed or last is None:
        return Condition("idle", "the task is closed" if task.closed else "the task has no rounds", "another task")
    over = block > last.commit_deadline
    membership = task.members.get(account)
    if not membership and not over:
        cannot = describe_membership(ledger, task)
        if cannot is not None:
            return cannot
        if open_rounds.stop >= end:
            return Condition("idle", f"the last round, {end - 1}, has begun: nobody can join any more", "another task")
        text = "joining: the transaction is on its way"
        return Condition("waiting_registration", text, "the ledger shows this account as a member")
    if over:
        text = f"the task's last round, {end - 1}, took commitments until block {last.commit_deadline}, now {block}"
        return Condition("idle", text, "another task")
    assert membership is not None
    if is_suspended(ledger.state, task, account, block):
        text = "a confirmed cheat of this account suspended it: it gets no more slots in this task"
        return Condition("idle", text, "another task; `rejections` says which round and why")
    first = get_times(task, membership[-1].from_epoch * task.spec.schedule.epoch_rounds).start
    left = membership[-1].to_epoch is not None
    if block < first and not left:
        text = f"joined from epoch {membership[-1].from_epoch} on"
        return Condition("idle", text, f"that epoch begins at block {first}, now {block}")
    if not open_rounds or block < task.start_block:
        return Condition("idle", "no round is open", f"round {max(open_rounds.stop, 0)} begins at block {first}")
    newest = open_rounds.stop - 1
    if left and get_epoch(task, newest) >= (membership[-1].to_epoch or 0):
        return Condition("idle", "this account left the task", "it joins again")
    return None


def describe_round(task: Task, round_index: int, state: State, reason: str) -> Condition:
    """A state that lasts until the next round."""
    following = round_index + 1
    if following < get_end_round(task):
        ends = f"round {following} begins at block {get_times(task, following).start}"
    else:
        ends = "another task: this is the last round"
    return Condition(state, reason, ends, round_index)


def describe_waiting(
    ledger: Ledger,
    task: Task,
    round_index: int,
    held: str,
    attempts: str,
    missing: Callable[[Task, Assignment], str],
) -> Condition:
    """Why an open round of this node's is not made yet.

    Args:
        held: a reason from outside, empty for none.
        attempts: how many attempts failed, in words.
        missing: why a policy is not here, empty when it is.
    """
    block, deadline = ledger.state.block_number, get_times(task, round_index).commit_deadline
    closes = f"round {round_index} closes after block {deadline}, now {block}"
    if held:
        return Condition("idle", held, f"that ends, or {closes}", round_index)
    try:
        absent = missing(task, get_own_assignment(ledger, task, round_index))
    except Ignore as error:
        return Condition("idle", str(error), f"somebody records its beacon, or {closes}", round_index)
    except Reject as error:
        return describe_round(task, round_index, "idle", str(error))
    if absent:
        return Condition("fetching", absent, f"it arrives, or {closes}", round_index)
    return Condition("working", f"round {round_index} is next, {attempts}", f"it is made, or {closes}", round_index)


def describe_late(
    ledger: Ledger, task: Task, round_index: int, needed: int, missing: Callable[[Task, Assignment], str]
) -> str:
    """Why a round cannot be finished in time.

    Args:
        needed: blocks of work that are predicted.
        missing: why a policy is not here, empty when it is.
    """
    deadline, block = get_times(task, round_index).commit_deadline, ledger.state.block_number
    try:
        absent = missing(task, get_own_assignment(ledger, task, round_index))
    except (Ignore, Reject) as error:
        return str(error)
    if absent:
        return f"{absent}; was not here by block {block}, commitments close at block {deadline}"
    return (
        f"no time left: observed block {block} and {needed} blocks of work, limit block {deadline}; "
        "declare fewer slots or use a faster machine if this goes on"
    )
