"""Compiled commitments equal the array form: the same top entries, bytes and comparisons, also where entries tie."""

from __future__ import annotations

from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol import polynomial
from protocol.errors import Fault, Reason, Reject
from protocol.kernels import Kernels
from protocol.kernels import toploc as compiled
from protocol.polynomial import PRIME, commit, compare, evaluate, find_top
from protocol.toploc import build_proofs, match_proofs, validate_format


class _Always:
    """Gives one answer to who asks for kernels."""

    def __init__(self, module):
        self._module = module

    def get(self, name, *, cost_ns, large):
        return self._module


@contextmanager
def _form(module):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(polynomial, "kernels", _Always(module))
        yield


def _bits(rng, shape, distinct):
    """Finite bf16 patterns, few distinct ones for ties."""
    values = rng.normal(size=shape).astype(np.float32)
    if distinct:
        values = np.round(values * distinct) / distinct
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def _both(function, *arguments):
    with _form(None):
        array = function(*arguments)
    with _form(compiled):
        return array, function(*arguments)


@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 4),
    st.sampled_from([1, 2, 31, 32, 33, 100, 2048, 5000, 70_000]),
    st.integers(1, 150),
    st.sampled_from([0, 1, 8]),
)
@settings(max_examples=150, deadline=None)
def test_each_step_equals_the_array_form(seed, chunks, n, k, distinct):
    rng, k = np.random.default_rng(seed), min(k, n)
    batch = _bits(rng, (chunks, n), distinct)
    array, fast = _both(find_top, batch, k, "these")
    indices = np.sort(array[0], axis=1)
    assert (indices == np.sort(fast[0], axis=1)).all()
    for found, values in (array, fast):
        assert (values == np.take_along_axis(batch, found, axis=1)).all()
    values = np.take_along_axis(batch, indices, axis=1)
    order = rng.permuted(np.broadcast_to(np.arange(k), indices.shape), axis=1)
    array, fast = _both(commit, np.take_along_axis(indices, order, axis=1), np.take_along_axis(values, order, axis=1))
    assert fast.dtype == np.uint16
    assert (array == fast).all()
    words = array
    array, fast = _both(evaluate, words, indices)
    assert (array == fast).all()
    assert (fast == values).all()
    words[:, 1:] = rng.integers(0, PRIME, (chunks, k))
    words[:, 0] = rng.integers(32769, PRIME + 1, chunks)
    array, fast = _both(evaluate, words, indices)
    assert (array == fast).all()


def _top_by_sorting(flat, k):
    """The rule as it is written, entry by entry: largest magnitude first, lowest index first among equals."""
    return sorted(sorted(range(len(flat)), key=lambda i: (-(int(flat[i]) & 0x7FFF), i))[:k])


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_top_entries_are_those_of_the_rule(data):
    """Lengths around the compiled form's segments, many ties, zeros and subnormals."""
    n = data.draw(st.sampled_from([1, 7, 63, 64, 65, 511, 512, 513, 575, 1024, 4095, 4096, 4097, 9000]))
    k = data.draw(st.integers(1, min(n, 300)))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    patterns = data.draw(
        st.sampled_from([[0], [0, 0x8000], [1, 0x8001, 0, 2], [0x3F80, 0xBF80], [0x7F7F, 0xFF7F, 0x0080], None])
    )
    flat = (rng.choice(patterns, n) if patterns else rng.integers(0, 0x7F80, n)).astype(np.uint16)
    expected = _top_by_sorting(flat, k)
    for found, values in _both(find_top, flat[None], k, "these"):
        assert sorted(found[0].tolist()) == expected
        assert (values == flat[found]).all()


@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.integers(1, 200), st.sampled_from([0, 3, 10, 255]))
@settings(max_examples=200, deadline=None)
def test_comparison_equals_the_array_form(seed, chunks, k, orders):
    """Among patterns near each other, far apart, and with exponents that mostly agree; `theirs` may be any 16 bits."""
    rng = np.random.default_rng(seed)
    mine = _bits(rng, (chunks, k), 0)
    for theirs in (
        mine,
        mine ^ rng.integers(0, 4, mine.shape).astype(np.uint16),
        mine ^ (1 << rng.integers(0, 16, mine.shape)).astype(np.uint16),
        mine ^ np.uint16(0x80),
        rng.integers(0, 2**16, mine.shape).astype(np.uint16),
    ):
        array, fast = _both(compare, mine, theirs, orders)
        assert (array == fast).all()
        assert (array[:, 4] >= 1).all()


@given(st.integers(0, 2**32 - 1), st.lists(st.integers(1, 40), min_size=1, max_size=6), st.sampled_from([8, 64, 300]))
@settings(max_examples=40, deadline=None)
def test_proofs_and_matches_of_mixed_lengths_equal_the_array_form(seed, lengths, hidden):
    rng = np.random.default_rng(seed)
    hiddens = [_bits(rng, (length, hidden), 0) for length in lengths]
    others = [_bits(rng, (length, hidden), 0) for length in lengths]
    array, fast = _both(lambda: build_proofs(hiddens, topk=32, chunk=16))
    assert array == fast
    array, fast = _both(lambda: match_proofs(others, fast, topk=32, chunk=16, modulus_min=32769))
    assert array == fast


def test_folded_indices_that_meet_change_the_modulus():
    batch = np.zeros((1, 3 * PRIME), dtype=np.uint16)
    batch[0, [5, 5 + PRIME, 7 + 2 * (PRIME - 1)]] = [0x4000, 0x4080, 0x4100]
    array, fast = _both(lambda: commit(*find_top(batch, 3, "these")))
    assert array.tolist() == fast.tolist()
    assert fast[0, 0] < PRIME


@pytest.mark.parametrize("module", [None, compiled], ids=["array", "compiled"])
@pytest.mark.parametrize("pattern", [0x7F80, 0xFF80, 0x7FC0, 0xFFFF])
@pytest.mark.parametrize("where", [0, 40, 99])
def test_non_finite_entries_are_a_fault(module, pattern, where):
    batch = np.full((2, 100), 0x3F80, dtype=np.uint16)
    batch[1, where] = pattern
    with _form(module), pytest.raises(Fault, match="these activations are not finite"):
        find_top(batch, 4, "these")


def test_kernels_are_loaded_for_large_calls_and_after_enough_small_ones():
    some = Kernels()
    assert some.get("toploc", cost_ns=1000, large=False) is None
    assert some.get("toploc", cost_ns=1000, large=True) is compiled
    assert some.get("toploc", cost_ns=1000, large=False) is compiled
    many = Kernels()
    asked = [many.get("toploc", cost_ns=250_000_000, large=False) for _ in range(5)]
    assert asked == [None, None, None, compiled, compiled]


@given(
    st.lists(st.binary(max_size=40) | st.binary(min_size=18, max_size=18), max_size=5),
    st.integers(1, 7),
    st.integers(0, 2**16),
)
@settings(max_examples=300, deadline=None)
def test_any_bytes_are_compared_or_rejected(proofs, tokens, modulus_min):
    """What the parser takes can be compared; what it refuses is a rejection of the form, alike one by one and together."""
    bits = _bits(np.random.default_rng(tokens), (tokens, 16), 0)
    limits = {"topk": 8, "chunk": 2, "modulus_min": modulus_min}
    lowest, count = max(modulus_min, 32769), -(-tokens // 2)
    words = [[int.from_bytes(proof[i : i + 2], "big") for i in range(0, len(proof), 2)] for proof in proofs]
    valid = len(proofs) == count and all(
        len(proof) == 18 and lowest <= word[0] <= PRIME and max(word[1:]) < PRIME
        for proof, word in zip(proofs, words, strict=True)
    )
    if valid:
        [matches] = match_proofs([bits], [proofs], **limits)
        assert len(matches) == count
        return
    for check in (
        lambda: match_proofs([bits], [proofs], **limits),
        lambda: validate_format(proofs, num_tokens=tokens, hidden=16, **limits),
    ):
        with pytest.raises(Reject) as caught:
            check()
        assert caught.value.reason is Reason.COMMITMENT_FORMAT


@given(st.binary(min_size=16, max_size=16), st.integers(32769, PRIME), st.integers(0, 2**32 - 1))
@settings(max_examples=100, deadline=None)
def test_well_formed_bytes_are_compared(coefficients, modulus, seed):
    words = [min(int.from_bytes(coefficients[i : i + 2], "big"), PRIME - 1) for i in range(0, 16, 2)]
    proof = b"".join(word.to_bytes(2, "big") for word in (modulus, *words))
    bits = _bits(np.random.default_rng(seed), (2, 16), 0)
    array, fast = _both(lambda: match_proofs([bits], [[proof]], topk=8, chunk=2, modulus_min=32769))
    assert array == fast
