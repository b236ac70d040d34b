"""Compiled search for the largest entries of a chunk, reading its activations once.

Activations are folded into a pyramid of maxima: entry j of a level is the largest magnitude of DEPTH entries of the level
below, LANES apart, so that folding is element-wise and costs about what reading costs. The k-th largest maximum of the
smallest level with at least 2 k entries is reached by k entries at least, so nothing below it is among the top, and only
what is above maxima that reach it is looked at again. Same entries as the array form in protocol.polynomial.
"""
# Numba infers the types of what it compiles; the signature of the kernel states them.
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="assignment,unused-ignore"

from __future__ import annotations

import numpy as np

from protocol.kernels.compiling import compiled

#: What the kernel returns.
DONE, NON_FINITE = 0, 1
#: Entries that one maximum stands for, their distance, and the entries that LANES maxima stand for.
DEPTH, LANES = 8, 64
_SEGMENT = DEPTH * LANES
#: Most levels of maxima: enough for 2^31 entries.
_LEVELS_MAX = 8

_MAGNITUDE = np.uint16(0x7FFF)
_INFINITY = np.uint16(0x7F80)


@compiled()
def _compute_ends(n, k, ends):
    """Where each level of maxima ends in the pyramid's memory; returns the number of levels. None is larger than n."""
    size, end = n, 0
    for level in range(_LEVELS_MAX):
        folded = (size + _SEGMENT - 1) // _SEGMENT * LANES
        if folded < 2 * k or folded >= size:
            return level
        size = folded
        end += size
        ends[level] = end
    return _LEVELS_MAX


@compiled()
def _fold(values, maxima):
    """Largest magnitudes of values [n]: maxima [ceil(n / _SEGMENT) * LANES], 0 where there is none."""
    n = values.shape[0]
    whole = n // _SEGMENT
    for s in range(whole):
        part, out = values[s * _SEGMENT : (s + 1) * _SEGMENT], maxima[s * LANES : (s + 1) * LANES]
        for j in range(LANES):
            a = max(part[j] & _MAGNITUDE, part[j + LANES] & _MAGNITUDE)
            b = max(part[j + 2 * LANES] & _MAGNITUDE, part[j + 3 * LANES] & _MAGNITUDE)
            c = max(part[j + 4 * LANES] & _MAGNITUDE, part[j + 5 * LANES] & _MAGNITUDE)
            d = max(part[j + 6 * LANES] & _MAGNITUDE, part[j + 7 * LANES] & _MAGNITUDE)
            out[j] = max(max(a, b), max(c, d))
    if whole * _SEGMENT < n:
        out = maxima[whole * LANES : (whole + 1) * LANES]
        out[:] = 0
        for i in range(whole * _SEGMENT, n):
            out[i % LANES] = max(out[i % LANES], values[i] & _MAGNITUDE)


@compiled()
def _count_reaching(values, bound):
    """How many magnitudes are at least `bound`."""
    count = np.int32(0)
    for i in range(values.shape[0]):
        count += np.int32((values[i] & _MAGNITUDE) >= bound)
    return count


@compiled()
def _kth_largest(values, k):
    """The k-th largest of 15-bit magnitudes, bit by bit: each pass is one vectorised count."""
    found = np.uint16(0)
    for shift in range(14, -1, -1):
        trial = np.uint16(found | np.uint16(1 << shift))
        if _count_reaching(values, trial) >= k:
            found = trial
    return found


@compiled()
def _find_reaching(values, bound, found):
    """Positions of magnitudes that reach `bound` to the front of `found`; returns how many.

    Without a branch per entry, which would be mispredicted: what does not count is overwritten.
    """
    count = 0
    for i in range(values.shape[0]):
        found[count] = i
        count += np.int64((values[i] & _MAGNITUDE) >= bound)
    return count


@compiled()
def _find_below(values, bound, parents, found):
    """The same, looking only at what the maxima at `parents` stand for."""
    n, count = values.shape[0], 0
    for p in range(parents.shape[0]):
        first = parents[p] // LANES * _SEGMENT + parents[p] % LANES
        for i in range(first, min(n, first + _SEGMENT), LANES):
            found[count] = i
            count += np.int64((values[i] & _MAGNITUDE) >= bound)
    return count


@compiled()
def _kth_smallest(positions, k):
    """The k-th smallest of distinct positions below 2^31, bit by bit."""
    found = np.int32(0)
    for shift in range(30, -1, -1):
        trial, below = np.int32(found | np.int32(1 << shift)), np.int32(0)
        for i in range(positions.shape[0]):
            below += np.int32(positions[i] < trial)
        if below < k:
            found = trial
    return found


@compiled()
def _pick(flat, found, magnitudes, indices):
    """The top entries among candidates `found`, which is used up: larger ones, then equal ones of the lowest index."""
    k, taken, num_equal = indices.shape[0], 0, 0
    for i in range(found.shape[0]):
        magnitudes[i] = flat[found[i]] & _MAGNITUDE
    threshold = _kth_largest(magnitudes[: found.shape[0]], k)
    for i in range(found.shape[0]):
        if magnitudes[i] > threshold:
            indices[taken] = found[i]
            taken += 1
        elif magnitudes[i] == threshold:
            found[num_equal] = found[i]
            num_equal += 1
    last = _kth_smallest(found[:num_equal], k - taken)
    for i in range(num_equal):
        if found[i] <= last:
            indices[taken] = found[i]
            taken += 1


@compiled()
def _get_level(flat, pyramid, ends, level):
    """Level 0 is the activations, level 1 their maxima, and so on."""
    if level == 0:
        return flat
    return pyramid[(ends[level - 2] if level > 1 else 0) : ends[level - 1]]


@compiled("int64(uint16[:, ::1], int64[:, ::1], uint16[:, ::1])")
def find_top(batch, indices, values):
    """Top entries of each chunk.

    Args:
        batch: bit patterns [chunks, n], n < 2^31.
        indices: int64 [chunks, k], 1 <= k <= n, written, in no particular order.
        values: uint16 [chunks, k], written: the bit patterns at these indices.

    Returns:
        DONE or NON_FINITE.
    """
    n, k = batch.shape[1], indices.shape[1]
    ends = np.zeros(_LEVELS_MAX, dtype=np.int64)
    levels = _compute_ends(n, k, ends)
    pyramid = np.empty(ends[levels - 1] if levels else 0, dtype=np.uint16)
    found, others, magnitudes = np.empty(n + 1, np.int32), np.empty(n + 1, np.int32), np.empty(n, np.uint16)
    for c in range(batch.shape[0]):
        flat = batch[c]
        for level in range(levels):
            _fold(_get_level(flat, pyramid, ends, level), _get_level(flat, pyramid, ends, level + 1))
        top = _get_level(flat, pyramid, ends, levels)
        if _count_reaching(top, _INFINITY) > 0:
            return NON_FINITE
        bound = _kth_largest(top, k)
        count = _find_reaching(top, bound, found)
        for level in range(levels - 1, -1, -1):
            found, others = others, found
            count = _find_below(_get_level(flat, pyramid, ends, level), bound, others[:count], found)
        _pick(flat, found[:count], magnitudes, indices[c])
        for i in range(k):
            values[c, i] = flat[indices[c, i]]
    return DONE
