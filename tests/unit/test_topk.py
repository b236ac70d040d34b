"""Top entries found by torch are those of protocol.toploc, and stand for the activations; impossible ones are refused.

Not run on a GPU here: the same code on tensors of the CPU.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from models.topk import find_top_entries
from protocol import toploc
from protocol.errors import Fault
from protocol.toploc import TopEntries, build_proofs, match_proofs, to_bf16_bits

LIMITS = {"topk": 64, "chunk": 16}


def _states(rows, hidden, kind):
    generator = torch.Generator().manual_seed(rows * 1000 + hidden)
    states = torch.randn((rows, hidden), generator=generator)
    if kind == "ties":
        states = (states * 2).round() / 2
    if kind == "zeros":
        states *= torch.rand((rows, hidden), generator=generator) > 0.99
    if kind == "subnormal":
        states *= 1e-39
    return states


def _ordered(top, topk, chunk):
    """Entries in one order, what is only padding left out."""
    sizes = toploc.compute_sizes(top.num_tokens, top.hidden, topk=topk, chunk=chunk)
    return [
        sorted(zip(indices[:size].tolist(), values[:size].tolist(), strict=True))
        for indices, values, size in zip(top.indices, top.values, sizes, strict=True)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kind", ["normal", "ties", "zeros", "subnormal"])
@pytest.mark.parametrize("shape", [(1, 1), (1, 300), (15, 8), (16, 8), (17, 8), (48, 96), (50, 1030)], ids=str)
def test_torch_finds_the_entries_that_the_host_finds(shape, kind, dtype):
    states = _states(*shape, kind).to(dtype)
    bits = to_bf16_bits(states.to(torch.bfloat16).float().numpy())
    found = find_top_entries(states, **LIMITS)
    expected = toploc.find_top_entries(bits, **LIMITS)
    assert _ordered(found, **LIMITS) == _ordered(expected, **LIMITS)
    assert build_proofs([found], **LIMITS) == build_proofs([bits], **LIMITS)


def test_many_chunks_are_searched_in_parts(monkeypatch):
    states = _states(50, 40, "normal")
    whole = find_top_entries(states, **LIMITS)
    monkeypatch.setattr("models.topk._KEYS_MAX", 16 * 40)
    parts = find_top_entries(states, **LIMITS)
    assert _ordered(parts, **LIMITS) == _ordered(whole, **LIMITS)


def test_top_entries_stand_for_activations():
    states = [_states(50, 96, "normal"), _states(3, 96, "ties"), _states(1, 96, "normal")]
    bits = [to_bf16_bits(one.numpy()) for one in states]
    tops = [find_top_entries(one, **LIMITS) for one in states]
    proofs = build_proofs(tops, **LIMITS)
    assert proofs == build_proofs(bits, **LIMITS)
    assert proofs == build_proofs([tops[0], bits[1], tops[2]], **LIMITS)
    others = [to_bf16_bits(one.numpy() * np.float32(1.004)) for one in states]
    other_tops = [find_top_entries(torch.from_numpy(one.numpy() * np.float32(1.004)), **LIMITS) for one in states]
    matches = match_proofs(other_tops, proofs, modulus_min=32769, **LIMITS)
    assert matches == match_proofs(others, proofs, modulus_min=32769, **LIMITS)
    assert any(match.differing for match in matches[0])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 3.4e38])
@pytest.mark.parametrize("where", [(0, 0), (31, 95), (33, 7)])
def test_states_that_are_not_finite_are_a_fault(value, where):
    """3.4e38 is finite in float32 and rounds to an infinity in bf16."""
    states = _states(34, 96, "normal")
    states[where] = value
    with pytest.raises(Fault, match="the verifier's own activations are not finite"):
        find_top_entries(states, whose="the verifier's own", **LIMITS)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda top: top._replace(num_tokens=49), "shapes"),
        (lambda top: top._replace(num_tokens=33), "different indices below 96"),
        (lambda top: top._replace(indices=top.indices[:, :63], values=top.values[:, :63]), "shapes"),
        (lambda top: top._replace(values=top.values[:2]), "shapes"),
        (lambda top: top._replace(indices=np.where(top.indices == top.indices[0, 0], -1, top.indices)), "different"),
        (lambda top: top._replace(indices=top.indices + 16 * 96), "different indices below 1536"),
        (lambda top: top._replace(indices=np.zeros_like(top.indices)), "64 different indices"),
        (lambda top: top._replace(values=top.values | 0x7F80), "not finite"),
    ],
)
def test_impossible_entries_are_a_fault(edit, message):
    top = find_top_entries(_states(34, 96, "normal"), **LIMITS)
    assert isinstance(top, TopEntries)
    with pytest.raises(Fault, match=message):
        build_proofs([edit(top)], **LIMITS)
