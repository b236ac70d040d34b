"""Rollouts to tensors, and the log-probabilities of one forward pass over them.

Rollouts of similar length share a padded batch. Padding is on the right, where causal attention never looks, so there is
no attention mask. Neighbours: trainer.step runs these batches, trainer.grpo takes the log-probabilities.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from trainer.batch import TrainingGroup


@dataclass(frozen=True)
class MicroBatch:
    """Rollouts of one forward pass, padded.

    Attributes:
        inputs: int64 [rollouts, width], prompts and completions without their last token.
        targets / mask: int64 and bool [rollouts, width], the next token and whether it is a sampled token.
        old: float32 [rollouts, width], log-probabilities under the rollout's policy, 0 where masked.
        advantages: float32 [rollouts].
        first: lowest position whose logits matter.
    """

    inputs: Tensor
    targets: Tensor
    mask: Tensor
    old: Tensor
    advantages: Tensor
    first: int


class _Row(NamedTuple):
    """One rollout; `sampled` are positions in `tokens`, `logprobs` belong to them."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    sampled: NDArray[np.int64]
    logprobs: NDArray[np.float32]
    advantage: float


def make_micro_batches(
    groups: Sequence[TrainingGroup], advantages: NDArray[np.float32], tokens_max: int, device: str
) -> Iterator[MicroBatch]:
    """Pack rollouts of similar length into padded batches of at most `tokens_max` tokens (but at least one rollout).

    Args:
        advantages: float32 [groups, group size].
    """
    rows = [
        _Row(
            group.prompt,
            tokens,
            np.arange(len(tokens)) if group.sampled is None else group.sampled[number],
            group.logprobs[number],
            float(advantages[index, number]),
        )
        for index, group in enumerate(groups)
        for number, tokens in enumerate(group.completions)
    ]
    rows.sort(key=lambda row: len(row.prompt) + len(row.tokens))
    start = 0
    while start < len(rows):
        end = start + 1
        while end < len(rows) and (len(rows[end].prompt) + len(rows[end].tokens)) * (end + 1 - start) <= tokens_max:
            end += 1
        yield _pad(rows[start:end], device)
        start = end


def _pad(rows: Sequence[_Row], device: str) -> MicroBatch:
    width = max(len(row.prompt) + len(row.tokens) for row in rows)
    inputs = np.zeros((len(rows), width), dtype=np.int64)
    mask = np.zeros((len(rows), width - 1), dtype=bool)
    old = np.zeros((len(rows), width - 1), dtype=np.float32)
    for i, row in enumerate(rows):
        start = len(row.prompt)
        inputs[i, : start + len(row.tokens)] = row.prompt + row.tokens
        mask[i, row.sampled + start - 1] = True
        old[i, row.sampled + start - 1] = row.logprobs
    return MicroBatch(
        torch.from_numpy(inputs[:, :-1].copy()).to(device),
        torch.from_numpy(inputs[:, 1:].copy()).to(device),
        torch.from_numpy(mask).to(device),
        torch.from_numpy(old).to(device),
        torch.tensor([row.advantage for row in rows], dtype=torch.float32, device=device),
        min(len(row.prompt) for row in rows) - 1,
    )


def compute_logprobs(
    model: PreTrainedModel,
    part: MicroBatch,
    temperature: float,
    *,
    with_entropy: bool,
    vocab_size: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities of the next tokens at the task's temperature, [rollouts, width], and entropies if asked for.

    Logits are computed only from the first completion position on; what is before it is 0 and masked.

    Args:
        vocab_size: tokens that may be sampled, as for engines and scorers; all of the model's when None. A distribution over
            more of them is not the one that rollouts were drawn from, and no ratio to their log-probabilities would be 1.
    """
    width = part.inputs.shape[1]
    logits = model(input_ids=part.inputs, use_cache=False, logits_to_keep=width - part.first).logits
    spread = torch.log_softmax(logits[..., :vocab_size].float() / temperature, dim=-1)
    targets = part.targets[:, part.first :].clamp(max=spread.shape[-1] - 1)  # a masked one may be no token of the task
    chosen = spread.gather(-1, targets[..., None])[..., 0]
    padded = torch.nn.functional.pad(chosen, (part.first, 0))
    if not with_entropy:
        return padded, None
    entropy = -(spread.exp() * spread).sum(dim=-1)
    return padded, torch.nn.functional.pad(entropy, (part.first, 0))
