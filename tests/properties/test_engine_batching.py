"""The engine's completions against a reference without a batch: any order, neighbours, budget and refill schedule.

The reference (`complete`) knows neither rows, pools nor a cache: it runs the whole sequence through transformers for every
token and draws by `choose(scores(...))`. Logits of both differ by fp32 rounding only, so tokens are equal where the two best
scores are further apart than `TOLERANCE`, and seeds are drawn such that near-ties are all but absent.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from inference.engine import TorchEngine
from protocol.errors import Fault
from protocol.ports import SampleRequest
from protocol.sampling import choose, replay_gaps, scores
from protocol.toploc import to_bf16_bits
from tests.support.scenario import make_model

STOPS = (1, 2)
TOLERANCE = 1e-3
VOCAB = 32


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("engine") / "policy", 5)


@pytest.fixture(scope="module")
def reference(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def engines(folder):
    @lru_cache
    def make(budget):
        engine = TorchEngine(batch_tokens_max=budget)
        engine.load(folder)
        return engine

    return make


def answer(completion):
    """An environment that answers every first stop token by how long the completion is, and ends at the second."""
    if completion[-1] == 2 or len(completion) > 12:
        return ()
    return tuple(3 + (len(completion) + i) % 20 for i in range(len(completion) % 4))


def complete(reference, request, temperature, max_tokens):
    """Tokens and sampled positions' states of one request; None where the draw is a near-tie."""
    tokens, states = [], []
    while len(tokens) < max_tokens:
        with torch.inference_mode():
            hidden = reference.model(torch.tensor([[*request.prompt, *tokens]]), use_cache=False).last_hidden_state[
                0, -1:
            ]
            logits = reference.lm_head(hidden).numpy()
        where = np.array([request.key], np.uint64), np.array([len(tokens)])
        z = scores(logits, *where, temperature=temperature, vocab_size=VOCAB)
        best = choose(z)
        z_rest = z.copy()
        z_rest[0, best] = -np.inf
        if replay_gaps(z, choose(z_rest))[0] < TOLERANCE:
            return None
        tokens.append(int(best[0]))
        states.append(to_bf16_bits(hidden.numpy())[0])
        if tokens[-1] in STOPS:
            more = () if request.respond is None else request.respond(tuple(tokens))
            if not more or len(tokens) + len(more) >= max_tokens:
                break
            tokens += more
    return tuple(tokens), np.stack(states)


def check(reference, requests, made, temperature, max_tokens):
    for request, one in zip(requests, made, strict=True):
        expected = complete(reference, request, temperature, max_tokens)
        if expected is None:
            continue
        tokens, hidden = expected
        assert one.tokens == tokens
        assert one.hidden.shape == hidden.shape
        x, y = ((bits.astype(np.uint32) << 16).view(np.float32) for bits in (one.hidden, hidden))
        assert np.allclose(x, y, rtol=2.0**-7, atol=1e-4)


@given(
    seed=st.integers(0, 2**16),
    lengths=st.lists(st.integers(1, 24), min_size=1, max_size=5),
    repeats=st.integers(1, 4),
    max_tokens=st.integers(1, 14),
    rows=st.integers(1, 9),
    temperature=st.sampled_from([0.3, 1.0, 4.0]),
    speaking=st.booleans(),
)
@settings(max_examples=15, deadline=None)
def test_completions_are_those_of_the_plain_loop(
    engines, reference, seed, lengths, repeats, max_tokens, rows, temperature, speaking
):
    """Prompts of one token to many, groups and single rows, one row to all of them, with answers and without."""
    rng = np.random.default_rng(seed)
    prompts = [tuple(int(t) for t in rng.integers(3, VOCAB, n)) for n in lengths]
    requests = [
        SampleRequest(prompt, int(rng.integers(0, 2**63)), answer if speaking else None)
        for prompt in prompts
        for _ in range(repeats)
    ]
    requests = [requests[i] for i in rng.permutation(len(requests))]
    budget = rows * (max(lengths) + max_tokens)
    made = engines(budget).generate(requests, temperature=temperature, max_tokens=max_tokens, stop_tokens=STOPS)
    check(reference, requests, made, temperature, max_tokens)


def make_requests(seed, lengths, repeat):
    rng = np.random.default_rng(seed)
    prompts = [tuple(int(t) for t in rng.integers(3, VOCAB, n)) for n in lengths]
    return [SampleRequest(prompt, int(rng.integers(0, 2**63)), answer) for prompt in prompts for _ in range(repeat)]


def generate(engine, requests, **changes):
    options = {"temperature": 1.0, "max_tokens": 12, "stop_tokens": STOPS, **changes}
    return [one.tokens for one in engine.generate(requests, **options)]


def test_seeds_are_not_changed_by_an_unseeded_neighbour_in_the_batch(engines):
    """Public symptom: a request's seed has no effect once a request without a seed shares its batch.

    There is no request without a key, and none draws from a shared generator: neighbours of any kind change nothing.
    """
    ours = make_requests(1, (5, 9), 3)
    alone = generate(engines(4096), ours)
    torch.manual_seed(99)
    neighbours = [SampleRequest(request.prompt, 0) for request in make_requests(2, (5, 2, 30), 4)]
    mixed = [one for pair in zip(neighbours, ours, strict=False) for one in pair]
    assert generate(engines(4096), mixed)[1::2] == alone
    twins = generate(engines(4096), [ours[0]] * 5 + ours)  # the same key five times over, too
    assert twins == [alone[0]] * 5 + alone


def test_seeds_are_not_changed_by_batch_order(engines):
    """Public symptom: seeds follow the place in the batch instead of the request."""
    requests = make_requests(3, (2, 7, 7, 20), 3)
    made = generate(engines(4096), requests)
    for seed in range(3):
        order = np.random.default_rng(seed).permutation(len(requests))
        shuffled = generate(engines(4096), [requests[i] for i in order])
        assert shuffled == [made[i] for i in order]


def test_seeds_are_not_changed_by_preemption(engines):
    """Public symptom: a row that is evicted under memory pressure and restarted draws other tokens.

    This engine never evicts; the tightest budget, in which every row waits for the one before it, gives the same tokens.
    """
    requests = make_requests(4, (6, 6, 20), 4)
    wide = generate(engines(65_536), requests)
    assert generate(engines(20 + 12), requests) == wide
    assert generate(engines(2 * (20 + 12)), requests) == wide


@pytest.mark.parametrize("temperature", [0.25, 0.7, 1.0, 3.0])
def test_log_probs_hold_when_the_temperature_is_not_one(engines, reference, temperature):
    """Public symptom: log-probs off when T != 1 (drawn from one distribution, reported or replayed from another).

    First tokens of many keys have the frequencies of softmax(logits / T): chi-squared against them.
    """
    prompt, draws = (7, 9, 11), 4000
    requests = [SampleRequest(prompt, key * 0x9E3779B97F4A7C15 % 2**63) for key in range(draws)]
    made = generate(engines(65_536), requests, temperature=temperature, max_tokens=1)
    counts = np.bincount([tokens[0] for tokens in made], minlength=VOCAB)
    with torch.inference_mode():
        logits = reference(torch.tensor([prompt])).logits[0, -1].double()
    expected = torch.softmax(logits / temperature, -1).numpy() * draws
    often = expected >= 5
    statistic = ((counts[often] - expected[often]) ** 2 / expected[often]).sum()
    freedom = max(1, int(often.sum()) - 1)
    assert statistic < freedom + 6 * (2 * freedom) ** 0.5 + 10  # six sigma
    assert counts[~often].sum() <= expected[~often].sum() + 6 * expected[~often].sum() ** 0.5 + 6


@pytest.mark.parametrize("stops", [(), STOPS, tuple(range(VOCAB))], ids=["limit", "some", "all"])
def test_completions_of_one_token_do_not_crash(engines, reference, stops):
    """Public symptom: a crash on completions of one token, by the limit or by a stop token first thing."""
    requests = [SampleRequest((3, 4), 5), *make_requests(5, (1, 8), 6)]
    one = engines(40).generate(requests, temperature=1.0, max_tokens=1, stop_tokens=stops)
    assert [(len(made.tokens), made.hidden.shape) for made in one] == [(1, (1, 64))] * len(requests)
    if len(stops) == VOCAB:
        plain = [SampleRequest(request.prompt, request.key) for request in requests]
        made = engines(60).generate(plain, temperature=1.0, max_tokens=9, stop_tokens=stops)
        assert [(len(x.tokens), x.hidden.shape) for x in made] == [(1, (1, 64))] * len(requests)
        assert [x.tokens for x in made] == [x.tokens for x in one]


def test_a_request_that_alone_exceeds_the_budget_is_a_fault(engines):
    with pytest.raises(
        Fault, match=r"prompt of 30 tokens with up to 12 more needs 42 .* limit 41: raise compute.batch_tokens_max"
    ):
        generate(engines(41), make_requests(6, (3, 30), 1))
    assert len(generate(engines(42), make_requests(6, (3, 30), 1))) == 2


def test_answers_that_leave_no_room_end_the_completion(engines):
    """An engine trusts no `respond`: a longer answer than fits is the end, as protocol.episodes has it."""
    requests = [SampleRequest((3, 4, 5), key, lambda completion: (7,) * 50) for key in range(8)]
    for tokens in generate(engines(4096), requests, stop_tokens=tuple(range(VOCAB))):
        assert len(tokens) == 1


def test_a_failing_environment_is_not_swallowed(engines):
    def respond(completion):
        raise Fault("tool server is down")

    with pytest.raises(Fault, match="tool server is down"):
        generate(engines(4096), [SampleRequest((3, 4), 1, respond)], stop_tokens=tuple(range(VOCAB)))


@pytest.mark.parametrize("answered", [(3, VOCAB), (-1,)])
def test_answers_of_unknown_ids_are_a_fault(engines, answered):
    with pytest.raises(Fault, match="the policy's ids go from 0 to 31"):
        generate(engines(4096), [SampleRequest((3, 4), 1, lambda _: answered)], stop_tokens=tuple(range(VOCAB)))
