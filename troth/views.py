"""Plain dictionaries of what the ledger says, for `--json`, tables and the demo's screen. Reads the replica only."""

from __future__ import annotations

from collections import Counter
from typing import Any

from protocol.errors import Reason
from protocol.evidence import describe_trial
from protocol.ledger.state import LedgerState, Task
from protocol.lottery import PPM
from protocol.rounds import (
    get_audit_ppm,
    get_end_round,
    get_epoch,
    get_history,
    get_num_epochs,
    get_open_round,
    get_outcomes,
    get_trial,
    is_suspended,
)
from protocol.settlement import compute_settlement
from protocol.task import TaskSpec
from protocol.verdict import Status


def hex_account(account: bytes) -> str:
    """0x-prefixed address."""
    return "0x" + account.hex()


def describe_spec(spec: TaskSpec) -> dict[str, Any]:
    """The task as published, in people's units."""
    return {
        "name": spec.name,
        "environment": {"entry": spec.environment.entry, "args": spec.environment.args},
        "licence_data": spec.licence_data,
        "licence_model": spec.licence_model,
        "temperature": spec.sampling.temperature_milli / 1000,
        "max_tokens": spec.sampling.max_tokens,
        "stop_tokens": list(spec.sampling.stop_tokens),
        "group_size": spec.group_size,
        "groups_per_round": spec.groups_per_round,
        "slots_max": spec.slots_max,
        "max_staleness": spec.max_staleness,
        "profile": spec.profile.name,
        "audit_probability": spec.economics.audit_ppm / PPM,
        "base_policy": spec.base_policy.hex(),
        "adapter": {"rank": spec.adapter.rank, "alpha": spec.adapter.alpha, "modules": list(spec.adapter.modules)},
        "trainer": hex_account(spec.trainer),
        "token": hex_account(spec.token),
        "schedule": {name: getattr(spec.schedule, name) for name in spec.schedule.__struct_fields__},
        "economics": {name: getattr(spec.economics, name) for name in spec.economics.__struct_fields__},
    }


def get_phase(state: LedgerState, task: Task) -> str:
    """One word for where a task stands."""
    if task.closed:
        return "closed"
    if state.block_number < task.start_block:
        return "published"
    if get_open_round(task, state.block_number) is not None:
        return "running"
    final = task.final
    return "settled" if final is not None and final.epoch + 1 >= get_num_epochs(task) else "settling"


def describe_task(state: LedgerState, task: Task) -> dict[str, Any]:
    """A task's public state."""
    policy = task.policies[-1] if task.policies else None
    open_round = get_open_round(task, state.block_number)
    final = task.final
    return {
        "task": task.task.hex(),
        "name": task.spec.name,
        "phase": get_phase(state, task),
        "block": state.block_number,
        "start_block": task.start_block,
        "round": open_round,
        "end_round": get_end_round(task),
        "epoch": None if open_round is None else get_epoch(task, open_round),
        "policy_version": None if policy is None else policy.version,
        "deposit": task.deposit,
        "settled_epoch": None if final is None else final.epoch,
        "paid_total": 0 if final is None else final.paid_total,
        "claimed": sum(task.claimed.values()),
        "rollouts": count_rollouts(state, task),
    }


def count_rollouts(state: LedgerState, task: Task) -> dict[str, Any]:
    """Judged rollouts so far: accepted, and rejected by reason."""
    accepted, rejected = 0, Counter[str]()
    for round_index in sorted(task.commitments):
        for outcome in get_outcomes(state, task, round_index).values():
            rollouts = outcome.row.groups * task.spec.group_size
            if outcome.row.status == Status.GOOD:
                accepted += rollouts
            else:
                rejected[reason_name(outcome.row.reason)] += rollouts
    return {"accepted": accepted, "rejected": dict(sorted(rejected.items()))}


def reason_name(reason: int) -> str:
    """Lower-case name of a reason number; unknown numbers are shown as such."""
    try:
        return Reason(reason).name.lower()
    except ValueError:
        return f"reason_{reason}"


def describe_nodes(state: LedgerState, task: Task) -> list[dict[str, Any]]:
    """Every node that ever joined a task: stake, standing, audits, evidence, unclaimed earnings of final settlements."""
    earnings = get_final_earnings(state, task)
    newest = max(task.commitments, default=0)
    rows = []
    for account in sorted(task.members):
        history = get_history(state, task, account, state.block_number)
        failed = next((row for row in history if row.status == Status.CHEAT), None)
        participant = state.participants[account]
        trial = describe_trial(get_trial(state, task, account, state.block_number))
        rows.append(
            {
                "account": hex_account(account),
                "stake": participant.bonded + participant.unbonding,
                "slashed": participant.slashed,
                "slots": task.members[account][-1].slots,
                "rounds": len(history),
                "groups_good": sum(row.groups for row in history if row.status == Status.GOOD),
                "leaves_audited": sum(row.audited for row in history),
                "leaves_total": sum(row.groups for row in history),
                "audit_probability": get_audit_ppm(state, task, account, newest) / PPM,
                "evidence_log10": trial["log10"],
                "evidence": trial,
                "suspended": is_suspended(state, task, account, state.block_number),
                "caught_by": reason_name(failed.reason) if failed else None,
                "earned": earnings.get(account, 0),
                "unclaimed": earnings.get(account, 0) - task.claimed.get(account, 0),
            }
        )
    return rows


def get_final_earnings(state: LedgerState, task: Task) -> dict[bytes, int]:
    """Cumulative earnings under the last final settlement; empty before the first."""
    final = task.final
    return {} if final is None else compute_settlement(state, task, final.epoch).earnings
