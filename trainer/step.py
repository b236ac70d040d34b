"""One training step: a batch of verified groups in, new weights and optimiser state out.

A step is a function of (weights, optimiser state, batch, configuration, version): the same thread count and library give
the same bits, which is what `trainer.audit` relies on. Weights are kept in float32 whatever the policy's own type is.
Neighbours: trainer.batch makes batches, trainer.weights is what is trained, trainer.checkpoint stores a `Learner`,
trainer.grpo holds the loss.
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
from torch import Tensor
from transformers import PreTrainedModel

from protocol.adapter import WHOLE_POLICIES, Adapter
from protocol.errors import Fault
from trainer.batch import TrainingGroup
from trainer.config import TrainerConfig
from trainer.grpo import compute_advantages, compute_loss, has_variance
from trainer.packing import MicroBatch, compute_logprobs, make_micro_batches
from trainer.policy import encode_tensors
from trainer.weights import open_weights

_MOMENTS = ("exp_avg", "exp_avg_sq")
#: Logits of one forward pass, tokens times vocabulary; with their gradients and softmax a few times as many are in memory.
LOGITS_MAX = 1 << 26


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
        adapter / base_policy: the task's. With an adapter only that is trained, and the folder holds one or is the base.
        reference: folder of version 0, for a KL penalty; an adapter needs none.
        vocab_size: tokens of the task's environment; all of the model's when None.

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
        adapter: Adapter = WHOLE_POLICIES,
        base_policy: bytes = b"",
        reference: Path | None = None,
        vocab_size: int | None = None,
        device: str = "cpu",
        threads: int = 1,
    ) -> None:
        torch.set_num_threads(threads)
        self.config = config
        self.temperature = temperature
        self._vocab_size = vocab_size
        self.device = device
        reference = reference if config.kl else None
        self._weights = open_weights(folder, adapter, base_policy, reference=reference, seed=config.seed, device=device)
        self.model = self._weights.model
        self._optimizer = torch.optim.AdamW(
            self._weights.trained.values(),
            lr=config.learning_rate,
            betas=(config.beta1, config.beta2),
            weight_decay=config.weight_decay,
            fused=True,
        )
        if optimizer is not None:
            self._load_optimizer(optimizer)

    def encode_policy(self) -> dict[str, bytes]:
        """Canonical files of the policy by name: a configuration and a safetensors file."""
        return self._weights.encode_policy()

    def encode_optimizer(self) -> bytes:
        """Canonical optimiser state: moments and step counts by parameter name, and the float32 weights when the policy
        is published in a narrower type."""
        tensors: dict[str, Tensor] = {}
        for name, parameter in self._weights.trained.items():
            state = self._optimizer.state.get(parameter, {})
            for moment in _MOMENTS:
                tensors[f"{moment}.{name}"] = state.get(moment, torch.zeros_like(parameter)).detach().cpu().contiguous()
            tensors[f"step.{name}"] = torch.as_tensor(state.get("step", 0.0), dtype=torch.float32).reshape(1).cpu()
            if self._weights.published_dtype != torch.float32:
                tensors[f"weight.{name}"] = parameter.detach().cpu().contiguous()
        return encode_tensors(tensors)

    def _load_optimizer(self, data: bytes) -> None:
        try:
            tensors = load_tensors(data)
            for name, parameter in self._weights.trained.items():
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
        tokens_max = min(self.config.tokens_max, max(1, LOGITS_MAX // int(self.model.config.vocab_size)))
        parts = list(make_micro_batches(groups, advantages, tokens_max, self.device))
        references: list[Tensor | None] = [None] * len(parts)
        if self.config.kl:
            references = self._compute_references(parts)
        return Minibatch(parts, references, sum(group.num_sampled for group in groups))

    def _update(self, minibatch: Minibatch) -> Update:
        """One optimiser step over a minibatch; it is skipped when the gradient is not finite."""
        self._optimizer.zero_grad(set_to_none=True)
        loss = kl = entropy = 0.0
        clipped = skipped = 0
        for part, reference in zip(minibatch.parts, minibatch.references, strict=True):
            new, entropies = self._compute_logprobs(self.model, part, with_entropy=self.config.entropy > 0)
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
        norm = float(torch.nn.utils.clip_grad_norm_(self._weights.trained.values(), self.config.grad_norm_max))
        if np.isfinite(norm):
            self._optimizer.step()
        return Update(loss, norm, clipped, skipped, kl, entropy)

    def _compute_references(self, parts: Sequence[MicroBatch]) -> list[Tensor | None]:
        """Log-probabilities of each part under policy version 0."""
        with self._weights.reference() as model, torch.no_grad():
            if model is None:
                return [None] * len(parts)
            return [self._compute_logprobs(model, part, with_entropy=False)[0] for part in parts]

    def _compute_logprobs(
        self, model: PreTrainedModel, part: MicroBatch, *, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        return compute_logprobs(model, part, self.temperature, with_entropy=with_entropy, vocab_size=self._vocab_size)


def _split(
    groups: Sequence[TrainingGroup], advantages: NDArray[np.float32], size: int
) -> list[tuple[Sequence[TrainingGroup], NDArray[np.float32]]]:
    """Deal groups out to parts of at most `size`, so that each has groups of every node and age."""
    count = -(-len(groups) // size) if size else 1
    return [(groups[part::count], advantages[part::count]) for part in range(count)]
