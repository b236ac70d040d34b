"""Replayable sampling inside vLLM: a logits processor that leaves one token possible, the one the sample's noise gives.

vLLM is asked for temperature 0, so its own seeds and its own temperature play no part: this processor divides by the
task's temperature, adds the Gumbel noise of (key, position) and masks every token but the winner, which argmax then takes.
Nothing here knows the batch: a row's token depends on its logits, its key and its position alone, so a neighbour, the
order of the batch, a preemption or a cached prefix changes nothing but the rounding of the logits.
Rows without a key in their `extra_args` pass through untouched.

vLLM imports this module by the name `PROCESSOR`, in each of its workers. Neighbours: inference.vllm_runtime sets
`extra_args`, protocol.sampling draws.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from models import gumbel
from protocol.errors import Fault
from protocol.sampling import sample_tokens


class _Draw(NamedTuple):
    """What a row samples with.

    Attributes:
        key: the sample's Philox key.
        offset: completion tokens before this request's own (the environment has answered in between).
        temperature: above 0.
        vocab_size: ids at or above it cannot be sampled.
        output: this request's tokens so far: vLLM's own list, which grows, and which is whole again after a preemption.
    """

    key: int
    offset: int
    temperature: float
    vocab_size: int
    output: list[int]


class GumbelNoise(LogitsProcessor):  # type: ignore[misc]  # vllm is optional: without it the base class is unknown
    """See the module."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._rows: dict[int, _Draw] = {}

    def is_argmax_invariant(self) -> bool:
        """Noise decides which token is the largest, so vLLM must not skip it for greedy rows."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow vLLM's rows as requests come, go and move."""
        process_dict_updates(self._rows, batch_update, _read_draw)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Mask all but the sampled token of every row with a key.

        Args:
            logits: [rows, vocabulary], changed in place.

        Raises:
            Fault: when a logit that could be sampled is not finite.
        """
        groups: dict[tuple[float, int], list[int]] = {}
        for row, draw in self._rows.items():
            groups.setdefault((draw.temperature, draw.vocab_size), []).append(row)
        for (temperature, vocab_size), rows in groups.items():
            index = torch.tensor(rows, device=logits.device)
            limit = min(vocab_size, logits.shape[1])
            values = logits[index, :limit].float()
            if not bool(torch.isfinite(values).all()):
                raise Fault("the policy gives logits that are not finite: nothing can be sampled from it")
            draws = [self._rows[row] for row in rows]
            sample: Any = gumbel.sample_tokens if gumbel.is_elsewhere(logits) else _sample_here
            tokens = sample(
                values,
                np.array([draw.key for draw in draws], dtype=np.uint64),
                np.array([draw.offset + len(draw.output) for draw in draws], dtype=np.int64),
                temperature=temperature,
                vocab_size=limit,
            )
            logits[index] = float("-inf")
            logits[index, torch.from_numpy(tokens).to(logits.device)] = 0.0
        return logits


def _sample_here(values: torch.Tensor, *rest: Any, **terms: Any) -> Any:
    """`sample_tokens` of logits in the host's memory."""
    return sample_tokens(values.numpy(), *rest, **terms)


def _read_draw(params: Any, prompt: list[int] | None, output: list[int]) -> _Draw | None:
    """A new row's draw; None when the request has no key."""
    given = (params.extra_args or {}).get("troth")
    if given is None:
        return None
    key, offset, temperature, vocab_size = given
    return _Draw(key, offset, temperature, vocab_size, output)
