"""A fixed sample of every harness: valid inputs pass, and whatever else comes is refused in the documented way or passes too.

`make fuzz` is the long run (docs/fuzzing.md).
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.harnesses import HARNESSES, split_runs
from tests.fuzz.kit import ACCEPTED, bounded_memory
from tests.fuzz.mutate import mutate

#: Address space that one harness's inputs may take beside what is taken already.
EXTRA_BYTES = 3 << 29


@pytest.mark.parametrize("name", HARNESSES)
def test_every_input_is_accepted_or_refused_as_documented(name, tmp_path):
    harness = HARNESSES[name]
    target = harness.make(tmp_path)
    assert ACCEPTED in {target.fuzz(seed) for seed in target.seeds}, (
        "no seed passes: the harness tests the first check only"
    )
    assert all(len(seed) <= harness.bytes_max for seed in target.seeds)

    @settings(
        max_examples=harness.examples,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.sampled_from(target.seeds), st.randoms(use_true_random=False), st.binary(max_size=64))
    def sample(seed, rng, noise):
        target.fuzz(mutate(seed, rng, harness.shape, harness.bytes_max))
        target.fuzz(noise)

    with bounded_memory(EXTRA_BYTES):
        sample()


def test_a_long_run_is_split_over_all_harnesses():
    runs = split_runs(1_000_000)
    assert set(runs) == set(HARNESSES)
    assert 1_000_000 <= sum(runs.values()) <= 1_001_000
    assert min(runs.values()) >= 500
