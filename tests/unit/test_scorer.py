"""The verifier's prefill against the engine's decode and against plain arithmetic: same states, same tokens, any batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inference.engine import TorchEngine
from models.policy import load_model
from protocol.errors import ConfigError, Fault
from protocol.ports import SampleRequest
from tests.support.forge import edit_weights
from tests.support.scenario import make_model
from verifier.scorer import TorchScorer, _compute_logprobs

TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("scorer") / "policy", 9)


@pytest.fixture(scope="module")
def engine(folder):
    made = TorchEngine()
    made.load(folder)
    return made


@pytest.fixture(scope="module")
def scorer(folder):
    made = TorchScorer()
    made.load(folder)
    return made


def make_requests(seed, lengths):
    rng = np.random.default_rng(seed)
    return [SampleRequest(tuple(rng.integers(2, 32, n).tolist()), int(rng.integers(0, 2**63))) for n in lengths]


def generate(engine, requests, temperature=1.0):
    return engine.generate(requests, temperature=temperature, max_tokens=6, stop_tokens=(1,))


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32 - 1), st.lists(st.integers(1, 24), min_size=1, max_size=12))
def test_what_the_engine_decodes_the_scorer_replays(engine, scorer, seed, lengths):
    requests = make_requests(seed, lengths)
    made = generate(engine, requests)
    scored = scorer.score(requests, [one.tokens for one in made], temperature=1.0)
    for one, mine in zip(made, scored, strict=True):
        assert mine.gaps.shape == mine.logprobs.shape == (len(one.tokens),)
        assert mine.hidden.shape == one.hidden.shape
        assert mine.hidden.dtype == np.uint16
        assert mine.gaps.max() <= TOLERANCE
        assert np.abs(mine.hidden.astype(int) - one.hidden.astype(int)).max() <= 1 or near(mine.hidden, one.hidden)


def near(a, b):
    """Within two bf16 ulps of each value, or tiny both."""
    x, y = (torch.from_numpy(v.astype(np.int32) << 16).view(torch.float32).numpy() for v in (a, b))
    return np.allclose(x, y, rtol=2**-7, atol=1e-4)


def test_log_probabilities_and_gaps_by_hand(folder, scorer):
    """One completion, one forward pass without batching, numpy in float64."""
    from protocol.sampling import gumbel_noise

    [request] = make_requests(3, [7])
    completion, temperature = (4, 9, 17, 1), 0.8
    [scored] = scorer.score([request], [completion], temperature=temperature)
    model = load_model(folder)
    with torch.inference_mode():
        logits = model(torch.tensor([[*request.prompt, *completion]])).logits[0].double().numpy()
    for position, token in enumerate(completion):
        row = logits[len(request.prompt) - 1 + position] / temperature
        expected = row[token] - np.log(np.exp(row - row.max()).sum()) - row.max()
        assert scored.logprobs[position] == pytest.approx(expected, abs=1e-4)
        z = row + gumbel_noise(np.array([request.key], dtype=np.uint64), np.array([position]), 32)[0]
        assert scored.gaps[position] == pytest.approx(z.max() - z[token], abs=1e-4)


@pytest.mark.parametrize("limit", [1, 40, 10**6])
def test_scores_do_not_depend_on_the_batch(folder, engine, scorer, limit):
    requests = make_requests(4, [3, 20, 1, 9, 9, 14])
    completions = [one.tokens for one in generate(engine, requests)]
    other = TorchScorer(batch_tokens_max=limit)
    other.load(folder)
    together = scorer.score(requests, completions, temperature=1.0)
    apart = other.score(requests, completions, temperature=1.0)
    reordered = scorer.score(requests[::-1], completions[::-1], temperature=1.0)[::-1]
    for a, b, c in zip(together, apart, reordered, strict=True):
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5)
        np.testing.assert_allclose(a.gaps, c.gaps, atol=1e-5)
        assert near(a.hidden, b.hidden)
        assert near(a.hidden, c.hidden)


def test_logits_in_chunks_are_the_same(scorer, engine, monkeypatch):
    requests = make_requests(5, [5] * 8)
    completions = [one.tokens for one in generate(engine, requests)]
    whole = scorer.score(requests, completions, temperature=1.0)
    monkeypatch.setattr("verifier.scorer.LOGITS_MAX", 96)  # three rows of logits at a time
    parts = scorer.score(requests, completions, temperature=1.0)
    for a, b in zip(whole, parts, strict=True):
        np.testing.assert_allclose(a.gaps, b.gaps, atol=1e-5)
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5)


def test_another_temperature_has_other_gaps(scorer, engine):
    requests = make_requests(6, [7] * 32)
    completions = [one.tokens for one in generate(engine, requests, temperature=0.5)]
    assert max(one.gaps.max() for one in scorer.score(requests, completions, temperature=0.5)) <= TOLERANCE
    assert max(one.gaps.max() for one in scorer.score(requests, completions, temperature=1.0)) > TOLERANCE


def test_a_padded_vocabulary_is_cut(tmp_path):
    """Tokens at or above `vocab_size` have no score: neither noise nor log-probability goes to them."""
    folder = make_model(tmp_path / "padded", 10, vocab=64)
    scorer, engine = TorchScorer(vocab_size=32), TorchEngine(vocab_size=32)
    scorer.load(folder)
    engine.load(folder)
    requests = make_requests(7, [5] * 16)
    completions = [one.tokens for one in generate(engine, requests)]
    assert max(max(one) for one in completions) < 32
    assert max(one.gaps.max() for one in scorer.score(requests, completions, temperature=1.0)) <= TOLERANCE
    whole = TorchScorer()
    whole.load(folder)
    cut = scorer.score(requests, completions, temperature=1.0)
    full = whole.score(requests, completions, temperature=1.0)
    assert all((a.logprobs > b.logprobs).all() for a, b in zip(cut, full, strict=True))


def test_nothing_gives_nothing(scorer):
    assert scorer.score([], [], temperature=1.0) == []


def test_without_a_policy_there_is_no_verdict():
    with pytest.raises(Fault, match="no policy is loaded"):
        TorchScorer().score(make_requests(1, [3]), [(1,)], temperature=1.0)


@pytest.mark.parametrize("where", ["lm_head", "model.norm"])
def test_numbers_that_are_not_finite_are_a_fault(folder, tmp_path, where):
    def edit(name, tensor):
        return tensor.new_full(tensor.shape, float("nan")) if where in name else tensor

    scorer = TorchScorer()
    scorer.load(edit_weights(folder, tmp_path / "nan", edit))
    with pytest.raises(Fault, match="not finite"):
        scorer.score(make_requests(1, [3]), [(4, 1)], temperature=1.0)


def test_a_damaged_policy_leaves_the_old_one(folder, tmp_path, engine):
    scorer = TorchScorer()
    scorer.load(folder)
    requests = make_requests(8, [4, 6])
    completions = [one.tokens for one in generate(engine, requests)]
    before = scorer.score(requests, completions, temperature=1.0)
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    (damaged / "config.json").write_bytes((folder / "config.json").read_bytes())
    (damaged / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-100])
    with pytest.raises(Fault):
        scorer.load(damaged)
    after = scorer.score(requests, completions, temperature=1.0)
    assert [one.gaps.tolist() for one in before] == [one.gaps.tolist() for one in after]


@pytest.mark.parametrize("dtype", ["float33", "pickle", "nn"])
def test_unknown_dtypes_are_a_configuration_error(dtype):
    with pytest.raises(ConfigError, match="dtype"):
        TorchScorer(dtype=dtype)


@pytest.mark.parametrize("tokens", [(32, 3), (3, 32), (-1, 3), (3, -1), (2**40, 3)])
def test_tokens_the_policy_does_not_have_are_a_fault(scorer, tokens):
    """An environment may know more tokens than the policy: that ends no process, and -1 is not the last token."""
    with pytest.raises(Fault, match=r"the policy has no token"):
        scorer.score([SampleRequest((5, 6), 1)], [tokens], temperature=1.0)


def test_a_prompt_the_policy_cannot_read_is_a_fault(scorer):
    with pytest.raises(Fault, match="the policy has no token 99, limit 31"):
        scorer.score([SampleRequest((5, 99), 1)], [(3,)], temperature=1.0)


def test_tokens_beyond_the_environments_vocabulary_are_a_fault(folder):
    narrow = TorchScorer(vocab_size=16)
    narrow.load(folder)
    with pytest.raises(Fault, match="the policy has no token 20, limit 15"):
        narrow.score([SampleRequest((20, 6), 1)], [(3, 20)], temperature=1.0)


def test_logits_that_are_elsewhere_give_the_same_gaps_winners_and_log_probabilities(engine, scorer, monkeypatch):
    requests = make_requests(11, [3, 9, 4])
    completions = [one.tokens for one in generate(engine, requests)]
    completions[1] = (2, *completions[1][1:])
    here = scorer.score(requests, completions, temperature=0.8)
    monkeypatch.setattr("models.gumbel.is_elsewhere", lambda logits: True)
    for a, b in zip(here, scorer.score(requests, completions, temperature=0.8), strict=True):
        assert a.gaps.tobytes() == b.gaps.tobytes()
        assert a.winners.tolist() == b.winners.tolist()
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-12)


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
@pytest.mark.parametrize("scale", [0.01, 5.0, 40.0])
def test_log_probabilities_in_float32_are_those_of_float64(temperature, scale):
    """A vocabulary of 152,064, flat and peaked."""
    rng = np.random.default_rng(3)
    logits = (scale * rng.standard_normal((4, 152_064))).astype(np.float32)
    tokens = np.array([0, 151_935, int(logits[2].argmax()), int(logits[3].argmin())])
    exact = logits.astype(np.float64) / temperature
    peak = exact.max(axis=1)
    exact_logprobs = exact[np.arange(4), tokens] - peak - np.log(np.exp(exact - peak[:, None]).sum(axis=1))
    found = _compute_logprobs(torch.from_numpy(logits), tokens, temperature)
    assert found.dtype == np.float64
    assert np.abs(found - exact_logprobs).max() < 2e-6


def test_batches_are_sorted_and_padded_by_at_most_a_tenth_once_they_are_large(scorer):
    lengths = [int(length) for length in np.random.default_rng(5).integers(8, 400, 300)]
    requests = [SampleRequest((2,) * length, 0) for length in lengths]
    batches = list(scorer._batches(requests, [(3,)] * len(lengths)))
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    order = [lengths[i] for batch in batches for i in batch]
    assert order == sorted(order)
    for batch in batches:
        used, padded = sum(lengths[i] + 1 for i in batch), (max(lengths[i] for i in batch) + 1) * len(batch)
        assert padded <= 16_384
        assert padded <= 1.1 * used or used < 2048
