"""How the engine draws the next tokens of many rows: replayable noise, or torch's own generator to measure what that costs.

Noise is a function of key and position alone, so at small vocabularies, where a call costs more than its arithmetic, it is made
some positions ahead for each row. Nothing that is kept can be wrong for a row: it is found by the row's key and position.
Logits on an accelerator are sampled from there (models.gumbel).
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from inference.memory import SAMPLE_SCORES_MAX
from models import gumbel
from models.gumbel import is_elsewhere
from protocol.errors import Fault
from protocol.sampling import choose, gumbel_noise, sample_tokens

#: Largest vocabulary whose noise is made ahead, and positions that are made at once.
AHEAD_VOCAB_MAX = 256
AHEAD_POSITIONS = 8
NOT_FINITE = "the policy gives logits that are not finite: nothing can be sampled from it"


class Draw(Protocol):
    """Draws a token for each row of a step."""

    def __call__(
        self,
        logits: torch.Tensor,
        keys: NDArray[np.uint64],
        positions: NDArray[np.int64],
        slots: NDArray[np.int64],
    ) -> NDArray[np.int64]:
        """Token ids, int64 [n].

        Args:
            logits: [n, vocabulary].
            keys: uint64 [n], the samples' Philox keys.
            positions: int64 [n], completion positions from 0.
            slots: int64 [n], the pool's row of each.

        Raises:
            Fault: when a logit is not finite.
        """
        ...


class ReplayableDraw:
    """The tokens of protocol.sampling. See `Draw`.

    Args:
        temperature: above 0.
        vocab_size: tokens that may be drawn; the model's own vocabulary when None or larger.
        num_rows: rows of the pool.
    """

    def __init__(self, temperature: float, vocab_size: int | None, num_rows: int) -> None:
        self._temperature, self._vocab_size = temperature, vocab_size
        self._keys = np.zeros(num_rows, dtype=np.uint64)
        self._starts = np.full(num_rows, -AHEAD_POSITIONS, dtype=np.int64)  # nothing is made for any position yet
        self._noise: NDArray[np.float64] = np.zeros((num_rows, AHEAD_POSITIONS, 0))

    def __call__(
        self,
        logits: torch.Tensor,
        keys: NDArray[np.uint64],
        positions: NDArray[np.int64],
        slots: NDArray[np.int64],
    ) -> NDArray[np.int64]:
        """See `Draw`."""
        if is_elsewhere(logits):
            return self._draw_elsewhere(logits, keys, positions)
        host = logits.float().cpu().numpy()
        # A sum is finite only if every term is, and costs a fraction of looking at each.
        with np.errstate(invalid="ignore"):
            total = host.sum()
        if not np.isfinite(total) and not np.isfinite(host).all():
            raise Fault(NOT_FINITE)
        vocab = _limit(host.shape[1], self._vocab_size)
        if vocab <= AHEAD_VOCAB_MAX:
            noise = self._look_up(keys, positions, slots, vocab)
            return choose(host[:, :vocab].astype(np.float64) / self._temperature + noise)
        step = max(1, SAMPLE_SCORES_MAX // vocab)
        parts = []
        for start in range(0, len(host), step):
            rows = slice(start, start + step)
            parts.append(
                sample_tokens(host[rows], keys[rows], positions[rows], temperature=self._temperature, vocab_size=vocab)
            )
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _draw_elsewhere(
        self, logits: torch.Tensor, keys: NDArray[np.uint64], positions: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """The same tokens from logits on an accelerator: only the winners travel."""
        if not bool(torch.isfinite(logits).all()):
            raise Fault(NOT_FINITE)
        vocab = _limit(logits.shape[1], self._vocab_size)
        return gumbel.sample_tokens(logits, keys, positions, temperature=self._temperature, vocab_size=vocab)

    def _look_up(
        self, keys: NDArray[np.uint64], positions: NDArray[np.int64], slots: NDArray[np.int64], vocab: int
    ) -> NDArray[np.float64]:
        """Noise of each row, float64 [n, vocab]; made for the rows that have none for their position."""
        if not self._noise.shape[2]:
            self._noise = np.zeros((len(self._keys), AHEAD_POSITIONS, vocab))
        offsets = positions - self._starts[slots]
        missing = (offsets < 0) | (offsets >= AHEAD_POSITIONS) | (self._keys[slots] != keys)
        if missing.any():
            rows, first = slots[missing], positions[missing]
            ahead = (first[:, None] + np.arange(AHEAD_POSITIONS)).reshape(-1)
            made = gumbel_noise(np.repeat(keys[missing], AHEAD_POSITIONS), ahead, vocab)
            self._noise[rows] = made.reshape(len(rows), AHEAD_POSITIONS, vocab)
            self._keys[rows], self._starts[rows] = keys[missing], first
            offsets[missing] = 0
        found: NDArray[np.float64] = self._noise[slots, offsets]
        return found


class PlainDraw:
    """torch.multinomial over the softmax. See `Draw`; keys and positions are not used."""

    def __init__(self, temperature: float, vocab_size: int | None) -> None:
        self._temperature, self._vocab_size = temperature, vocab_size

    def __call__(
        self,
        logits: torch.Tensor,
        keys: NDArray[np.uint64],
        positions: NDArray[np.int64],
        slots: NDArray[np.int64],
    ) -> NDArray[np.int64]:
        """See `Draw`."""
        scaled = logits[:, : _limit(logits.shape[1], self._vocab_size)].float() / self._temperature
        chosen: NDArray[np.int64] = torch.multinomial(torch.softmax(scaled, -1), 1)[:, 0].cpu().numpy()
        return chosen


def _limit(width: int, vocab_size: int | None) -> int:
    return width if vocab_size is None else min(vocab_size, width)
