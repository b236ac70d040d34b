"""Settings of the optimiser and of the loss, their bounds and their hash. No torch here: the composition root reads it.

The hash of a configuration is part of every lineage record, so an auditor knows that it re-runs the same arithmetic.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

from protocol.codec import tagged_hash
from protocol.errors import ConfigError


@dataclass(frozen=True)
class TrainerConfig:
    """How a batch becomes a policy.

    Attributes:
        learning_rate: peak of the schedule: linear warm-up over `warmup_steps`, then linear decay to
            `learning_rate_end` (a fraction of the peak) at `total_steps`.
        beta1 / beta2 / weight_decay: AdamW.
        grad_norm_max: gradients are scaled down to this norm.
        epochs: passes over a batch.
        minibatch_groups: about so many groups per optimiser step; 0 means the whole batch.
        clip_low / clip_high: the ratio is clipped to [1 - clip_low, 1 + clip_high].
        ratio_max: upper bound on the ratio where the advantage is negative (the second side of the clip).
        kl / entropy: coefficients of the KL penalty towards policy version 0 and of the entropy bonus.
        tokens_max: padded tokens per forward pass; a larger batch is accumulated over several.
        groups_min: admitted groups that start a step; 0 means half of the task's groups per round.
        groups_max: most groups of one step; 0 means twice the task's groups per round.
        node_share_max_ppm: largest share of one node in a batch, in millionths, unless no other node delivers.
        seed: of dropout, for models that have it, and of the first adapter of a LoRA task.
    """

    learning_rate: float = 2e-4
    learning_rate_end: float = 0.1
    warmup_steps: int = 10
    total_steps: int = 60
    beta1: float = 0.9
    beta2: float = 0.99
    weight_decay: float = 0.0
    grad_norm_max: float = 1.0
    epochs: int = 2
    minibatch_groups: int = 4
    clip_low: float = 0.2
    clip_high: float = 0.2
    ratio_max: float = 4.0
    kl: float = 0.0
    entropy: float = 0.0
    tokens_max: int = 16_384
    groups_min: int = 0
    groups_max: int = 0
    node_share_max_ppm: int = 500_000
    seed: int = 0

    def __post_init__(self) -> None:
        """Raises `ConfigError` naming the field, what was given and what is expected."""
        bounds: dict[str, tuple[float, float]] = {
            "learning_rate": (0, 1),
            "learning_rate_end": (0, 1),
            "warmup_steps": (0, 10**9),
            "total_steps": (1, 10**9),
            "beta1": (0, 0.999999),
            "beta2": (0, 0.999999),
            "weight_decay": (0, 1),
            "grad_norm_max": (1e-6, 1e6),
            "epochs": (1, 16),
            "minibatch_groups": (0, 10**6),
            "clip_low": (0, 1),
            "clip_high": (0, 10),
            "ratio_max": (1 + self.clip_high, 1e6),
            "kl": (0, 1e3),
            "entropy": (0, 1e3),
            "tokens_max": (1, 10**9),
            "groups_min": (0, 10**6),
            "groups_max": (0, 10**6),
            "node_share_max_ppm": (1, 1_000_000),
        }
        for name, (low, high) in bounds.items():
            value = getattr(self, name)
            if not low <= value <= high:
                raise ConfigError(f"trainer.{name} is {value}, expected {low} to {high}")

    def compute_learning_rate(self, step: int) -> float:
        """Learning rate of the step that makes policy version `step` + 1."""
        warm = min(1.0, (step + 1) / self.warmup_steps) if self.warmup_steps else 1.0
        span = max(1, self.total_steps - self.warmup_steps)
        progress = min(1.0, max(0.0, (step - self.warmup_steps) / span))
        return self.learning_rate * warm * (1.0 - (1.0 - self.learning_rate_end) * progress)

    def compute_hash(self, temperature_milli: int) -> bytes:
        """Hash of everything that decides a step's arithmetic, given the batch."""
        text = json.dumps(dataclasses.asdict(self), sort_keys=True, separators=(",", ":"))
        return tagged_hash("trainer-config", text.encode(), temperature_milli.to_bytes(8, "big"))
