"""A demo on a slow machine takes longer blocks and fewer rounds, and about the same time."""

from __future__ import annotations

import pytest

from troth.demo.plan import BLOCK_SECONDS, EPOCHS_DEFAULT, SLOWER_MAX, WARM_UP_SECONDS, fit_plan, make_plan


@pytest.mark.parametrize("seconds", [1.0, WARM_UP_SECONDS, 13.9])
def test_a_usual_machine_keeps_the_plan(seconds):
    plan = make_plan(0, 3, "", 0.0)
    assert fit_plan(plan, seconds) == plan


@pytest.mark.parametrize("seconds", [15.0, 18.0, 25.0, 600.0])
def test_a_slow_machine_gets_longer_blocks_and_fewer_rounds(seconds):
    plan = make_plan(0, 3, "", 0.0)
    slow = fit_plan(plan, seconds)
    assert BLOCK_SECONDS < slow.block_seconds <= BLOCK_SECONDS * SLOWER_MAX
    assert 1 <= slow.num_epochs < EPOCHS_DEFAULT
    assert slow.num_epochs * slow.block_seconds == pytest.approx(plan.num_epochs * plan.block_seconds, rel=0.25)
    assert slow.is_default_length, "the reward gate does not depend on the machine"
