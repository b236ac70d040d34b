"""`troth node selftest` on real models: yes for an honest node, no for each way of being set up wrongly."""

from __future__ import annotations

import numpy as np
import pytest

from inference.engine import TorchEngine
from protocol.errors import ConfigError, Fault
from protocol.ports import Generation
from tests.support.scenario import make_model, make_spec
from troth import selftest
from verifier.scorer import TorchScorer

BEACON = b"\3" * 32
GROUPS = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("models") / "base", 0, vocab=40)


@pytest.fixture(scope="module")
def task(folder):
    import environments

    spec = make_spec(folder)
    return spec, environments.load(spec.environment)


def ask(task, folder, engine, *, dtype="float32"):
    spec, environment = task
    scorer = TorchScorer(dtype=dtype, vocab_size=environment.vocab_size)
    return selftest.run_selftest(spec, environment, engine, scorer, folder, slots=GROUPS, beacon=BEACON)


def failed(result):
    return {check.name for check in result.checks if check.passed is False}


def test_an_honest_node_would_be_accepted(task, folder):
    result = ask(task, folder, TorchEngine(vocab_size=task[1].vocab_size))
    assert result.accepted
    assert failed(result) == set()
    assert result.rollouts == GROUPS * task[0].group_size
    assert result.tokens_per_s > 0
    numbers = {check.name: check for check in result.checks}
    assert "0 of" in numbers["replay of every token"].observed
    assert numbers["replay of every token"].limit == "0.000500 logit/T"


def test_a_wrong_numeric_type_is_found(task, folder):
    result = ask(task, folder, TorchEngine(dtype="bfloat16", vocab_size=task[1].vocab_size))
    assert not result.accepted
    assert failed(result) >= {"activations, worst chunk", "verdict"}
    [worst] = [check for check in result.checks if check.name == "activations, worst chunk"]
    assert "compute.dtype" in worst.todo


def test_a_wrong_vocabulary_is_found(task, folder):
    """The model's padded vocabulary is larger than the environment's."""
    assert task[1].vocab_size < 40
    result = ask(task, folder, TorchEngine(vocab_size=None))
    assert not result.accepted
    assert "token_range" in str(result.checks) or "replay" in str(failed(result))


class Altered:
    """An engine that differs from the honest one in one way."""

    def __init__(self, **changes):
        self.inner, self.changes = TorchEngine(vocab_size=32), changes

    def load(self, folder):
        self.inner.load(self.changes.get("folder", folder))

    def generate(self, requests, *, temperature, max_tokens, stop_tokens):
        temperature = self.changes.get("temperature", temperature)
        if self.changes.get("greedy_keys"):
            requests = [request._replace(key=7) for request in requests]
        made = self.inner.generate(requests, temperature=temperature, max_tokens=max_tokens, stop_tokens=stop_tokens)
        if self.changes.get("hidden_of_nothing"):
            return [Generation(one.tokens, np.zeros_like(one.hidden) + 0x3F80) for one in made]
        return made


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"temperature": 0.3}, "replay of every token"),
        ({"greedy_keys": True}, "replay of every token"),
        ({"hidden_of_nothing": True}, "activations, worst chunk"),
    ],
)
def test_a_wrong_engine_is_found(task, folder, changes, expected):
    result = ask(task, folder, Altered(**changes))
    assert not result.accepted
    assert expected in failed(result)


def test_stale_weights_are_found(task, folder, tmp_path):
    result = ask(task, folder, Altered(folder=make_model(tmp_path / "old", 5, vocab=40)))
    assert not result.accepted
    assert "replay of every token" in failed(result)


def test_a_false_reward_is_found(task, folder):
    spec, environment = task

    class Generous:
        num_prompts, vocab_size = environment.num_prompts, environment.vocab_size
        prompt, respond = staticmethod(environment.prompt), staticmethod(environment.respond)
        calls = 0

        def reward(self, index, completion):
            self.calls += 1
            true = environment.reward(index, completion)
            return true if self.calls > GROUPS * spec.group_size else 1_000_000 - true

    result = selftest.run_selftest(
        spec, Generous(), TorchEngine(vocab_size=32), TorchScorer(vocab_size=32), folder, slots=GROUPS, beacon=BEACON
    )
    assert not result.accepted
    assert "reward" in str([check for check in result.checks if check.passed is False])


def test_a_failure_of_this_machine_is_no_answer(task, folder, tmp_path):
    with pytest.raises(Fault, match="config"):
        ask(task, tmp_path / "nowhere", TorchEngine(vocab_size=32))


def test_the_assignment_is_nobodys(task):
    assignment = selftest.make_assignment(task[0], 2, BEACON)
    assert (assignment.chain_id, assignment.account, assignment.task) == (0, bytes(20), bytes(32))
    with pytest.raises(ConfigError, match="groups is 0"):
        selftest.run_selftest(task[0], task[1], Altered(), TorchScorer(), None, slots=0)


def test_numbers_and_verdict_agree(task, folder):
    """The listed numbers are judged by the limits the verdict uses: they fail exactly when it does."""
    for engine in (TorchEngine(vocab_size=32), Altered(temperature=0.5), TorchEngine(dtype="bfloat16", vocab_size=32)):
        result = ask(task, folder, engine)
        numbers = [check for check in result.checks if check.name not in ("verdict", "speed")]
        assert result.accepted == all(check.passed for check in numbers)
