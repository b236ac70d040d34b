"""Verdicts for roc.py: what the protocol's own checks say of rollouts, alone, in groups, in submissions, and over time.

Nothing is decided here: `protocol.checks.validate_scored` accepts or refuses, `protocol.evidence` accumulates. Here it is
counted, with Clopper-Pearson bounds (one-sided, 95 %; 1 - 0.05^(1/n), about 3 / n, where nothing was seen).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from attacks import GROUP_SIZE
from numpy.typing import NDArray

from protocol.checks import validate_scored
from protocol.codec import PROTOCOL_VERSION
from protocol.errors import Reject
from protocol.evidence import NO_TRIAL, compute_evidence, compute_next, is_alarm
from protocol.messages import Group, Sample
from protocol.ports import Scored
from protocol.presets import MINIMAL
from protocol.task import Environment, ProofProfile, Sampling, TaskSpec, validate_spec
from protocol.toploc import ChunkMatch
from troth.calibrate.measure import Made
from troth.calibrate.statistics import Observed

#: Groups of one submission, and the chance that one of them is audited once a node is trusted (the demo's task).
GROUPS, AUDIT_SHARE = 8, 0.05
SUBMISSION = GROUPS * GROUP_SIZE
#: Simulated nodes, and the rounds after which one counts as never found.
TRIALS, ROUNDS_MAX = 20, 1_000
#: Rounds after which nodes whose evidence shrinks on average are given up.
HOPELESS = 100


class Verdicts(NamedTuple):
    """What the judge said; a unit counts where something in it is forged.

    Attributes:
        rollouts / groups / submissions: bool, accepted, one entry per unit that counts. A unit is judged as if all of
            it were audited: a submission so at p = 1, a group is what is audited at least of every submission.
        is_group_refused / group_nats: of all groups in order, for what happens over time; nats in 1/256.
    """

    rollouts: NDArray[np.bool_]
    groups: NDArray[np.bool_]
    submissions: NDArray[np.bool_]
    is_group_refused: NDArray[np.bool_]
    group_nats: NDArray[np.int64]


def make_spec(profile: ProofProfile, max_tokens: int) -> TaskSpec:
    """A task with this profile; the checks of scored rollouts read nothing else of it."""
    spec = TaskSpec(
        version=PROTOCOL_VERSION,
        name="roc",
        base_policy=bytes(32),
        base_manifest=bytes(32),
        environment=Environment("sort", "{}", bytes(32)),
        licence_data="CC0-1.0",
        licence_model="Apache-2.0",
        sampling=Sampling(1000, max_tokens, (1,)),
        group_size=GROUP_SIZE,
        groups_per_round=GROUPS,
        slots_max=GROUPS,
        max_staleness=4,
        profile=profile,
        schedule=MINIMAL.schedule,
        economics=MINIMAL.economics,
        verifiers_per_round=MINIMAL.verifiers_per_round,
        trainer=bytes(20),
        token=bytes(20),
    )
    validate_spec(spec)
    return spec


def judge(spec: TaskSpec, made: Made, observed: Observed, is_forged: NDArray[np.bool_]) -> Verdicts:
    """Judge rollouts whose number is a multiple of `GROUP_SIZE`; a last submission that is not full is left out."""
    samples = [Sample(tokens, 0, proofs) for tokens, proofs in zip(made.completions, made.proofs, strict=True)]
    matches = split_matches(observed)
    ends = np.cumsum(np.bincount(observed.token_rollouts, minlength=observed.num_rollouts))[:-1]
    nothing = np.zeros((0, 0), dtype=np.uint16)
    scored = [Scored(nothing, gaps, gaps) for gaps in np.split(observed.gaps, ends)]

    def is_accepted(start: int, size: int) -> bool:
        part, sizes = slice(start, start + size), min(size, GROUP_SIZE)
        groups = [Group(i, 0, tuple(samples[start + i * sizes :][:sizes])) for i in range(size // sizes)]
        try:
            validate_scored(spec, groups, scored[part], matches[part])
        except Reject:
            return False
        return True

    accepted = {}
    for size in (1, GROUP_SIZE, SUBMISSION):
        starts = range(0, len(samples) // size * size, size)
        accepted[size] = np.array(
            [is_accepted(start, size) for start in starts if is_forged[start : start + size].any()]
        )
    starts = range(0, len(samples), GROUP_SIZE)
    gaps = [one.gaps for one in scored]
    nats = [compute_evidence(spec.profile, matches[i : i + GROUP_SIZE], gaps[i : i + GROUP_SIZE]) for i in starts]
    refused = [not is_accepted(start, GROUP_SIZE) for start in starts]
    return Verdicts(accepted[1], accepted[GROUP_SIZE], accepted[SUBMISSION], np.array(refused), np.array(nats))


def split_matches(observed: Observed) -> list[list[ChunkMatch]]:
    """Chunks of each rollout as `match_proofs` gave them."""
    matches: list[list[ChunkMatch]] = [[] for _ in range(observed.num_rollouts)]
    columns = (observed.mismatches, observed.exponents, observed.means, observed.medians, observed.sizes)
    rows = zip(*(column.tolist() for column in (*columns, observed.differing)), strict=True)
    for rollout, row in zip(observed.chunk_rollouts.tolist(), rows, strict=True):
        matches[rollout].append(ChunkMatch(*row))
    return matches


def bound(hits: int, total: int) -> float:
    """Upper end of the one-sided 95 % Clopper-Pearson interval: the rate at which `hits` or fewer have a chance of 5 %."""
    if hits >= total:
        return 1.0
    low, high = hits / total, 1.0
    terms = np.arange(hits + 1)
    choose = np.array(
        [math.lgamma(total + 1) - math.lgamma(k + 1) - math.lgamma(total - k + 1) for k in terms.tolist()]
    )
    for _ in range(60):
        middle = (low + high) / 2
        logs = choose + terms * math.log(middle) + (total - terms) * math.log1p(-middle)
        chance = float(np.exp(logs - logs.max()).sum()) * math.exp(float(logs.max()))
        low, high = (middle, high) if chance > 0.05 else (low, middle)
    return high


def rate(accepted: NDArray[np.bool_]) -> dict[str, Any]:
    """Accepted out of N, their share and its bound; shares are None where N is 0."""
    hits, total = int(accepted.sum()), len(accepted)
    return {
        "n": total,
        "accepted": hits,
        "rate": round(hits / total, 6) if total else None,
        "upper": round(bound(hits, total), 6) if total else None,
    }


def simulate_rounds(verdicts: Verdicts, *, audit_share: float, seed: int) -> dict[str, float | None]:
    """Submissions of 8 groups, drawn from the measured ones, until the node is found: medians over simulated nodes.

    Each group is audited with chance `audit_share`, and one of them at least, as in protocol.lottery.

    Returns:
        `refused`: until a submission is refused; `alarm`: until the sequential test alarms. None where more than half of
        the nodes are not found within `ROUNDS_MAX` rounds.
    """
    rng, groups = np.random.default_rng(seed), len(verdicts.group_nats)
    refused, alarms = [], []
    for _ in range(TRIALS):
        first, trial, alarm = math.inf, NO_TRIAL, math.inf
        for number in range(1, ROUNDS_MAX + 1):
            drawn = rng.integers(groups, size=max(1, rng.binomial(GROUPS, audit_share)))
            if verdicts.is_group_refused[drawn].any():
                first = min(first, number)
            if math.isinf(alarm):
                nats = int(verdicts.group_nats[drawn].sum())
                trial = compute_next(trial, min(max(nats, -(2**15)), 2**15 - 1))
                alarm = number if is_alarm(trial) else alarm
            if first <= number and alarm <= number:
                break
            is_settled = first <= number or not verdicts.is_group_refused.any()
            if is_settled and number >= HOPELESS and verdicts.group_nats.mean() <= 0:
                break
        refused.append(first)
        alarms.append(alarm)
    return {"refused": _median(refused), "alarm": _median(alarms)}


def _median(values: Sequence[float]) -> float | None:
    middle = sorted(values)[len(values) // 2]
    return None if math.isinf(middle) else middle


def summarise(verdicts: Verdicts, seed: int) -> dict[str, Any]:
    """Everything that is said of one attack."""
    rollouts = rate(verdicts.rollouts)
    share = rollouts["rate"]
    return {
        "rollouts": rollouts,
        "groups": rate(verdicts.groups),
        "submissions": rate(verdicts.submissions),
        "rollouts_to_refusal": round(1 / (1 - share), 1) if share is not None and share < 1 else None,
        "nats_per_group": round(float(verdicts.group_nats.mean()) / 256, 3),
        "rounds_at_1": simulate_rounds(verdicts, audit_share=1.0, seed=seed),
        "rounds_at_p": simulate_rounds(verdicts, audit_share=AUDIT_SHARE, seed=seed),
    }
