"""A fixed sample of every harness of messages, of the mesh and of the chain.

`make fuzz` is the long run (docs/fuzzing.md).
"""

from __future__ import annotations

import pytest

from tests.fuzz import targets_chain, targets_judging, targets_messages, targets_shardcast, targets_work
from tests.fuzz.harnesses import HARNESSES, split_runs
from tests.fuzz.sampling import check_sample

MODULES = (targets_messages, targets_work, targets_judging, targets_shardcast, targets_chain)


@pytest.mark.parametrize("name", [name for module in MODULES for name in module.HARNESSES])
def test_every_input_is_accepted_or_refused_as_documented(name, tmp_path):
    check_sample(name, tmp_path)


def test_a_long_run_is_split_over_all_harnesses():
    runs = split_runs(1_000_000)
    assert set(runs) == set(HARNESSES)
    assert 1_000_000 <= sum(runs.values()) <= 1_001_000
    assert min(runs.values()) >= 500
