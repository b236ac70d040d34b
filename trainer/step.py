"""One training step: a batch of verified groups in, new weights and optimiser state out.

A step is a function of (weights, optimiser state, batch, configuration, version): the same thread count and library give
the same bits, which is what `trainer.audit` relies on. Weights are kept in float32 whatever the policy's own type is.
Neighbours: trainer.batch makes batches, trainer.checkpoint stores a `Learner`, trainer.grpo holds the loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import load_file
from torch import Tensor

from models.policy import CONFIG, WEIGHTS, load_model
from protocol.errors import Fault
from trainer.batch import TrainingGroup
from trainer.config import TrainerConfig
from trainer.grpo import compute_advantages, compute_loss, has_variance
from trainer.packing import MicroBatch, compute_logprobs, make_micro_batches
from trainer.policy import collect_tensors, encode_tensors

_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class StepReport:
    """What a step did.

    Attributes:
        groups / informative: groups in the batch, and those among them whose rewards differ.
        tokens: completion tokens that were trained on, per epoch.
        reward_mean: of all rollouts of the batch, 0 to 1.
        loss: mean over the first epoch.
        grad_norm: mean over the optimiser steps, before clipping.
        clip_fraction: share of tokens without gradient because of the clip, over all epochs.
        tokens_skipped: tokens with a log ratio that is not finite, over all epochs.
        updates_skipped: optimiser steps whose gradient was not finite; they changed nothing.
    """

    groups: int
    informative: int
    tokens: int
    reward_mean: float
    learning_rate: float
    loss: float
    grad_norm: float
    clip_fraction: float
    kl: float
    entropy: float
    tokens_skipped: int
    updates_skipped: int


class Minibatch(NamedTuple):
    """What one optimiser step sees: its forward passes, reference log-probabilities of each, completion tokens."""

    parts: list[MicroBatch]
    references: list[Tensor | None]
    num_tokens: int


class Update(NamedTuple):
    """What one optimiser step reports; see `StepReport` and `LossParts`."""

    loss: float
    grad_norm: float
    clipped: int
    skipped: int
    kl: float
    entropy: float


class Learner:
    """Weights and optimiser state of a lineage.

    Args:
        folder: policy folder to start from.
        optimizer: canonical optimiser bytes as `encode_optimizer` gives them, or None for a fresh state.
        temperature: the task's, in logit units.

    Raises:
        Fault: see `models.policy.load_model`; a damaged optimiser state is a `Fault`.
    """

    def __init__(
        self,
        config: TrainerConfig,
        folder: Path,
        *,
        temperature: float,
        optimizer: bytes | None = None,
        reference: Path | None = None,
        device: str = "cpu",
        threads: int = 1,
    ) -> None:
        torch.set_num_threads(threads)
        self.config = config
        self.temperature = temperature
        self.device = device
        self.model = load_model(folder, device=device)
        self.config_bytes = (folder / CONFIG).read_bytes()
        #: Type in which policies are published: that of the policy we started from.
        self.policy_dtype = _read_dtype(folder)
        self._reference = load_model(reference, device=device) if reference is not None and config.kl else None
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=config.learning_rate,
            betas=(config.beta1, config.beta2),
            weight_decay=config.weight_decay,
            fused=True,
        )
        if optimizer is not None:
            self._load_optimizer(optimizer)

    def encode_weights(self) -> bytes:
        """Canonical model.safetensors of the policy."""
        return encode_tensors(collect_tensors(self.model, self.policy_dtype))

    def encode_optimizer(self) -> bytes:
        """Canonical optimiser state: moments and step counts by parameter name, and the float32 weights when the policy
        is published in a narrower type."""
        tensors: dict[str, Tensor] = {}
        for name, parameter in self.model.named_parameters():
            state = self._optimizer.state.get(parameter, {})
            for moment in _MOMENTS:
                tensors[f"{moment}.{name}"] = state.get(moment, torch.zeros_like(parameter)).detach().cpu().contiguous()
            tensors[f"step.{name}"] = torch.as_tensor(state.get("step", 0.0), dtype=torch.float32).reshape(1).cpu()
            if self.policy_dtype != torch.float32:
                tensors[f"weight.{name}"] = parameter.detach().cpu().contiguous()
        return encode_tensors(tensors)

    def _load_optimizer(self, data: bytes) -> None:
        try:
            tensors = load_tensors(data)
            for name, parameter in self.model.named_parameters():
                self._optimizer.state[parameter] = {
                    "step": tensors[f"step.{name}"].reshape(()),
                    **{moment: tensors[f"{moment}.{name}"].to(self.device) for moment in _MOMENTS},
                }
                if f"weight.{name}" in tensors:
                    parameter.data.copy_(tensors[f"weight.{name}"])
        except (SafetensorError, KeyError, RuntimeError) as error:
            raise Fault(f"optimiser state does not fit the policy: {error}") from None

    def step(self, groups: Sequence[TrainingGroup], version: int) -> StepReport:
        """Train on a batch and make policy `version` + 1.

        Raises:
            Fault: when no group of the batch has rewards that differ; nothing is changed.
        """
        config = self.config
        rewards = np.stack([group.rewards_micro for group in groups])
        varies = has_variance(rewards)
        if not varies.any():
            raise Fault(f"none of {len(groups)} groups has rewards that differ: there is nothing to learn from them")
        used = [group for group, kept in zip(groups, varies, strict=True) if kept]
        minibatches = [
            self._pack(*part) for part in _split(used, compute_advantages(rewards[varies]), config.minibatch_groups)
        ]
        rate = config.compute_learning_rate(version)
        for settings in self._optimizer.param_groups:
            settings["lr"] = rate
        self.model.train()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed * 1_000_003 + version)
            updates = [self._update(minibatch) for _ in range(config.epochs) for minibatch in minibatches]
        self.model.train(False)
        num_tokens = sum(minibatch.num_tokens for minibatch in minibatches)
        seen = num_tokens * config.epochs
        norms = [update.grad_norm for update in updates if np.isfinite(update.grad_norm)]
        return StepReport(
            groups=len(groups),
            informative=len(used),
            tokens=num_tokens,
            reward_mean=float(rewards.mean()) / 1e6,
            learning_rate=rate,
            loss=float(np.mean([update.loss for update in updates[: len(minibatches)]])),
            grad_norm=float(np.mean(norms)) if norms else 0.0,
            clip_fraction=sum(update.clipped for update in updates) / seen,
            kl=sum(update.kl for update in updates) / seen,
            entropy=sum(update.entropy for update in updates) / seen,
            tokens_skipped=sum(update.skipped for update in updates),
            updates_skipped=len(updates) - len(norms),
        )

    def _pack(self, groups: Sequence[TrainingGroup], advantages: NDArray[np.float32]) -> Minibatch:
        parts = list(make_micro_batches(groups, advantages, self.config.tokens_max, self.device))
        references = [None if self._reference is None else self._reference_logprobs(part) for part in parts]
        return Minibatch(parts, references, sum(group.num_sampled for group in groups))

    def _update(self, minibatch: Minibatch) -> Update:
        """One optimiser step over a minibatch; it is skipped when the gradient is not finite."""
        self._optimizer.zero_grad(set_to_none=True)
        loss = kl = entropy = 0.0
        clipped = skipped = 0
        for part, reference in zip(minibatch.parts, minibatch.references, strict=True):
            new, entropies = compute_logprobs(self.model, part, self.temperature, with_entropy=self.config.entropy > 0)
            found = compute_loss(
                self.config,
                new,
                part.old,
                part.advantages,
                part.mask,
                minibatch.num_tokens,
                reference=reference,
                entropy=entropies,
            )
            found.loss.backward()  # type: ignore[no-untyped-call]
            loss += float(found.loss.detach())
            clipped, skipped = clipped + found.clipped, skipped + found.skipped
            kl, entropy = kl + found.kl, entropy + found.entropy
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.grad_norm_max))
        if np.isfinite(norm):
            self._optimizer.step()
        return Update(loss, norm, clipped, skipped, kl, entropy)

    def _reference_logprobs(self, part: MicroBatch) -> Tensor:
        assert self._reference is not None
        with torch.no_grad():
            return compute_logprobs(self._reference, part, self.temperature, with_entropy=False)[0]


def _split(
    groups: Sequence[TrainingGroup], advantages: NDArray[np.float32], size: int
) -> list[tuple[Sequence[TrainingGroup], NDArray[np.float32]]]:
    """Deal groups out to parts of at most `size`, so that each has groups of every node and age."""
    count = -(-len(groups) // size) if size else 1
    return [(groups[part::count], advantages[part::count]) for part in range(count)]


def _read_dtype(folder: Path) -> torch.dtype:
    """Type of the floating-point tensors in a policy's file."""
    return next((t.dtype for t in load_file(folder / WEIGHTS).values() if t.is_floating_point()), torch.float32)
