"""Compiled TOPLOC: modulus, interpolation, evaluation and comparison; top entries are found in protocol.kernels.top.

Everything is exact integer arithmetic, so results equal the array form in protocol.polynomial bit for bit.
"""
# Numba infers the types of what it compiles; the signatures of the kernels state them.
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="assignment,unused-ignore"

from __future__ import annotations

import numpy as np

from protocol.kernels.compiling import compiled
from protocol.kernels.top import DONE, NON_FINITE, find_top

__all__ = ["DONE", "NON_FINITE", "NO_MODULUS", "commit", "compare", "evaluate", "find_top"]

PRIME = 65497
MODULUS_MIN = 32769
#: What `commit` returns when no modulus keeps a chunk's indices distinct.
NO_MODULUS = 2

_P = np.uint32(PRIME)
#: 2^16 = FOLD mod PRIME.
_FOLD = np.uint32((1 << 16) - PRIME)
_LOW = np.uint32(0xFFFF)
_HALF = np.uint32(16)


@compiled()
def _reduce(value):
    """uint32 mod PRIME without a division: two folds leave a value below 2 * PRIME."""
    value = np.uint32((value >> _HALF) * _FOLD + (value & _LOW))
    value = np.uint32((value >> _HALF) * _FOLD + (value & _LOW))
    return min(value, np.uint32(value - _P))


@compiled()
def _subtract(a, b):
    """(a - b) mod PRIME of field elements: the smaller of the wrapped and the shifted difference."""
    difference = np.uint32(a - b)
    return min(difference, np.uint32(difference + _P))


@compiled()
def _find_modulus(indices, taken):
    """Largest m <= PRIME that keeps indices distinct; 0 when there is none. `taken` is scratch [PRIME], zeros."""
    k, largest = indices.shape[0], np.int64(0)
    for i in range(k):
        largest = max(largest, indices[i])
    if largest < PRIME:
        return PRIME
    for m in range(PRIME, MODULUS_MIN - 1, -1):
        num_distinct = 0
        for i in range(k):
            slot = np.uint32(indices[i]) % np.uint32(m)
            if taken[slot]:
                break
            taken[slot] = True
            num_distinct += 1
        for i in range(num_distinct):
            taken[np.uint32(indices[i]) % np.uint32(m)] = False
        if num_distinct == k:
            return m
    return 0


@compiled()
def _interpolate(nodes, values, inverse, steps, newton, other):
    """Coefficients, constant first, of the polynomial through (nodes, values); returned in `values` or `other`.

    Newton's divided differences, kept at the front of `values`, then Horner from the last node down.
    """
    k = nodes.shape[0]
    newton[0] = values[0]
    for j in range(1, k):
        for i in range(k - j):
            steps[i] = _subtract(nodes[i + j], nodes[i])
        for i in range(k - j):
            steps[i] = inverse[steps[i]]
        for i in range(k - j):
            values[i] = _reduce(np.uint32(_subtract(values[i + 1], values[i]) * steps[i]))
        newton[j] = values[0]
    old, new = values, other
    old[0] = newton[k - 1]
    for degree in range(1, k):
        i = k - 1 - degree
        minus = np.uint32(_P - nodes[i])
        old[degree] = 0
        new[0] = _reduce(np.uint32(old[0] * minus + newton[i]))
        for m in range(1, degree + 1):
            new[m] = _reduce(np.uint32(old[m] * minus + old[m - 1]))
        old, new = new, old
    return old


@compiled("int64(int64[:, ::1], uint16[:, ::1], uint32[::1], uint16[:, ::1])")
def commit(indices, values, inverse, words):
    """Modulus and coefficients of each chunk.

    Args:
        indices: int64 [chunks, k], distinct, below 2^31, in any order.
        values: bit patterns at these indices [chunks, k].
        inverse: inverses of field elements [PRIME].
        words: uint16 [chunks, 1 + k], written.

    Returns:
        DONE or NO_MODULUS.
    """
    k = indices.shape[1]
    nodes, heights = np.empty(k, dtype=np.uint32), np.empty(k, dtype=np.uint32)
    steps, newton, other = np.empty(k, dtype=np.uint32), np.empty(k, dtype=np.uint32), np.empty(k, dtype=np.uint32)
    taken = np.zeros(PRIME, dtype=np.bool_)
    for c in range(indices.shape[0]):
        modulus = _find_modulus(indices[c], taken)
        if modulus == 0:
            return NO_MODULUS
        for i in range(k):
            nodes[i] = (np.uint32(indices[c, i]) % np.uint32(modulus)) % _P
            heights[i] = np.uint32(values[c, i]) % _P
        coefficients = _interpolate(nodes, heights, inverse, steps, newton, other)
        words[c, 0] = modulus
        for i in range(k):
            words[c, 1 + i] = coefficients[i]
    return DONE


@compiled("void(uint16[:, ::1], int64[:, ::1], uint16[:, ::1])")
def evaluate(words, indices, values):
    """Values [chunks, k] of each chunk's polynomial at its indices mod its modulus, by Horner's rule.

    Args:
        words: modulus, then coefficients, constant first: uint16 [chunks, 1 + k].
        indices: int64 [chunks, k], below 2^31.
        values: uint16 [chunks, k], written.
    """
    k = indices.shape[1]
    nodes, sums = np.empty(k, dtype=np.uint32), np.empty(k, dtype=np.uint32)
    for c in range(indices.shape[0]):
        for i in range(k):
            nodes[i] = np.uint32(indices[c, i]) % np.uint32(words[c, 0])
            sums[i] = 0
        for j in range(k, 0, -1):
            added = np.uint32(words[c, j])
            for i in range(k):
                sums[i] = _reduce(np.uint32(sums[i] * nodes[i] + added))
        for i in range(k):
            values[c, i] = sums[i]


@compiled("void(uint16[:, ::1], uint16[:, ::1], int64, int64[:, ::1])")
def compare(mine, theirs, orders, counts):
    """How bit patterns differ, chunk by chunk; the columns are those of protocol.polynomial.compare.

    Args:
        mine / theirs: uint16 [chunks, k], k >= 1.
        orders: entries whose exponent in `mine` is more than this below the chunk's largest are left out.
        counts: int64 [chunks, 6], written.
    """
    k = mine.shape[1]
    histogram = np.empty(128, dtype=np.int64)
    for c in range(mine.shape[0]):
        largest = np.int64(0)
        for i in range(k):
            largest = max(largest, np.int64(mine[c, i] >> 7 & 0xFF))
        histogram[:] = 0
        size = mismatches = exponents = total = differing = 0
        for i in range(k):
            a, b = np.int64(mine[c, i]), np.int64(theirs[c, i])
            if (a >> 7 & 0xFF) + orders < largest:
                continue
            size += 1
            differing += np.int64(a != b)
            mismatches += np.int64((a ^ b) >> 7 != 0)
            if (a ^ b) & 0x7F80:
                exponents += 1
            else:
                total += abs((a & 0x7F) - (b & 0x7F))
                histogram[abs((a & 0x7F) - (b & 0x7F))] += 1
        middle, below = 0, histogram[0]
        while exponents < size and below <= (size - exponents) // 2:
            middle += 1
            below += histogram[middle]
        counts[c, 0], counts[c, 1], counts[c, 2] = mismatches, exponents, total
        counts[c, 3], counts[c, 4], counts[c, 5] = middle, size, differing
