"""Compiled commitments equal the array form: the same top entries, bytes and comparisons, also where entries tie."""

from __future__ import annotations

from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol import polynomial
from protocol.errors import Fault
from protocol.kernels import Kernels
from protocol.kernels import toploc as compiled
from protocol.polynomial import PRIME, commit, evaluate, find_top
from protocol.toploc import build_proofs, match_proofs


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
    indices = np.sort(array, axis=1)
    assert (indices == fast).all()
    array, fast = _both(commit, batch, rng.permuted(indices, axis=1))
    assert fast.dtype == np.uint16
    assert (array == fast).all()
    moduli = array[:, 0].astype(np.int64)
    coefficients = array[:, 1:].astype(np.int64)
    array, fast = _both(evaluate, coefficients, indices, moduli)
    assert (array == fast).all()
    assert (fast == np.take_along_axis(batch, indices, axis=1)).all()
    forged = rng.integers(0, PRIME, coefficients.shape)
    array, fast = _both(evaluate, forged, indices, rng.integers(32769, PRIME + 1, chunks))
    assert (array == fast).all()


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
    array, fast = _both(lambda: commit(batch, find_top(batch, 3, "these")))
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
