"""Public symptoms of batching: a completion's tokens follow from its key and position, whatever else vLLM is doing."""

from __future__ import annotations

import random

import pytest

from inference import vllm_runtime
from inference.vllm_options import VllmOptions, compute_kv_size, make_config
from models.policy import read_config
from tests.vllm.kit import make_family, make_requests, require_replayable, require_same, run

LENGTHS = [3, 60, 9, 21, 2, 34, 5, 100]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_family(tmp_path_factory.mktemp("batches") / "policy", "llama-tied-gqa", 21)


@pytest.fixture
def loaded(engine, folder):
    engine.load(folder)
    return engine


@pytest.fixture
def alone(loaded):
    """Requests and their completions, each made alone."""
    requests = make_requests(30, LENGTHS * 3)
    return requests, [run(loaded, [one])[0] for one in requests]


def test_seeds_changed_by_batch_order(loaded, alone):
    requests, expected = alone
    order = list(range(len(requests)))
    for seed in range(3):
        random.Random(seed).shuffle(order)
        made = run(loaded, [requests[i] for i in order])
        require_same(made, [expected[i] for i in order])


def test_seeds_changed_by_an_unseeded_neighbour(loaded, alone, monkeypatch):
    """Rows of vLLM's own sampler, without a seed, come and go in the same batches."""
    from vllm import SamplingParams

    requests, expected = alone
    runtime = loaded._runtime
    step, strangers = runtime._step, []

    def step_with_strangers():
        if len(strangers) < 20:
            params = SamplingParams(
                temperature=1.0, max_tokens=3 + len(strangers) % 5, ignore_eos=True, detokenize=False
            )
            strangers.append(runtime._submit([5, 6, 7 + len(strangers)], params))
        return [output for output in step() if output.request_id in mine]

    mine = {f"row-{number}" for number in range(100_000)}
    submit = runtime._submit

    def submit_stranger_or_row(tokens, params, number=""):
        return submit(tokens, params, number or f"stranger-{len(strangers)}")

    monkeypatch.setattr(runtime, "_submit", submit_stranger_or_row)
    monkeypatch.setattr(runtime, "_step", step_with_strangers)
    require_same(run(loaded, requests), expected)
    assert len(strangers) == 20
    while runtime._llm.has_unfinished_requests():
        step()


@pytest.mark.parametrize("rows", [1, 3])
def test_fewer_rows_at_a_time(make_engine, folder, alone, rows):
    requests, expected = alone
    engine = make_engine(options=VllmOptions(max_num_seqs=rows))
    engine.load(folder)
    require_same(run(engine, requests), expected)


def test_prompts_in_chunks(make_engine, folder, alone, monkeypatch):
    """A prompt that is prefilled in pieces of at most 16 tokens has one state to sample from, behind its last token."""
    requests, expected = alone
    arguments = vllm_runtime.Runtime._arguments

    def in_chunks(self, *given):
        return {**arguments(self, *given), "max_num_batched_tokens": 16}

    monkeypatch.setattr(vllm_runtime.Runtime, "_arguments", in_chunks)
    engine = make_engine(options=VllmOptions(max_num_seqs=8))
    engine.load(folder)
    require_same(run(engine, requests), expected)


def test_a_prefix_cache_that_hits(loaded, folder):
    """Whole blocks of a prompt come from the cache the second time; the states that tokens are sampled from do not."""
    requests = make_requests(31, [300] * 4)
    first = run(loaded, requests)
    hits = count_cached(loaded, lambda: require_same(run(loaded, requests), first))
    assert hits >= 4 * 256
    require_replayable(folder, requests, first)


def count_cached(engine, work):
    """Prompt tokens that vLLM did not compute while `work` ran."""
    runtime, counts = engine._runtime, []
    step = runtime._step

    def step_and_count():
        outputs = step()
        counts.extend(output.num_cached_tokens or 0 for output in outputs if output.finished)
        return outputs

    runtime._step = step_and_count
    try:
        work()
    finally:
        del runtime._step
    return sum(counts)


def test_seeds_changed_by_preemption(make_engine, folder, monkeypatch):
    """A KV cache too small for all rows at full length: vLLM throws rows out and computes them again from their tokens.
    Nothing of a completion changes, and a state is caught once for every token."""
    from vllm.v1.core.sched.scheduler import Scheduler

    requests = make_requests(32, [20, 50, 90, 110] * 3)
    roomy = make_engine()
    roomy.load(folder)
    expected = run(roomy, requests, max_tokens=120, stop_tokens=())

    thrown_out = []
    preempt = Scheduler._preempt_request

    def count(self, request, *given, **named):
        thrown_out.append(request.request_id)
        return preempt(self, request, *given, **named)

    monkeypatch.setattr(Scheduler, "_preempt_request", count)
    config = make_config(read_config(folder))
    full = compute_kv_size(config, VllmOptions(max_num_seqs=1), "cpu", "float32")
    tight = make_engine(options=VllmOptions(max_num_seqs=12, kv_cache_gib=full / 2**30))
    tight.load(folder)
    made = run(tight, requests, max_tokens=120, stop_tokens=())
    assert len(thrown_out) >= 3
    assert require_same(made, expected) == 12 * 120
    require_replayable(folder, requests, made)
