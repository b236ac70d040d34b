"""What is counted when rollouts of one engine are held against another's prefill, and how it is summed up.

Per chunk: mismatches, exponent mismatches, mantissa mean and median, share of differing entries. Per sampled token: the
replay gap; a gap above 0 is a miss. Per rollout: its misses. Everything is kept as arrays, so that quantiles, limits and the
sequential test are computed from the same numbers. No model is run here; numpy only. Neighbours: troth.calibrate.measure
makes rollouts, troth.calibrate.choose takes limits from them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from protocol.checks import validate_match
from protocol.errors import Reject
from protocol.evidence import compute_expected_rollouts
from protocol.ports import Scored
from protocol.task import ProofProfile
from protocol.toploc import ChunkMatch, match_proofs

#: Quantiles that are reported of every statistic, in percent; 100 is the largest seen.
QUANTILES = (50.0, 90.0, 99.0, 99.9, 99.99, 100.0)

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]


class Observed(NamedTuple):
    """Rollouts held against a prefill.

    Attributes:
        mismatches / exponents / sizes / differing: int64 [chunks]; see protocol.toploc.ChunkMatch.
        means / medians: float64 [chunks], mantissa differences in bf16 ulps.
        chunk_rollouts: int64 [chunks], the rollout of each chunk, from 0.
        gaps: float64 [tokens], replay gaps of sampled tokens.
        token_rollouts: int64 [tokens], the rollout of each token.
        moduli: int64 [chunks], of the commitments.
        num_rollouts: rollouts in all.
    """

    mismatches: Ints
    exponents: Ints
    means: Floats
    medians: Floats
    sizes: Ints
    differing: Ints
    chunk_rollouts: Ints
    gaps: Floats
    token_rollouts: Ints
    moduli: Ints
    num_rollouts: int

    @property
    def shares(self) -> Floats:
        """Differing entries of each chunk as a share of those compared."""
        return np.divide(self.differing, self.sizes, dtype=np.float64)

    @property
    def misses(self) -> Ints:
        """Missed tokens of each rollout, int64 [rollouts]."""
        return np.bincount(self.token_rollouts[self.gaps > 0], minlength=self.num_rollouts)


class Rejections(NamedTuple):
    """Which rollouts single checks refuse, bool [rollouts] each.

    Attributes:
        activations: some chunk is outside the limits of `validate_match`.
        replay: some gap is above the tolerance.
    """

    activations: Flags
    replay: Flags

    @property
    def any(self) -> Flags:
        """Refused by one or the other."""
        return self.activations | self.replay


def observe(
    proofs: Sequence[Sequence[bytes]], scored: Sequence[Scored], *, topk: int, chunk: int, modulus_min: int
) -> Observed:
    """Hold commitments against a verifier's prefill, one entry per rollout in both.

    Raises:
        Reject: when a commitment is malformed.
    """
    matches = match_proofs([one.hidden for one in scored], proofs, topk=topk, chunk=chunk, modulus_min=modulus_min)
    flat = [match for one in matches for match in one]
    columns = list(zip(*flat, strict=True)) if flat else [()] * len(ChunkMatch._fields)
    named = dict(zip(ChunkMatch._fields, columns, strict=True))
    return Observed(
        np.array(named["mismatches"], dtype=np.int64),
        np.array(named["exponent_mismatches"], dtype=np.int64),
        np.array(named["mantissa_mean"], dtype=np.float64),
        np.array(named["mantissa_median"], dtype=np.float64),
        np.array(named["size"], dtype=np.int64),
        np.array(named["differing"], dtype=np.int64),
        np.repeat(np.arange(len(matches)), [len(one) for one in matches]),
        np.concatenate([one.gaps for one in scored]) if scored else np.zeros(0),
        np.repeat(np.arange(len(scored)), [len(one.gaps) for one in scored]),
        np.array([int.from_bytes(proof[:2], "big") for one in proofs for proof in one], dtype=np.int64),
        len(scored),
    )


def join(parts: Iterable[Observed]) -> Observed:
    """Several lots of rollouts as one, rollouts numbered on.

    Raises:
        ValueError: when there are none.
    """
    shifted, total = [], 0
    for part in parts:
        shifted.append(
            part._replace(chunk_rollouts=part.chunk_rollouts + total, token_rollouts=part.token_rollouts + total)
        )
        total += part.num_rollouts
    if not shifted:
        raise ValueError("nothing was observed")
    arrays = {
        field: np.concatenate([getattr(part, field) for part in shifted])
        for field in Observed._fields
        if field != "num_rollouts"
    }
    return Observed(**arrays, num_rollouts=total)


def find_rejections(profile: ProofProfile, observed: Observed) -> Rejections:
    """What the single checks of a profile refuse; the activation check is the verifier's own function."""
    activations = np.zeros(observed.num_rollouts, dtype=np.bool_)
    columns = (observed.mismatches, observed.exponents, observed.means, observed.medians, observed.sizes)
    rows = zip(*(column.tolist() for column in (*columns, observed.differing)), strict=True)
    for rollout, row in zip(observed.chunk_rollouts.tolist(), rows, strict=True):
        if not activations[rollout]:
            try:
                validate_match(profile, ChunkMatch(*row), (0,))
            except Reject:
                activations[rollout] = True
    late = observed.token_rollouts[observed.gaps * 1e6 > profile.replay_tolerance_micro]
    replay = np.bincount(late, minlength=observed.num_rollouts) > 0
    return Rejections(activations, replay)


def average_by_rollout(values: Floats, rollouts: Ints, num_rollouts: int) -> Floats:
    """Mean of each rollout's values, float64 [rollouts]; 0 where it has none."""
    sums = np.bincount(rollouts, weights=values, minlength=num_rollouts)
    counts: Ints = np.bincount(rollouts, minlength=num_rollouts)
    means: Floats = sums / np.maximum(counts, 1)
    return means


def compute_auc(honest: Floats, other: Floats) -> float:
    """Chance that a value of `other` is above one of `honest`, ties counting half (Mann-Whitney U / (n m))."""
    ordered = np.sort(honest)
    below = np.searchsorted(ordered, other, side="left")
    upto = np.searchsorted(ordered, other, side="right")
    return float((below + upto).mean() / 2 / len(honest))


def compute_nats(values: Floats, null: float, bet: float) -> Floats:
    """What each of these values, 0 to 1, adds to the sequential test in nats: ln(1 + bet * (value - null))."""
    nats: Floats = np.log1p(bet * (values - null))
    return nats


def estimate_delay(profile: ProofProfile, observed: Observed) -> float:
    """Audited rollouts until the sequential test alarms on a node whose rollouts all look like these; may be infinite."""
    misses = int((observed.gaps > 0).sum())
    return compute_expected_rollouts(
        profile,
        observed.shares.tolist(),
        misses / len(observed.gaps),
        len(observed.sizes) / observed.num_rollouts,
        len(observed.gaps) / observed.num_rollouts,
    )


def summarise(values: Floats | Ints) -> list[float]:
    """`QUANTILES` of values, each one that was seen (no interpolation); empty when there are none."""
    if not len(values):
        return []
    return [float(value) for value in np.percentile(values, QUANTILES, method="higher")]


def summarise_all(observed: Observed) -> dict[str, Any]:
    """Counts, means and quantiles of every statistic, as profile files keep them; numbers rounded to what they are good for."""
    statistics: dict[str, Floats | Ints] = {
        "mismatches": observed.mismatches,
        "exponent_mismatches": observed.exponents,
        "mantissa_mean": observed.means,
        "mantissa_median": observed.medians,
        "share": observed.shares,
        "gap": observed.gaps,
        "misses": observed.misses,
    }
    return {
        "rollouts": observed.num_rollouts,
        "chunks": len(observed.sizes),
        "tokens": len(observed.gaps),
        "missed_tokens": int((observed.gaps > 0).sum()),
        "share_average": round(float(observed.shares.mean()), 8),
        **{name: [round(value, 8) for value in summarise(values)] for name, values in statistics.items()},
    }
