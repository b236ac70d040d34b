"""From figures to limits: the rule by which a profile is chosen, and when none is.

Limits of single checks are `MARGIN` times the largest honest figure over all accepted pairs, never below the protocol's
floors. Nulls of the sequential test are `NULL_RATIO` times the highest mean of any accepted pair, never below the floors, nor
below what so few tokens could show. Bets maximise growth against the weakest alternative that can be found within
`FIND_ROLLOUTS` audited rollouts. A profile is refused when too little was measured, or when it would find nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from protocol.errors import ConfigError
from protocol.evidence import ALARM
from protocol.task import (
    BET_MAX,
    MANTISSA_MEAN_MILLI_MIN,
    REPLAY_TOLERANCE_MICRO_MIN,
    SHARE_NULL_PPM_MIN,
    TIES_NULL_PPM_MIN,
    ProofProfile,
)
from troth.calibrate.statistics import (
    Floats,
    Observed,
    average_by_rollout,
    compute_auc,
    compute_nats,
    estimate_delay,
    find_rejections,
)

#: Largest honest figure to limit, and highest honest mean to null.
MARGIN, NULL_RATIO = 2, 1.5
#: Tolerance to the gap at which a miss is slashable.
SEVERE_RATIO = 10
#: One in so many entries may mismatch whatever was measured: an entry beside a power of two flips its exponent by an ulp.
MISMATCH_FLOOR = 32
#: Fewest rollouts over all accepted pairs that limits are taken from.
ROWS_MIN = 1_000
#: Audited rollouts within which an alternative has to be found to count as found: 16 submissions of 8 groups x 16.
FIND_ROLLOUTS = 2_048
#: Share of an alternative's rollouts that single checks refuse, from which it counts as found by them.
FIND_SHARE = 0.5
#: Commitments of honest provers that fold no index have the largest modulus there is; this is the room below.
MODULUS_MIN, MODULUS_ROOM = 65_433, 64
#: With no miss among n tokens, the miss rate is below this over n at 95 % (the rule of three).
RULE_OF_THREE = 3
#: What ties are bet against where no alternative misses more often than its null: a miss rate of so many nulls.
TIES_RATIO = 10
#: Steps in which a bet is searched.
_BET_STEPS = 200


class Bet(NamedTuple):
    """A bet of the sequential test, in thousandths, and the alternative it is tuned for (empty where there is none)."""

    milli: int
    alternative: str


class Choice(NamedTuple):
    """A profile, what its bets are tuned for, and what it does to each alternative, as profile files keep it."""

    profile: ProofProfile
    share_bet: Bet
    ties_bet: Bet
    alternatives: list[dict[str, Any]]


def choose_profile(
    name: str,
    dtype: str,
    honest: Mapping[str, Observed],
    alternatives: Mapping[str, Observed],
    *,
    topk: int,
    chunk: int,
) -> Choice:
    """Limits for a model from what was measured of it.

    Args:
        honest: accepted pairs by name; the first is the one alternatives were measured under.
        alternatives: rollouts of other policies under the honest prefill, by name.

    Raises:
        ConfigError: when too little was measured, or nothing would be found.
    """
    require_rows(sum(one.num_rollouts for one in honest.values()), len(honest))
    limits = _choose_limits(honest, topk)
    share_null, ties_null = _choose_nulls(honest)
    shares = {label: (one.shares, len(one.sizes) / one.num_rollouts) for label, one in alternatives.items()}
    misses = {
        label: ((one.gaps > 0).astype(np.float64), len(one.gaps) / one.num_rollouts)
        for label, one in alternatives.items()
    }
    share_bet, ties_bet = choose_bet(shares, share_null), choose_bet(misses, ties_null)
    profile = ProofProfile(
        name=name,
        dtype=dtype,
        topk=topk,
        chunk=chunk,
        share_null_ppm=share_null,
        share_bet_milli=share_bet.milli,
        ties_null_ppm=ties_null,
        ties_bet_milli=ties_bet.milli,
        **limits,
    )
    _require_honest(profile, honest)
    reference = next(iter(honest.values()))
    found = [judge_alternative(profile, label, reference, one) for label, one in alternatives.items()]
    if not any(_is_found(one) for one in found):
        raise ConfigError(
            f"no profile would be worth having: none of {len(found)} alternatives is refused in {FIND_SHARE:.0%} of its "
            f"rollouts or found within {FIND_ROLLOUTS} audited ones, so honest work in {dtype} and other policies overlap; "
            "measure more --alternatives, or calibrate --dtype float32"
        )
    return Choice(profile, share_bet, ties_bet, found)


def require_rows(rows: int, num_pairs: int) -> None:
    """Refuse to take limits from less than `ROWS_MIN` honest rollouts. Raises `ConfigError`."""
    if rows < ROWS_MIN:
        raise ConfigError(
            f"{rows} honest rollouts over {num_pairs} accepted pairs are too few to take limits from, expected at least "
            f"{ROWS_MIN}: raise --rollouts"
        )


def _choose_limits(honest: Mapping[str, Observed], topk: int) -> dict[str, int]:
    mismatches = mean = gap = median = 0.0
    misses, modulus = 0, MODULUS_MIN + MODULUS_ROOM
    for one in honest.values():
        mismatches = max(mismatches, float((one.mismatches * topk / one.sizes).max()))
        mean, median = max(mean, float(one.means.max())), max(median, float(one.medians.max()))
        gap, misses = max(gap, float(one.gaps.max())), max(misses, int(one.misses.max()))
        modulus = min(modulus, int(one.moduli.min()))
    rate = max(float((one.gaps > 0).mean()) for one in honest.values())
    tolerance = max(REPLAY_TOLERANCE_MICRO_MIN, math.ceil(MARGIN * gap * 1e6))
    return {
        "exponent_mismatches_max": min(topk, max(topk // MISMATCH_FLOOR, MARGIN * math.ceil(mismatches))),
        "mantissa_mean_milli_max": max(MANTISSA_MEAN_MILLI_MIN, math.ceil(MARGIN * mean * 1e3)),
        "mantissa_median_max": int(median) + 1 if median else 0,
        "modulus_min": max(32_769, modulus - MODULUS_ROOM),
        "replay_tolerance_micro": tolerance,
        "replay_severe_micro": SEVERE_RATIO * tolerance,
        "near_ties_sequence_max": max(1, MARGIN * misses),
        "near_ties_per_1k_max": max(1, math.ceil(NULL_RATIO * rate * 1e3)),
    }


def _choose_nulls(honest: Mapping[str, Observed]) -> tuple[int, int]:
    """Nulls of shares and of misses, in millionths."""
    share = max(float(one.shares.mean()) for one in honest.values())
    rate = max(float((one.gaps > 0).mean()) for one in honest.values())
    tokens = sum(len(one.gaps) for one in honest.values())
    share_null = max(SHARE_NULL_PPM_MIN, math.ceil(NULL_RATIO * share * 1e6))
    ties_null = max(TIES_NULL_PPM_MIN, math.ceil(NULL_RATIO * rate * 1e6), math.ceil(RULE_OF_THREE / tokens * 1e6))
    return share_null, ties_null


def choose_bet(measured: Mapping[str, tuple[Floats, float]], null_ppm: int) -> Bet:
    """The bet that grows fastest against the weakest alternative that is found by it alone within `FIND_ROLLOUTS`.

    Args:
        measured: per alternative, values between 0 and 1, and how many of them a rollout has.

    Returns:
        Where none is found, the best bet against values of 0 and 1 whose mean is `TIES_RATIO` nulls.
    """
    weakest: tuple[float, float, str] | None = None
    for label, (values, per_rollout) in measured.items():
        bet, growth = _find_bet(values, null_ppm)
        nats = growth * per_rollout
        if nats * FIND_ROLLOUTS >= math.log(ALARM) and (weakest is None or nats < weakest[0]):
            weakest = (nats, bet, label)
    if weakest is None:
        null = null_ppm / 1e6
        mean = min(TIES_RATIO * null, (1 + null) / 2)  # a mean above 1 is none
        return Bet(_to_milli((mean - null) / (null * (1 - null)), null_ppm), "")
    return Bet(_to_milli(weakest[1], null_ppm), weakest[2])


def _to_milli(bet: float, null_ppm: int) -> int:
    return min(int(bet * 1e3), int(BET_MAX * 10**9 / null_ppm))


def _find_bet(values: Floats, null_ppm: int) -> tuple[float, float]:
    """The bet with the highest mean of ln(1 + bet (value - null)), and that mean. It is concave, so a grid suffices."""
    null = null_ppm / 1e6
    if float(values.mean()) <= null:
        return 0.0, 0.0
    seen, counts = np.unique(values, return_counts=True)
    weights = counts / counts.sum()
    bets = np.linspace(0, BET_MAX / null, _BET_STEPS + 1)
    for _ in range(3):  # three looks, each at the neighbourhood of the best so far
        growths = [float(weights @ compute_nats(seen, null, bet)) for bet in bets]
        best = int(np.argmax(growths))
        result = float(bets[best]), growths[best]
        bets = np.linspace(bets[max(best - 1, 0)], bets[min(best + 1, len(bets) - 1)], _BET_STEPS + 1)
    return result


def _require_honest(profile: ProofProfile, honest: Mapping[str, Observed]) -> None:
    """A profile under which honest work is refused, or earns evidence, contradicts its own rule."""
    for label, one in honest.items():
        assert not find_rejections(profile, one).any.any(), f"honest rollouts of {label} are refused"
        assert math.isinf(estimate_delay(profile, one)), f"evidence grows against honest rollouts of {label}"


def judge_alternative(profile: ProofProfile, label: str, honest: Observed, other: Observed) -> dict[str, Any]:
    """What single checks and the sequential test make of an alternative's rollouts, beside honest ones of the same pair."""
    refused, delay = find_rejections(profile, other), estimate_delay(profile, other)

    def auc(values: str) -> float:
        parts = (
            average_by_rollout(getattr(one, values), one.chunk_rollouts, one.num_rollouts) for one in (honest, other)
        )
        return round(compute_auc(*parts), 4)

    result = {
        "name": label,
        "rollouts": other.num_rollouts,
        "tokens": len(other.gaps),
        "share_average": round(float(other.shares.mean()), 6),
        "mantissa_average": round(float(np.mean(other.means[np.isfinite(other.means)])), 4),
        "missed_share": round(float((other.gaps > 0).mean()), 6),
        "refused": round(float(refused.any.mean()), 4),
        "refused_activations": round(float(refused.activations.mean()), 4),
        "refused_replay": round(float(refused.replay.mean()), 4),
        "auc_share": auc("shares"),
        "auc_mantissa": auc("means"),
        "auc_misses": round(compute_auc(honest.misses.astype(np.float64), other.misses.astype(np.float64)), 4),
    }
    if math.isfinite(delay):
        result["rollouts_to_alarm"] = max(1, math.ceil(delay))
    return result


def _is_found(row: Mapping[str, Any]) -> bool:
    return bool(row["refused"] >= FIND_SHARE) or row.get("rollouts_to_alarm", math.inf) <= FIND_ROLLOUTS


def list_unfound(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Alternatives that a profile does not find, neither by single checks nor within `FIND_ROLLOUTS` audited rollouts."""
    return (row["name"] for row in rows if not _is_found(row))
