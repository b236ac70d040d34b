"""The verifier's own prefill: activations, replay gaps and log-probabilities of claimed completions.

One full forward pass per length-bucketed batch, without a KV cache and with padding on the right, where causal attention
cannot see it; nothing here is shared with a node's decode but the library that holds the weights. Logits are made only
at completion positions and in bounded chunks, so memory does not grow with the vocabulary times the batch.
Device-agnostic; not run on a GPU here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from models import gumbel
from models.policy import load_model
from protocol.errors import ConfigError, Fault
from protocol.ports import SampleRequest, Scored
from protocol.sampling import Replayed, replay_tokens
from protocol.toploc import to_bf16_bits

#: Padded tokens of one forward pass.
BATCH_TOKENS_MAX = 16_384
#: Tokens from which on a batch is ended early so as not to be padded to more than this many times its tokens.
LARGE_BATCH_TOKENS, PADDING_MAX = 1024, 1.1
#: Logits in memory at once, rows times vocabulary.
LOGITS_MAX = 1 << 24


class _Row(NamedTuple):
    """One completion to score; `sampled` are positions in it."""

    request: SampleRequest
    completion: tuple[int, ...]
    sampled: NDArray[np.int64]


class TorchScorer:
    """A scorer on one torch device; see protocol.ports.Scorer.

    Args:
        device: torch device.
        dtype: torch dtype of weights and activations; part of the task's proof profile.
        threads: CPU threads of torch in this process.
        vocab_size: tokens that may be sampled; the model's own vocabulary when None or larger.
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
        if not isinstance(getattr(torch, dtype, None), torch.dtype):
            raise ConfigError(f"dtype is {dtype!r}, expected a torch floating-point type like float32 or bfloat16")
        self._device, self._dtype, self._threads = device, dtype, threads
        self._vocab_size, self._batch_tokens_max = vocab_size, batch_tokens_max
        self._model: Any = None

    def load(self, folder: Path) -> None:
        """Load a policy folder; the old policy stays until the new one is complete. Raises `Fault`."""
        torch.set_num_threads(self._threads)
        self._model = load_model(folder, device=self._device, dtype=self._dtype)

    def score(
        self,
        requests: Sequence[SampleRequest],
        completions: Sequence[Sequence[int]],
        *,
        temperature: float,
        sampled: Sequence[NDArray[np.int64]] | None = None,
    ) -> list[Scored]:
        """Score completions under the loaded policy; see protocol.ports.Scorer.

        Raises:
            Fault: when no policy is loaded, the model has no such tokens, or its own numbers are not finite.
        """
        if self._model is None:
            raise Fault("no policy is loaded: nothing can be scored")
        results: list[Scored | None] = [None] * len(requests)
        for batch in self._batches(requests, completions):
            rows = [
                _Row(
                    requests[i],
                    tuple(completions[i]),
                    np.arange(len(completions[i])) if sampled is None else sampled[i],
                )
                for i in batch
            ]
            try:
                scored_rows = self._score_batch(rows, temperature)
            except RuntimeError as error:  # torch's own: out of memory, a device that went away
                raise Fault(f"prefill of {len(rows)} rollouts failed: {error}") from error
            for i, scored in zip(batch, scored_rows, strict=True):
                results[i] = scored
        return [scored for scored in results if scored is not None]

    def _batches(self, requests: Sequence[SampleRequest], completions: Sequence[Sequence[int]]) -> Iterator[list[int]]:
        """Indices of similar length whose padded size stays below the limit, shortest first.

        A batch that is large enough for the work to be in the matrices also ends before padding is more than a tenth of it.
        """
        lengths = [len(r.prompt) + len(c) for r, c in zip(requests, completions, strict=True)]
        batch: list[int] = []
        used = 0
        for i in sorted(range(len(lengths)), key=lengths.__getitem__):
            padded = lengths[i] * (len(batch) + 1)
            wasteful = used >= LARGE_BATCH_TOKENS and padded > PADDING_MAX * (used + lengths[i])
            if batch and (padded > self._batch_tokens_max or wasteful):
                yield batch
                batch, used = [], 0
            batch.append(i)
            used += lengths[i]
        if batch:
            yield batch

    def _score_batch(self, rows: list[_Row], temperature: float) -> list[Scored]:
        hidden = self._prefill(rows)
        bits = to_bf16_bits(hidden.float().cpu().numpy())
        keys = np.concatenate([np.full(len(row.sampled), row.request.key, dtype=np.uint64) for row in rows])
        positions = np.concatenate([row.sampled for row in rows])
        tokens = np.concatenate([np.asarray(row.completion, dtype=np.int64)[row.sampled] for row in rows])
        self._require_tokens(tokens, self._count_tokens())
        replayed, logprobs = self._replay(hidden, keys, positions, tokens, temperature)
        ends = np.cumsum([len(row.sampled) for row in rows]).tolist()
        parts = [slice(end - len(row.sampled), end) for row, end in zip(rows, ends, strict=True)]
        return [Scored(bits[part], replayed.gaps[part], logprobs[part], replayed.winners[part]) for part in parts]

    def _count_tokens(self) -> int:
        """Tokens that may be sampled."""
        size = int(self._model.get_output_embeddings().weight.shape[0])
        return min(self._vocab_size or size, size)

    @staticmethod
    def _require_tokens(tokens: NDArray[np.int64], limit: int) -> None:
        """No token is looked up that is not there: it would end the process, or stand for another (-1 for the last)."""
        if tokens.min() < 0 or tokens.max() >= limit:
            bad = tokens.max() if tokens.max() >= limit else tokens.min()
            raise Fault(f"the policy has no token {bad}, limit {limit - 1}: it does not fit the task's environment")

    @torch.inference_mode()
    def _prefill(self, rows: list[_Row]) -> torch.Tensor:
        """Last hidden states behind every sampled token, all rows concatenated: [sampled, hidden]."""
        width = max(len(row.request.prompt) + len(row.completion) - 1 for row in rows)
        inputs = np.zeros((len(rows), width), dtype=np.int64)
        where_row, where_column = [], []
        for i, row in enumerate(rows):
            sequence = row.request.prompt + row.completion[:-1]
            inputs[i, : len(sequence)] = sequence
            where_row.append(np.full(len(row.sampled), i))
            where_column.append(row.sampled + len(row.request.prompt) - 1)
        self._require_tokens(inputs, self._model.get_input_embeddings().weight.shape[0])
        states = self._model.base_model(
            input_ids=torch.from_numpy(inputs).to(self._device), use_cache=False
        ).last_hidden_state
        index_row = torch.from_numpy(np.concatenate(where_row)).to(self._device)
        index_column = torch.from_numpy(np.concatenate(where_column)).to(self._device)
        picked: torch.Tensor = states[index_row, index_column]
        if not bool(torch.isfinite(picked).all()):
            raise Fault("the policy's own activations are not finite: no verdict can follow from them")
        return picked

    @torch.inference_mode()
    def _replay(
        self,
        hidden: torch.Tensor,
        keys: NDArray[np.uint64],
        positions: NDArray[np.int64],
        tokens: NDArray[np.int64],
        temperature: float,
    ) -> tuple[Replayed, NDArray[np.float64]]:
        """Winners and gaps, and the log-probability, of every completion token, float64 [tokens].

        Where the logits are on an accelerator they stay there: only what a row is decided by travels.
        """
        head, vocab_size = self._model.get_output_embeddings(), self._count_tokens()
        winners, gaps, logprobs = np.empty(len(tokens), dtype=np.int64), np.empty(len(tokens)), np.empty(len(tokens))
        step = max(1, LOGITS_MAX // vocab_size)
        for start in range(0, len(tokens), step):
            part = slice(start, start + step)
            logits = head(hidden[part]).float()
            terms = (keys[part], positions[part], tokens[part])
            if gumbel.is_elsewhere(logits):
                found = gumbel.replay_tokens(logits, *terms, temperature=temperature, vocab_size=vocab_size)
                scaled = logits[:, :vocab_size].double() / temperature
                given = torch.from_numpy(np.ascontiguousarray(tokens[part])).to(scaled.device)[:, None]
                picked = torch.gather(scaled, 1, given)[:, 0] - torch.logsumexp(scaled, dim=1)
                logprobs[part] = picked.cpu().numpy()
            else:
                found = replay_tokens(logits.numpy(), *terms, temperature=temperature, vocab_size=vocab_size)
                logprobs[part] = _compute_logprobs(logits[:, :vocab_size], tokens[part], temperature)
            winners[part], gaps[part] = found
        if not np.isfinite(gaps).all():
            raise Fault("the policy's own logits are not finite: no verdict can follow from them")
        return Replayed(winners, gaps), logprobs


def _compute_logprobs(logits: torch.Tensor, tokens: NDArray[np.int64], temperature: float) -> NDArray[np.float64]:
    """Log-probability of each row's token, float64 [rows], of float32 logits [rows, vocabulary].

    Exponentials of differences to the row's largest, and their sum, are float32: relative errors of some 2^-24, summed in a
    tree, so that the logarithm is right to about 1e-6, which is no more than the logits' own rounding.
    """
    peak = logits.amax(dim=1, keepdim=True)
    total = (logits - peak).div_(temperature).exp_().sum(dim=1).double()
    picked = torch.gather(logits, 1, torch.from_numpy(np.ascontiguousarray(tokens))[:, None])
    found: NDArray[np.float64] = ((picked.double() - peak.double())[:, 0] / temperature - total.log()).numpy()
    return found
