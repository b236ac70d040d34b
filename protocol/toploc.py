"""TOPLOC activation commitments: build, parse, compare. Byte-compatible with the published format.

Ong et al., "TOPLOC: A Locality Sensitive Hashing Scheme for Trustless Verifiable Inference" (2025). Per chunk of 32
tokens, the `k` entries of the last hidden state that are largest in magnitude are interpolated by a polynomial over the
field of 65497 elements: it maps flat index (row * hidden + dim) mod m to the entry's bf16 bit pattern. A commitment is
the modulus m followed by the k coefficients, constant first, all big-endian uint16. m is the largest number up to 65497
that keeps the indices distinct; it only folds indices, the field prime is always 65497.

Deviations from the reference library: ties go to the lowest flat index, a sign that differs counts as a mismatch,
non-finite activations are refused on both sides, and the parser refuses everything that is not exactly well-formed.
k is min(k, rows * hidden) in a short chunk. Such a chunk can commit to entries so near zero that honest rounding changes all
of their bits; entries below 2^-10 of the chunk's largest, by the verifier's own exponents, are not compared.
The numbers themselves are made in protocol.polynomial. Where activations live on a device only their top entries need to
travel: models.topk finds them there, and `TopEntries` stands for the activations here.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from protocol.errors import Fault, Reason, Reject
from protocol.polynomial import NON_FINITE, PRIME, commit, compare, evaluate, find_top

_EXPONENT = np.uint16(0x7F80)
#: Binary orders of magnitude below the chunk's largest entry within which entries are compared. In fp32 the noise of a state
#: is about 2^-20 of its largest entry, so an entry this small is still good to a bf16 ulp (2^-8 of itself).
_ORDERS = 10
#: Below it no modulus is valid, whatever a task's profile says: half of what a word holds.
MODULUS_MIN = 32769
T = TypeVar("T")


class ChunkMatch(NamedTuple):
    """How a verifier's chunk compares with the committed one.

    Attributes:
        mismatches: entries whose sign or exponent differs, of `size`.
        exponent_mismatches: entries whose exponent alone differs (what the published check counts).
        mantissa_mean: mean absolute mantissa difference (7-bit ulps) over entries whose exponents agree; inf if none.
        mantissa_median: median of the same (the upper one of an even count, as in the reference).
        size: number of entries compared: those not too small beside the largest.
        differing: entries compared whose bit patterns differ at all: what the sequential test counts (protocol.evidence).
    """

    mismatches: int
    exponent_mismatches: int
    mantissa_mean: float
    mantissa_median: float
    size: int
    differing: int


class TopEntries(NamedTuple):
    """The part of a completion's activations that commitments depend on: the largest entries of each chunk.

    Attributes:
        num_tokens / hidden: shape of the activations.
        indices: int64 [chunks, width], flat index (row * hidden + dim) within the chunk, each at most once a chunk; width is
            min(topk, min(chunk, num_tokens) * hidden).
        values: uint16 [chunks, width], the bf16 bit patterns there. A last chunk of fewer than `width` entries has them first;
            what follows is not looked at.
    """

    num_tokens: int
    hidden: int
    indices: NDArray[np.int64]
    values: NDArray[np.uint16]


#: What commitments are built from and compared with: bf16 bit patterns [num_tokens, hidden], or their top entries.
Activations = NDArray[np.uint16] | TopEntries


_UNMATCHED = ChunkMatch(0, 0, float("inf"), float("inf"), 0, 0)


def to_bf16_bits(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round fp32 to bf16, nearest even, and return the bit patterns. Non-finite values stay non-finite."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)
    rounded[np.isnan(values)] = 0x7FC0
    return rounded


def compute_num_chunks(num_tokens: int, chunk: int) -> int:
    """Commitments of a completion: ceil(tokens / chunk)."""
    return -(-num_tokens // chunk)


def compute_proof_bytes(rows: int, hidden: int, topk: int) -> int:
    """Exact length of one commitment over `rows` rows."""
    return 2 + 2 * min(topk, rows * hidden)


def compute_sizes(num_tokens: int, hidden: int, *, topk: int, chunk: int) -> list[int]:
    """Entries that each chunk of a completion commits to."""
    return [min(topk, min(chunk, num_tokens - start) * hidden) for start in range(0, num_tokens, chunk)]


def find_top_entries(hidden: NDArray[np.uint16], *, topk: int, chunk: int, whose: str = "the engine's") -> TopEntries:
    """Top entries of a completion's chunks.

    Args:
        hidden: uint16 bf16 bit patterns [num_tokens, hidden].
        topk: entries per chunk.
        chunk: tokens per commitment.
        whose: whose activations these are, for the message.

    Raises:
        Fault: when an activation is not finite.
    """
    rows, width = hidden.shape
    sizes = compute_sizes(rows, width, topk=topk, chunk=chunk)
    dense, whole = np.ascontiguousarray(hidden), rows // chunk
    parts = []
    if whole:
        parts.append(find_top(dense[: whole * chunk].reshape(whole, chunk * width), sizes[0], whose))
    if whole * chunk < rows:
        parts.append(find_top(dense[whole * chunk :].reshape(1, -1), sizes[-1], whose))
    return join_top_entries(rows, width, parts)


def join_top_entries(
    num_tokens: int, hidden: int, parts: Sequence[tuple[NDArray[np.int64], NDArray[np.uint16]]]
) -> TopEntries:
    """Top entries of consecutive chunks, found separately: indices and values [chunks, k], the first k the largest."""
    if len(parts) == 1:
        return TopEntries(num_tokens, hidden, *parts[0])
    count, width = sum(len(part) for part, _ in parts), parts[0][0].shape[1] if parts else 0
    indices, values = np.zeros((count, width), dtype=np.int64), np.zeros((count, width), dtype=np.uint16)
    start = 0
    for part, part_values in parts:
        rows, k = part.shape
        indices[start : start + rows, :k], values[start : start + rows, :k] = part, part_values
        start += rows
    return TopEntries(num_tokens, hidden, indices, values)


def _validate_top_entries(top: TopEntries, *, topk: int, chunk: int, whose: str) -> None:
    """Entries that others found must be possible ones: a commitment to anything else would be refused by everybody."""
    sizes = compute_sizes(top.num_tokens, top.hidden, topk=topk, chunk=chunk)
    shape = (len(sizes), sizes[0] if sizes else 0)
    if top.indices.shape != shape or top.values.shape != shape:
        raise Fault(
            f"{whose} top entries have shapes {top.indices.shape} and {top.values.shape} where {top.num_tokens} x "
            f"{top.hidden} activations give {shape}: find them with the task's topk {topk} and chunk {chunk}"
        )
    for number, size in enumerate(sizes):
        indices, length = np.sort(top.indices[number, :size]), min(chunk, top.num_tokens - number * chunk) * top.hidden
        if indices[0] < 0 or indices[-1] >= length or (indices[1:] == indices[:-1]).any():
            raise Fault(f"{whose} top entries of chunk {number} are not {size} different indices below {length}")
        if ((top.values[number, :size] & _EXPONENT) == _EXPONENT).any():
            raise Fault(NON_FINITE.format(whose=whose))


class _Batch(NamedTuple):
    """Top entries of many completions, chunk after chunk: [chunks, width], and how many of each chunk count."""

    indices: NDArray[np.int64]
    values: NDArray[np.uint16]
    sizes: list[int]
    ends: list[int]  # a zero, then per completion the chunk after its last


def _by_size(sizes: list[int]) -> list[tuple[slice | list[int], int]]:
    """Positions of chunks that commit to equally many entries: each size is one vectorised call."""
    distinct = sorted(set(sizes))
    if len(distinct) == 1:
        return [(slice(0, len(sizes)), distinct[0])]
    return [([i for i, one in enumerate(sizes) if one == size], size) for size in distinct]


def _place(all_of_them: list[T], chosen: slice | list[int], some: list[T]) -> None:
    if isinstance(chosen, slice):
        all_of_them[chosen] = some
    else:
        for position, one in zip(chosen, some, strict=True):
            all_of_them[position] = one


def _gather(hiddens: Sequence[Activations], *, topk: int, chunk: int, whose: str) -> _Batch:
    """Find or check the top entries of all completions."""
    tops, sizes, ends = [], [], [0]
    for one in hiddens:
        if isinstance(one, TopEntries):
            _validate_top_entries(one, topk=topk, chunk=chunk, whose=whose)
            top = one
        else:
            top = find_top_entries(one, topk=topk, chunk=chunk, whose=whose)
        tops.append(top)
        sizes += compute_sizes(top.num_tokens, top.hidden, topk=topk, chunk=chunk)
        ends.append(len(sizes))
    if len(tops) == 1:
        indices, values = tops[0].indices, tops[0].values
    else:
        width = max((top.indices.shape[1] for top in tops), default=0)
        indices, values = np.zeros((len(sizes), width), dtype=np.int64), np.zeros((len(sizes), width), dtype=np.uint16)
        for top, (start, end) in zip(tops, pairwise(ends), strict=True):
            indices[start:end, : top.indices.shape[1]] = top.indices
            values[start:end, : top.indices.shape[1]] = top.values
    return _Batch(indices, values, sizes, ends)


def build_proofs(hiddens: Sequence[Activations], *, topk: int, chunk: int) -> list[tuple[bytes, ...]]:
    """Commit to completions.

    Args:
        hiddens: per completion, uint16 bf16 bit patterns [num_tokens, hidden], or their top entries.
        topk: entries per chunk.
        chunk: tokens per commitment.

    Returns:
        Per completion, one commitment a chunk.

    Raises:
        Fault: when an activation is not finite; nothing is ever committed in its place.
    """
    batch = _gather(hiddens, topk=topk, chunk=chunk, whose="the engine's")
    proofs: list[bytes] = [b""] * len(batch.sizes)
    for chosen, size in _by_size(batch.sizes):
        words = commit(batch.indices[chosen, :size], batch.values[chosen, :size])
        data, length = words.astype(">u2").tobytes(), 2 * words.shape[1]
        _place(proofs, chosen, [data[start : start + length] for start in range(0, len(data), length)])
    return [tuple(proofs[start:end]) for start, end in pairwise(batch.ends)]


def parse_proof(proof: bytes, *, size: int, modulus_min: int) -> tuple[int, NDArray[np.int64]]:
    """Modulus and coefficients of a commitment over `size` entries.

    Raises:
        Reject: `COMMITMENT_FORMAT` for a wrong length, a modulus outside modulus_min..65497, or a coefficient that is
            not a field element.
    """
    if len(proof) != 2 + 2 * size:
        raise Reject(Reason.COMMITMENT_FORMAT, "commitment has a wrong length", observed=len(proof), limit=2 + 2 * size)
    words = np.frombuffer(proof, dtype=">u2").astype(np.int64)
    modulus = int(words[0])
    if not max(modulus_min, MODULUS_MIN) <= modulus <= PRIME:
        limit = f"{max(modulus_min, MODULUS_MIN)} to {PRIME}"
        raise Reject(Reason.COMMITMENT_FORMAT, "commitment modulus is out of range", observed=modulus, limit=limit)
    if int(words[1:].max()) >= PRIME:
        raise Reject(
            Reason.COMMITMENT_FORMAT,
            "commitment coefficient is not a field element",
            observed=int(words[1:].max()),
            limit=PRIME - 1,
        )
    return modulus, words[1:]


def _validate_count(proofs: Sequence[bytes], num_tokens: int, chunk: int) -> None:
    expected = compute_num_chunks(num_tokens, chunk)
    if len(proofs) != expected:
        raise Reject(
            Reason.COMMITMENT_FORMAT,
            f"completion of {num_tokens} tokens has a wrong number of commitments",
            observed=len(proofs),
            limit=expected,
        )


def validate_format(
    proofs: Sequence[bytes], *, num_tokens: int, hidden: int, topk: int, chunk: int, modulus_min: int
) -> None:
    """Check count and form of a completion's commitments, without any model.

    Raises:
        Reject: `COMMITMENT_FORMAT`.
    """
    _validate_count(proofs, num_tokens, chunk)
    _parse_all(proofs, compute_sizes(num_tokens, hidden, topk=topk, chunk=chunk), modulus_min=modulus_min)


def _parse_all(
    proofs: Sequence[bytes], sizes: list[int], *, modulus_min: int
) -> list[tuple[slice | list[int], int, NDArray[np.uint16]]]:
    """Commitments over `sizes` entries, by size: their positions, the size, and modulus and coefficients [some, 1 + size].

    Raises:
        Reject: as `parse_proof` does for the first one that it refuses.
    """
    lowest, parsed = max(modulus_min, MODULUS_MIN), []
    for chosen, size in _by_size(sizes):
        some = proofs[chosen] if isinstance(chosen, slice) else [proofs[i] for i in chosen]
        words = None
        if set(map(len, some)) == {2 + 2 * size}:
            words = np.frombuffer(b"".join(some), dtype=">u2").reshape(len(some), 1 + size).astype(np.uint16)
        if words is None or words[:, 0].min() < lowest or words.max() > PRIME or words[:, 1:].max() == PRIME:
            alone = [
                parse_proof(proof, size=of, modulus_min=modulus_min) for proof, of in zip(proofs, sizes, strict=True)
            ]
            picked = alone[chosen] if isinstance(chosen, slice) else [alone[i] for i in chosen]
            words = np.array([[modulus, *coefficients[:size]] for modulus, coefficients in picked], dtype=np.uint16)
        parsed.append((chosen, size, words))
    return parsed


def _make_matches(counts: NDArray[np.int64]) -> list[ChunkMatch]:
    """What `compare` counted, by name."""
    matches = []
    for mismatches, exponents, total, middle, size, differing in counts.tolist():
        agree = size - exponents
        mean, median = (total / agree, float(middle)) if agree else (float("inf"), float("inf"))
        matches.append(ChunkMatch(mismatches, exponents, mean, median, size, differing))
    return matches


def match_proofs(
    hiddens: Sequence[Activations],
    proofs: Sequence[Sequence[bytes]],
    *,
    topk: int,
    chunk: int,
    modulus_min: int,
) -> list[tuple[ChunkMatch, ...]]:
    """Compare committed completions with a verifier's own activations.

    Args:
        hiddens: per completion, the verifier's uint16 bf16 bit patterns [num_tokens, hidden], or their top entries.
        proofs: per completion, the commitments under test.

    Raises:
        Reject: `COMMITMENT_FORMAT` when the count or form of a commitment is wrong.
        Fault: when the verifier's own activations are not finite (never held against the prover).
    """
    sizes: list[int] = []
    flat: list[bytes] = []
    for one, given in zip(hiddens, proofs, strict=True):
        rows, width = (one.num_tokens, one.hidden) if isinstance(one, TopEntries) else one.shape
        _validate_count(given, rows, chunk)
        sizes += compute_sizes(rows, width, topk=topk, chunk=chunk)
        flat += given[: compute_num_chunks(rows, chunk)]
    parsed = _parse_all(flat, sizes, modulus_min=modulus_min)
    batch = _gather(hiddens, topk=topk, chunk=chunk, whose="the verifier's own")
    matches: list[ChunkMatch] = [_UNMATCHED] * len(sizes)
    for chosen, size, words in parsed:
        theirs = evaluate(words, batch.indices[chosen, :size])
        _place(matches, chosen, _make_matches(compare(batch.values[chosen, :size], theirs, _ORDERS)))
    return [tuple(matches[start:end]) for start, end in pairwise(batch.ends)]
