"""One training step: a batch of verified groups in, new weights and optimiser state out.

A step is a function of (weights, optimiser state, batch, configuration, version): the same thread count and library give
the same bits, which is what `trainer.audit` relies on. Weights are kept in float32 whatever the policy's own type is.
Neighbours: trainer.batch makes batches, trainer.checkpoint stores a `Learner`, trainer.grpo holds the loss.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from protocol.errors import Fault
from trainer.batch import TrainingGroup
from trainer.config import TrainerConfig
from trainer.grpo import compute_advantages, compute_loss, has_variance
from trainer.policy import CONFIG, WEIGHTS, collect_tensors, encode_tensors, load_model

_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class StepReport:
    """What a step did.

    Attributes:
        groups / informative: groups in the batch, and those among them whose rewards differ.
        tokens: completion tokens that were trained on, per epoch.
        reward_mean: of all rollouts of the batch, 0 to 1.
        loss: at the start of the step (first epoch).
        grad_norm: mean over the epochs, before clipping.
        clip_fraction: share of tokens without gradient because of the clip, over all epochs.
        tokens_skipped: tokens with a log ratio that is not finite, over all epochs.
        updates_skipped: epochs whose gradient was not finite; nothing was changed by them.
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


@dataclass(frozen=True)
class MicroBatch:
    """Rollouts of one forward pass, padded on the right: causal attention never looks there.

    Attributes:
        inputs: int64 [rollouts, width], prompts and completions.
        targets / mask: int64 and bool [rollouts, width - 1], the next token and whether it is a completion token.
        old: float32 [rollouts, width - 1], log-probabilities under the rollout's policy, 0 where masked.
        advantages: float32 [rollouts].
        first: lowest position whose logits matter.
    """

    inputs: Tensor
    targets: Tensor
    mask: Tensor
    old: Tensor
    advantages: Tensor
    first: int


class Learner:
    """Weights and optimiser state of a lineage.

    Args:
        folder: policy folder to start from.
        optimizer: canonical optimiser bytes as `encode_optimizer` gives them, or None for a fresh state.
        temperature: the task's, in logit units.

    Raises:
        Fault / ConfigError: see `trainer.policy.load_model`; a damaged optimiser state is a `Fault`.
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
        parts = list(make_micro_batches(used, compute_advantages(rewards[varies]), config.tokens_max, self.device))
        num_tokens = sum(len(line) for group in used for line in group.completions)
        rate = config.compute_learning_rate(version)
        for settings in self._optimizer.param_groups:
            settings["lr"] = rate
        references = [None if self._reference is None else self._reference_logprobs(part) for part in parts]
        self.model.train()
        totals = np.zeros(4)
        losses, norms = [], []
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed * 1_000_003 + version)
            for _ in range(config.epochs):
                loss, norm, counts = self._epoch(parts, references, num_tokens)
                losses.append(loss)
                norms.append(norm)
                totals += counts
        self.model.train(False)
        seen = num_tokens * config.epochs
        finite = [norm for norm in norms if np.isfinite(norm)]
        return StepReport(
            groups=len(groups),
            informative=len(used),
            tokens=num_tokens,
            reward_mean=float(rewards.mean()) / 1e6,
            learning_rate=rate,
            loss=losses[0],
            grad_norm=float(np.mean(finite)) if finite else 0.0,
            clip_fraction=float(totals[0]) / seen,
            kl=float(totals[2]) / seen,
            entropy=float(totals[3]) / seen,
            tokens_skipped=int(totals[1]),
            updates_skipped=len(norms) - len(finite),
        )

    def _epoch(
        self, parts: Sequence[MicroBatch], references: Sequence[Tensor | None], num_tokens: int
    ) -> tuple[float, float, np.ndarray[tuple[int], np.dtype[np.float64]]]:
        """One optimiser step over the whole batch; it is skipped when the gradient is not finite."""
        self._optimizer.zero_grad(set_to_none=True)
        loss, counts = 0.0, np.zeros(4)
        for part, reference in zip(parts, references, strict=True):
            new, entropy = compute_logprobs(self.model, part, self.temperature, with_entropy=bool(self.config.entropy))
            found = compute_loss(
                self.config,
                new,
                part.old,
                part.advantages,
                part.mask,
                num_tokens,
                reference=reference,
                entropy=entropy,
            )
            found.loss.backward()  # type: ignore[no-untyped-call]
            loss += float(found.loss.detach())
            counts += (found.clipped, found.skipped, found.kl, found.entropy)
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.grad_norm_max))
        if np.isfinite(norm):
            self._optimizer.step()
        return loss, norm, counts

    def _reference_logprobs(self, part: MicroBatch) -> Tensor:
        assert self._reference is not None
        with torch.no_grad():
            return compute_logprobs(self._reference, part, self.temperature, with_entropy=False)[0]


def _read_dtype(folder: Path) -> torch.dtype:
    """Type of the floating-point tensors in a policy's file."""
    return next((t.dtype for t in load_file(folder / WEIGHTS).values() if t.is_floating_point()), torch.float32)


def make_micro_batches(
    groups: Sequence[TrainingGroup], advantages: np.ndarray, tokens_max: int, device: str
) -> Iterator[MicroBatch]:
    """Pack rollouts of similar length into padded batches of at most `tokens_max` tokens (but at least one rollout).

    Args:
        advantages: float32 [groups, group size].
    """
    rows = [
        (group.prompt, tokens, group.logprobs[number], float(advantages[index, number]))
        for index, group in enumerate(groups)
        for number, tokens in enumerate(group.completions)
    ]
    rows.sort(key=lambda row: len(row[0]) + len(row[1]))
    start = 0
    while start < len(rows):
        end = start + 1
        while end < len(rows) and (len(rows[end][0]) + len(rows[end][1])) * (end + 1 - start) <= tokens_max:
            end += 1
        yield _pad(rows[start:end], device)
        start = end


def _pad(rows: Sequence[tuple[tuple[int, ...], tuple[int, ...], np.ndarray, float]], device: str) -> MicroBatch:
    width = max(len(prompt) + len(tokens) for prompt, tokens, _, _ in rows)
    inputs = np.zeros((len(rows), width), dtype=np.int64)
    mask = np.zeros((len(rows), width - 1), dtype=bool)
    old = np.zeros((len(rows), width - 1), dtype=np.float32)
    for i, (prompt, tokens, logprobs, _) in enumerate(rows):
        start, end = len(prompt), len(prompt) + len(tokens)
        inputs[i, :end] = prompt + tokens
        mask[i, start - 1 : end - 1] = True
        old[i, start - 1 : end - 1] = logprobs
    return MicroBatch(
        torch.from_numpy(inputs).to(device),
        torch.from_numpy(inputs[:, 1:].copy()).to(device),
        torch.from_numpy(mask).to(device),
        torch.from_numpy(old).to(device),
        torch.tensor([row[3] for row in rows], dtype=torch.float32, device=device),
        min(len(row[0]) for row in rows) - 1,
    )


def compute_logprobs(
    model: PreTrainedModel, part: MicroBatch, temperature: float, *, with_entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities of the next tokens at the task's temperature, [rollouts, width - 1], and entropies if asked for.

    Logits are computed only from the first completion position on; what is before it is 0 and masked.
    """
    width = part.inputs.shape[1]
    logits = model(input_ids=part.inputs, use_cache=False, logits_to_keep=width - part.first).logits[:, :-1]
    spread = torch.log_softmax(logits.float() / temperature, dim=-1)
    chosen = spread.gather(-1, part.targets[:, part.first :, None])[..., 0]
    padded = torch.nn.functional.pad(chosen, (part.first, 0))
    if not with_entropy:
        return padded, None
    entropy = -(spread.exp() * spread).sum(dim=-1)
    return padded, torch.nn.functional.pad(entropy, (part.first, 0))
