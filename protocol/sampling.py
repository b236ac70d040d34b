"""Replayable sampling: Gumbel-max with counter-based noise, and the gap by which a given token misses it.

For a sample with 64-bit key s, the noise of token v at completion position t (from 0) is, with x the Philox4x32-10 word
of counter (v // 4, t, 0, 0), lane v % 4, under key (s mod 2^32, s div 2^32):

    u = (x + 0.5) * 2^-32,   g = -log(-log(u))       (float64)

The token is argmax over v of z[v] = logits[v] / T + g[v], lowest id first on a tie; ids beyond the vocabulary are -inf.
Drawn this way a token has the softmax distribution at temperature T (Gumbel-max), and given policy and key there is one
right completion up to honest near-ties.

`scores` is the definition. `sample_tokens`, `replay_tokens` and `compute_gaps` give exactly what follows from it, faster where
it matters (protocol.kernels.gumbel says why nothing changes); models.gumbel is the same for logits on an accelerator.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from protocol.kernels import dense, kernels
from protocol.philox import philox4x32

#: Vocabulary from which the compiled form pays from its first call.
LARGE_VOCAB = 8192
#: The compiled form serves temperatures up to it and down to its inverse, where its float32 differences cannot overflow.
TEMPERATURE_MAX = 1e6
#: What the array form costs, roughly: a call, and each score in it.
ARRAY_CALL_NS = 150_000
ARRAY_SCORE_NS = 30
#: Row flags of protocol.kernels.gumbel, which is not imported for them.
_CLOSE, _NON_FINITE = np.uint8(1), np.uint8(2)


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
    words = philox4x32(counter, _split(keys)[:, None]).reshape(n, blocks * 4)[:, :vocab_size]
    return _to_gumbel(words)


def _split(keys: NDArray[np.uint64]) -> NDArray[np.uint32]:
    """Philox's two key words of each key: uint32 [n, 2], low word first."""
    return np.stack([keys & np.uint64(0xFFFFFFFF), keys >> np.uint64(32)], axis=-1).astype(np.uint32)


def _to_gumbel(words: NDArray[np.uint32]) -> NDArray[np.float64]:
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
    """The sampled token of each row: `choose(scores(...))`, without the noise of tokens that cannot win.

    Args:
        logits: float32 [n, at least vocab_size].
        keys: uint64 [n], the samples' Philox keys.
        positions: int64 [n], completion positions from 0.
        temperature: above 0.
        vocab_size: number of valid token ids.

    Returns:
        int64 [n].
    """
    found = _find_winners(logits, keys, positions, temperature, vocab_size)
    if found is None:
        return choose(scores(logits, keys, positions, temperature=temperature, vocab_size=vocab_size))
    _, winners, flags = found
    close = np.flatnonzero(flags & _CLOSE)
    if len(close):
        z = scores(logits[close], keys[close], positions[close], temperature=temperature, vocab_size=vocab_size)
        winners[close] = choose(z)
    return winners


class Replayed(NamedTuple):
    """How tokens compare with those that sampling gives.

    Attributes:
        winners: int64 [n], the sampled token of each row.
        gaps: float64 [n], the replay gap of each row's token, infinite where a valid logit is not finite.
    """

    winners: NDArray[np.int64]
    gaps: NDArray[np.float64]


def replay_tokens(
    logits: NDArray[np.float32],
    keys: NDArray[np.uint64],
    positions: NDArray[np.int64],
    tokens: NDArray[np.int64],
    *,
    temperature: float,
    vocab_size: int,
) -> Replayed:
    """Each row's winner and replay gap: `choose(z)` and `replay_gaps(z, tokens)` with z = `scores(...)`, without the noise of
    all other tokens.

    Args:
        tokens: int64 [n], the tokens under test; see `sample_tokens` for the rest.
    """
    found = _find_winners(logits, keys, positions, temperature, vocab_size)
    if found is None or not ((tokens >= 0) & (tokens < vocab_size)).all():
        z = scores(logits, keys, positions, temperature=temperature, vocab_size=vocab_size)
        return Replayed(choose(z), replay_gaps(z, tokens))
    kernel, winners, flags = found
    close, settled = np.flatnonzero(flags & _CLOSE), np.flatnonzero(flags & _CLOSE == 0)
    gaps = np.empty(len(tokens))
    pairs, rows = np.concatenate([winners[settled], tokens[settled]]), np.tile(settled, 2)
    words = np.empty(len(rows), dtype=np.uint32)
    kernel.fill_words(dense(keys[rows], np.uint64), dense(positions[rows], np.int64), dense(pairs, np.int64), words)
    z = logits[rows, pairs].astype(np.float64) / temperature + _to_gumbel(words)
    gaps[settled] = z[: len(settled)] - z[len(settled) :]
    if len(close):
        z = scores(logits[close], keys[close], positions[close], temperature=temperature, vocab_size=vocab_size)
        winners[close], gaps[close] = choose(z), replay_gaps(z, tokens[close])
    gaps[flags & _NON_FINITE != 0] = np.inf
    return Replayed(winners, gaps)


def compute_gaps(
    logits: NDArray[np.float32],
    keys: NDArray[np.uint64],
    positions: NDArray[np.int64],
    tokens: NDArray[np.int64],
    *,
    temperature: float,
    vocab_size: int,
) -> NDArray[np.float64]:
    """The replay gap of each row's token: the gaps of `replay_tokens`."""
    return replay_tokens(logits, keys, positions, tokens, temperature=temperature, vocab_size=vocab_size).gaps


def score_tokens(
    logits: NDArray[np.float32],
    keys: NDArray[np.uint64],
    positions: NDArray[np.int64],
    tokens: NDArray[np.int64],
    *,
    temperature: float,
) -> NDArray[np.float64]:
    """z of single tokens by the same arithmetic as in `scores`.

    Args:
        logits: float32 [n], each token's own logit.
        tokens: int64 [n], not negative.

    Returns:
        float64 [n].
    """
    counter = np.zeros((len(tokens), 4), dtype=np.uint32)
    counter[:, 0], counter[:, 1] = tokens // 4, positions.astype(np.uint32)
    words = philox4x32(counter, _split(keys))[np.arange(len(tokens)), tokens % 4]
    z: NDArray[np.float64] = logits.astype(np.float64) / temperature + _to_gumbel(words)
    return z


def _find_winners(
    logits: NDArray[np.float32],
    keys: NDArray[np.uint64],
    positions: NDArray[np.int64],
    temperature: float,
    vocab_size: int,
) -> tuple[Any, NDArray[np.int64], NDArray[np.uint8]] | None:
    """The gumbel kernels with their winners and flags, or None where the array form should serve the call."""
    num_rows, width = logits.shape
    cost_ns = ARRAY_CALL_NS + ARRAY_SCORE_NS * num_rows * vocab_size
    kernel = kernels.get("gumbel", cost_ns=cost_ns, large=vocab_size >= LARGE_VOCAB)
    fits = len(keys) == len(positions) == num_rows and 0 < vocab_size <= width and logits.dtype == np.float32
    if kernel is None or not fits or not 1 / TEMPERATURE_MAX <= temperature <= TEMPERATURE_MAX:
        return None
    rows = dense(logits, np.float32)
    winners, flags = np.empty(num_rows, dtype=np.int64), np.empty(num_rows, dtype=np.uint8)
    kernel.find_winners(
        rows,
        rows.view(np.int32),
        dense(keys, np.uint64),
        dense(positions, np.int64),
        float(temperature),
        vocab_size,
        winners,
        flags,
    )
    return kernel, winners, flags
