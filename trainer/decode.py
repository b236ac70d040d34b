"""A plain KV-cache decoding loop for measuring policies: warm-up, evaluation and the reference benchmark use it.

It makes no commitments; what nodes generate for pay comes from the inference package. Prompts are bucketed by length, so
there is no padding and no mask. Completions in which an environment answers (protocol.episodes) are made turn by turn, each
from the beginning.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from protocol.sampling import sample_tokens

#: pick(logits [n, vocabulary], rows [n], position) -> tokens [n]; rows index the prompts given to `generate`, and the position
#: in the completion is one for all rows or one for each.
Pick = Callable[[Tensor, NDArray[np.int64], int | NDArray[np.int64]], Tensor]
#: respond(row, completion) -> tokens that follow a completion which ends in a stop token; empty when it is over.
Respond = Callable[[int, tuple[int, ...]], tuple[int, ...]]

#: Most sequences decoded together.
ROWS_MAX = 1024


def make_gumbel_pick(keys: NDArray[np.uint64], *, temperature: float, vocab_size: int) -> Pick:
    """Sampling by the protocol's replayable noise, one Philox key per prompt."""

    def pick(logits: Tensor, rows: NDArray[np.int64], position: int | NDArray[np.int64]) -> Tensor:
        positions = np.full(len(rows), position, dtype=np.int64)
        tokens = sample_tokens(
            logits.float().numpy(), keys[rows], positions, temperature=temperature, vocab_size=vocab_size
        )
        return torch.from_numpy(tokens)

    return pick


def make_multinomial_pick(generator: torch.Generator, *, temperature: float, vocab_size: int) -> Pick:
    """Sampling by torch's own generator."""

    def pick(logits: Tensor, rows: NDArray[np.int64], position: int | NDArray[np.int64]) -> Tensor:
        probabilities = torch.softmax(logits[:, :vocab_size].float() / temperature, dim=-1)
        return torch.multinomial(probabilities, 1, generator=generator)[:, 0]

    return pick


@torch.inference_mode()
def generate(
    model: PreTrainedModel,
    prompts: Sequence[tuple[int, ...]],
    *,
    max_tokens: int,
    stop_tokens: Sequence[int],
    pick: Pick,
) -> list[tuple[int, ...]]:
    """Complete every prompt.

    Returns:
        Completions in the order of `prompts`, each ending with its first stop token or at `max_tokens`.
    """
    completions: list[tuple[int, ...]] = [()] * len(prompts)
    buckets: dict[int, list[int]] = {}
    for row, prompt in enumerate(prompts):
        buckets.setdefault(len(prompt), []).append(row)
    for _, rows in sorted(buckets.items()):
        for start in range(0, len(rows), ROWS_MAX):
            part = np.array(rows[start : start + ROWS_MAX], dtype=np.int64)
            tokens = _generate_bucket(model, [prompts[row] for row in part], part, max_tokens, stop_tokens, pick)
            for row, line in zip(part.tolist(), tokens, strict=True):
                completions[row] = line
    return completions


def generate_turns(
    model: PreTrainedModel,
    prompts: Sequence[tuple[int, ...]],
    respond: Respond,
    *,
    max_tokens: int,
    stop_tokens: Sequence[int],
    pick: Pick,
) -> list[tuple[int, ...]]:
    """Complete every prompt, with what `respond` appends behind stop tokens as long as it leaves room for another token.

    Returns:
        Completions in the order of `prompts`, the answers within them.
    """
    completions: list[tuple[int, ...]] = [()] * len(prompts)
    live = list(range(len(prompts)))
    while live:
        rows, done = np.array(live, dtype=np.int64), [completions[row] for row in live]
        offsets = np.array([len(line) for line in done], dtype=np.int64)
        turns = generate(
            model,
            [prompts[row] + line for row, line in zip(live, done, strict=True)],
            max_tokens=max_tokens - int(offsets.min()),
            stop_tokens=stop_tokens,
            pick=_shift(pick, rows, offsets),
        )
        waiting, live = live, []
        for row, line, turn in zip(waiting, done, turns, strict=True):
            completions[row] = (line + turn)[:max_tokens]
            if completions[row][-1] not in stop_tokens:
                continue
            answer = tuple(respond(row, completions[row]))
            if answer and len(completions[row]) + len(answer) < max_tokens:
                completions[row] += answer
                live.append(row)
    return completions


def _shift(pick: Pick, rows: NDArray[np.int64], offsets: NDArray[np.int64]) -> Pick:
    """`pick` for prompts that continue completions: `rows` are the original rows, `offsets` how far each one is."""
    return lambda logits, part, position: pick(logits, rows[part], offsets[part] + position)


def _generate_bucket(
    model: PreTrainedModel,
    prompts: Sequence[tuple[int, ...]],
    rows: NDArray[np.int64],
    max_tokens: int,
    stop_tokens: Sequence[int],
    pick: Pick,
) -> list[tuple[int, ...]]:
    """Prompts of one length. Finished rows stay in the batch (their tokens are cut off) until all are finished."""
    inputs, cache = torch.tensor(prompts, device=model.device), None
    stops = torch.tensor(list(stop_tokens))
    drawn: list[Tensor] = []
    finished = torch.zeros(len(prompts), dtype=torch.bool)
    for position in range(max_tokens):
        output = model(input_ids=inputs, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = output.past_key_values
        tokens = pick(output.logits[:, -1].cpu(), rows, position)
        drawn.append(tokens)
        finished |= torch.isin(tokens, stops)
        if bool(finished.all()):
            break
        inputs = tokens[:, None].to(model.device)
    stop_set = set(stop_tokens)
    lines = []
    for line in torch.stack(drawn, dim=1).tolist():
        end = next((i + 1 for i, token in enumerate(line) if token in stop_set), len(line))
        lines.append(tuple(line[:end]))
    return lines
