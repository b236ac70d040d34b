"""The sequential test by simulation: how often it accuses the innocent, how long it takes for the guilty."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from protocol.evidence import (
    EVIDENCE_MAX,
    EVIDENCE_MIN,
    NO_TRIAL,
    Trial,
    compute_evidence,
    compute_expected_rollouts,
    compute_median,
    compute_next,
    is_alarm,
)
from protocol.presets import PROFILE_FP32
from protocol.toploc import ChunkMatch

SIZE = 128
#: The profile of these simulations, written out so that no recalibration moves what they assert.
PROFILE = replace(PROFILE_FP32, share_null_ppm=10_000, share_bet_milli=20_000, ties_null_ppm=100, ties_bet_milli=20_000)
#: Level at which the bound is simulated: at 1e-6 nobody could see a violation.
ALPHA = 0.01


def audit(differing, *, tokens=0, misses=0):
    """Evidence of one rollout: entries of `SIZE` that differ in each chunk, misses among its tokens."""
    chunks = [ChunkMatch(0, 0, 0.0, 0.0, SIZE, int(one)) for one in differing]
    gaps = np.zeros(tokens)
    gaps[:misses] = 1e-4
    return compute_evidence(PROFILE, [chunks], [gaps])


Nature = Callable[[np.random.Generator, Trial], int]

#: All or nothing: the largest swings that a mean of `share_null` allows.
ALL, NOTHING = audit([SIZE]), audit([0])
#: Of a rollout of 50 tokens, by its misses.
MISSES = [audit([], tokens=50, misses=misses) for misses in range(51)]
#: Few entries, often: 4 of 128 differ in 32 % of the chunks.
FEW = audit([4])


def swinging(rng: np.random.Generator, trial: Trial) -> int:
    return ALL if rng.random() < 0.01 else NOTHING


def gentle(rng: np.random.Generator, trial: Trial) -> int:
    return FEW if rng.random() < 0.32 else NOTHING


def token_by_token(rng: np.random.Generator, trial: Trial) -> int:
    return MISSES[rng.binomial(50, 0.0001)]


def spiteful(rng: np.random.Generator, trial: Trial) -> int:
    """Noise that depends on the past in the worst way the null hypothesis allows: it swings when the evidence is high."""
    return swinging(rng, trial) if trial.value > 1 else gentle(rng, trial)


def count_alarms(nature: Nature, *, nodes: int, rounds: int, seed: int) -> int:
    """Nodes whose trial ever reaches 1 / ALPHA."""
    alarms = 0
    for node in range(nodes):
        rng, trial = np.random.default_rng([seed, node]), NO_TRIAL
        for _ in range(rounds):
            trial = compute_next(trial, nature(rng, trial))
            if trial.value * int(ALPHA * 10_000) >= 10_000:
                alarms += 1
                break
    return alarms


def alarms_max(nodes: int) -> float:
    """Five deviations above what the bound allows on average."""
    return ALPHA * nodes + 5 * math.sqrt(ALPHA * nodes)


@pytest.mark.parametrize("nature", [swinging, gentle, token_by_token, spiteful])
def test_the_innocent_are_accused_no_more_often_than_the_bound_says(nature):
    """On the edge of the null hypothesis, which no calibrated node is near."""
    assert count_alarms(nature, nodes=1_000, rounds=100, seed=1) <= alarms_max(1_000)


@pytest.mark.slow
@pytest.mark.parametrize("nature", [swinging, gentle, token_by_token, spiteful])
def test_the_innocent_are_accused_no_more_often_in_many_trials(nature):
    assert count_alarms(nature, nodes=10_000, rounds=300, seed=2) <= ALPHA * 10_000 + 3 * math.sqrt(ALPHA * 10_000)


def test_the_simulation_would_see_a_bound_that_is_broken():
    """The same with ten times the null, and with bets that are paid out twice."""
    guilty = lambda rng, trial: ALL if rng.random() < 0.1 else NOTHING  # noqa: E731
    assert count_alarms(guilty, nodes=300, rounds=100, seed=3) > 3 * alarms_max(300)
    doubled = lambda rng, trial: swinging(rng, trial) + int(256 * math.log(2))  # noqa: E731
    assert count_alarms(doubled, nodes=300, rounds=100, seed=3) > 3 * alarms_max(300)


def test_an_honest_node_is_never_accused_in_2000_rounds():
    """What decoding differs by from prefill in fp32: 2 of 192 chunks of the test model in one entry of 128, no token of 1,079.
    Tokens are let miss at half the null all the same."""
    highest = 0.0
    for node in range(5):
        rng, trial = np.random.default_rng([4, node]), NO_TRIAL
        for _ in range(2_000):
            evidence = audit(rng.random(8) < 2 / 192, tokens=45, misses=rng.binomial(45, 0.00005))
            trial = compute_next(trial, evidence)
            highest = max(highest, float(trial.value))
    assert highest < 100


def delay(rng: np.random.Generator, share: float, *, chunks: int = 4, tokens: int = 100, honest: int = 0) -> int:
    """Rollouts, one a round, from the first dishonest one to the alarm. Shares spread by half their mean."""
    trial = NO_TRIAL
    for _ in range(honest):
        trial = compute_next(trial, audit([0] * chunks, tokens=tokens))
    assert not is_alarm(trial)
    for count in range(1, 5_000):
        differing = np.rint(SIZE * share * rng.uniform(0.5, 1.5, chunks))
        trial = compute_next(trial, audit(differing, tokens=tokens, misses=rng.binomial(tokens, 0.0001)))
        if is_alarm(trial):
            return count
    raise AssertionError("no alarm")


def expect(share: float, *, honest: int = 0) -> float:
    differing = np.rint(SIZE * share * np.linspace(0.5, 1.5, 2_001))
    return compute_expected_rollouts(PROFILE, list(differing / SIZE), 0.0001, 4, 100, honest_rounds=honest)


@pytest.mark.parametrize("share", [0.03, 0.06, 0.12, 0.4])
def test_delays_are_as_expected(share):
    rng = np.random.default_rng(5)
    found = float(np.mean([delay(rng, share) for _ in range(40)]))
    assert expect(share) * 0.9 < found < expect(share) * 1.1 + 1  # the last rollout is counted whole


def test_int8_weights_are_found_at_once_and_a_drift_in_a_few_rollouts():
    """int8 weights change 80 % of the entries in fp32; noise of 1e-4 of the weights' own deviation changes 4.5 %."""
    rng = np.random.default_rng(6)
    assert {delay(rng, 0.8) for _ in range(20)} == {2}
    assert max(delay(rng, 0.045) for _ in range(20)) <= 12


def test_r16_a_sleeper_pays_two_logarithms_for_its_honest_rounds():
    """Found later than who cheats from the start by ln(t (t + 1)) over the drift, not by all the credit it gathered."""
    rng = np.random.default_rng(7)
    late = float(np.mean([delay(rng, 0.06, honest=500) for _ in range(20)]))
    early = float(np.mean([delay(rng, 0.06) for _ in range(20)]))
    assert 0.9 * expect(0.06, honest=500) < late < 1.1 * expect(0.06, honest=500) + 1
    drift = math.log(2 * 10**6) / expect(0.06)
    assert abs((late - early) * drift - math.log(501 * 502 / 2)) < 3


VALUES = st.lists(st.integers(EVIDENCE_MIN, EVIDENCE_MAX), min_size=1, max_size=40)


@given(VALUES, st.data())
def test_v4_half_of_the_verifiers_cannot_raise_the_evidence(honest, data):
    lies = data.draw(st.lists(st.integers(EVIDENCE_MIN, EVIDENCE_MAX), max_size=len(honest)))
    assert compute_median(honest + lies) <= max(honest)
    if len(lies) < len(honest):
        assert min(honest) <= compute_median(honest + lies)


@given(st.lists(st.integers(EVIDENCE_MIN, EVIDENCE_MAX), max_size=30), st.integers(0, 2**14))
def test_more_evidence_never_helps_a_node(evidence, more):
    low = high = NO_TRIAL
    for one in evidence:
        low, high = compute_next(low, one), compute_next(high, min(one + more, EVIDENCE_MAX))
        assert low.value <= high.value
