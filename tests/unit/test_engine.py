"""The embedded engine against plain transformers prefill: same logits, same tokens, any batch, any prompt lengths."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from inference.engine import TorchEngine
from inference.kv_pool import KvPool
from protocol.errors import ConfigError, Fault
from protocol.ports import SampleRequest
from protocol.sampling import replay_gaps, scores
from protocol.toploc import to_bf16_bits
from tests.support.scenario import make_model

MAX_TOKENS, STOPS = 6, (1,)
TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("engine") / "policy", 5)


@pytest.fixture(scope="module")
def engine(folder):
    engine = TorchEngine()
    engine.load(folder)
    return engine


@pytest.fixture(scope="module")
def reference(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def make_requests(seed, lengths, repeat=1):
    rng = np.random.default_rng(seed)
    prompts = [tuple(int(t) for t in rng.integers(2, 32, n)) for n in lengths]
    return [SampleRequest(prompt, int(rng.integers(0, 2**63))) for prompt in prompts for _ in range(repeat)]


def generate(engine, requests, **changes):
    options = {"temperature": 1.0, "max_tokens": MAX_TOKENS, "stop_tokens": STOPS, **changes}
    return engine.generate(requests, **options)


def prefill(reference, request, tokens):
    """Logits and post-norm states of every completion position, by one full forward pass without a cache."""
    with torch.inference_mode():
        ids = torch.tensor([[*request.prompt, *tokens]])
        hidden = reference.model(ids, use_cache=False).last_hidden_state[0]
        rows = slice(len(request.prompt) - 1, len(request.prompt) + len(tokens) - 1)
        return reference.lm_head(hidden)[rows].numpy(), hidden[rows].numpy()


@pytest.mark.parametrize("lengths", [(7,) * 5, (1, 2, 7, 7, 30), (3, 40), (1,)], ids=str)
def test_every_token_is_the_one_full_prefill_gives(engine, reference, lengths):
    requests = make_requests(1, lengths, repeat=4)
    for request, made in zip(requests, generate(engine, requests), strict=True):
        logits, hidden = prefill(reference, request, made.tokens)
        n = len(made.tokens)
        z = scores(logits, np.full(n, request.key, np.uint64), np.arange(n), temperature=1.0, vocab_size=32)
        assert replay_gaps(z, np.array(made.tokens)).max() < TOLERANCE
        assert made.hidden.shape == (n, 64)
        ulps = np.abs(made.hidden.astype(np.int64) - to_bf16_bits(hidden).astype(np.int64))
        assert ulps.max() <= 1  # fp32 rounding may flip the last bit of bf16, nothing more
        assert (ulps == 0).mean() > 0.99


def spy_on_forward(engine, monkeypatch):
    """Feeds and states of every forward pass, in order."""
    seen = []
    policy = engine._policy

    def forward(pool, feed):
        states = policy.forward(pool, feed)
        seen.append((feed, states))
        return states

    monkeypatch.setattr(engine, "_policy", policy._replace(forward=forward))
    return seen


def test_logits_of_cached_decoding_are_those_of_full_prefill(engine, reference, monkeypatch):
    seen = spy_on_forward(engine, monkeypatch)
    [request] = make_requests(2, (9,))
    [made] = generate(engine, [request], stop_tokens=())
    logits, _ = prefill(reference, request, made.tokens)
    assert len(made.tokens) == MAX_TOKENS
    assert np.abs(np.concatenate([states.logits.numpy() for _, states in seen]) - logits).max() < 1e-4


def test_low_temperature_equals_greedy_generation(engine, reference):
    requests = make_requests(3, (5, 8, 13))
    for request, made in zip(requests, generate(engine, requests, temperature=1e-4), strict=True):
        with torch.inference_mode():
            ids = reference.generate(
                torch.tensor([request.prompt]),
                do_sample=False,
                max_new_tokens=MAX_TOKENS,
                eos_token_id=1,
                pad_token_id=0,
            )
        assert made.tokens == tuple(ids[0, len(request.prompt) :].tolist())


def test_completions_end_at_a_stop_token_or_at_the_limit(engine):
    made = generate(engine, make_requests(4, (7,) * 8, repeat=16), temperature=3.0)
    lengths = {len(one.tokens) for one in made}
    assert len(lengths) > 2
    for one in made:
        assert 1 not in one.tokens[:-1]
        assert one.tokens[-1] == 1 or len(one.tokens) == MAX_TOKENS


def assert_equal_but_near_ties(reference, requests, left, right):
    for request, a, b in zip(requests, left, right, strict=True):
        if a.tokens == b.tokens:
            # One bf16 ulp, or the rounding noise of fp32 sums, which is many ulps of an entry that is nearly zero.
            x, y = ((one.hidden.astype(np.uint32) << 16).view(np.float32) for one in (a, b))
            assert np.allclose(x, y, rtol=2.0**-7, atol=1e-4)
            continue
        n = next(i for i, (x, y) in enumerate(zip(a.tokens, b.tokens, strict=False)) if x != y)
        logits, _ = prefill(reference, request, a.tokens)
        z = scores(logits[n : n + 1], np.array([request.key], np.uint64), np.array([n]), temperature=1.0, vocab_size=32)
        assert replay_gaps(z, np.array([b.tokens[n]]))[0] < TOLERANCE


@given(
    seed=st.integers(0, 2**16),
    lengths=st.lists(st.integers(1, 24), min_size=1, max_size=6),
    budget=st.sampled_from([30, 64, 200, 65_536]),
)
@settings(max_examples=8, deadline=None)
def test_result_does_not_depend_on_the_batch(folder, reference, seed, lengths, budget):
    small = TorchEngine(batch_tokens_max=budget)
    small.load(folder)
    requests = make_requests(seed, lengths, repeat=2)
    alone = [generate(small, [request])[0] for request in requests]
    assert_equal_but_near_ties(reference, requests, alone, generate(small, requests))
    order = np.random.default_rng(seed).permutation(len(requests))
    shuffled = generate(small, [requests[i] for i in order])
    assert_equal_but_near_ties(reference, [requests[i] for i in order], [alone[i] for i in order], shuffled)


def test_the_pool_keeps_the_token_budget(folder, monkeypatch):
    pools = []
    monkeypatch.setattr("inference.engine.KvPool", lambda *size: pools.append(KvPool(*size)) or pools[-1])
    engine = TorchEngine(batch_tokens_max=60)
    engine.load(folder)
    pools.clear()
    requests = make_requests(6, (3, 9, 9, 14, 30, 2, 2, 54), repeat=3)
    assert len(generate(engine, requests)) == len(requests)
    assert pools
    assert max(pool.num_rows * pool.num_columns for pool in pools) <= 60
    # Short requests are not padded to the width of the longest while the budget is short.
    assert max(pool.num_rows for pool in pools) >= 60 // (2 * (9 + MAX_TOKENS))


def test_equal_prompts_are_prefilled_once(folder, monkeypatch):
    requests = make_requests(7, (7, 7), repeat=16)
    for budget in (65_536, 3 * (7 + MAX_TOKENS)):  # all rows at once; three rows, refilled
        engine = TorchEngine(batch_tokens_max=budget)
        engine.load(folder)
        seen = spy_on_forward(engine, monkeypatch)
        generate(engine, requests)
        prefilled = [row.tolist() for feed, _ in seen if feed.tokens.shape[1] > 1 for row in feed.tokens]
        assert sorted(prefilled) == sorted(list(prompt) for prompt in {request.prompt for request in requests})


def test_the_vocabulary_can_be_smaller_than_the_models(folder):
    engine = TorchEngine(vocab_size=5)
    engine.load(folder)
    made = generate(engine, make_requests(8, (7,) * 4, repeat=8))
    assert max(token for one in made for token in one.tokens) < 5


def test_tied_heads_are_loaded(tmp_path):
    tied = make_model(tmp_path / "tied", 9, tie=True)
    engine = TorchEngine()
    engine.load(tied)
    reference = AutoModelForCausalLM.from_pretrained(tied, dtype=torch.float32).eval()
    [request] = make_requests(9, (7,))
    [made] = generate(engine, [request])
    logits, _ = prefill(reference, request, made.tokens)
    n = len(made.tokens)
    z = scores(logits, np.full(n, request.key, np.uint64), np.arange(n), temperature=1.0, vocab_size=32)
    assert replay_gaps(z, np.array(made.tokens)).max() < TOLERANCE


def break_folder(folder, target, how):
    shutil.copytree(folder, target)
    weights, config = target / "model.safetensors", target / "config.json"
    tensors = {name: tensor.clone() for name, tensor in load_file(weights).items()}  # not mapped: the file is rewritten
    if how == "missing tensor":
        tensors.pop("model.norm.weight")
        save_file(tensors, weights)
    elif how == "unknown tensor":
        save_file({**tensors, "extra": torch.zeros(1)}, weights)
    elif how == "wrong shape":
        save_file({**tensors, "model.norm.weight": torch.zeros(3)}, weights)
    elif how == "truncated":
        weights.write_bytes(weights.read_bytes()[:-7])
    elif how == "pickle":
        torch.save(tensors, weights)
    elif how == "no config":
        config.unlink()
    elif how == "code":
        config.write_text(json.dumps({**json.loads(config.read_text()), "auto_map": {"AutoConfig": "evil.Config"}}))
    elif how == "unknown architecture":
        config.write_text(json.dumps({**json.loads(config.read_text()), "model_type": "nonesuch"}))
    return target


HOWS = [
    "missing tensor",
    "unknown tensor",
    "wrong shape",
    "truncated",
    "pickle",
    "no config",
    "code",
    "unknown architecture",
]


@pytest.mark.parametrize("how", HOWS)
def test_a_bad_folder_is_a_fault_and_the_old_policy_stays(folder, tmp_path, how):
    engine = TorchEngine()
    engine.load(folder)
    requests = make_requests(10, (7, 7))
    before = generate(engine, requests)
    with pytest.raises(Fault):
        engine.load(break_folder(folder, tmp_path / "broken", how))
    assert [one.tokens for one in generate(engine, requests)] == [one.tokens for one in before]


def test_a_policy_with_nan_weights_is_a_fault(folder, tmp_path):
    target = tmp_path / "nan"
    shutil.copytree(folder, target)
    tensors = {name: tensor.clone() for name, tensor in load_file(target / "model.safetensors").items()}
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, target / "model.safetensors")
    engine = TorchEngine()
    engine.load(target)
    with pytest.raises(Fault, match="not finite"):
        generate(engine, make_requests(11, (7,)))


def test_misuse_is_named():
    with pytest.raises(Fault, match="no policy is loaded"):
        generate(TorchEngine(), make_requests(12, (7,)))
    with pytest.raises(ConfigError, match="float33"):
        TorchEngine(dtype="float33")


def test_an_empty_prompt_is_a_fault(engine):
    with pytest.raises(Fault, match="empty"):
        generate(engine, [SampleRequest((), 1)])
    assert generate(engine, []) == []
