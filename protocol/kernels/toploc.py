"""Compiled TOPLOC: top entries, modulus, interpolation and evaluation over the field of protocol.toploc.

Everything is exact integer arithmetic, so results equal the array form in protocol.toploc bit for bit.
"""
# Numba infers the types of what it compiles; the signatures of the kernels state them.
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="assignment,unused-ignore"

from __future__ import annotations

import numpy as np

from protocol.kernels.compiling import compiled

PRIME = 65497
MODULUS_MIN = 32769
#: Entries whose largest magnitude is taken first: only blocks that reach the k-th largest of these are searched.
BLOCK = 32
#: What a kernel returns.
DONE, NON_FINITE, NO_MODULUS = 0, 1, 2

_P = np.uint32(PRIME)
#: 2^16 = FOLD mod PRIME.
_FOLD = np.uint32((1 << 16) - PRIME)
_LOW = np.uint32(0xFFFF)
_HALF = np.uint32(16)
_MAGNITUDE = np.uint16(0x7FFF)
_INFINITY = np.uint16(0x7F80)


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
def _fill_magnitudes(flat, magnitudes, maxima):
    """Magnitudes of bit patterns and the largest of each block; returns the largest of all."""
    n = flat.shape[0]
    for i in range(n):
        magnitudes[i] = flat[i] & _MAGNITUDE
    largest = np.uint16(0)
    for b in range(maxima.shape[0]):
        part = magnitudes[b * BLOCK : min(n, (b + 1) * BLOCK)]
        top = np.uint16(0)
        for i in range(part.shape[0]):
            top = max(top, part[i])
        maxima[b] = top
        largest = max(largest, top)
    return largest


@compiled()
def _count_reaching(values, bound):
    """How many values are at least `bound`."""
    count = np.int32(0)
    for i in range(values.shape[0]):
        count += np.int32(values[i] >= bound)
    return count


@compiled()
def _kth_largest(values, k):
    """The k-th largest of 15-bit values, bit by bit: each pass is one vectorised count."""
    found = np.uint16(0)
    for shift in range(14, -1, -1):
        trial = np.uint16(found | np.uint16(1 << shift))
        if _count_reaching(values, trial) >= k:
            found = trial
    return found


@compiled()
def _collect(magnitudes, maxima, bound, kept, where):
    """Magnitudes that reach `bound` and their indices to the front of `kept` and `where`; returns how many.

    Without a branch per entry, which would be mispredicted: what does not count is overwritten.
    """
    n, count = magnitudes.shape[0], 0
    for b in range(maxima.shape[0]):
        if maxima[b] >= bound:
            for i in range(b * BLOCK, min(n, (b + 1) * BLOCK)):
                kept[count] = magnitudes[i]
                where[count] = i
                count += np.int64(magnitudes[i] >= bound)
    return count


@compiled()
def _top_indices(magnitudes, maxima, kept, where, indices):
    """Indices of the largest magnitudes, lowest index first among equals, ascending."""
    k = indices.shape[0]
    if maxima.shape[0] >= 2 * k:
        # The k-th largest maximum is reached by k entries at least, so nothing below it is among the top.
        count = _collect(magnitudes, maxima, _kth_largest(maxima, k), kept, where)
        threshold = _kth_largest(kept[:count], k)
    else:
        threshold = _kth_largest(magnitudes, k)
        count = _collect(magnitudes, maxima, threshold, kept, where)
    equals, taken = k - _count_reaching(kept[:count], np.uint16(threshold + 1)), 0
    for i in range(count):
        if kept[i] > threshold or (kept[i] == threshold and equals > 0):
            equals -= np.int64(kept[i] == threshold)
            indices[taken] = where[i]
            taken += 1


@compiled()
def _find_modulus(indices, stamps):
    """Largest m <= PRIME that keeps indices distinct; 0 when there is none. `stamps` is scratch [PRIME]."""
    k, largest = indices.shape[0], np.int64(0)
    for i in range(k):
        largest = max(largest, indices[i])
    if largest < PRIME:
        return PRIME
    stamps[:] = 0
    for m in range(PRIME, MODULUS_MIN - 1, -1):
        distinct = True
        for i in range(k):
            slot = indices[i] % m
            if stamps[slot] == m:
                distinct = False
                break
            stamps[slot] = m
        if distinct:
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


@compiled("int64(uint16[:, ::1], int64[:, ::1])")
def find_top(batch, indices):
    """Top entries of each chunk.

    Args:
        batch: bit patterns [chunks, n].
        indices: int64 [chunks, k], k <= n, written: ascending.

    Returns:
        DONE or NON_FINITE.
    """
    n = batch.shape[1]
    maxima = np.empty((n + BLOCK - 1) // BLOCK, dtype=np.uint16)
    magnitudes = np.empty(n, dtype=np.uint16)
    kept, where = np.empty(n + 1, dtype=np.uint16), np.empty(n + 1, dtype=np.int64)
    for c in range(batch.shape[0]):
        if _fill_magnitudes(batch[c], magnitudes, maxima) >= _INFINITY:
            return NON_FINITE
        _top_indices(magnitudes, maxima, kept, where, indices[c])
    return DONE


@compiled("int64(uint16[:, ::1], int64[:, ::1], uint32[::1], uint16[:, ::1])")
def commit(batch, indices, inverse, words):
    """Modulus and coefficients of each chunk.

    Args:
        batch: bit patterns [chunks, n].
        indices: int64 [chunks, k], distinct, in any order.
        inverse: inverses of field elements [PRIME].
        words: uint16 [chunks, 1 + k], written.

    Returns:
        DONE or NO_MODULUS.
    """
    k = indices.shape[1]
    nodes, values = np.empty(k, dtype=np.uint32), np.empty(k, dtype=np.uint32)
    steps, newton, other = np.empty(k, dtype=np.uint32), np.empty(k, dtype=np.uint32), np.empty(k, dtype=np.uint32)
    stamps = np.empty(PRIME, dtype=np.int64)
    for c in range(batch.shape[0]):
        modulus = _find_modulus(indices[c], stamps)
        if modulus == 0:
            return NO_MODULUS
        for i in range(k):
            nodes[i] = indices[c, i] % modulus
            values[i] = np.uint32(batch[c, indices[c, i]]) % _P
        coefficients = _interpolate(nodes, values, inverse, steps, newton, other)
        words[c, 0] = modulus
        for i in range(k):
            words[c, 1 + i] = coefficients[i]
    return DONE


@compiled("void(int64[:, ::1], int64[:, ::1], int64[::1], uint16[:, ::1])")
def evaluate(coefficients, indices, moduli, values):
    """Values [chunks, k] of each chunk's polynomial at its indices mod its modulus, by Horner's rule."""
    k = indices.shape[1]
    nodes, sums = np.empty(k, dtype=np.uint32), np.empty(k, dtype=np.uint32)
    for c in range(indices.shape[0]):
        for i in range(k):
            nodes[i] = indices[c, i] % moduli[c]
            sums[i] = 0
        for j in range(k - 1, -1, -1):
            added = np.uint32(coefficients[c, j])
            for i in range(k):
                sums[i] = _reduce(np.uint32(sums[i] * nodes[i] + added))
        for i in range(k):
            values[c, i] = sums[i]
