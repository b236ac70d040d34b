"""The embedded generation engine: continuous batching in torch with replayable Gumbel-max sampling.

One completion is a function of (policy, prompt, key): batch composition, order and budget only move its logits by
rounding, so two runs differ at most at near-ties (protocol.sampling). Memory is bounded by a budget of tokens, whatever the
number of requests, and compared with what is free before anything is allocated. Not run on a GPU here.

Neighbours: inference.decode runs the batch, inference.llama and inference.forward are the policy's forward pass,
protocol.sampling draws the tokens, protocol.toploc turns the captured states into commitments. A verifier's prefill
(ports.Scorer) shares no code with any of them.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from inference.decode import Decoder
from inference.draw import Draw, PlainDraw, ReplayableDraw
from inference.forward import Forward, ModuleForward
from inference.kv_pool import Feed, KvPool
from inference.llama import LlamaForward
from inference.memory import (
    SIZE_FIELDS,
    compute_rows_max,
    estimate_memory,
    read_free_bytes,
    require_free,
)
from models.policy import load_model, read_config
from protocol.errors import ConfigError, Fault
from protocol.ports import Generation, SampleRequest

log = logging.getLogger(__name__)

#: Tokens of prompts and completions whose keys and values are held at once.
BATCH_TOKENS_MAX = 65_536
#: Requests in one pool need at least this share of the widest one's tokens, where the budget is short.
BAND_SHARE = 0.5
#: Largest difference between logits of the short forward pass and the model's own, as a share of the largest logit.
_PROBE_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.01}
_PROBE_TOKENS = 7


class _Policy(NamedTuple):
    """What `load` makes: complete, or not there."""

    model: Any
    forward: Forward
    sizes: dict[str, Any]


class TorchEngine:
    """An engine on one torch device; see protocol.ports.Engine.

    Args:
        device: torch device, for example "cpu" or "cuda:0".
        dtype: torch dtype of weights and activations, for example "float32" or "bfloat16".
        threads: CPU threads of torch in this process.
        vocab_size: tokens that may be sampled; the model's own vocabulary when None or larger (padded vocabularies).
        batch_tokens_max: budget of prompt and completion tokens whose keys and values are held at once.
        replayable: False only to measure what replay costs: tokens come from torch's generator and no state is kept.
    """

    def __init__(
        self,
        device: str = "cpu",
        dtype: str = "float32",
        threads: int = 1,
        *,
        vocab_size: int | None = None,
        batch_tokens_max: int = BATCH_TOKENS_MAX,
        replayable: bool = True,
    ) -> None:
        found = getattr(torch, dtype, None)
        if not isinstance(found, torch.dtype) or not found.is_floating_point:
            raise ConfigError(f"dtype is {dtype!r}, expected a torch floating-point type like float32 or bfloat16")
        self._device, self._dtype, self._threads = device, dtype, threads
        self._vocab_size = vocab_size
        self._batch_tokens_max = batch_tokens_max
        self._replayable = replayable
        self._policy: _Policy | None = None

    @property
    def hidden_size(self) -> int:
        """Width of the loaded policy's last hidden state, 0 before the first load."""
        return 0 if self._policy is None else int(self._policy.sizes["hidden_size"])

    def load(self, folder: Path) -> None:
        """Load a policy folder; the old policy stays usable until the new one is complete.

        Raises:
            Fault: when the folder is not a usable policy, or its weights do not fit into the free memory.
        """
        torch.set_num_threads(self._threads)
        self._require_weights(folder)
        try:
            model = load_model(folder, device=self._device, dtype=self._dtype)
            config = model.config.get_text_config(decoder=True)
            sizes = {name: getattr(config, name, None) for name in SIZE_FIELDS}
            with torch.inference_mode():
                self._policy = _Policy(model, _make_forward(model, self._device), sizes)
        except RuntimeError as error:  # torch's own: out of memory, a device that went away
            raise Fault(f"policy folder {folder} cannot be run on {self._device}: {error}") from error

    def _require_weights(self, folder: Path) -> None:
        """Compare a policy's weights with the free memory before they are read. Raises `Fault`."""
        config = read_config(folder)
        if "hidden_size" in config:  # a family with names of its own is counted once it is built
            need = estimate_memory(config, dtype=self._dtype, batch_tokens=1)
            todo = "use a narrower dtype, another device, or a task with a smaller policy"
            require_free(need.weights_bytes, _read_free(self._device), f"policy in {self._dtype}", todo)

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
            max_tokens: longest completion, answers of the environment included.
            stop_tokens: ids that end a turn and are part of it.

        Raises:
            Fault: before a policy is loaded, for a prompt that is empty, no prompt of this policy, or too long for the
                budget, when memory is short, or when the policy's numbers are not finite.
        """
        policy = self._policy
        if policy is None:
            raise Fault("no policy is loaded: nothing can be generated")
        if temperature <= 0 or max_tokens < 1:
            raise Fault(f"temperature {temperature} and max_tokens {max_tokens}: both have to be above 0")
        self._validate(policy, requests, max_tokens)
        torch.set_num_threads(self._threads)
        results: list[Generation | None] = [None] * len(requests)
        for members in self._split(requests, max_tokens):
            batch = [requests[i] for i in members]
            try:
                made = self._run(policy, batch, temperature, max_tokens, stop_tokens)
            except RuntimeError as error:  # torch's own: out of memory, a device that went away
                raise Fault(f"generation of {len(batch)} rollouts failed: {error}") from error
            for i, generation in zip(members, made, strict=True):
                results[i] = generation
        return [result for result in results if result is not None]

    def _run(
        self,
        policy: _Policy,
        batch: Sequence[SampleRequest],
        temperature: float,
        max_tokens: int,
        stop_tokens: Sequence[int],
    ) -> list[Generation]:
        """Complete the requests of one pool, which is gone afterwards: two would exceed the budget."""
        with torch.inference_mode():
            pool = self._make_pool(policy, batch, max_tokens)
            draw: Draw = PlainDraw(temperature, self._vocab_size)
            if self._replayable:
                draw = ReplayableDraw(temperature, self._vocab_size, pool.num_rows)
            decoder = Decoder(
                policy.forward,
                pool,
                batch,
                draw,
                max_tokens=max_tokens,
                stop_tokens=stop_tokens,
                vocab_size=_count_ids(policy.model),
                capture=self._replayable,
            )
            return decoder.run()

    def _validate(self, policy: _Policy, requests: Sequence[SampleRequest], max_tokens: int) -> None:
        vocab = _count_ids(policy.model)
        for prompt in {request.prompt for request in requests}:
            if not prompt:
                raise Fault("a prompt is empty: there is no state to sample a first token from")
            if not 0 <= min(prompt) <= max(prompt) < vocab:
                raise Fault(
                    f"a prompt has ids from {min(prompt)} to {max(prompt)}, the policy's go from 0 to {vocab - 1}"
                )
            if len(prompt) + max_tokens > self._batch_tokens_max:
                raise Fault(
                    f"a prompt of {len(prompt)} tokens with up to {max_tokens} more needs {len(prompt) + max_tokens} tokens "
                    f"of the batch, limit {self._batch_tokens_max}: raise compute.batch_tokens_max"
                )

    def _split(self, requests: Sequence[SampleRequest], max_tokens: int) -> list[list[int]]:
        """Request indices by pool. All share one, unless the budget is short and lengths are so mixed that it would be
        spent on the padding of short requests."""
        order = sorted(range(len(requests)), key=lambda i: -len(requests[i].prompt))
        bands: list[list[int]] = []
        for i in order:
            need = len(requests[i].prompt) + max_tokens
            if bands:
                widest = len(requests[bands[-1][0]].prompt) + max_tokens
                fits = len(requests) * widest <= self._batch_tokens_max
                if fits or need >= BAND_SHARE * widest:
                    bands[-1].append(i)
                    continue
            bands.append([i])
        return bands

    def _make_pool(self, policy: _Policy, batch: Sequence[SampleRequest], max_tokens: int) -> KvPool:
        """Rows for a batch within the budget. Raises `Fault` when they do not fit into the free memory."""
        width = max(len(request.prompt) for request in batch) + max_tokens
        rows = min(len(batch), self._batch_tokens_max // width, compute_rows_max(policy.sizes["vocab_size"]))
        need = estimate_memory(policy.sizes, dtype=self._dtype, batch_tokens=rows * width)
        require_free(
            need.kv_bytes + need.activations_bytes,
            _read_free(self._device),
            f"generation with {rows} rows of {width} tokens",
            "lower compute.batch_tokens_max, or free memory",
        )
        return KvPool(rows, width, self._device)


def _count_ids(model: Any) -> int:
    """Token ids that a model has an embedding for: 0 to this number - 1."""
    return int(model.get_input_embeddings().weight.shape[0])


def _read_free(device: str) -> int | None:
    """Free memory of a device in bytes, None where it is not known."""
    kind = torch.device(device).type
    if kind == "cuda" and torch.cuda.is_available():
        return int(torch.cuda.mem_get_info(device)[0])
    return read_free_bytes() if kind == "cpu" else None


def _make_forward(model: Any, device: str) -> Forward:
    """The short forward pass where it covers the model and agrees with it, else the model's own."""
    own = ModuleForward(model)
    short = LlamaForward.of(model)
    if short is None:
        return own
    vocab = _count_ids(model)
    tokens = (np.arange(2 * _PROBE_TOKENS).reshape(2, -1) * 7919 + 3) % vocab
    rows = np.arange(2)
    feeds = [
        Feed(rows, tokens[:, :-1], np.array([_PROBE_TOKENS - 1, _PROBE_TOKENS - 3]), np.zeros_like(rows)),
        Feed(rows, tokens[:, -1:], np.ones_like(rows), np.array([_PROBE_TOKENS - 1, _PROBE_TOKENS - 3])),
    ]
    passes: tuple[Forward, Forward] = (short, own)
    pools = [KvPool(2, _PROBE_TOKENS + 1, device) for _ in passes]
    for feed in feeds:
        ours, theirs = (forward(pool, feed).logits.float() for forward, pool in zip(passes, pools, strict=True))
        limit = _PROBE_TOLERANCE[model.dtype] * (1 + float(theirs.abs().max()))
        off = float((ours - theirs).abs().max())
        if not off <= limit:
            log.warning("logits of the short forward pass are off by %g, limit %g: using the model's own", off, limit)
            return own
    return short
