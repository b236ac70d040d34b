"""Replayable sampling: Philox equals its published vectors, tokens follow the softmax, replay agrees with sampling."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.philox import philox4x32
from protocol.sampling import choose, gumbel_noise, replay_gaps, scores

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "philox.json").read_text())["vectors"]


def _words(texts):
    return np.array([int(text, 16) for text in texts], dtype=np.uint32)


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["words"][0])
def test_philox_equals_the_published_vectors(vector):
    assert (philox4x32(_words(vector["counter"]), _words(vector["key"])) == _words(vector["words"])).all()


def test_philox_batches_like_one_by_one():
    counters = np.stack([_words(vector["counter"]) for vector in VECTORS])
    keys = np.stack([_words(vector["key"]) for vector in VECTORS])
    together = philox4x32(counters, keys)
    assert (together == np.stack([_words(vector["words"]) for vector in VECTORS])).all()


def test_noise_is_the_documented_function_of_key_token_and_position():
    key, position, token = 0xA4093822_299F31D0, 7, 13
    noise = gumbel_noise(np.array([key], dtype=np.uint64), np.array([position]), 32)
    counter = np.array([token // 4, position, 0, 0], dtype=np.uint32)
    word = philox4x32(counter, np.array([key & 0xFFFFFFFF, key >> 32], dtype=np.uint32))[token % 4]
    assert noise[0, token] == pytest.approx(-math.log(-math.log((int(word) + 0.5) / 2**32)), abs=1e-12)


@given(
    key=st.integers(0, 2**64 - 1),
    position=st.integers(0, 2**31 - 1),
    small=st.integers(1, 40),
    more=st.integers(0, 40),
)
@settings(max_examples=50, deadline=None)
def test_noise_of_a_token_does_not_depend_on_the_vocabulary_or_the_batch(key, position, small, more):
    keys, positions = np.array([key, key ^ 1], dtype=np.uint64), np.array([position, position])
    alone = gumbel_noise(keys[:1], positions[:1], small)
    assert (gumbel_noise(keys, positions, small + more)[:1, :small] == alone).all()
    assert np.isfinite(alone).all()


def _chi_square(temperature, seed, samples=20_000):
    """Pearson's statistic of sampled tokens against softmax(logits / T), and its degrees of freedom."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=16).astype(np.float32)
    keys = rng.integers(0, 2**64, samples, dtype=np.uint64)
    z = scores(
        np.tile(logits, (samples, 1)), keys, np.zeros(samples, dtype=np.int64), temperature=temperature, vocab_size=16
    )
    counts = np.bincount(choose(z), minlength=16)
    scaled = logits.astype(np.float64) / temperature
    expected = np.exp(scaled - scaled.max())
    expected *= samples / expected.sum()
    return float(((counts - expected) ** 2 / expected).sum()), 15


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_tokens_have_exactly_the_softmax_distribution(temperature, seed):
    statistic, freedom = _chi_square(temperature, seed)
    # 0.9999 quantile of chi-square(15) is 44.3: nine fixed seeds, so this never flickers
    assert statistic < 44.3, (statistic, freedom)


def test_the_distribution_test_would_notice_a_wrong_temperature():
    rng = np.random.default_rng(1)
    logits, samples = rng.normal(size=16).astype(np.float32), 20_000
    keys = rng.integers(0, 2**64, samples, dtype=np.uint64)
    z = scores(np.tile(logits, (samples, 1)), keys, np.zeros(samples, dtype=np.int64), temperature=0.9, vocab_size=16)
    expected = np.exp(logits.astype(np.float64))
    expected *= samples / expected.sum()
    assert ((np.bincount(choose(z), minlength=16) - expected) ** 2 / expected).sum() > 44.3


def test_positions_and_keys_are_independent_streams():
    keys = np.arange(4000, dtype=np.uint64)
    noise = gumbel_noise(keys, np.zeros(4000, dtype=np.int64), 8)
    later = gumbel_noise(keys, np.ones(4000, dtype=np.int64), 8)
    correlations = np.corrcoef(np.concatenate([noise, later], axis=1).T) - np.eye(16)
    assert np.abs(correlations).max() < 0.08  # five deviations of 1 / sqrt(4000)


@given(st.integers(0, 2**32 - 1), st.integers(2, 64))
@settings(max_examples=50, deadline=None)
def test_a_sampled_token_replays_with_gap_zero_and_every_other_has_a_gap(seed, vocab):
    rng = np.random.default_rng(seed)
    logits = rng.normal(scale=3, size=(5, vocab + 3)).astype(np.float32)
    keys = rng.integers(0, 2**64, 5, dtype=np.uint64)
    z = scores(logits, keys, np.arange(5), temperature=0.8, vocab_size=vocab)
    tokens = choose(z)
    assert tokens.max() < vocab
    assert (replay_gaps(z, tokens) == 0).all()
    assert (replay_gaps(z, (tokens + 1) % vocab) > 0).all()


def test_ties_go_to_the_lowest_id_and_non_finite_scores_never_replay():
    assert choose(np.array([[1.0, 3.0, 3.0]])).tolist() == [1]
    for bad in (np.nan, np.inf, -np.inf):
        gaps = replay_gaps(np.array([[0.0, bad], [0.0, -1.0]]), np.array([0, 0]))
        assert gaps[0] == np.inf
        assert gaps[1] == 0
