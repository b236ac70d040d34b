"""Rollouts to tensors, and the log-probabilities of one forward pass over them.

Rollouts of similar length share a padded batch. Padding is on the right, where causal attention never looks, so there is
no attention mask. Neighbours: trainer.step runs these batches, trainer.grpo takes the log-probabilities.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

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
        targets / mask: int64 and bool [rollouts, width], the next token and whether it is a completion token.
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


def make_micro_batches(
    groups: Sequence[TrainingGroup], advantages: NDArray[np.float32], tokens_max: int, device: str
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


def _pad(
    rows: Sequence[tuple[tuple[int, ...], tuple[int, ...], NDArray[np.float32], float]], device: str
) -> MicroBatch:
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
        torch.from_numpy(inputs[:, :-1].copy()).to(device),
        torch.from_numpy(inputs[:, 1:].copy()).to(device),
        torch.from_numpy(mask).to(device),
        torch.from_numpy(old).to(device),
        torch.tensor([row[3] for row in rows], dtype=torch.float32, device=device),
        min(len(row[0]) for row in rows) - 1,
    )


def compute_logprobs(
    model: PreTrainedModel, part: MicroBatch, temperature: float, *, with_entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities of the next tokens at the task's temperature, [rollouts, width], and entropies if asked for.

    Logits are computed only from the first completion position on; what is before it is 0 and masked.
    """
    width = part.inputs.shape[1]
    logits = model(input_ids=part.inputs, use_cache=False, logits_to_keep=width - part.first).logits
    spread = torch.log_softmax(logits.float() / temperature, dim=-1)
    chosen = spread.gather(-1, part.targets[:, part.first :, None])[..., 0]
    padded = torch.nn.functional.pad(chosen, (part.first, 0))
    if not with_entropy:
        return padded, None
    entropy = -(spread.exp() * spread).sum(dim=-1)
    return padded, torch.nn.functional.pad(entropy, (part.first, 0))
