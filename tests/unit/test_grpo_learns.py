"""The defaults learn: the demo's task, model and batch in one process, on rollouts that are two policies old."""

from __future__ import annotations

import pytest

from benchmarks.bare_grpo import run


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_reward_grows_by_more_than_0_3_in_35_steps(seed):
    result = run(35, 35, 16, seed, lag=2)
    assert result["rollouts"] == 35 * 35 * 16
    assert 0.2 < result["reward_first"] < 0.4
    assert result["reward_last"] - result["reward_first"] > 0.35
