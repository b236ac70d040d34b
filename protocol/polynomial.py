"""The numeric core of TOPLOC: top entries, modulus, polynomials over the field of 65497 elements, comparison.

Exact integer arithmetic on batches of equally long chunks, in an array form here and in a compiled form
(protocol.kernels.toploc) that gives the same integers. protocol.toploc says what they mean.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protocol.errors import Fault
from protocol.kernels import dense, kernels

PRIME = 65497
_EXPONENT = np.uint16(0x7F80)
#: Length of a chunk, in entries, from which the compiled form pays from its first call.
LARGE_CHUNK = 8192
#: What the array form costs, roughly: a chunk, each entry that is searched, each that is committed to.
ARRAY_CHUNK_NS, ARRAY_ENTRY_NS, ARRAY_TOP_NS = 50_000, 40, 1500


def find_top(batch: NDArray[np.uint16], k: int, whose: str) -> tuple[NDArray[np.int64], NDArray[np.uint16]]:
    """The k largest magnitudes of each chunk, lowest index first among equals.

    Args:
        batch: bf16 bit patterns [chunks, n], n < 2^31.
        k: 1 to n.
        whose: whose activations these are, for the message.

    Returns:
        Their indices, int64 [chunks, k], in no particular order, and the bit patterns there, uint16 [chunks, k].

    Raises:
        Fault: when an entry is not finite.
    """
    kernel, shape = _kernel(len(batch), k, n=batch.shape[1]), (len(batch), k)
    if kernel is not None:
        indices: NDArray[np.int64] = np.empty(shape, dtype=np.int64)
        values: NDArray[np.uint16] = np.empty(shape, dtype=np.uint16)
        if kernel.find_top(dense(batch, np.uint16), indices, values) == kernel.NON_FINITE:
            raise Fault(NON_FINITE.format(whose=whose))
        return indices, values
    if ((batch & _EXPONENT) == _EXPONENT).any():
        raise Fault(NON_FINITE.format(whose=whose))
    indices = _top_indices(batch, k)
    return indices, np.take_along_axis(batch, indices, axis=1)


def commit(indices: NDArray[np.int64], values: NDArray[np.uint16]) -> NDArray[np.uint16]:
    """Modulus, then coefficients, constant first, of each chunk's polynomial: uint16 [chunks, 1 + k].

    Args:
        indices: int64 [chunks, k] as `find_top` gives them.
        values: finite bf16 bit patterns there, uint16 [chunks, k].

    Raises:
        Fault: when no modulus keeps a chunk's indices distinct.
    """
    chunks, k = indices.shape
    kernel = _kernel(chunks, k)
    if kernel is not None:
        words = np.empty((chunks, 1 + k), dtype=np.uint16)
        done = kernel.commit(dense(indices, np.int64), dense(values, np.uint16), _inverses(), words)
        if done == kernel.NO_MODULUS:
            raise Fault(_NO_MODULUS)
        return words
    moduli = np.array([_modulus(row) for row in indices], dtype=np.int64)
    coefficients = _interpolate(indices % moduli[:, None], values.astype(np.int64))
    made: NDArray[np.uint16] = np.concatenate([moduli[:, None], coefficients], axis=1).astype(np.uint16)
    return made


def evaluate(words: NDArray[np.uint16], indices: NDArray[np.int64]) -> NDArray[np.uint16]:
    """Value of each chunk's polynomial at its indices mod its modulus: uint16 [chunks, k].

    Args:
        words: modulus, at least 1, then coefficients, which are field elements, constant first: uint16 [chunks, 1 + k].
        indices: int64 [chunks, k].
    """
    chunks, k = indices.shape
    kernel = _kernel(chunks, k)
    if kernel is None:
        wide = words.astype(np.int64)
        return _evaluate(wide[:, 1:], indices % wide[:, :1]).astype(np.uint16)
    values = np.empty((chunks, k), dtype=np.uint16)
    kernel.evaluate(dense(words, np.uint16), dense(indices, np.int64), values)
    return values


def compare(mine: NDArray[np.uint16], theirs: NDArray[np.uint16], orders: int) -> NDArray[np.int64]:
    """How the bit patterns of two chunks differ, entry by entry.

    Args:
        mine / theirs: finite bf16 bit patterns of the same entries, uint16 [chunks, k]; `theirs` may be any patterns.
        orders: entries whose exponent in `mine` is more than this below the chunk's largest are left out.

    Returns:
        int64 [chunks, 6]: entries whose sign or exponent differs; whose exponent differs; the sum, and the upper median (0 if
        none), of absolute mantissa differences where exponents agree; entries compared; and those that differ at all.
    """
    chunks, k = mine.shape
    counts: NDArray[np.int64] = np.empty((chunks, 6), dtype=np.int64)
    kernel = _kernel(chunks, k)
    if kernel is not None:
        kernel.compare(dense(mine, np.uint16), dense(theirs, np.uint16), orders, counts)
        return counts
    exponents = (mine & _EXPONENT) >> 7
    compared = exponents + orders >= exponents.max(axis=1, keepdims=True)
    agree = compared & ((mine ^ theirs) & _EXPONENT == 0)
    mantissa = np.abs((mine & 0x7F).astype(np.int64) - (theirs & 0x7F).astype(np.int64))
    num_agree = agree.sum(axis=1)
    ordered = np.sort(np.where(agree, mantissa, 128), axis=1)
    middle = np.take_along_axis(ordered, np.minimum(num_agree // 2, k - 1)[:, None], axis=1)[:, 0]
    counts[:, 0] = (compared & ((mine ^ theirs) >> 7 != 0)).sum(axis=1)
    counts[:, 1] = compared.sum(axis=1) - num_agree
    counts[:, 2] = np.where(agree, mantissa, 0).sum(axis=1)
    counts[:, 3] = np.where(num_agree > 0, middle, 0)
    counts[:, 4] = compared.sum(axis=1)
    counts[:, 5] = (compared & (mine != theirs)).sum(axis=1)
    return counts


def _kernel(chunks: int, k: int, *, n: int = 0) -> Any | None:
    cost_ns = chunks * (ARRAY_CHUNK_NS + n * ARRAY_ENTRY_NS + k * ARRAY_TOP_NS) // 2  # asked twice for each chunk
    return kernels.get("toploc", cost_ns=cost_ns, large=n >= LARGE_CHUNK)


#: What is said of activations that are not finite.
NON_FINITE = "{whose} activations are not finite: nothing can be committed to or compared with them"
_NO_MODULUS = "no modulus keeps the top indices distinct: use a smaller top-k or chunk"


@cache
def _inverses() -> NDArray[np.uint32]:
    """inverse[a] * a = 1 mod PRIME; inverse[0] is unused. Recurrence: inv(a) = -(p // a) * inv(p mod a)."""
    table = [0, 1]
    for a in range(2, PRIME):
        table.append(-(PRIME // a) * table[PRIME % a] % PRIME)
    return np.array(table, dtype=np.uint32)


def _top_indices(flat: NDArray[np.uint16], k: int) -> NDArray[np.int64]:
    """Indices of the k largest magnitudes of each row of [batch, n], lowest index first among equals; unordered."""
    n = flat.shape[1]
    if k == n:
        return np.broadcast_to(np.arange(n), flat.shape)
    ordered = ((flat & np.uint16(0x7FFF)).astype(np.int64) << 32) | (n - 1 - np.arange(n, dtype=np.int64))
    top: NDArray[np.int64] = np.argpartition(ordered, n - k, axis=1)[:, n - k :]
    return top


def _modulus(indices: NDArray[np.int64]) -> int:
    """Largest m <= PRIME under which all indices stay distinct."""
    if int(indices.max()) < PRIME:
        return PRIME
    for m in range(PRIME, 32768, -1):
        if len(np.unique(indices % m)) == len(indices):
            return m
    raise Fault(_NO_MODULUS)


def _reduce(values: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """values mod PRIME, in place. NumPy divides uint32 by a scalar with SIMD, which its remainder does not."""
    values -= values // np.uint32(PRIME) * np.uint32(PRIME)
    return values


def _interpolate(x: NDArray[np.int64], y: NDArray[np.int64]) -> NDArray[np.int64]:
    """Coefficients, constant first, of the polynomials through (x, y); all arrays int64 [batch, k].

    Newton's divided differences, then Horner from the last node down, both vectorised over the batch. Inside, arrays are
    uint32 [k, batch]: PRIME squared is below 2^32, so no product overflows, and rows are contiguous.
    """
    inverse, k, prime = _inverses(), x.shape[1], np.uint32(PRIME)
    nodes = np.ascontiguousarray((x % PRIME).T, dtype=np.uint32)
    newton = np.ascontiguousarray((y % PRIME).T, dtype=np.uint32)
    for j in range(1, k):
        step = nodes[j:] + prime - nodes[: k - j]
        step -= prime * (step >= prime)
        rise = newton[j:] + prime - newton[j - 1 : -1]
        rise -= prime * (rise >= prime)
        newton[j:] = _reduce(rise * inverse[step])
    coefficients = np.zeros_like(newton)
    coefficients[0] = newton[k - 1]
    for degree, i in enumerate(range(k - 2, -1, -1), start=1):
        active = coefficients[: degree + 1]
        shifted = active[:-1].copy()
        active *= prime - nodes[i]
        _reduce(active)
        active[1:] += shifted
        active[0] += newton[i]
        active -= prime * (active >= prime)
    return coefficients.T.astype(np.int64)


def _evaluate(coefficients: NDArray[np.int64], x: NDArray[np.int64]) -> NDArray[np.int64]:
    """Values of the polynomials [batch, k] at x [batch, q], by Horner's rule."""
    value = np.zeros_like(x)
    for j in range(coefficients.shape[1] - 1, -1, -1):
        value = (value * x + coefficients[:, j : j + 1]) % PRIME
    return value
