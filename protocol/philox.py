"""Philox4x32-10, the counter-based generator of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).

Counter-based means that the noise of any token at any position can be computed alone, by anybody, in any order: that is
what makes sampling replayable. The integer part is exact on every machine; vectors are checked in under tests/vectors.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_M0 = np.uint64(0xD2511F53)
_M1 = np.uint64(0xCD9E8D57)
_W0 = 0x9E3779B9
_W1 = 0xBB67AE85
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)


def philox4x32(counter: NDArray[np.uint32], key: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Ten rounds over a batch.

    Args:
        counter: uint32 [..., 4].
        key: uint32 [..., 2], broadcast against the counter's leading axes.

    Returns:
        uint32 [..., 4] random words.
    """
    c0, c1, c2, c3 = (counter[..., i].astype(np.uint64) for i in range(4))
    k0 = key[..., 0].astype(np.uint64)
    k1 = key[..., 1].astype(np.uint64)
    for _ in range(10):
        p0 = c0 * _M0
        p1 = c2 * _M1
        c0, c1, c2, c3 = (p1 >> _SHIFT) ^ c1 ^ k0, p1 & _LOW, (p0 >> _SHIFT) ^ c3 ^ k1, p0 & _LOW
        k0 = (k0 + np.uint64(_W0)) & _LOW
        k1 = (k1 + np.uint64(_W1)) & _LOW
    return np.stack(np.broadcast_arrays(c0, c1, c2, c3), axis=-1).astype(np.uint32)
