"""A fixed sample of a harness: valid inputs pass, and whatever else comes is refused in the documented way or passes too."""

from __future__ import annotations

from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.harnesses import HARNESSES
from tests.fuzz.kit import ACCEPTED, bounded_memory
from tests.fuzz.mutate import mutate

#: Address space that one harness's inputs may take beside what is taken already.
EXTRA_BYTES = 3 << 29


def check_sample(name: str, tmp_path: Path) -> None:
    """Run one harness's sample; fails on the first input that ends in an exception that nothing documents."""
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
