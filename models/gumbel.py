"""Replayable sampling where the logits are: the noise of protocol.sampling in torch, on any device with int64 and float64.

With logits on an accelerator only a few numbers a row travel to the host: the winner, its own logit and that of a token
under test. Results equal protocol.sampling's bit for bit, on every device:

- The noise words are integers. A product of two 32-bit words is made of 16-bit halves, so nothing exceeds 49 bits and nothing
  depends on how a device treats the overflow of an int64.
- Division and addition of float64 are exact to IEEE everywhere; only the two logarithms of a device may differ from the host's,
  by a few ulp. A row whose two best scores are closer than `MARGIN`, which is far above that, is not decided here: its logits
  go to the host, to the definition. So do rows with a logit that is NaN or +inf, or out of the range where this holds.
- A gap is the difference of two scores, which the host makes of two logits and two noise words as `protocol.sampling` does.

The vocabulary is taken in slices, so memory does not grow with it. Not run on a GPU here: tests force this path on the CPU.
Neighbours: inference.draw, inference.vllm_noise and verifier.scorer use it where logits are not on the CPU.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from protocol import sampling
from protocol.sampling import Replayed

#: Scores (rows times tokens) in memory at once; each takes about a hundred bytes meanwhile.
SLICE_SCORES = 1 << 20
#: Scores closer than this are a close race. Errors of a score are below 1e-9 while none is beyond `PEAK_MAX`.
MARGIN = 1e-8
PEAK_MAX = float(1 << 20)

_ROUNDS = 10
_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_LOW = 0xFFFFFFFF


class Winners(NamedTuple):
    """What a row is decided by.

    Attributes:
        tokens: int64 [n], the token with the best score; meaningless where a row is close.
        close: bool [n], rows that only the definition decides.
        finite: bool [n], whether every valid logit is finite.
    """

    tokens: torch.Tensor
    close: torch.Tensor
    finite: torch.Tensor


def is_elsewhere(logits: torch.Tensor) -> bool:
    """Whether logits are not in the host's memory, so that they should be sampled from where they are."""
    return logits.device.type != "cpu"


def _multiply(words: torch.Tensor, factor: int) -> tuple[torch.Tensor, torch.Tensor]:
    """High and low 32 bits of 32-bit words times a 32-bit constant; all int64."""
    below, above = words * (factor & 0xFFFF), words * (factor >> 16)
    return (above + (below >> 16)) >> 16, (below + ((above & 0xFFFF) << 16)) & _LOW


def philox4x32(
    counter: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], key: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Philox4x32-10: four counter words under two key words, int64 tensors that broadcast, with values below 2^32."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        high0, low0 = _multiply(c0, _M0)
        high1, low1 = _multiply(c2, _M1)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _W0) & _LOW, (k1 + _W1) & _LOW
    return c0, c1, c2, c3


def noise_words(
    keys: NDArray[np.uint64], positions: NDArray[np.int64], first: int, blocks: int, device: torch.device
) -> torch.Tensor:
    """Noise words of the tokens 4 * first .. 4 * (first + blocks) - 1.

    Args:
        keys: uint64 [n].
        positions: int64 [n]; the low 32 bits count.

    Returns:
        int64 [n, 4 * blocks].
    """
    low, high = (keys & np.uint64(_LOW)).astype(np.int64), (keys >> np.uint64(32)).astype(np.int64)
    columns = [
        torch.from_numpy(np.ascontiguousarray(part)).to(device)[:, None]
        for part in (positions.astype(np.int64) & _LOW, low, high)
    ]
    block = torch.arange(first, first + blocks, dtype=torch.int64, device=device)[None]
    zero = torch.zeros((1, 1), dtype=torch.int64, device=device)
    words = philox4x32((block, columns[0], zero, zero), (columns[1], columns[2]))
    shape = (len(keys), blocks)
    return torch.stack([word.expand(shape) for word in words], dim=-1).reshape(len(keys), 4 * blocks)


def find_winners(
    logits: torch.Tensor,
    keys: NDArray[np.uint64],
    positions: NDArray[np.int64],
    *,
    temperature: float,
    vocab_size: int,
) -> Winners:
    """Winner of each row, on the logits' own device; see `sample_tokens` for the arguments."""
    rows, device = len(keys), logits.device
    best = torch.full((rows,), -torch.inf, dtype=torch.float64, device=device)
    second, peak = best.clone(), torch.zeros_like(best)
    tokens = torch.zeros(rows, dtype=torch.int64, device=device)
    close, finite = (
        torch.zeros(rows, dtype=torch.bool, device=device),
        torch.ones(rows, dtype=torch.bool, device=device),
    )
    width = max(4, SLICE_SCORES // max(rows, 1) // 4 * 4)
    for start in range(0, vocab_size, width):
        part = logits[:, start : min(start + width, vocab_size)].float()
        size = part.shape[1]
        words = noise_words(keys, positions, start // 4, (size + 3) // 4, device)[:, :size]
        scaled = part.double() / temperature
        z = scaled - torch.log(-torch.log((words.double() + 0.5) * 2.0**-32))
        top = torch.topk(z, min(2, size), dim=1)
        ahead = top.values[:, 0] > best
        second = torch.maximum(second, torch.minimum(best, top.values[:, 0]))
        if size > 1:
            second = torch.maximum(second, top.values[:, 1])
        tokens = torch.where(ahead, top.indices[:, 0] + start, tokens)
        best = torch.maximum(best, top.values[:, 0])
        peak = torch.maximum(peak, scaled.amax(dim=1))
        finite &= torch.isfinite(part).all(dim=1)
        close |= (torch.isnan(part) | (part == torch.inf)).any(dim=1)
    close |= (
        ~(best - second > MARGIN) & (vocab_size > 1) | ~torch.isfinite(best) | (peak > PEAK_MAX) | (best < -PEAK_MAX)
    )
    return Winners(tokens, close, finite)


def _is_decidable(logits: torch.Tensor, keys: NDArray[np.uint64], temperature: float, vocab_size: int) -> bool:
    """Whether a call is one whose rows can be decided here."""
    limit = sampling.TEMPERATURE_MAX
    fits = 0 < vocab_size <= logits.shape[1] and len(keys) == logits.shape[0] > 0
    return fits and 1 / limit <= temperature <= limit


def _to_host(logits: torch.Tensor) -> NDArray[np.float32]:
    host: NDArray[np.float32] = logits.float().cpu().numpy()
    return host


def sample_tokens(
    logits: torch.Tensor,
    keys: NDArray[np.uint64],
    positions: NDArray[np.int64],
    *,
    temperature: float,
    vocab_size: int,
) -> NDArray[np.int64]:
    """The tokens of `protocol.sampling.sample_tokens`, of logits on any device.

    Args:
        logits: [n, at least vocab_size], any floating-point type; sampled from as float32.
        keys: uint64 [n], the samples' Philox keys.
        positions: int64 [n], completion positions from 0.
        temperature: above 0.
        vocab_size: number of valid token ids.

    Returns:
        int64 [n].
    """
    if not _is_decidable(logits, keys, temperature, vocab_size):
        return sampling.sample_tokens(_to_host(logits), keys, positions, temperature=temperature, vocab_size=vocab_size)
    found = find_winners(logits, keys, positions, temperature=temperature, vocab_size=vocab_size)
    tokens: NDArray[np.int64] = found.tokens.cpu().numpy().copy()
    close = np.flatnonzero(found.close.cpu().numpy())
    if len(close):
        rows = _to_host(logits[torch.from_numpy(close).to(logits.device)])
        tokens[close] = sampling.sample_tokens(
            rows, keys[close], positions[close], temperature=temperature, vocab_size=vocab_size
        )
    return tokens


def replay_tokens(
    logits: torch.Tensor,
    keys: NDArray[np.uint64],
    positions: NDArray[np.int64],
    tokens: NDArray[np.int64],
    *,
    temperature: float,
    vocab_size: int,
) -> Replayed:
    """What `protocol.sampling.replay_tokens` gives, of logits on any device; see `sample_tokens` for the arguments."""
    valid = bool(((tokens >= 0) & (tokens < vocab_size)).all())
    if not valid or not _is_decidable(logits, keys, temperature, vocab_size):
        return sampling.replay_tokens(
            _to_host(logits), keys, positions, tokens, temperature=temperature, vocab_size=vocab_size
        )
    found = find_winners(logits, keys, positions, temperature=temperature, vocab_size=vocab_size)
    winners: NDArray[np.int64] = found.tokens.cpu().numpy().copy()
    pairs = torch.stack([found.tokens, torch.from_numpy(np.ascontiguousarray(tokens)).to(logits.device)], dim=1)
    picked = _to_host(torch.gather(logits, 1, pairs))
    z = [
        sampling.score_tokens(picked[:, i], keys, positions, given, temperature=temperature)
        for i, given in enumerate((winners, tokens))
    ]
    gaps = z[0] - z[1]
    close = np.flatnonzero(found.close.cpu().numpy())
    if len(close):
        rows = _to_host(logits[torch.from_numpy(close).to(logits.device)])
        again = sampling.replay_tokens(
            rows, keys[close], positions[close], tokens[close], temperature=temperature, vocab_size=vocab_size
        )
        winners[close], gaps[close] = again
    gaps[~found.finite.cpu().numpy()] = np.inf
    return Replayed(winners, gaps)
