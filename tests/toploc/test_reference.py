"""Commitments against the reference library `toploc`, both ways: random activations of many shapes, and a model's own."""

from __future__ import annotations

import base64

import numpy as np
import pytest

from protocol.toploc import build_proofs, match_proofs, to_bf16_bits
from tests.toploc.kit import MODULUS_MIN, as_tensor, check, count_tied, reference_build, reference_verify
from tests.vectors.toploc_activations import activations, load_cases, perturbed

pytestmark = pytest.mark.toploc

HIDDENS = (64, 65, 96, 128, 300, 576, 1024, 2048, 4096, 5120, 8192)
CHUNKS = (1, 2, 5, 16, 32, 33, 64)
TOPKS = (1, 2, 8, 31, 64, 128, 200, 256)
#: Most entries of a completion, so that a case takes milliseconds.
ENTRIES_MAX = 400_000


def normal(rng, shape):
    return to_bf16_bits(rng.standard_normal(shape, dtype=np.float32))


def heavy(rng, shape):
    """A few dimensions that dominate, as in trained models."""
    values = rng.standard_normal(shape, dtype=np.float32) * np.exp(3 * rng.standard_normal(shape[1], dtype=np.float32))
    return to_bf16_bits(values)


def patterns(rng, shape):
    """Any finite pattern with equal chance: all exponents, subnormals, both zeros."""
    return (rng.integers(0, 0x7F80, shape) | rng.integers(0, 2, shape) << 15).astype(np.uint16)


def subnormal(rng, shape):
    """Nothing but subnormals and zeros, of which there are 256."""
    return (rng.integers(0, 0x80, shape) | rng.integers(0, 2, shape) << 15).astype(np.uint16)


def distinct(rng, shape):
    """As few ties as 16 bits allow: large entries are distinct, the others small."""
    bits = rng.integers(0, 0x3000, shape).astype(np.uint16).reshape(-1)
    where = rng.choice(bits.size, min(bits.size, 4000), replace=False)
    bits[where] = (0x3C00 + 3 * rng.permutation(len(where))) | rng.integers(0, 2, len(where)) << 15
    return bits.reshape(shape)


def tied(rng, shape):
    """Few magnitudes, so that nearly every choice of entries is among equals."""
    return rng.choice(np.array([0x3F80, 0xBF80, 0x4000, 0x3E00, 0], dtype=np.uint16), shape)


def sparse(rng, shape):
    """Mostly zeros of both signs: fewer entries differ from zero than are committed to."""
    bits = normal(rng, shape)
    bits[rng.random(shape) > 0.01] &= 0x8000
    return bits


def _verifiers(rng, bits):
    """What a verifier may hold instead: noise of an ulp, of a percent, other signs, other activations."""
    ulps = bits.copy()
    ulps[(bits & 0x7FFF) > 0x0080] -= rng.integers(0, 2, int(((bits & 0x7FFF) > 0x0080).sum())).astype(np.uint16)
    as_float = (bits.astype(np.uint32) << 16).view(np.float32)
    percent = to_bf16_bits(as_float * (1 - np.abs(0.01 * rng.standard_normal(bits.shape, dtype=np.float32)).clip(0, 1)))
    return ulps, percent, bits ^ np.uint16(0x8000), rng.permuted(bits.reshape(-1)).reshape(bits.shape)


@pytest.mark.parametrize("block", range(4))
@pytest.mark.parametrize("make", [normal, heavy, patterns, subnormal, distinct, tied, sparse])
def test_random_activations(make, block):
    """110 completions of random hidden size, length, chunk and top-k; last chunks are short as they come."""
    rng = np.random.default_rng([block, *make.__name__.encode()])
    for number in range(110):
        hidden, chunk, topk = HIDDENS[number % len(HIDDENS)], int(rng.choice(CHUNKS)), int(rng.choice(TOPKS))
        tokens = int(rng.integers(1, min(150, ENTRIES_MAX // hidden) + 1))
        bits = make(rng, (tokens, hidden))
        check(bits, topk=topk, chunk=chunk, verifiers=_verifiers(rng, bits) if number % 3 == 0 else ())


def test_distinct_entries_have_no_ties():
    """The cases that ask for equal bytes exist: among them are none that ties excuse."""
    bits = distinct(np.random.default_rng(3), (40, 5120))
    assert count_tied(bits, topk=128, chunk=32) == [0, 0]


def test_full_size_completions():
    """512 x 5120, top 128 in chunks of 32: what benchmarks/toploc.py times."""
    rng = np.random.default_rng(11)
    for make in (normal, heavy, distinct):
        bits = make(rng, (512, 5120))
        check(bits, topk=128, chunk=32, verifiers=_verifiers(rng, bits))


def test_modulus_that_has_to_be_searched():
    """Indices that meet modulo 65497, and modulo several next numbers, so that both search downwards."""
    rng = np.random.default_rng(5)
    for _ in range(200):
        bits = (rng.integers(0, 0x3000, (32, 5120))).astype(np.uint16)
        flat = bits.reshape(-1)
        base, size = int(rng.integers(0, 10_000)), int(rng.integers(1, 20))
        where = {base, *(base + 65497 - step for step in range(size))}
        where |= set(rng.choice(flat.size, 128 - len(where), replace=False).tolist())
        flat[list(where)] = 0x4000 + 5 * rng.permutation(len(where)).astype(np.uint16)
        [proof] = check(bits, topk=len(where), chunk=32)
        assert int.from_bytes(proof[:2], "big") <= 65497 - size


@pytest.fixture(
    scope="module", params=[(64, "float32"), (64, "bfloat16"), (256, "float32"), (256, "bfloat16")], ids=str
)
def states(request):
    """Post-norm last hidden states of a small Llama, decoded with a cache and prefilled at once: bf16 bits, both."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden, dtype = request.param
    torch.manual_seed(hidden)
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
    )
    model = LlamaForCausalLM(config).to(getattr(torch, dtype)).eval()
    pairs = []
    with torch.inference_mode():
        for length in (1, 2, 31, 32, 33, 64, 90, 150):
            tokens, cache, rows = torch.randint(0, 300, (1, 8 + length)), None, []
            for start, end in [(0, 8), *((i, i + 1) for i in range(8, 7 + length))]:
                step = model.model(tokens[:, start:end], past_key_values=cache, use_cache=True)
                cache = step.past_key_values
                rows.append(step.last_hidden_state[0, -1])
            prefill = model.model(tokens[:, : 7 + length]).last_hidden_state[0, 7:]
            pairs.append(
                tuple(
                    one.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
                    for one in (torch.stack(rows), prefill)
                )
            )
    return pairs


@pytest.mark.parametrize(("topk", "chunk"), [(128, 32), (32, 32), (64, 16), (128, 1)])
def test_model_activations(states, topk, chunk):
    """A node's decode under a verifier's prefill, and the other way round."""
    for decode, prefill in states:
        assert decode.shape == prefill.shape
        check(decode, topk=topk, chunk=chunk, verifiers=(prefill,))
        check(prefill, topk=topk, chunk=chunk, verifiers=(decode,))


def test_commitments_of_many_completions_at_once_are_those_of_each(states):
    together = build_proofs([decode for decode, _ in states], topk=128, chunk=32)
    for (decode, prefill), proofs in zip(states, together, strict=True):
        for mine, other, free in zip(
            proofs, reference_build(decode, topk=128, chunk=32), count_tied(decode, topk=128, chunk=32), strict=True
        ):
            assert mine == other or free
        [matches] = match_proofs([prefill], [proofs], topk=128, chunk=32, modulus_min=MODULUS_MIN)
        assert all(match.size for match in matches)


def test_bits_are_the_references_numbers():
    """Our bit patterns and the tensors handed to the reference are the same numbers."""
    values = np.random.default_rng(2).standard_normal((5, 64), dtype=np.float32)
    rounded = as_tensor(to_bf16_bits(values)).float().numpy()
    assert np.abs(rounded - values).max() < 0.02
    assert (to_bf16_bits(rounded) == to_bf16_bits(values)).all()


@pytest.mark.parametrize("case", load_cases(), ids=lambda case: case["name"])
def test_vectors_are_the_references(case):
    """tests/vectors/toploc.json, which the default suite checks ours against, made again by the library itself."""
    limits = {"topk": case["topk"], "chunk": case["chunk"]}
    proofs = reference_build(activations(case), **limits)
    assert [base64.b64encode(proof).decode() for proof in proofs] == case["proofs"]
    for how, expected in case["verify"].items():
        found = reference_verify(perturbed(case, how), proofs, **limits)
        assert [[exponents, round(mean, 4), median] for exponents, mean, median in found] == expected
