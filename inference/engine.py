"""The embedded generation engine: batched KV-cache decoding in torch with replayable Gumbel-max sampling.

One completion is a function of (policy, prompt, key): batch composition, order and batch size only move its logits by
rounding, so two runs differ at most at near-ties (protocol.sampling). Prompts that occur several times, like the samples of
one group, are prefilled once. Rows that have ended leave the batch. Not run on a GPU here.

Neighbours: protocol.sampling draws the tokens, protocol.toploc turns the captured states into commitments. A verifier's
prefill (ports.Scorer) shares no code with this module.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache

from models.policy import load_model
from protocol.errors import ConfigError, Fault
from protocol.ports import Generation, SampleRequest
from protocol.sampling import choose, scores
from protocol.toploc import to_bf16_bits

#: Prompt and completion tokens of one batch, padding included: bounds the KV cache.
BATCH_TOKENS_MAX = 65_536


class TorchEngine:
    """An engine on one torch device; see protocol.ports.Engine.

    Args:
        device: torch device, for example "cpu" or "cuda:0".
        dtype: torch dtype of weights and activations, for example "float32" or "bfloat16".
        threads: CPU threads of torch in this process.
        vocab_size: tokens that may be sampled; the model's own vocabulary when None or larger (padded vocabularies).
        batch_tokens_max: prompt and completion tokens decoded together.
    """

    def __init__(
        self,
        device: str = "cpu",
        dtype: str = "float32",
        threads: int = 1,
        *,
        vocab_size: int | None = None,
        batch_tokens_max: int = BATCH_TOKENS_MAX,
    ) -> None:
        found = getattr(torch, dtype, None)
        if not isinstance(found, torch.dtype) or not found.is_floating_point:
            raise ConfigError(f"dtype is {dtype!r}, expected a torch floating-point type like float32 or bfloat16")
        self._device, self._dtype, self._threads = device, dtype, threads
        self._vocab_size = vocab_size
        self._batch_tokens_max = batch_tokens_max
        self._model: Any = None
        self._captured: torch.Tensor | None = None

    @property
    def hidden_size(self) -> int:
        """Width of the loaded policy's last hidden state, 0 before the first load."""
        return 0 if self._model is None else int(self._model.config.hidden_size)

    def load(self, folder: Path) -> None:
        """Load a policy folder; the old policy stays until the new one is complete.

        Raises:
            Fault: when the folder is not a usable policy.
        """
        torch.set_num_threads(self._threads)
        model = load_model(folder, device=self._device, dtype=self._dtype)
        model.get_output_embeddings().register_forward_pre_hook(self._capture)
        self._model = model

    def _capture(self, module: Any, inputs: tuple[torch.Tensor, ...]) -> None:
        """The output head's input is the post-norm last hidden state, whatever the architecture calls it."""
        self._captured = inputs[0]

    def generate(
        self,
        requests: Sequence[SampleRequest],
        *,
        temperature: float,
        max_tokens: int,
        stop_tokens: Sequence[int],
    ) -> list[Generation]:
        """Complete every request; results in the order of the requests.

        Args:
            temperature: above 0.
            max_tokens: longest completion.
            stop_tokens: ids that end a completion and are part of it.

        Raises:
            Fault: before a policy is loaded, for an empty prompt, or when the policy's numbers are not finite.
        """
        if self._model is None:
            raise Fault("no policy is loaded: nothing can be generated")
        if not all(request.prompt for request in requests):
            raise Fault("a prompt is empty: there is no state to sample a first token from")
        torch.set_num_threads(self._threads)
        results: list[Generation | None] = [None] * len(requests)
        for members in self._batches(requests, max_tokens):
            batch = [requests[i] for i in members]
            try:
                with torch.inference_mode():
                    made = _Decode(self, batch, temperature, max_tokens, stop_tokens).run()
            except RuntimeError as error:  # torch's own: out of memory, a device that went away
                raise Fault(f"generation of {len(batch)} rollouts failed: {error}") from error
            for i, generation in zip(members, made, strict=True):
                results[i] = generation
        return [result for result in results if result is not None]

    def _batches(self, requests: Sequence[SampleRequest], max_tokens: int) -> list[list[int]]:
        """Request indices, sorted by prompt (so that equal lengths and equal prompts meet), cut by the token budget."""
        order = sorted(range(len(requests)), key=lambda i: (len(requests[i].prompt), requests[i].prompt))
        batches: list[list[int]] = []
        for i in order:
            width = len(requests[i].prompt) + max_tokens  # the longest so far: the batch is padded to it
            if not batches or (len(batches[-1]) + 1) * width > self._batch_tokens_max:
                batches.append([])
            batches[-1].append(i)
        return batches

    def forward(
        self, tokens: torch.Tensor, mask: torch.Tensor | None, positions: torch.Tensor, cache: DynamicCache
    ) -> tuple[NDArray[np.float32], NDArray[np.uint16]]:
        """One forward pass that extends `cache`.

        Args:
            tokens: int64 [batch, new].
            mask: int64 [batch, past + new], 0 at left padding; None without padding.
            positions: int64 [batch, new].

        Returns:
            Logits float32 [batch, vocabulary] and hidden bits uint16 [batch, hidden] of the last position.
        """
        output = self._model(
            input_ids=tokens,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        if self._captured is None:
            raise Fault("the policy's output head was not called: this architecture is not supported")
        logits: NDArray[np.float32] = output.logits[:, -1].float().cpu().numpy()
        hidden = to_bf16_bits(self._captured[:, -1].float().cpu().numpy())
        self._captured = None
        if not np.isfinite(logits).all():
            raise Fault("the policy gives logits that are not finite: nothing can be sampled from it")
        limit = logits.shape[1] if self._vocab_size is None else min(self._vocab_size, logits.shape[1])
        return logits[:, :limit], hidden

    def to_device(self, values: NDArray[np.int64]) -> torch.Tensor:
        """Copy an array to the engine's device."""
        return torch.from_numpy(values).to(self._device)


class _Decode:
    """One batch from prefill to the last stop token. `active` maps rows of the cache to requests."""

    def __init__(
        self,
        engine: TorchEngine,
        batch: Sequence[SampleRequest],
        temperature: float,
        max_tokens: int,
        stop_tokens: Sequence[int],
    ) -> None:
        self._engine = engine
        self._batch = batch
        self._temperature = temperature
        self._max_tokens = max_tokens
        self._stops = np.array(sorted(stop_tokens), dtype=np.int64)
        self._keys = np.array([request.key for request in batch], dtype=np.uint64)
        self._lengths = np.array([len(request.prompt) for request in batch], dtype=np.int64)
        self._width = int(self._lengths.max())
        self._tokens = np.zeros((len(batch), max_tokens), dtype=np.int64)
        self._counts = np.zeros(len(batch), dtype=np.int64)
        self._hidden: NDArray[np.uint16] = np.zeros((0, 0, 0), dtype=np.uint16)

    def run(self) -> list[Generation]:
        """Decode until every row has ended."""
        cache = DynamicCache()
        logits, hidden = self._prefill(cache)
        self._hidden = np.zeros((len(self._batch), self._max_tokens, hidden.shape[1]), dtype=np.uint16)
        active = np.arange(len(self._batch))
        for position in range(self._max_tokens):
            chosen = self._sample(logits, hidden, active, position)
            going = ~np.isin(chosen, self._stops)
            if position + 1 == self._max_tokens or not going.any():
                break
            if not going.all():
                cache.batch_select_indices(self._engine.to_device(np.flatnonzero(going)))
                active, chosen = active[going], chosen[going]
            logits, hidden = self._extend(cache, active, chosen, position)
        return [
            Generation(tuple(self._tokens[i, :count].tolist()), self._hidden[i, :count])
            for i, count in enumerate(self._counts.tolist())
        ]

    def _sample(
        self, logits: NDArray[np.float32], hidden: NDArray[np.uint16], active: NDArray[np.int64], position: int
    ) -> NDArray[np.int64]:
        z = scores(
            logits,
            self._keys[active],
            np.full(len(active), position, dtype=np.int64),
            temperature=self._temperature,
            vocab_size=logits.shape[1],
        )
        chosen = choose(z)
        self._tokens[active, position] = chosen
        self._hidden[active, position] = hidden
        self._counts[active] = position + 1
        return chosen

    def _prefill(self, cache: DynamicCache) -> tuple[NDArray[np.float32], NDArray[np.uint16]]:
        """Prefill each distinct prompt once, then give every request its row."""
        rows: dict[tuple[int, ...], int] = {}
        row_of = np.array([rows.setdefault(request.prompt, len(rows)) for request in self._batch], dtype=np.int64)
        tokens = np.zeros((len(rows), self._width), dtype=np.int64)
        mask = np.zeros_like(tokens)
        for prompt, row in rows.items():
            tokens[row, self._width - len(prompt) :] = prompt
            mask[row, self._width - len(prompt) :] = 1
        positions = np.maximum(mask.cumsum(axis=1) - 1, 0)
        to_device = self._engine.to_device
        padding = None if mask.all() else to_device(mask)
        logits, hidden = self._engine.forward(to_device(tokens), padding, to_device(positions), cache)
        if len(rows) < len(self._batch):
            cache.batch_select_indices(to_device(row_of))
        return logits[row_of], hidden[row_of]

    def _extend(
        self, cache: DynamicCache, active: NDArray[np.int64], chosen: NDArray[np.int64], position: int
    ) -> tuple[NDArray[np.float32], NDArray[np.uint16]]:
        """Feed the tokens sampled at `position`."""
        to_device = self._engine.to_device
        lengths, padding = self._lengths[active], None
        if (self._lengths != self._width).any():
            columns = np.arange(self._width + position + 1)
            padding = to_device((columns[None] >= (self._width - lengths)[:, None]).astype(np.int64))
        positions = to_device((lengths + position)[:, None])
        return self._engine.forward(to_device(chosen[:, None]), padding, positions, cache)
