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
The numbers themselves are made in protocol.polynomial.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from protocol.errors import Reason, Reject
from protocol.polynomial import PRIME, commit, evaluate, find_top

_EXPONENT = np.uint16(0x7F80)
#: Binary orders of magnitude below the chunk's largest entry within which entries are compared. In fp32 the noise of a state
#: is about 2^-20 of its largest entry, so an entry this small is still good to a bf16 ulp (2^-8 of itself).
_ORDERS = 10


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


def _chunks(hidden: NDArray[np.uint16], chunk: int) -> list[NDArray[np.uint16]]:
    return [hidden[start : start + chunk].reshape(-1) for start in range(0, len(hidden), chunk)]


def _by_length(flats: Sequence[NDArray[np.uint16]]) -> dict[int, list[int]]:
    """Positions of equally long chunks, so that each length is one vectorised batch."""
    groups: dict[int, list[int]] = {}
    for i, flat in enumerate(flats):
        groups.setdefault(len(flat), []).append(i)
    return groups


def build_proofs(hiddens: Sequence[NDArray[np.uint16]], *, topk: int, chunk: int) -> list[tuple[bytes, ...]]:
    """Commit to completions.

    Args:
        hiddens: per completion, uint16 bf16 bit patterns [num_tokens, hidden].
        topk: entries per chunk.
        chunk: tokens per commitment.

    Returns:
        Per completion, one commitment a chunk.

    Raises:
        Fault: when an activation is not finite; nothing is ever committed in its place.
    """
    flats = [flat for hidden in hiddens for flat in _chunks(hidden, chunk)]
    proofs: list[bytes] = [b""] * len(flats)
    for length, members in _by_length(flats).items():
        batch = np.stack([flats[i] for i in members])
        words = commit(batch, find_top(batch, min(topk, length), "the engine's"))
        data, size = words.astype(">u2").tobytes(), 2 * words.shape[1]
        for position, i in enumerate(members):
            proofs[i] = data[position * size : (position + 1) * size]
    result, start = [], 0
    for hidden in hiddens:
        count = compute_num_chunks(len(hidden), chunk)
        result.append(tuple(proofs[start : start + count]))
        start += count
    return result


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
    if not max(modulus_min, 32769) <= modulus <= PRIME:
        limit = f"{max(modulus_min, 32769)} to {PRIME}"
        raise Reject(Reason.COMMITMENT_FORMAT, "commitment modulus is out of range", observed=modulus, limit=limit)
    if int(words[1:].max()) >= PRIME:
        raise Reject(
            Reason.COMMITMENT_FORMAT,
            "commitment coefficient is not a field element",
            observed=int(words[1:].max()),
            limit=PRIME - 1,
        )
    return modulus, words[1:]


def validate_format(
    proofs: Sequence[bytes], *, num_tokens: int, hidden: int, topk: int, chunk: int, modulus_min: int
) -> None:
    """Check count and form of a completion's commitments, without any model.

    Raises:
        Reject: `COMMITMENT_FORMAT`.
    """
    expected = compute_num_chunks(num_tokens, chunk)
    if len(proofs) != expected:
        raise Reject(
            Reason.COMMITMENT_FORMAT,
            f"completion of {num_tokens} tokens has a wrong number of commitments",
            observed=len(proofs),
            limit=expected,
        )
    for index, proof in enumerate(proofs):
        rows = min(chunk, num_tokens - index * chunk)
        parse_proof(proof, size=min(topk, rows * hidden), modulus_min=modulus_min)


def _compare(mine: NDArray[np.uint16], theirs: NDArray[np.uint16]) -> ChunkMatch:
    """Compare bit patterns entry by entry; both uint16 [k]."""
    orders = (mine & _EXPONENT) >> 7
    large = orders + _ORDERS >= orders.max()
    mine, theirs = mine[large], theirs[large]
    exponents = (mine & _EXPONENT) == (theirs & _EXPONENT)
    signs = (mine >> 15) == (theirs >> 15)
    mantissa = np.abs((mine & 0x7F).astype(np.int64) - (theirs & 0x7F).astype(np.int64))[exponents]
    mean = float(mantissa.mean()) if len(mantissa) else float("inf")
    median = float(np.sort(mantissa)[len(mantissa) // 2]) if len(mantissa) else float("inf")
    differing = int((mine != theirs).sum())
    return ChunkMatch(int((~(exponents & signs)).sum()), int((~exponents).sum()), mean, median, len(mine), differing)


def match_proofs(
    hiddens: Sequence[NDArray[np.uint16]],
    proofs: Sequence[Sequence[bytes]],
    *,
    topk: int,
    chunk: int,
    modulus_min: int,
) -> list[tuple[ChunkMatch, ...]]:
    """Compare committed completions with a verifier's own activations.

    Args:
        hiddens: per completion, the verifier's uint16 bf16 bit patterns [num_tokens, hidden].
        proofs: per completion, the commitments under test.

    Raises:
        Reject: `COMMITMENT_FORMAT` when the count or form of a commitment is wrong.
        Fault: when the verifier's own activations are not finite (never held against the prover).
    """
    flats: list[NDArray[np.uint16]] = []
    flat_proofs: list[bytes] = []
    counts = []
    for hidden, given in zip(hiddens, proofs, strict=True):
        validate_format(
            given,
            num_tokens=len(hidden),
            hidden=hidden.shape[1],
            topk=topk,
            chunk=chunk,
            modulus_min=modulus_min,
        )
        parts = _chunks(hidden, chunk)
        flats += parts
        flat_proofs += given
        counts.append(len(parts))
    matches: list[ChunkMatch | None] = [None] * len(flats)
    for length, members in _by_length(flats).items():
        batch = np.stack([flats[i] for i in members])
        size = min(topk, length)
        parsed = [parse_proof(flat_proofs[i], size=size, modulus_min=modulus_min) for i in members]
        indices = find_top(batch, size, "the verifier's own")
        moduli = np.array([modulus for modulus, _ in parsed], dtype=np.int64)
        theirs = evaluate(np.stack([c for _, c in parsed]), indices, moduli)
        mine = np.take_along_axis(batch, indices, axis=1)
        for i, a, b in zip(members, mine, theirs, strict=True):
            matches[i] = _compare(a, b)
    result, start = [], 0
    for count in counts:
        result.append(tuple(match for match in matches[start : start + count] if match is not None))
        start += count
    return result
