"""Group-relative policy optimisation: advantages from verified rewards, and the two-sided clipped loss.

Formulas, with r = exp(log pi_new(token) - log pi_old(token)) and A the advantage of the token's rollout:

    A          = (R - mean of the group) / (standard deviation of the group)     DeepSeekMath, arXiv:2402.03300, eq. 3 ff.
    objective  = min( min(r, delta) A, clip(r, 1 - low, 1 + high) A )             INTELLECT-2, arXiv:2505.07291, sec. 4.1
    KL         = exp(d) - d - 1,  d = log pi_ref - log pi_new                     Schulman, "Approximating KL divergence", k3
    loss       = sum over tokens of (-objective + kl KL - entropy H) / number of tokens in the batch   (token mean)

Without delta a negative advantage lets r grow without bound, which is what blows up off-policy batches. Deviations: log
ratios are limited to +-20 before exp, where the clipped objective has (almost) no gradient anyway, and tokens whose log
ratio is not finite are left out *before* exp, so that neither they nor their gradients become NaN.
Neighbours: trainer.step computes the log-probabilities and takes the optimiser step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainer.config import TrainerConfig

#: Largest |log ratio| that reaches exp: float32 overflows at 88.
LOG_RATIO_MAX = 20.0


def compute_advantages(rewards_micro: NDArray[np.int64]) -> NDArray[np.float32]:
    """Standardised advantages within each group; 0 for every rollout of a group whose rewards are all equal.

    Args:
        rewards_micro: int64 [groups, group size], verified rewards in millionths.

    Returns:
        float32 [groups, group size].
    """
    centred = rewards_micro - rewards_micro.mean(axis=1, keepdims=True, dtype=np.float64)
    varies = has_variance(rewards_micro)
    deviation = np.where(varies, centred.std(axis=1), 1.0)
    centred[~varies] = 0.0
    advantages: NDArray[np.float32] = (centred / deviation[:, None]).astype(np.float32)
    return advantages


def has_variance(rewards_micro: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which groups say anything: bool [groups]."""
    varies: NDArray[np.bool_] = rewards_micro.min(axis=1) != rewards_micro.max(axis=1)
    return varies


@dataclass
class LossParts:
    """Loss of a part of a batch and what to report about it; sums are over tokens.

    Attributes:
        loss: scalar, already divided by the number of tokens of the whole batch.
        clipped: tokens whose objective has no gradient because their ratio is clipped.
        skipped: tokens left out because their log ratio is not finite.
        kl: sum of the KL estimate, 0 without a reference.
        entropy: sum of entropies, 0 when not given.
    """

    loss: Tensor
    clipped: int
    skipped: int
    kl: float
    entropy: float


def compute_loss(
    config: TrainerConfig,
    new: Tensor,
    old: Tensor,
    advantages: Tensor,
    mask: Tensor,
    num_tokens: int,
    *,
    reference: Tensor | None = None,
    entropy: Tensor | None = None,
) -> LossParts:
    """The loss at the top of this module.

    Args:
        new: log-probabilities under the policy in training, [rollouts, tokens], with gradient.
        old: the same under the rollout's policy.
        advantages: [rollouts].
        mask: bool [rollouts, tokens], completion tokens.
        num_tokens: completion tokens of the whole batch, over which the mean is taken.
        reference: log-probabilities under policy version 0; needed when `config.kl` > 0.
        entropy: of the distribution at each position, with gradient; needed when `config.entropy` > 0.
    """
    difference = new - old
    usable = mask & torch.isfinite(difference)
    # Masked before exp: the gradient of a discarded branch would otherwise be 0 * inf = NaN.
    log_ratio = torch.where(usable, difference, torch.zeros_like(difference)).clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX)
    ratio = log_ratio.exp()
    gain = advantages[:, None]
    bounded = ratio.clamp(max=config.ratio_max) * gain
    clipped = ratio.clamp(1.0 - config.clip_low, 1.0 + config.clip_high) * gain
    total = -torch.minimum(bounded, clipped)
    kl_sum = entropy_sum = 0.0
    if config.kl and reference is not None:
        distance = torch.where(usable & torch.isfinite(reference), reference - new, torch.zeros_like(new))
        distance = distance.clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX)
        penalty = distance.exp() - distance - 1.0
        total = total + config.kl * penalty
        kl_sum = float((penalty.detach() * usable).sum())
    if config.entropy and entropy is not None:
        total = total - config.entropy * torch.where(usable, entropy, torch.zeros_like(entropy))
        entropy_sum = float((entropy.detach() * usable).sum())
    loss = torch.where(usable, total, torch.zeros_like(total)).sum() / num_tokens
    with torch.no_grad():
        positive = (gain > 0) & (ratio > 1.0 + config.clip_high)
        negative = (gain < 0) & ((ratio < 1.0 - config.clip_low) | (ratio > config.ratio_max))
        num_clipped = int(((positive | negative) & usable).sum())
    return LossParts(loss, num_clipped, int((mask & ~usable).sum()), kl_sum, entropy_sum)
