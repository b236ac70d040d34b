"""TOPLOC commitments: bytes and comparison results equal the reference's vectors; the parser refuses the rest."""

from __future__ import annotations

import base64

import numpy as np
import pytest

from protocol.errors import Fault, Reason, Reject
from protocol.toploc import PRIME, build_proofs, match_proofs, parse_proof, to_bf16_bits
from tests.vectors.toploc_activations import activations, load_cases, perturbed

CASES = load_cases()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_bytes_equal_the_reference(case):
    [proofs] = build_proofs([activations(case)], topk=case["topk"], chunk=case["chunk"])
    assert [base64.b64encode(proof).decode() for proof in proofs] == case["proofs"]


@pytest.mark.parametrize("how", ["same", "ulp", "sign", "half", "other"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_comparison_equals_the_reference(case, how):
    proofs = [base64.b64decode(proof) for proof in case["proofs"]]
    [matches] = match_proofs(
        [perturbed(case, how)], [proofs], topk=case["topk"], chunk=case["chunk"], modulus_min=32769
    )
    for match, (exponents, mean, median) in zip(matches, case["verify"][how], strict=True):
        assert match.exponent_mismatches == exponents
        if exponents < match.size:  # with no exponent in common the reference reports 2^64, we report infinity
            assert (round(match.mantissa_mean, 4), match.mantissa_median) == (mean, median)
        if how == "sign":
            assert match.mismatches == match.size


def test_batch_equals_one_by_one():
    hiddens = [activations(case) for case in CASES if case["hidden"] == 64]
    together = build_proofs(hiddens, topk=64, chunk=32)
    assert together == [build_proofs([hidden], topk=64, chunk=32)[0] for hidden in hiddens]


def test_ties_go_to_the_lowest_index():
    bits = np.full((1, 8), 0x3F80, dtype=np.uint16)
    [[proof]] = build_proofs([bits], topk=3, chunk=32)
    modulus, coefficients = parse_proof(proof, size=3, modulus_min=32769)
    assert modulus == PRIME
    assert coefficients.tolist() == [0x3F80, 0, 0]


@pytest.mark.parametrize(("value", "compared"), [(-2.25e-6, 63), (2.0**-11, 63), (2.0**-10, 64), (-0.5, 64)])
def test_entries_that_are_zero_but_for_rounding_are_not_compared(value, compared):
    """All 64 entries of a short chunk are committed to; one that is noise must not refuse an honest state."""
    mine = np.linspace(1.0, 1.9, 64, dtype=np.float32)[None]
    mine[0, 4] = value
    theirs = mine.copy()
    theirs[0, 4] *= 1.3
    [proofs] = build_proofs([to_bf16_bits(theirs)], topk=64, chunk=2)
    [[match]] = match_proofs([to_bf16_bits(mine)], [proofs], topk=64, chunk=2, modulus_min=32769)
    assert match.size == compared
    assert (match.mantissa_mean > 0) == (compared == 64)


@pytest.mark.parametrize("pattern", [0x7F80, 0xFF80, 0x7FC0])
def test_non_finite_activations_are_never_committed(pattern):
    bits = np.full((2, 8), 0x3F80, dtype=np.uint16)
    bits[1, 3] = pattern
    with pytest.raises(Fault, match="not finite"):
        build_proofs([bits], topk=4, chunk=32)


def _proof(modulus: int, coefficients: list[int]) -> bytes:
    return np.array([modulus, *coefficients], dtype=">u2").tobytes()


MALFORMED = [
    b"",
    b"\xff",
    b"\xff\xd9",
    _proof(0, [1, 2, 3]),
    _proof(32768, [1, 2, 3]),
    _proof(65498, [1, 2, 3]),
    _proof(65497, [1, 2, PRIME]),
    _proof(65497, [1, 2]),
    _proof(65497, [1, 2, 3, 4]),
]


@pytest.mark.parametrize("proof", MALFORMED, ids=bytes.hex)
def test_malformed_commitments_are_rejected(proof):
    with pytest.raises(Reject) as caught:
        parse_proof(proof, size=3, modulus_min=32769)
    assert caught.value.reason is Reason.COMMITMENT_FORMAT


def test_rounding_to_bf16_is_to_nearest_even():
    values = np.array([1.0, 1.00390625, 1.01171875, -1.00390625, np.nan, np.inf], dtype=np.float32)
    assert to_bf16_bits(values).tolist() == [0x3F80, 0x3F80, 0x3F82, 0xBF80, 0x7FC0, 0x7F80]


def test_rounding_to_bf16_equals_torch():
    import torch

    values = np.random.default_rng(7).standard_normal(10_000).astype(np.float32)
    expected = torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    assert (to_bf16_bits(values) == expected).all()
