"""Compiled sampling equals its definition, bit for bit: tokens and gaps, for every logit, temperature and vocabulary."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from protocol import sampling
from protocol.kernels import gumbel
from protocol.sampling import choose, compute_gaps, gumbel_noise, replay_gaps, sample_tokens, scores

ROOT = Path(__file__).parents[2]
SCALES = [0.0, 1e-42, 1e-3, 1.0, 20.0, 1e4, 1e9, 3e38]
TEMPERATURES = [1e-30, 1e-6, 1e-3, 0.1, 0.7, 1.0, 1.5, 100.0, 1e6, 1e30]


@pytest.fixture(autouse=True, scope="module")
def _compiled_for_every_size():
    """Every vocabulary counts as large, so that small ones are compared too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "LARGE_VOCAB", 0)
        yield


@st.composite
def _calls(draw, vocab_max=1100):
    """Logits of one scale with ties, outliers and padding, and the rest of a call."""
    vocab, pad, rows = draw(st.integers(1, vocab_max)), draw(st.integers(0, 5)), draw(st.integers(1, 4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    scale = draw(st.sampled_from(SCALES))
    values = np.clip(rng.normal(size=(rows, vocab + pad)) * scale, -3.4e38, 3.4e38)
    steps = draw(st.sampled_from([0, 1, 3]))  # few distinct values: ties
    if steps and scale:
        values = np.clip(np.round(values / scale * steps) / steps * scale, -3.4e38, 3.4e38)
    if draw(st.booleans()):
        values[rng.random(values.shape) < 0.3] = -np.inf
    if draw(st.integers(0, 4)) == 0:
        values[rng.integers(rows), rng.integers(vocab + pad)] = draw(st.sampled_from([np.nan, np.inf, -np.inf, 3.4e38]))
    keys = rng.integers(0, 2**64, rows, dtype=np.uint64)
    positions = rng.integers(0, draw(st.sampled_from([1, 1000, 2**32])), rows)
    return values.astype(np.float32), keys, positions, draw(st.sampled_from(TEMPERATURES)), vocab


def _require_equal(logits, keys, positions, temperature, vocab):
    options = {"temperature": temperature, "vocab_size": vocab}
    with np.errstate(all="ignore"):
        z = scores(logits, keys, positions, **options)
        tokens = sample_tokens(logits, keys, positions, **options)
        assert tokens.dtype == np.int64
        assert tokens.tolist() == choose(z).tolist()
        rng = np.random.default_rng(int(keys[0]) % 2**32)
        for given_tokens in (tokens, rng.integers(0, vocab, len(keys)), np.argmin(z, axis=1)):
            expected = replay_gaps(z, given_tokens)
            gaps = compute_gaps(logits, keys, positions, given_tokens, **options)
            assert gaps.tobytes() == expected.tobytes(), (gaps, expected)


@given(_calls())
@settings(max_examples=300, deadline=None)
def test_tokens_and_gaps_equal_the_definition(call):
    _require_equal(*call)


@pytest.mark.nightly
@given(_calls(vocab_max=60_000))
@settings(max_examples=5000, deadline=None)
def test_tokens_and_gaps_equal_the_definition_at_large_vocabularies(call):
    _require_equal(*call)


@pytest.mark.parametrize("vocab", [4096, 49_152, 151_936])
@pytest.mark.parametrize("scale", [0.1, 3.0])
def test_model_sized_vocabularies(vocab, scale):
    rng = np.random.default_rng(vocab)
    logits = (rng.normal(size=(6, vocab)) * scale).astype(np.float32)
    keys = rng.integers(0, 2**64, 6, dtype=np.uint64)
    _require_equal(logits, keys, np.arange(6), 1.0, vocab)
    flags = np.empty(6, dtype=np.uint8)
    gumbel.find_winners(logits, logits.view(np.int32), keys, np.arange(6), 1.0, vocab, np.empty(6, np.int64), flags)
    assert not flags.any()  # none of it was decided by the definition itself


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=100, deadline=None)
def test_close_races_are_left_to_the_definition(seed):
    """Two tokens whose scores differ by float32's last bit: the kernel says that it does not know."""
    rng = np.random.default_rng(seed)
    keys = rng.integers(0, 2**64, 1, dtype=np.uint64)
    noise = gumbel_noise(keys, np.array([3]), 2000)[0]
    order = np.argsort(noise)
    spread = np.diff(noise[order])
    pair = int(np.argmax((spread > 0) & (spread < 0.01) & (noise[order][:-1] > 0)))
    low, high = order[pair], order[pair + 1]
    logits = np.full((1, 2000), -60, dtype=np.float32)
    logits[0, high] = 0.0
    logits[0, low] = noise[high] - noise[low]
    assume(abs(float(logits[0, low])) < 0.01)
    winners, flags = np.empty(1, dtype=np.int64), np.empty(1, dtype=np.uint8)
    gumbel.find_winners(logits, logits.view(np.int32), keys, np.array([3]), 1.0, 2000, winners, flags)
    assert flags.tolist() == [gumbel.CLOSE]
    _require_equal(logits, keys, np.array([3]), 1.0, 2000)


def test_arrays_need_not_be_contiguous_or_writeable():
    rng = np.random.default_rng(5)
    logits = rng.normal(size=(8, 1000)).astype(np.float32)
    keys = rng.integers(0, 2**64, 8, dtype=np.uint64)
    options = {"temperature": 0.9, "vocab_size": 321}
    whole = sample_tokens(logits, keys, np.arange(8), **options)
    assert (sample_tokens(logits[:, :321], keys, np.arange(8), **options) == whole).all()
    assert (sample_tokens(logits[::2], keys[::2], np.arange(8)[::2], **options) == whole[::2]).all()
    logits.flags.writeable = keys.flags.writeable = False
    assert (sample_tokens(logits, keys, np.arange(8, dtype=np.int32), **options) == whole).all()
    assert len(sample_tokens(logits[:0], keys[:0], np.arange(0), **options)) == 0


@pytest.mark.parametrize("wrong", [{"vocab_size": 33}, {"keys": 3}])
def test_calls_that_do_not_fit_fail_like_the_definition(wrong):
    logits, count = np.zeros((2, 32), dtype=np.float32), wrong.get("keys", 2)
    with pytest.raises(ValueError, match="broadcast"):
        sample_tokens(
            logits,
            np.zeros(count, dtype=np.uint64),
            np.zeros(count, dtype=np.int64),
            temperature=1.0,
            vocab_size=wrong.get("vocab_size", 32),
        )


SCRIPT = """
import numpy as np
from protocol.sampling import choose, sample_tokens, scores
rng = np.random.default_rng(1)
logits, keys = rng.normal(size=(3, 9000)).astype(np.float32), rng.integers(0, 2**64, 3, dtype=np.uint64)
for _ in range(3):
    tokens = sample_tokens(logits, keys, np.arange(3), temperature=1.0, vocab_size=9000)
assert (tokens == choose(scores(logits, keys, np.arange(3), temperature=1.0, vocab_size=9000))).all()
from protocol.kernels import kernels
print(kernels._loaded["gumbel"] is not None)
"""


def _run(prelude):
    done = subprocess.run(
        [sys.executable, "-c", prelude + SCRIPT], capture_output=True, text=True, check=True, cwd=ROOT, timeout=120
    )
    return done.stdout.strip(), done.stderr


def test_without_numba_tokens_are_the_same_and_it_is_said_once():
    out, err = _run("import sys; sys.modules['numba'] = None\n")
    assert out == "False"
    assert err.count("no compiled gumbel") == 1


def test_with_compilation_switched_off_tokens_are_the_same():
    out, err = _run("import os; os.environ['NUMBA_DISABLE_JIT'] = '1'\n")
    assert out == "False"
    assert "NUMBA_DISABLE_JIT" in err


def test_with_nowhere_to_cache_kernels_are_compiled_all_the_same():
    out, err = _run("import numba.core.caching as c; c.CacheImpl._locator_classes = []\n")
    assert (out, err) == ("True", "")


#: The word of this token under key 0 is 2^32 - 1: the largest noise there is, 33 ln 2 = 22.87 (found by search).
HIGHEST_POSITION, HIGHEST_TOKEN = 42_733, 113_636


@pytest.mark.parametrize("offset", [-1.0, -1e-3, -1e-5, 0.0, 1e-5, 1e-3, 1.0])
@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_the_largest_noise_wins_from_as_far_below_as_it_can(offset, temperature):
    """A token that only the largest noise lets win, and one that not even it does, on both sides of where noise is not made."""
    vocab, keys, positions = 114_000, np.zeros(1, dtype=np.uint64), np.array([HIGHEST_POSITION])
    noise = gumbel_noise(keys, positions, vocab)[0]
    assert noise.max() == noise[HIGHEST_TOKEN] == pytest.approx(33 * np.log(2), abs=1e-9)
    logits = np.full((1, vocab), -200, dtype=np.float32)
    logits[0, 5] = 3.0
    logits[0, HIGHEST_TOKEN] = 3.0 + temperature * (noise[5] - noise[HIGHEST_TOKEN] + offset)
    tokens = sample_tokens(logits, keys, positions, temperature=temperature, vocab_size=vocab)
    assert tokens.tolist() == [HIGHEST_TOKEN if offset > 0 else 5] or offset == 0
    _require_equal(logits, keys, positions, temperature, vocab)
