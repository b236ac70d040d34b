"""What a node of a given speed may expect of a task: accepted rollouts and reward per hour, with every assumption named.

Pure functions of what troth.doctor_facts found; troth.doctor_task shows them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from protocol.rounds import get_end_round, get_members
from protocol.task import compute_rollout_pay
from troth.doctor_facts import Facts
from troth.views import count_rollouts

#: Blocks of a round that go to its beacon, to seeing it, and to the root's own transaction.
BLOCKS_LOST = 3


@dataclass
class Estimate:
    """What a node like this may expect. Rollouts and reward (token units) per hour; zeros when nothing can be said."""

    rollouts_per_hour: float = 0.0
    reward_per_hour: float = 0.0
    assumptions: list[str] = field(default_factory=list)


def get_quota(facts: Facts) -> int:
    """Groups this node would be given in the next round, if the nodes that are there stay."""
    spec, others = facts.spec, 0
    if facts.task is not None and facts.state is not None:
        start, blocks = facts.task.start_block, spec.schedule.round_blocks
        newest = max((facts.state.block_number - start) // blocks, 0)
        last = max(get_end_round(facts.task) - 1, 0)
        others = len(set(get_members(facts.state, facts.task, min(newest, last))) - {facts.account})
    declared = min(facts.settings.slots or spec.slots_max, spec.slots_max)
    return max(1, min(declared, spec.groups_per_round // (others + 1)))


def get_time_to_commit(facts: Facts) -> float:
    """Seconds between a round's beacon and the last block for its root."""
    assert facts.clock is not None
    return max(facts.spec.schedule.commit_blocks - BLOCKS_LOST, 0) * facts.clock.block_s


def get_mean_tokens(facts: Facts) -> tuple[float, str]:
    """Mean sampled tokens of a rollout, and how that is known: from judged rounds, else the middle of what is allowed."""
    rows = [row for rows in facts.task.judged.values() for _, row in rows] if facts.task is not None else []
    rollouts = sum(row.groups for row in rows if row.tokens) * facts.spec.group_size
    if rollouts:
        return sum(row.tokens for row in rows) / rollouts, f"as in {rollouts} judged rollouts"
    return (facts.spec.sampling.max_tokens + 1) / 2, f"half of max_tokens = {facts.spec.sampling.max_tokens}"


def estimate(facts: Facts) -> Estimate:
    """Accepted rollouts and reward per hour."""
    found = Estimate()
    if facts.tokens_per_s is None or facts.clock is None or not facts.clock.block_s:
        found.assumptions.append("nothing is estimated: the speed or the ledger's pace is unknown")
        return found
    spec, schedule = facts.spec, facts.spec.schedule
    tokens, tokens_from = get_mean_tokens(facts)
    rollouts = get_quota(facts) * spec.group_size
    needed_s = rollouts * tokens / facts.tokens_per_s
    round_s = schedule.round_blocks * facts.clock.block_s
    time_s = get_time_to_commit(facts)
    share, share_from = _accepted_share(facts)
    found.assumptions = [
        f"{facts.tokens_per_s:.0f} tokens/s: {facts.speed_from}",
        f"{tokens:.1f} tokens a rollout: {tokens_from}",
        f"{get_quota(facts)} groups of {spec.group_size} a round: the nodes that are there stay, and no others come",
        f"a round every {round_s:.1f} s, {time_s:.1f} s of it to work in",
        f"{share:.0%} accepted: {share_from}",
        f"pay {spec.economics.reward_base} + {spec.economics.reward_token} a token, in units of the escrow token",
        "gas is not taken off",
    ]
    if needed_s > time_s:
        fitting = int(get_quota(facts) * time_s / needed_s)
        found.assumptions.append(f"too slow for the quota: as if {fitting} slots were declared")
        rollouts = fitting * spec.group_size
    rounds = 3600 / max(round_s, needed_s if needed_s <= time_s else round_s)
    found.rollouts_per_hour = rollouts * rounds * share
    found.reward_per_hour = found.rollouts_per_hour * compute_rollout_pay(spec, round(tokens))
    return found


def _accepted_share(facts: Facts) -> tuple[float, str]:
    if facts.task is not None and facts.state is not None:
        counted = count_rollouts(facts.state, facts.task)
        judged = counted["accepted"] + sum(counted["rejected"].values())
        if judged:
            return counted[
                "accepted"
            ] / judged, f"as of all {judged} judged so far; `troth node selftest` tells about yours"
    return 1.0, "nothing was judged yet; `troth node selftest` tells about yours"
