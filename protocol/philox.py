"""Philox4x32-10, the counter-based generator of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).

Counter-based means that the noise of any token at any position can be computed alone, by anybody, in any order: that is
what makes sampling replayable. The integer part is exact on every machine; vectors are checked in under tests/vectors.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 10
#: Multipliers of counter words 0 and 2; what is added to the key's two words, times the round.
_M = np.array([[0xD2511F53], [0xCD9E8D57]], dtype=np.uint64)
_W = np.arange(_ROUNDS, dtype=np.uint64)[:, None, None] * np.array([[0x9E3779B9], [0xBB67AE85]], dtype=np.uint64)
# Arrays of no dimension: NumPy converts a scalar on every call.
_LOW = np.array(0xFFFFFFFF, dtype=np.uint64)
_SHIFT = np.array(32, dtype=np.uint64)
#: Counters worked on together, so that they stay in the cache.
_SLICE = 4096


def philox4x32(counter: NDArray[np.uint32], key: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Ten rounds over a batch.

    Args:
        counter: uint32 [..., 4].
        key: uint32 [..., 2], broadcast against the counter's leading axes.

    Returns:
        uint32 [..., 4] random words.
    """
    shape = np.broadcast_shapes(counter.shape[:-1], key.shape[:-1])
    counters = np.broadcast_to(counter, (*shape, 4)).reshape(-1, 4)
    keys = np.broadcast_to(key, (*shape, 2)).reshape(-1, 2)
    words = np.empty(counters.shape, dtype=np.uint32)
    for start in range(0, len(counters), _SLICE):
        part = slice(start, start + _SLICE)
        words[part] = _rounds(counters[part], keys[part])
    return words.reshape(*shape, 4)


def _rounds(counters: NDArray[np.uint32], keys: NDArray[np.uint32]) -> NDArray[np.uint64]:
    """`philox4x32` of counters [n, 4] and keys [n, 2].

    A round multiplies words 0 and 2 and not 1 and 3: five operations on pairs of words, in place, with full operands. For a
    small batch the time is the number of calls.
    """
    words = counters.T.astype(np.uint64, order="C")
    round_keys = (keys.T.astype(np.uint64, order="C") + _W) & _LOW
    even, odd = words[0::2].copy(), words[1::2].copy()
    factors, product = np.broadcast_to(_M, even.shape).copy(), np.empty_like(even)
    crossed = product[::-1]
    for index in range(_ROUNDS):
        np.multiply(even, factors, out=product)
        np.right_shift(crossed, _SHIFT, out=even)
        np.bitwise_xor(even, odd, out=even)
        np.bitwise_xor(even, round_keys[index], out=even)
        np.bitwise_and(crossed, _LOW, out=odd)
    words[0::2], words[1::2] = even, odd
    return words.T
