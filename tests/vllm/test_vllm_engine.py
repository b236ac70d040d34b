"""The vLLM engine against the embedded one and the verifier: same tokens, same states, whatever the architecture."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from inference.engine import TorchEngine
from protocol.errors import Fault
from protocol.ports import SampleRequest
from protocol.presets import PROFILE_FP32
from protocol.toploc import build_proofs, match_proofs
from tests.support.scenario import make_model
from tests.vllm.kit import FAMILIES, make_family, make_requests, require_replayable, require_same, run
from verifier.scorer import TorchScorer


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """The demo's shape."""
    return make_model(tmp_path_factory.mktemp("demo") / "policy", 5)


@pytest.fixture
def on_demo(engine, demo):
    engine.load(demo)
    return engine


@pytest.fixture(scope="module")
def torch_on_demo(demo):
    made = TorchEngine()
    made.load(demo)
    return made


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_and_states_are_those_of_the_embedded_engine(engine, tmp_path, family):
    """N >= 1,000 sampled tokens per family; the verifier's prefill replays all of them."""
    folder = make_family(tmp_path / "policy", family, 3)
    engine.load(folder)
    embedded = TorchEngine()
    embedded.load(folder)
    requests = make_requests(1, [1, 2, 17, 40, 100, 33, 5, 8] * 8)
    made = run(engine, requests)
    assert require_same(made, run(embedded, requests)) >= 1000
    assert require_replayable(folder, requests, made) >= 1000


def test_the_demo_shape(on_demo, torch_on_demo, demo):
    requests = make_requests(2, [7] * 200, vocab=32)
    made = run(on_demo, requests, max_tokens=6)
    assert require_same(made, run(torch_on_demo, requests, max_tokens=6)) >= 800
    assert require_replayable(demo, requests, made) >= 800


def test_the_other_way_round_vllm_confirms_what_torch_made(on_demo, torch_on_demo, demo):
    """Commitments made from torch's states match vLLM's own states, and vLLM's prefill of torch's completions gives the
    verifier's log-probabilities."""
    requests = make_requests(3, [3, 9, 20, 11] * 8, vocab=32)
    theirs = run(torch_on_demo, requests)
    proofs = build_proofs([one.hidden for one in theirs], topk=PROFILE_FP32.topk, chunk=PROFILE_FP32.chunk)
    ours = run(on_demo, requests)
    assert [one.tokens for one in ours] == [one.tokens for one in theirs]
    matches = match_proofs(
        [one.hidden for one in ours],
        proofs,
        topk=PROFILE_FP32.topk,
        chunk=PROFILE_FP32.chunk,
        modulus_min=PROFILE_FP32.modulus_min,
    )
    for match in (match for chunks in matches for match in chunks):
        assert match.mismatches <= PROFILE_FP32.exponent_mismatches_max
        assert match.mantissa_mean * 1000 <= PROFILE_FP32.mantissa_mean_milli_max
    scorer = TorchScorer()
    scorer.load(demo)
    scored = scorer.score(requests, [one.tokens for one in theirs], temperature=1.0)
    for request, one, mine in zip(requests, theirs, scored, strict=True):
        prompt = [*request.prompt, *one.tokens]
        found = on_demo._runtime.measure_logprobs(prompt)[len(request.prompt) - 1 :]
        np.testing.assert_allclose(found, mine.logprobs, atol=1e-4)


def test_bfloat16(make_engine, tmp_path):
    """Sixteen bits move logits much further, and near-ties with them: N >= 500 tokens, none beyond what bf16 explains."""
    folder = make_family(tmp_path / "policy", "llama-tied-gqa", 4, scale=2.0)
    engine = make_engine(dtype="bfloat16")
    engine.load(folder)
    requests = make_requests(4, [5, 30] * 16)
    made = run(engine, requests)
    assert require_replayable(folder, requests, made, dtype="bfloat16", tolerance=0.5) >= 500


@pytest.mark.parametrize("temperature", [0.3, 0.7, 2.5])
def test_log_probabilities_off_when_the_temperature_is_not_one(on_demo, torch_on_demo, demo, temperature):
    """Public symptom: a sampler's temperature and the log-probabilities' are not the same. Here nothing but our own
    division sees it: tokens replay at that temperature and at no other."""
    requests = make_requests(5, [6] * 64, vocab=32)
    made = run(on_demo, requests, temperature=temperature)
    require_same(made, run(torch_on_demo, requests, temperature=temperature))
    require_replayable(demo, requests, made, temperature=temperature)
    with pytest.raises(AssertionError, match="gap"):
        require_replayable(demo, requests, made, temperature=1.0)


def test_completions_of_one_token(on_demo, torch_on_demo):
    """Public symptom: a crash on completions of one token, by limit and by a stop token drawn first."""
    requests = make_requests(6, [1, 4, 12] * 8, vocab=32)
    one = run(on_demo, requests, max_tokens=1)
    assert {len(made.tokens) for made in one} == {1}
    require_same(one, run(torch_on_demo, requests, max_tokens=1))
    stops = tuple(range(32))
    require_same(run(on_demo, requests, stop_tokens=stops), run(torch_on_demo, requests, stop_tokens=stops))


def test_the_configs_end_token_is_not_the_tasks(engine, tmp_path):
    """eos_token_id of the family's config.json is 7: it ends nothing; the task's stop tokens do."""
    folder = make_family(tmp_path / "policy", "llama", 8, vocab=16)
    engine.load(folder)
    requests = make_requests(8, [4] * 32, vocab=16)
    made = run(engine, requests, stop_tokens=(3,))
    assert any(7 in one.tokens[:-1] for one in made)
    assert all(one.tokens[-1] == 3 or len(one.tokens) == 24 for one in made)
    assert not any(3 in one.tokens[:-1] for one in made)


def test_ids_beyond_the_vocabulary_are_never_sampled(make_engine, demo):
    engine, embedded = make_engine(vocab_size=5), TorchEngine(vocab_size=5)
    engine.load(demo)
    embedded.load(demo)
    requests = make_requests(9, [4] * 32, vocab=32)
    made = run(engine, requests, stop_tokens=(1, 40))
    assert max(token for one in made for token in one.tokens) < 5
    require_same(made, run(embedded, requests, stop_tokens=(1, 40)))


def test_no_requests(on_demo):
    assert run(on_demo, []) == []


@pytest.mark.parametrize(
    ("prompt", "said"),
    [((), "empty"), ((3, 32), "outside 0 to 31"), ((-1,), "outside 0 to 31"), ((3,) * 240, "limit 232 tokens")],
)
def test_prompts_that_the_policy_cannot_take(on_demo, prompt, said):
    with pytest.raises(Fault, match=said):
        run(on_demo, [SampleRequest(prompt, 1)])


def test_nothing_is_generated_before_a_policy_is_loaded(make_engine):
    with pytest.raises(Fault, match="no policy is loaded"):
        run(make_engine(), make_requests(1, [3]))


# Completions in turns


def answer(completion):
    """Says three tokens behind the first two stop tokens, then nothing; nothing either where they would not fit."""
    turns = sum(token in STOPS for token in completion)
    return (5, 6, 5) if turns <= 2 and len(completion) + 3 < 60 else ()


STOPS = (1, 2, 3, 4)


def test_an_environment_that_answers(on_demo, torch_on_demo, demo):
    """The environment's tokens are taken in, not sampled; noise positions go on behind them."""
    requests = make_requests(10, [6, 20] * 16, vocab=32, respond=answer)
    made = run(on_demo, requests, stop_tokens=STOPS, max_tokens=60)
    require_same(made, run(torch_on_demo, requests, stop_tokens=STOPS, max_tokens=60))
    sampled = []
    for one in made:
        here, position = [], 0
        while position < len(one.tokens):
            here.append(position)
            position += 1
            if one.tokens[position - 1] in STOPS:
                said = answer(one.tokens[:position])
                assert one.tokens[position : position + len(said)] == said
                position += len(said)
        sampled.append(np.array(here))
        assert one.hidden.shape[0] == len(here)
    assert sum(len(one.tokens) - len(here) for one, here in zip(made, sampled, strict=True)) >= 6 * 20
    scorer = TorchScorer()
    scorer.load(demo)
    scored = scorer.score(requests, [one.tokens for one in made], temperature=1.0, sampled=sampled)
    assert max(float(one.gaps.max()) for one in scored) <= 1e-3
    for one, mine in zip(made, scored, strict=True):
        assert np.abs(one.hidden.astype(int) - mine.hidden.astype(int)).max() <= 64


def test_an_environment_that_fails_leaves_the_engine_usable(on_demo, torch_on_demo):
    def fail(completion):
        raise Fault("the sandbox is gone")

    requests = make_requests(11, [6] * 8, vocab=32)
    with pytest.raises(Fault, match="sandbox is gone"):
        run(on_demo, [one._replace(respond=fail) for one in requests], stop_tokens=STOPS)
    runtime = on_demo._runtime
    require_same(run(on_demo, requests), run(torch_on_demo, requests))
    assert on_demo._runtime is runtime


def test_importing_the_engine_does_not_import_vllm():
    code = "import sys, inference.vllm_engine, troth.engines; assert 'vllm' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
