"""A taskset of the verifiers package as an environment; what needs more than an answer, or names code, is refused."""

from __future__ import annotations

import asyncio
import json

import pytest

import environments
import environments.verifiers_adapter as module
from protocol.errors import ConfigError, Fault
from protocol.task import Environment as EnvironmentSpec
from troth.environment_check import check_environment

pytestmark = pytest.mark.verifiers
NAME = "troth-test-taskset"


def make_spec(**args):
    text = json.dumps({"taskset": NAME, **args}, sort_keys=True, separators=(",", ":"))
    return EnvironmentSpec("verifiers", text, environments.content_hash("verifiers", text))


def make(**args):
    return environments.load(make_spec(**args))


def test_tasks_are_asked_and_scored_by_their_own_rewards():
    environment = make(size=5)
    assert environment.num_prompts == 5
    assert bytes(environment.prompt(2)) == b"Add.\n\n2+1="
    assert environment.known_answer(2) == "3"
    rewards = {text: environment.reward(2, [*text.encode(), 256]) for text in ("3", "4", "3   ", "four")}
    assert rewards == {"3": 1_000_000, "4": 250_000, "3   ": 1_000_000, "four": 0}


def test_rewards_can_be_asked_for_within_a_loop():
    environment = make(size=5)

    async def ask():
        return environment.reward(0, [ord("1"), 256])

    assert asyncio.run(ask()) == 1_000_000


def test_a_grader_that_fails_or_hangs_is_a_fault(monkeypatch):
    environment = make(size=2)
    with pytest.raises(Fault, match="a grader that fails"):
        environment.reward(0, [*b"fail", 256])
    monkeypatch.setattr(module, "SCORE_S_MAX", 0.5)
    with pytest.raises(Fault, match="not scored in"):
        environment.reward(0, [*b"hang", 256])
    monkeypatch.setattr(module, "SCORE_S_MAX", 30)
    assert environment.reward(0, [ord("1"), 256]) == 1_000_000


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"kind": "runtime"}, "runtime in passes"),
        ({"kind": "setup"}, "setup"),
        ({"kind": "unpaid"}, "no reward function"),
        ({"count": 0}, "no tasks"),
        ({"kind": "nonsense"}, "takes no arguments"),
        ({"colour": 1}, "takes no arguments"),
        ({"task": {"rewards": {"x": {"fn": "os.getpid"}}}}, "option task"),
        ({"system_prompt": "/etc/passwd"}, "option system_prompt"),
    ],
)
def test_what_cannot_be_scored_from_an_answer_or_names_code_is_refused(config, says):
    with pytest.raises(ConfigError, match=says):
        make(config=config)


@pytest.mark.parametrize("name", ["os", "pip", "numpy", "../troth", "troth_test_taskset/../os", "", "verifiers"])
def test_only_installed_distributions_that_require_verifiers_are_imported(name):
    with pytest.raises(ConfigError):
        make(taskset=name)


def test_the_hash_covers_the_files_of_the_taskset():
    names = [name for name, _ in module.read_sources({"taskset": NAME})]
    assert {"troth_test_taskset.py", "version", "verifiers", "text.py"} <= set(names)


def test_it_is_the_same_in_another_process():
    rows = check_environment(make_spec(size=10), [], num_prompts=4, max_tokens=32)
    failed = {row.check: row.observed for row in rows if row.status == "failed"}
    assert not failed
