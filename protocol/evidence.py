"""Accumulated evidence: what many audits that each passed say together about one node, as a sequential test.

A verifier reduces the numbers of one audited submission to an e-value (`compute_evidence`); the ledger multiplies those of a
node's judged rounds (`compute_next`) and raises the alarm when the product is one that an honest node reaches with
probability 1e-6 at most, ever. The bets are those of Waudby-Smith and Ramdas, "Estimating means of bounded random variables
by betting" (2023); docs/evidence.md has the null hypothesis, the proof and what is assumed.

Guarantees: `compute_next` gives the same bits on every machine (`_CONTEXT`), and everything that is rounded there is
rounded towards innocence. Neighbours: protocol.toploc counts, verifier.judge fills rows, protocol.rounds keeps the trials.
"""

from __future__ import annotations

import decimal
import math
from collections.abc import Iterable, Sequence
from decimal import Decimal
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from protocol.task import ProofProfile

if TYPE_CHECKING:  # what reads the ledger alone loads no kernels
    import numpy as np
    from numpy.typing import NDArray

    from protocol.toploc import ChunkMatch

#: Evidence is counted in these parts of a nat.
UNITS_PER_NAT = 256
EVIDENCE_MIN, EVIDENCE_MAX = -(2**15), 2**15 - 1
#: An honest node's trial reaches this with probability 1 / ALARM at most, over all rounds of a task.
ALARM = 10**6

#: Rounds whose contributions a description shows.
STEPS_SHOWN = 8

#: 34 digits as in IEEE 754 decimal128, exponents for a million rounds at either end of a row's range. Sums, products and
#: quotients are rounded down; `exp` is correctly rounded to nearest, as the decimal arithmetic specification has it.
_CONTEXT = decimal.Context(
    prec=34,
    rounding=decimal.ROUND_DOWN,
    Emin=-400_000_000,
    Emax=400_000_000,
    traps=[decimal.InvalidOperation, decimal.DivisionByZero, decimal.Overflow],
)


class Trial(NamedTuple):
    """Where the test of one node in one task stands.

    Attributes:
        rounds: judged rounds so far, t.
        value: R_t, the evidence ratio against the node, mixed over the rounds in which cheating may have begun.
    """

    rounds: int
    value: Decimal

    @property
    def log10(self) -> float | None:
        """log10 of R_t, for people; None before the first judged round."""
        return float(self.value.log10(_CONTEXT)) if self.value else None


#: The trial of a node without judged rounds.
NO_TRIAL = Trial(0, Decimal(0))


class Step(NamedTuple):
    """What one judged round did to a trial.

    Attributes:
        evidence: of the round's outcome, in 1/256 nat.
        trial: after the round.
    """

    round_index: int
    evidence: int
    trial: Trial


def compute_next(trial: Trial, evidence: int) -> Trial:
    """The trial after one more judged round: R_t = exp(evidence / 256) (R_{t-1} + 1 / (t (t + 1)))."""
    rounds = trial.rounds + 1
    weight = _CONTEXT.divide(Decimal(1), Decimal(rounds * (rounds + 1)))
    return Trial(rounds, _CONTEXT.multiply(_exp(evidence), _CONTEXT.add(trial.value, weight)))


@lru_cache(maxsize=4096)
def _exp(evidence: int) -> Decimal:
    """exp(evidence / 256)."""
    return _CONTEXT.exp(_CONTEXT.divide(Decimal(evidence), Decimal(UNITS_PER_NAT)))


def is_alarm(trial: Trial) -> bool:
    """Whether the evidence suffices to call the node a cheat."""
    return trial.value >= ALARM


def describe_trial(steps: Sequence[Step]) -> dict[str, Any]:
    """A trial for people and `--json`: log10 of R_t, where the alarm is, and what the latest rounds added, in nats."""
    log10 = steps[-1].trial.log10 if steps else None
    return {
        "log10": None if log10 is None else round(log10, 3),
        "alarm_log10": round(math.log10(ALARM), 3),
        "rounds": len(steps),
        "nats_by_round": {str(s.round_index): round(s.evidence / UNITS_PER_NAT, 3) for s in steps[-STEPS_SHOWN:]},
    }


def compute_evidence(
    profile: ProofProfile, matches: Iterable[Sequence[ChunkMatch]], gaps: Iterable[NDArray[np.float64]]
) -> int:
    """What one audited submission adds to its node's trial, in 1/256 nat, rounded down and clipped to 16 bits.

    Args:
        matches: per audited rollout, its chunks as compared with the verifier's own.
        gaps: per audited rollout, float64 [sampled], replay gaps; above 0 is a miss.

    Returns:
        256 times the sum of ln(1 + share_bet (differing / size - share_null)) over chunks, of
        ln(1 + ties_bet (1 - ties_null)) over misses and of ln(1 - ties_bet ties_null) over the other sampled tokens.
    """
    null, bet = profile.share_null_ppm / 1e6, profile.share_bet_milli / 1e3
    terms = [math.log1p(bet * (match.differing / match.size - null)) for chunks in matches for match in chunks]
    hit, miss = _token_terms(profile)
    for one in gaps:
        missed = int((one > 0).sum())
        terms += [missed * miss, (len(one) - missed) * hit]
    # Infinite or undefined gaps never get here: a scorer that has any raises a Fault.
    return min(max(math.floor(UNITS_PER_NAT * math.fsum(terms)), EVIDENCE_MIN), EVIDENCE_MAX)


def _token_terms(profile: ProofProfile) -> tuple[float, float]:
    """What a token adds that the replay gives, and one that it does not, in nats."""
    null, bet = profile.ties_null_ppm / 1e6, profile.ties_bet_milli / 1e3
    return math.log1p(-bet * null), math.log1p(bet * (1 - null))


def compute_median(values: Sequence[int]) -> int:
    """The lower median: verifiers that are at most half of all cannot raise it above every other's value."""
    return sorted(values)[(len(values) - 1) // 2]


def compute_expected_rollouts(
    profile: ProofProfile,
    share: float | Sequence[float],
    miss_rate: float,
    chunks: float,
    tokens: float,
    *,
    honest_rounds: int = 0,
) -> float:
    """Audited rollouts until the alarm, about: what has to be overcome over what one rollout adds (Wald).

    Args:
        share: share of differing entries per chunk: a mean, or measured values, whose spread makes the delay longer.
        miss_rate: misses per sampled token.
        chunks, tokens: of one rollout.
        honest_rounds: judged rounds before the cheating began.

    Returns:
        Infinity when this is not enough to ever be found.
    """
    null, bet = profile.share_null_ppm / 1e6, profile.share_bet_milli / 1e3
    shares = [share] if isinstance(share, float | int) else list(share)
    hit, miss = _token_terms(profile)
    drift = chunks * math.fsum(math.log1p(bet * (one - null)) for one in shares) / len(shares)
    drift += tokens * (miss_rate * miss + (1 - miss_rate) * hit)
    start = honest_rounds + 1
    return math.log(ALARM * start * (start + 1)) / drift if drift > 0 else math.inf
