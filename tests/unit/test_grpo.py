"""GRPO: advantages, the two-sided clip, KL and entropy, and gradients that stay finite whatever the ratios are."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from protocol.errors import ConfigError
from trainer.config import TrainerConfig
from trainer.grpo import compute_advantages, compute_loss, has_variance

CONFIG = TrainerConfig()


def loss_of(new, old, advantages, mask=None, config=CONFIG, **extra):
    """Loss parts of plain numbers, with the gradient towards `new`."""
    new = torch.tensor(new, dtype=torch.float64, requires_grad=True)
    old = torch.tensor(old, dtype=torch.float64)
    mask = torch.ones_like(old, dtype=torch.bool) if mask is None else torch.tensor(mask)
    parts = compute_loss(
        config, new, old, torch.tensor(advantages, dtype=torch.float64), mask, int(mask.sum()) or 1, **extra
    )
    parts.loss.backward()
    return parts, new.grad


def test_advantages_are_standardised_by_hand():
    advantages = compute_advantages(np.array([[1_000_000, 0, 0, 0]]))
    mean, deviation = 0.25, math.sqrt(3) / 4
    assert advantages[0] == pytest.approx([(1 - mean) / deviation, *[-mean / deviation] * 3], rel=1e-6)


def test_groups_without_variance_have_no_advantage():
    rewards = np.array([[1_000_000] * 4, [0] * 4, [333_333] * 4, [1, 0, 0, 0]])
    assert has_variance(rewards).tolist() == [False, False, False, True]
    assert not compute_advantages(rewards)[:3].any()


@given(hnp.arrays(np.int64, (3, 8), elements=st.integers(0, 1_000_000)))
def test_advantages_have_mean_0_and_deviation_1(rewards):
    advantages = compute_advantages(rewards).astype(np.float64)
    assert np.isfinite(advantages).all()
    assert np.abs(advantages.mean(axis=1)).max() < 1e-5
    for line, varies in zip(advantages, has_variance(rewards), strict=True):
        assert line.std() == pytest.approx(1.0 if varies else 0.0, abs=1e-5)


def expected_objective(ratio: float, advantage: float) -> float:
    """INTELLECT-2, section 4.1, written down on its own."""
    low, high, delta = CONFIG.clip_low, CONFIG.clip_high, CONFIG.ratio_max
    return min(min(ratio, delta) * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)


@pytest.mark.parametrize("advantage", [1.5, -1.5])
@pytest.mark.parametrize("ratio", [0.1, 0.79, 0.81, 1.0, 1.19, 1.21, 3.9, 4.1, 1000.0])
def test_objective_and_gradient_in_every_region_of_the_clip(ratio, advantage):
    parts, gradient = loss_of([[math.log(ratio)]], [[0.0]], [advantage])
    assert parts.loss.item() == pytest.approx(-expected_objective(ratio, advantage), rel=1e-9)
    step = 1e-6
    numeric = (
        expected_objective(ratio * math.exp(step), advantage) - expected_objective(ratio * math.exp(-step), advantage)
    ) / (2 * step)
    assert gradient.item() == pytest.approx(-numeric, rel=1e-5, abs=1e-9)
    assert parts.clipped == (numeric == 0)


def test_negative_advantages_stop_pushing_above_delta():
    _, below = loss_of([[math.log(3.9)]], [[0.0]], [-1.0])
    _, above = loss_of([[math.log(4.1)]], [[0.0]], [-1.0])
    assert below.item() > 3
    assert above.item() == 0


@pytest.mark.parametrize("difference", [89.0, 200.0, -89.0, -200.0, math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_T3_extreme_ratios_leave_loss_and_gradient_finite(difference, advantage):
    parts, gradient = loss_of([[difference, math.log(1.1)]], [[0.0, 0.0]], [advantage])
    assert math.isfinite(parts.loss.item())
    assert torch.isfinite(gradient).all()
    assert gradient[0, 0].item() == pytest.approx(0, abs=1e-6)
    assert gradient[0, 1].item() == pytest.approx(-advantage * 1.1 / 2)
    assert parts.skipped == (not math.isfinite(difference))


@pytest.mark.parametrize("old", [-math.inf, math.nan])
def test_T3_a_token_the_rollouts_policy_could_not_draw_is_skipped(old):
    parts, gradient = loss_of([[-1.0, -2.0]], [[old, -2.0]], [1.0])
    assert parts.skipped == 1
    assert gradient[0].tolist() == pytest.approx([0.0, -0.5])


def test_T3_masked_positions_may_hold_anything():
    parts, gradient = loss_of([[math.nan, -2.0]], [[0.0, -2.0]], [1.0], mask=[[False, True]])
    assert parts.loss.item() == pytest.approx(-1.0)
    assert parts.skipped == 0
    assert gradient[0].tolist() == pytest.approx([0.0, -1.0])


def test_loss_is_a_mean_over_tokens_not_over_rollouts():
    mask = [[True, True, True], [True, False, False]]
    parts, gradient = loss_of([[0.0] * 3, [0.0] * 3], [[0.0] * 3, [0.0] * 3], [1.0, -1.0], mask=mask)
    assert parts.loss.item() == pytest.approx((-3 + 1) / 4)
    assert gradient[0].tolist() == pytest.approx([-0.25] * 3)


@pytest.mark.parametrize("distance", [-2.0, -0.3, 0.0, 0.3, 2.0])
def test_kl_penalty_and_its_gradient(distance):
    config = TrainerConfig(kl=0.7)
    reference = torch.tensor([[-1.0 + distance]], dtype=torch.float64)
    parts, gradient = loss_of([[-1.0]], [[-1.0]], [0.0], config=config, reference=reference)
    assert parts.kl == pytest.approx(math.exp(distance) - distance - 1)
    assert parts.loss.item() == pytest.approx(0.7 * parts.kl)
    assert gradient.item() == pytest.approx(0.7 * (1 - math.exp(distance)))


def test_kl_estimate_is_unbiased():
    """The expectation of k3 over tokens drawn from the policy is KL(policy || reference)."""
    config = TrainerConfig(kl=1.0)
    policy, reference = torch.log_softmax(torch.randn(2, 6, generator=torch.Generator().manual_seed(0)).double(), -1)
    estimate = 0.0
    for token in range(6):
        parts, _ = loss_of(
            [[policy[token].item()]],
            [[policy[token].item()]],
            [0.0],
            config=config,
            reference=reference[token].reshape(1, 1),
        )
        estimate += policy[token].exp().item() * parts.kl
    assert estimate == pytest.approx((policy.exp() * (policy - reference)).sum().item(), rel=1e-9)


def test_entropy_bonus_gradient_matches_the_closed_form():
    """d(-H)/d(logit) = p (log p + H), from the whole path logits -> loss."""
    config = TrainerConfig(entropy=0.3)
    logits = torch.randn(1, 1, 5, generator=torch.Generator().manual_seed(1)).double().requires_grad_()
    spread = torch.log_softmax(logits, dim=-1)
    entropy = -(spread.exp() * spread).sum(-1)
    parts = compute_loss(
        config,
        spread[..., 2],
        spread[..., 2].detach(),
        torch.zeros(1).double(),
        torch.ones(1, 1, dtype=torch.bool),
        1,
        entropy=entropy,
    )
    parts.loss.backward()
    p, h = spread.exp().detach(), entropy.detach()
    assert parts.loss.item() == pytest.approx(-0.3 * h.item())
    assert torch.allclose(logits.grad, 0.3 * p * (spread.detach() + h))


@pytest.mark.parametrize(
    ("field", "value"), [("ratio_max", 1.1), ("epochs", 0), ("learning_rate", 2.0), ("beta1", 1.0), ("kl", -1.0)]
)
def test_settings_out_of_range_are_named(field, value):
    with pytest.raises(ConfigError, match=field):
        TrainerConfig(**{field: value})


def test_learning_rate_warms_up_and_decays_to_its_end():
    config = TrainerConfig(learning_rate=1.0, learning_rate_end=0.1, warmup_steps=10, total_steps=60)
    rates = [config.compute_learning_rate(step) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9] == pytest.approx(1.0)
    assert max(rates) == pytest.approx(1.0)
    assert rates[60:] == pytest.approx([0.1] * 40)
    assert all(a >= b for a, b in itertools.pairwise(rates[10:]))


def test_every_setting_and_the_temperature_change_the_hash():
    hashes = {TrainerConfig().compute_hash(1000), TrainerConfig().compute_hash(700)}
    hashes |= {TrainerConfig(epochs=3).compute_hash(1000), TrainerConfig(clip_high=0.3).compute_hash(1000)}
    assert len(hashes) == 4
    assert TrainerConfig().compute_hash(1000) == TrainerConfig().compute_hash(1000)
