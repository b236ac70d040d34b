"""The reference library beside our commitments: the same activations given to both, and every result compared.

The reference leaves open which of equally large entries it takes. So bytes must be equal where the k-th largest magnitude is
not also the next one; and everywhere, bytes must be equal when both take the entries that the reference took.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from protocol.toploc import ChunkMatch, TopEntries, build_proofs, compute_sizes, match_proofs

MODULUS_MIN = 32769
#: What has been compared in this session, for the summary.
counts: Counter[str] = Counter()


def as_tensor(bits: NDArray[np.uint16]):
    import torch

    return torch.from_numpy(np.ascontiguousarray(bits).view(np.int16).copy()).view(torch.bfloat16)


def _chunks(bits, chunk):
    return [bits[start : start + chunk] for start in range(0, len(bits), chunk)]


def reference_build(bits, *, topk, chunk):
    """The reference's commitments: in one call, row by row, where all chunks have topk entries."""
    import toploc

    sizes = compute_sizes(*bits.shape, topk=topk, chunk=chunk)
    if set(sizes) == {topk}:
        proofs = toploc.build_proofs_bytes(list(as_tensor(bits)), chunk, topk, skip_prefill=True)
    else:
        proofs = [
            toploc.build_proofs_bytes([as_tensor(part)], 1, size, skip_prefill=True)[0]
            for part, size in zip(_chunks(bits, chunk), sizes, strict=True)
        ]
    assert not any(proof[:2] == b"\0\0" for proof in proofs), "the reference made a null proof"
    return tuple(proofs)


def reference_verify(bits, proofs, *, topk, chunk):
    """The reference's results, (exponent mismatches, mean, median) a chunk."""
    import toploc

    sizes = compute_sizes(*bits.shape, topk=topk, chunk=chunk)
    if set(sizes) == {topk}:
        results = toploc.verify_proofs_bytes(as_tensor(bits), list(proofs), chunk, topk, skip_prefill=True)
    else:
        results = [
            toploc.verify_proofs_bytes(as_tensor(part).view(1, -1), [proof], 1, size, skip_prefill=True)[0]
            for part, proof, size in zip(_chunks(bits, chunk), proofs, sizes, strict=True)
        ]
    return [(one.exp_mismatches, one.mant_err_mean, one.mant_err_median) for one in results]


def reference_entries(bits, *, topk, chunk):
    """The entries that the reference takes, which is what its `abs().topk()` gives."""
    sizes = compute_sizes(*bits.shape, topk=topk, chunk=chunk)
    indices = np.zeros((len(sizes), sizes[0]), dtype=np.int64)
    values = np.zeros((len(sizes), sizes[0]), dtype=np.uint16)
    for number, (part, size) in enumerate(zip(_chunks(bits, chunk), sizes, strict=True)):
        indices[number, :size] = as_tensor(part).view(-1).abs().topk(size).indices.numpy()
        values[number, :size] = part.reshape(-1)[indices[number, :size]]
    return TopEntries(*bits.shape, indices, values)


def count_tied(bits, *, topk, chunk):
    """Per chunk, how many of the taken entries could as well be others; 0 where the choice is free of ties."""
    tied = []
    for part, size in zip(_chunks(bits, chunk), compute_sizes(*bits.shape, topk=topk, chunk=chunk), strict=True):
        ordered = np.sort(part.reshape(-1) & 0x7FFF)[::-1]
        free = size < len(ordered) and ordered[size] == ordered[size - 1]
        tied.append(int((ordered[:size] == ordered[size - 1]).sum()) if free else 0)
    return tied


def agree(ours: ChunkMatch, theirs: tuple[int, float, float]) -> bool:
    """Whether two results are the same; with no exponent in common the reference reports 2^64, we report infinity."""
    exponents, mean, median = theirs
    if ours.exponent_mismatches == ours.size:
        return exponents == ours.size and mean == median == 2.0**64 and ours.mantissa_mean == float("inf")
    return (ours.exponent_mismatches, ours.mantissa_mean, ours.mantissa_median) == (exponents, mean, median)


def check(bits, *, topk, chunk, verifiers=()):
    """Commit with both, compare bytes, and let both verify both commitments with each of `verifiers`' activations.

    Returns:
        Our commitments.
    """
    limits = {"topk": topk, "chunk": chunk}
    [ours], theirs = build_proofs([bits], **limits), reference_build(bits, **limits)
    assert build_proofs([reference_entries(bits, **limits)], **limits) == [theirs]
    tied = count_tied(bits, **limits)
    for mine, other, free in zip(ours, theirs, tied, strict=True):
        assert len(mine) == len(other)
        assert mine == other or free
    counts.update(completions=1, chunks=len(ours), tied=sum(free > 0 for free in tied))
    _check_own(bits, ours, theirs, tied, limits)
    for verifier in verifiers:
        free_of_ties = [not free for free in count_tied(verifier, **limits)]
        for proofs in (ours,) if ours == theirs else (ours, theirs):
            [matches] = match_proofs([verifier], [proofs], modulus_min=MODULUS_MIN, **limits)
            results = reference_verify(verifier, proofs, **limits)
            sizes = compute_sizes(*bits.shape, **limits)
            for match, result, same, size in zip(matches, results, free_of_ties, sizes, strict=True):
                if same and match.size == size:  # where entries too small to compare are left out we say less
                    assert agree(match, result), (match, result)
                    counts["verified"] += 1
    return ours


def _check_own(bits, ours, theirs, tied, limits):
    """With the prover's own activations: nothing differs but, at most, the entries that ties let each side choose."""
    [by_us] = match_proofs([bits], [theirs], modulus_min=MODULUS_MIN, **limits)
    by_them = reference_verify(bits, ours, **limits)
    for match, (exponents, mean, _), free in zip(by_us, by_them, tied, strict=True):
        assert match.differing <= free
        assert exponents <= free
        assert free or (exponents, mean, match.mantissa_mean) == (0, 0.0, 0.0)


def split(bits, lengths):
    """Completions of these lengths from rows of activations."""
    return [bits[start:end] for start, end in pairwise(np.cumsum([0, *lengths]))]
