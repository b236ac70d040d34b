"""Replayable sampling: Gumbel-max with counter-based noise, and the gap by which a given token misses it.

For a sample with 64-bit key s, the noise of token v at completion position t (from 0) is, with x the Philox4x32-10 word
of counter (v // 4, t, 0, 0), lane v % 4, under key (s mod 2^32, s div 2^32):

    u = (x + 0.5) * 2^-32,   g = -log(-log(u))       (float64)

The token is argmax over v of z[v] = logits[v] / T + g[v], lowest id first on a tie; ids beyond the vocabulary are -inf.
Drawn this way a token has the softmax distribution at temperature T (Gumbel-max), and given policy and key there is one
right completion up to honest near-ties.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from protocol.philox import philox4x32


def gumbel_noise(keys: NDArray[np.uint64], positions: NDArray[np.int64], vocab_size: int) -> NDArray[np.float64]:
    """Noise of a batch of (sample, position) pairs.

    Args:
        keys: uint64 [n], the samples' Philox keys.
        positions: int64 [n], completion positions from 0.
        vocab_size: number of valid token ids.

    Returns:
        float64 [n, vocab_size].
    """
    n, blocks = len(keys), (vocab_size + 3) // 4
    counter = np.zeros((n, blocks, 4), dtype=np.uint32)
    counter[:, :, 0] = np.arange(blocks, dtype=np.uint32)
    counter[:, :, 1] = positions.astype(np.uint32)[:, None]
    key = np.empty((n, 1, 2), dtype=np.uint32)
    key[:, 0, 0] = keys & np.uint64(0xFFFFFFFF)
    key[:, 0, 1] = keys >> np.uint64(32)
    words = philox4x32(counter, key).reshape(n, blocks * 4)[:, :vocab_size]
    u = (words.astype(np.float64) + 0.5) * 2.0**-32
    noise: NDArray[np.float64] = -np.log(-np.log(u))
    return noise


def scores(
    logits: NDArray[np.float32],
    keys: NDArray[np.uint64],
    positions: NDArray[np.int64],
    *,
    temperature: float,
    vocab_size: int,
) -> NDArray[np.float64]:
    """z = logits / T + gumbel over the valid vocabulary, float64 [n, vocab_size]."""
    scaled = logits[:, :vocab_size].astype(np.float64) / temperature
    return scaled + gumbel_noise(keys, positions, vocab_size)


def choose(z: NDArray[np.float64]) -> NDArray[np.int64]:
    """The sampled token of each row: the highest score, lowest id first."""
    winners: NDArray[np.int64] = np.argmax(z, axis=1)
    return winners


def replay_gaps(z: NDArray[np.float64], tokens: NDArray[np.int64]) -> NDArray[np.float64]:
    """max(z) - z[token] of each row, 0 where the token is the one sampling gives.

    A non-finite score anywhere in a row makes its gap infinite: it can never pass.
    """
    gaps: NDArray[np.float64] = z.max(axis=1) - z[np.arange(len(tokens)), tokens]
    gaps[~np.isfinite(z).all(axis=1)] = np.inf
    return gaps


def sample_tokens(
    logits: NDArray[np.float32],
    keys: NDArray[np.uint64],
    positions: NDArray[np.int64],
    *,
    temperature: float,
    vocab_size: int,
) -> NDArray[np.int64]:
    """The sampled token of each row, `choose(scores(...))`: int64 [n]."""
    return choose(scores(logits, keys, positions, temperature=temperature, vocab_size=vocab_size))


def compute_gaps(
    logits: NDArray[np.float32],
    keys: NDArray[np.uint64],
    positions: NDArray[np.int64],
    tokens: NDArray[np.int64],
    *,
    temperature: float,
    vocab_size: int,
) -> NDArray[np.float64]:
    """The replay gap of each row's token, `replay_gaps(scores(...), tokens)`: float64 [n]."""
    return replay_gaps(scores(logits, keys, positions, temperature=temperature, vocab_size=vocab_size), tokens)
