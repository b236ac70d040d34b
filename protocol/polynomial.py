"""The numeric core of TOPLOC: top entries, modulus, and polynomials over the field of 65497 elements.

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


def find_top(batch: NDArray[np.uint16], k: int, whose: str) -> NDArray[np.int64]:
    """Indices of the k largest magnitudes of each chunk, lowest index first among equals.

    Args:
        batch: bf16 bit patterns [chunks, n].
        k: at most n.
        whose: whose activations these are, for the message.

    Returns:
        int64 [chunks, k], in no particular order.

    Raises:
        Fault: when an entry is not finite.
    """
    kernel, broken = _kernel(batch, k), False
    if kernel is not None:
        indices: NDArray[np.int64] = np.empty((len(batch), k), dtype=np.int64)
        broken = kernel.find_top(dense(batch, np.uint16), indices) == kernel.NON_FINITE
    elif ((batch & _EXPONENT) == _EXPONENT).any():
        broken = True
    else:
        indices = _top_indices(batch, k)
    if broken:
        raise Fault(f"{whose} activations are not finite: nothing can be committed to or compared with them")
    return indices


def commit(batch: NDArray[np.uint16], indices: NDArray[np.int64]) -> NDArray[np.uint16]:
    """Modulus, then coefficients, constant first, of each chunk's polynomial: uint16 [chunks, 1 + k].

    Args:
        batch: bf16 bit patterns [chunks, n], finite.
        indices: int64 [chunks, k] as `find_top` gives them.

    Raises:
        Fault: when no modulus keeps a chunk's indices distinct.
    """
    kernel = _kernel(batch, indices.shape[1])
    if kernel is not None:
        words = np.empty((len(batch), 1 + indices.shape[1]), dtype=np.uint16)
        done = kernel.commit(dense(batch, np.uint16), dense(indices, np.int64), _inverses(), words)
        if done == kernel.NO_MODULUS:
            raise Fault(_NO_MODULUS)
        return words
    moduli = np.array([_modulus(row) for row in indices], dtype=np.int64)
    values = np.take_along_axis(batch, indices, axis=1).astype(np.int64)
    coefficients = _interpolate(indices % moduli[:, None], values)
    made: NDArray[np.uint16] = np.concatenate([moduli[:, None], coefficients], axis=1).astype(np.uint16)
    return made


def evaluate(
    coefficients: NDArray[np.int64], indices: NDArray[np.int64], moduli: NDArray[np.int64]
) -> NDArray[np.uint16]:
    """Value of each chunk's polynomial at its indices mod its modulus: uint16 [chunks, k].

    Args:
        coefficients: field elements [chunks, k], constant first.
        indices: int64 [chunks, k].
        moduli: int64 [chunks].
    """
    kernel = _kernel(indices, indices.shape[1])
    if kernel is None:
        return _evaluate(coefficients, indices % moduli[:, None]).astype(np.uint16)
    values = np.empty(indices.shape, dtype=np.uint16)
    kernel.evaluate(dense(coefficients, np.int64), dense(indices, np.int64), dense(moduli, np.int64), values)
    return values


def _kernel(batch: NDArray[Any], k: int) -> Any | None:
    chunks, n = batch.shape
    cost_ns = chunks * (ARRAY_CHUNK_NS + n * ARRAY_ENTRY_NS + k * ARRAY_TOP_NS) // 2  # asked twice for each chunk
    return kernels.get("toploc", cost_ns=cost_ns, large=n >= LARGE_CHUNK)


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
