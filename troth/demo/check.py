"""The judge of a demo: reads the chain and public blobs, recomputes what it can, and says whether the run is good.

It shares no state with any role. Outcomes, settlement and slashes come from the ledger replica, money from the
contracts' own views and the token's balances, rewards from sampling both policies on held-out prompts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from contracts.client import EvmLedger
from protocol.ledger.state import Task
from protocol.rounds import get_history, get_outcomes
from protocol.verdict import Status
from troth.commands import escrow_of
from troth.demo.plan import Plan
from troth.views import count_rollouts, describe_nodes, hex_account


@dataclass(frozen=True)
class Evaluation:
    """Mean reward of the first and last policy on held-out prompts, and the standard errors of the two."""

    reward_first: float
    reward_last: float
    prompts: int
    error_first: float
    error_last: float


async def summarise(
    plan: Plan, ledger: EvmLedger, task: Task, names: dict[bytes, str], evaluation: Evaluation
) -> dict[str, Any]:
    """Everything a reader of `troth demo --json` wants to know, as one object. Money in token units."""
    state = ledger.state
    rows = {row["account"]: row for row in describe_nodes(state, task)}
    cheats, claims, honest_rejected, honest_late = [], {}, 0, 0
    for account, name in names.items():
        row = rows.get(hex_account(account))
        if row is None:
            continue
        if name in plan.cheats:
            cheats.append(
                {
                    "node": row["account"],
                    "kind": name,
                    "caught_by": row["caught_by"],
                    "slashed": row["slashed"],
                    "groups_good_before": row["groups_good"],
                    "leaves_audited": row["leaves_audited"],
                    "leaves_total": row["leaves_total"],
                    **_caught_where(ledger, task, account),
                }
            )
        else:
            history = get_history(state, task, account, state.block_number)
            bad = [r for r in history if r.status in (Status.UNPAID, Status.CHEAT)]
            honest_rejected += sum(r.groups for r in bad) * task.spec.group_size
            honest_late += sum(r.status == Status.SHORT for r in history)
            claims[name] = {
                "account": row["account"],
                "claimed": task.claimed.get(account, 0),
                "received": await ledger.token_balance(account),
                "slashed": row["slashed"],
            }
    for account, name in names.items():
        if name.startswith("verifier"):
            claims[name] = {
                "account": hex_account(account),
                "claimed": task.claimed.get(account, 0),
                "slashed": state.participants[account].slashed,
            }
    escrow = await escrow_of(ledger, task.task)
    escrow["held_by_contract"] = await ledger.token_balance(ledger.address)
    return {
        "task": task.task.hex(),
        "reward_first": round(evaluation.reward_first, 4),
        "reward_last": round(evaluation.reward_last, 4),
        "error_first": round(evaluation.error_first, 4),
        "error_last": round(evaluation.error_last, 4),
        "held_out": evaluation.prompts,
        "policies": len(task.policies),
        "rollouts": count_rollouts(state, task),
        "cheats": cheats,
        "honest_rejected": honest_rejected,
        "honest_late": honest_late,
        "claims": claims,
        "escrow": escrow,
    }


def _caught_where(ledger: EvmLedger, task: Task, account: bytes) -> dict[str, Any]:
    """In which round a cheat was caught, and at which audit probability the lottery ran then."""
    from protocol.lottery import PPM
    from protocol.rounds import get_audit_ppm

    for round_index in sorted(task.commitments):
        outcome = get_outcomes(ledger.state, task, round_index).get(account)
        if outcome is not None and outcome.row.status == Status.CHEAT:
            ppm = get_audit_ppm(ledger.state, task, account, round_index)
            return {
                "caught_round": round_index,
                "caught_at_probability": ppm / PPM,
                "audited_when_caught": f"{outcome.row.audited}/{outcome.row.groups}",
            }
    return {"caught_round": None, "caught_at_probability": None, "audited_when_caught": None}


def find_failures(plan: Plan, summary: dict[str, Any], task: Task) -> list[str]:
    """What is wrong with a run; empty when it is good."""
    failures = []
    gain = summary["reward_last"] - summary["reward_first"]
    if plan.is_default_length and gain < plan.reward_gain_min:
        failures.append(f"mean reward grew by {gain:.3f}, expected at least {plan.reward_gain_min}")
    if summary["held_out"] < plan.held_out_min:
        failures.append(f"evaluated on {summary['held_out']} held-out prompts, expected at least {plan.held_out_min}")
    caught = {cheat["kind"] for cheat in summary["cheats"] if cheat["caught_by"] and cheat["slashed"] > 0}
    for kind in plan.cheats:
        if kind not in caught:
            failures.append(f"cheat {kind} was not caught and slashed")
    for cheat in summary["cheats"]:
        if cheat["kind"] == "sleeper" and cheat["caught_at_probability"] == 1.0:
            failures.append("the sleeper was caught on probation, not by the lottery")
    if summary["honest_rejected"]:
        failures.append(f"{summary['honest_rejected']} rollouts of honest nodes were rejected")
    for name, claim in summary["claims"].items():
        if claim["slashed"]:
            failures.append(f"honest {name} was slashed by {claim['slashed']}")
        if not claim["claimed"]:
            failures.append(f"{name} claimed nothing")
    escrow = summary["escrow"]
    if not escrow["conserved"]:
        failures.append("deposit is not paid + refunded + burned + remaining")
    if escrow["held_by_contract"] != escrow["remaining"]:
        failures.append(f"the escrow holds {escrow['held_by_contract']}, its books say {escrow['remaining']}")
    claimed = sum(task.claimed.values())
    if escrow["paid"] != claimed:
        failures.append(f"the escrow paid {escrow['paid']}, claims add up to {claimed}")
    if not task.closed:
        failures.append("the task was not closed: its remaining money was not refunded")
    return failures


def render(summary: dict[str, Any], names: dict[bytes, str]) -> str:
    """The summary for people."""
    lines = [
        "",
        f"policies            {summary['policies']}",
        f"mean reward         {summary['reward_first']:.3f} first -> {summary['reward_last']:.3f} last "
        f"(gain {summary['reward_last'] - summary['reward_first']:+.3f}, {summary['held_out']} held-out prompts)",
        f"rollouts            {summary['rollouts']['accepted']} accepted, rejected: "
        + (", ".join(f"{k} {v}" for k, v in summary["rollouts"]["rejected"].items()) or "none"),
        f"honest rejected     {summary['honest_rejected']}",
    ]
    for cheat in summary["cheats"]:
        lines.append(
            f"cheat {cheat['kind']:<13} caught by {cheat['caught_by']} in round {cheat['caught_round']} at "
            f"p = {cheat['caught_at_probability']} ({cheat['audited_when_caught']} leaves of that submission, "
            f"{cheat['leaves_audited']}/{cheat['leaves_total']} of all), slashed {cheat['slashed']}"
        )
    lines += [f"claim {name:<13} {claim['claimed']}" for name, claim in summary["claims"].items()]
    e = summary["escrow"]
    lines.append(
        f"escrow              deposit {e['deposit']} = paid {e['paid']} + refunded {e['refunded']} + burned "
        f"{e['burned']} + remaining {e['remaining']}: {'conserved' if e['conserved'] else 'NOT CONSERVED'}"
    )
    lines.append(f"seconds             {summary['seconds']}")
    return "\n".join(lines)
