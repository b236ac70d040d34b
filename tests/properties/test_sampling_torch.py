"""Noise in torch, for logits on an accelerator, equals protocol.sampling bit for bit: words, tokens, winners and gaps.

The path is forced on the CPU, slice by slice as on any other device; no accelerator was at hand.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inference.draw import ReplayableDraw
from models import gumbel
from protocol import sampling
from protocol.errors import Fault
from protocol.philox import philox4x32
from protocol.sampling import choose, replay_gaps, scores

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "philox.json").read_text())["vectors"]
WORD = st.integers(0, 2**32 - 1)
TEMPERATURES = [1e-30, 1e-6, 0.1, 0.7, 1.0, 1.5, 1e6, 1e30]


@pytest.fixture(autouse=True)
def _small_slices(monkeypatch):
    """The vocabulary is cut into several slices even where it is small."""
    monkeypatch.setattr(gumbel, "SLICE_SCORES", 96)


def _philox(counter, key):
    words = gumbel.philox4x32(
        tuple(torch.tensor(word, dtype=torch.int64) for word in counter),
        tuple(torch.tensor(word, dtype=torch.int64) for word in key),
    )
    return [int(word) for word in words]


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["words"][0])
def test_philox_equals_the_published_vectors(vector):
    counter, key, words = ([int(text, 16) for text in vector[name]] for name in ("counter", "key", "words"))
    assert _philox(counter, key) == words


@given(st.tuples(WORD, WORD, WORD, WORD), st.tuples(WORD, WORD))
@settings(max_examples=100, deadline=None)
def test_philox_equals_the_array_form(counter, key):
    expected = philox4x32(np.array(counter, dtype=np.uint32), np.array(key, dtype=np.uint32))
    assert _philox(counter, key) == expected.tolist()


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**20), st.integers(1, 9))
@settings(max_examples=50, deadline=None)
def test_words_of_any_stretch_of_the_vocabulary(key, position, first, blocks):
    keys, positions = np.array([key], dtype=np.uint64), np.array([position])
    counter = np.zeros((blocks, 4), dtype=np.uint32)
    counter[:, 0], counter[:, 1] = np.arange(first, first + blocks), position
    expected = philox4x32(counter, np.array([[key & 0xFFFFFFFF, key >> 32]], dtype=np.uint32)).reshape(1, -1)
    assert (gumbel.noise_words(keys, positions, first, blocks, torch.device("cpu")).numpy() == expected).all()


@st.composite
def _calls(draw):
    vocab, pad, rows = draw(st.integers(1, 300)), draw(st.integers(0, 5)), draw(st.integers(1, 4))
    rng = np.random.default_rng(draw(WORD))
    scale = draw(st.sampled_from([0.0, 1e-3, 1.0, 20.0, 1e4, 1e9, 3e38]))
    values = np.clip(rng.normal(size=(rows, vocab + pad)) * scale, -3.4e38, 3.4e38)
    if draw(st.booleans()):
        values = np.round(values)  # ties
    if draw(st.booleans()):
        values[rng.random(values.shape) < 0.3] = -np.inf
    if draw(st.integers(0, 3)) == 0:
        values[rng.integers(rows), rng.integers(vocab + pad)] = draw(st.sampled_from([np.nan, np.inf, -np.inf]))
    keys = rng.integers(0, 2**64, rows, dtype=np.uint64)
    positions = rng.integers(0, draw(st.sampled_from([1, 1000, 2**32])), rows)
    return values.astype(np.float32), keys, positions, draw(st.sampled_from(TEMPERATURES)), vocab


@given(_calls())
@settings(max_examples=200, deadline=None)
def test_tokens_winners_and_gaps_equal_the_definition(call):
    logits, keys, positions, temperature, vocab = call
    options = {"temperature": temperature, "vocab_size": vocab}
    with np.errstate(all="ignore"):
        z = scores(logits, keys, positions, **options)
        tensor = torch.from_numpy(logits)
        assert gumbel.sample_tokens(tensor, keys, positions, **options).tolist() == choose(z).tolist()
        rng = np.random.default_rng(int(keys[0]) % 2**32)
        for tokens in (choose(z), rng.integers(0, vocab, len(keys))):
            found = gumbel.replay_tokens(tensor, keys, positions, tokens, **options)
            assert found.winners.tolist() == choose(z).tolist()
            assert found.gaps.tobytes() == replay_gaps(z, tokens).tobytes()


def test_a_model_sized_vocabulary_is_decided_without_the_host(monkeypatch):
    rng = np.random.default_rng(7)
    logits, keys = rng.normal(size=(3, 49_152)).astype(np.float32) * 3, rng.integers(0, 2**64, 3, dtype=np.uint64)
    options = {"temperature": 0.7, "vocab_size": 49_000}
    expected = choose(scores(logits, keys, np.arange(3), **options))
    monkeypatch.setattr(gumbel, "SLICE_SCORES", 1 << 15)
    monkeypatch.setattr(sampling, "sample_tokens", None)  # would be asked about close races
    assert gumbel.sample_tokens(torch.from_numpy(logits), keys, np.arange(3), **options).tolist() == expected.tolist()


def test_a_race_too_close_for_another_devices_logarithm_goes_to_the_definition(monkeypatch):
    """Two tokens whose scores differ by less than the margin: the winner is the definition's, and it was asked."""
    keys, asked = np.array([5], dtype=np.uint64), []
    noise = sampling.gumbel_noise(keys, np.array([2]), 64)[0]
    logits = np.full((1, 64), -60, dtype=np.float64)
    # in float32 the difference of the two scores can be made small, not nothing
    logits[0, 3], logits[0, 40] = 0.0, noise[3] - noise[40]
    tensor = torch.from_numpy(logits.astype(np.float32))
    monkeypatch.setattr(gumbel, "MARGIN", 1e-5)
    original = sampling.sample_tokens
    monkeypatch.setattr(sampling, "sample_tokens", lambda *a, **k: asked.append(1) or original(*a, **k))
    options = {"temperature": 1.0, "vocab_size": 64}
    expected = choose(scores(tensor.numpy(), keys, np.array([2]), **options))
    assert gumbel.sample_tokens(tensor, keys, np.array([2]), **options).tolist() == expected.tolist()
    assert asked == [1]


@pytest.mark.parametrize("vocab", [32, 400])
def test_the_engine_draws_the_same_tokens_from_logits_that_are_elsewhere(monkeypatch, vocab):
    rng = np.random.default_rng(vocab)
    logits, keys = (
        torch.from_numpy(rng.normal(size=(6, vocab)).astype(np.float32)),
        rng.integers(0, 2**64, 6, np.uint64),
    )
    draw, slots = ReplayableDraw(0.8, vocab - 3, 6), np.arange(6)
    here = [draw(logits, keys, np.full(6, at), slots).tolist() for at in range(10)]
    monkeypatch.setattr("inference.draw.is_elsewhere", lambda tensor: True)
    assert [draw(logits, keys, np.full(6, at), slots).tolist() for at in range(10)] == here
    logits[2, 1] = torch.nan
    with pytest.raises(Fault, match="not finite"):
        draw(logits, keys, np.zeros(6, dtype=np.int64), slots)
