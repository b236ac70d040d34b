"""Attacks on rewards and on the environment: claimed rewards (R13), reward hacking (T2), graders that flip under load (X3),
answers that are code (X1), and task code (a task that brings or names code instead of an installed environment)."""

from __future__ import annotations

import hashlib
import itertools
import json
import threading

import numpy as np
import pytest

import environments
from environments.sort import EOS, SortEnvironment
from inference.engine import TorchEngine
from inference.rollouts import make_bundle, make_groups
from protocol.checks import Assignment, validate_groups
from protocol.errors import ConfigError, Reason, Reject
from protocol.messages import Group, Sample
from protocol.task import Environment as EnvironmentSpec
from tests.support.scenario import make_model, make_spec


@pytest.fixture(scope="module")
def spec(tmp_path_factory):
    folder = make_model(tmp_path_factory.mktemp("models") / "base", 0)
    return make_spec(folder), folder


@pytest.fixture(scope="module")
def honest(spec):
    """An honest submission of 56 groups of 4, and what it was assigned."""
    task, folder = spec
    engine = TorchEngine()
    engine.load(folder)
    assignment = Assignment(1, bytes(20), b"t" * 32, 0, b"a" * 20, b"b" * 32, task.base_policy, 0, 56)
    environment = environments.load(task.environment)
    return assignment, make_groups(task, environment, engine, assignment).groups, environment


def with_reward(groups, slot, number, reward):
    samples = list(groups[slot].samples)
    samples[number] = Sample(samples[number].tokens, reward, samples[number].proofs)
    changed = list(groups)
    changed[slot] = Group(groups[slot].slot, groups[slot].prompt_index, tuple(samples))
    return tuple(changed)


def test_honest_control_is_accepted(spec, honest):
    assignment, groups, environment = honest
    assert sum(len(group.samples) for group in groups) >= 200
    validate_groups(spec[0], environment, assignment, make_bundle(assignment, groups), 64)


@pytest.mark.parametrize("claim", [1_000_000, 1, 999_999, 500_000, 10**9, 2**62, -1])
def test_R13_a_claimed_reward_that_the_environment_does_not_give(spec, honest, claim):
    assignment, groups, environment = honest
    rng = np.random.default_rng(abs(claim) % 2**32)
    tried = 0
    while tried < 50:
        slot, number = int(rng.integers(len(groups))), int(rng.integers(4))
        if groups[slot].samples[number].reward_micro == claim:
            continue
        bundle = make_bundle(assignment, with_reward(groups, slot, number, claim))
        with pytest.raises(Reject) as caught:
            validate_groups(spec[0], environment, assignment, bundle, 64)
        assert caught.value.reason is Reason.REWARD
        assert caught.value.where == (slot, number)
        tried += 1


def hacks(solution):
    """Completions that look right to a careless grader."""
    body = solution[:-1]
    yield from (
        (),
        (EOS,),
        (EOS, *solution),
        (*solution, EOS),
        (*solution, *solution),
        body,
        (*body, 0),
        (*body, 0, EOS),
    )
    yield from ((*body, *body, EOS), (0, *solution), (body[0],) * 4 + (EOS,), (*reversed(body), EOS))
    yield from ((*p, EOS) for p in itertools.permutations(body) if p != body)
    yield from ((*body[:i], token, *body[i + 1 :], EOS) for i in range(4) for token in range(32) if token != body[i])


def test_T2_known_hacks_of_the_grader_score_nothing():
    environment = SortEnvironment(4)
    tried = 0
    for index in (0, 77, 4321, environment.num_prompts - 1):
        for tokens in hacks(environment.solution(index)):
            if tokens != environment.solution(index):  # equal digits: reversed is right
                assert environment.reward(index, tokens) == 0, tokens
                tried += 1
    assert tried >= 500


def test_T2_the_right_answer_to_another_prompt_scores_nothing():
    environment = SortEnvironment(4)
    answers = {environment.solution(index) for index in range(0, environment.num_prompts, 40)}
    wrong = [tokens for tokens in answers if tokens != environment.solution(123)]
    assert len(wrong) >= 50
    assert {environment.reward(123, tokens) for tokens in wrong} == {0}


def test_X3_rewards_do_not_change_under_load():
    environment = SortEnvironment(4)
    cases = [(index, environment.solution((index * 7) % 500)) for index in range(500)]
    expected = [environment.reward(*case) for case in cases]
    assert 0 < sum(expected) < 500 * 1_000_000
    seen = []

    def grade():
        fresh = SortEnvironment(4)
        for _ in range(3):
            seen.append([fresh.reward(*case) for case in cases])

    threads = [threading.Thread(target=grade) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [expected] * 24


HOSTILE_ENTRIES = [
    "os",
    "os.system",
    "subprocess",
    "builtins",
    "environments.sort",
    "environments",
    "sort.make",
    "sort ",
    " sort",
    "SORT",
    "sort\x00",
    "../sort",
    "/etc/passwd",
    "sort.py",
    "",
    "__import__('os')",
    "http://example.org/env.py",
    "git+https://example.org/env",
    "tests.support.scenario",
    "ſort",
]


@pytest.mark.parametrize("entry", HOSTILE_ENTRIES)
@pytest.mark.parametrize("args", ["{}", '{"digits":4}', '{"path":"/tmp/x.py"}'])
def test_task_code_is_never_taken(entry, args):
    with pytest.raises(ConfigError):
        environments.load(EnvironmentSpec(entry, args, bytes(32)))


def test_a_task_of_another_version_of_the_environment_is_refused():
    right = environments.content_hash("sort", '{"digits":4}')
    rng = np.random.default_rng(7)
    for _ in range(64):
        wrong = bytearray(right)
        wrong[int(rng.integers(32))] ^= 1 << int(rng.integers(8))
        with pytest.raises(ConfigError):
            environments.load(EnvironmentSpec("sort", '{"digits":4}', bytes(wrong)))
    environments.load(EnvironmentSpec("sort", '{"digits":4}', right))


# ---- environments in text: what a model writes is data


def write_set(folder, *rows):
    data = "".join(json.dumps({"prompt": prompt, "answer": answer}) + "\n" for prompt, answer in rows).encode()
    (folder / "data.jsonl").write_bytes(data)
    return hashlib.sha256(data).hexdigest()


def make_text(entry, folders=(), **args):
    text = json.dumps(args, sort_keys=True, separators=(",", ":"))
    return environments.load(EnvironmentSpec(entry, text, environments.content_hash(entry, text)), folders)


SECRET = "troth_must_not_exist"


def write_code(path):
    """Answers that would leave a file behind if anything ran them."""
    line = f"open({str(path)!r},'w')"
    yield from (line, f"[{line}]", f"({line},)", f"{{'a':{line}}}", f"<answer>{line}</answer>", f"\\boxed{{{line}}}")
    yield from (
        f"__import__('os').system('touch {path}')",
        f"${line}$",
        f"5 if {line} else 5",
        f"$(touch {path})",
        f"`touch {path}`",
    )


def test_X1_no_environment_runs_what_a_model_wrote(tmp_path):
    from reasoning_gym.factory import DATASETS

    from environments.reasoning_gym import REFUSED

    target = tmp_path / SECRET
    digest = write_set(tmp_path, ("a?", "5"))
    tried = 0
    made = [make_text("math", [tmp_path], data=digest)]
    made += [
        make_text("dataset", [tmp_path], data=digest, reward=name)
        for name in ("exact", "contains", "prefix", "numeric")
    ]
    quick = [name for name in sorted(DATASETS) if name not in REFUSED][::4]
    made += [make_text("reasoning_gym", dataset=name, size=3) for name in quick]
    for environment in made:
        for answer in write_code(target):
            assert 0 <= environment.reward(0, environment.codec.encode(answer)) <= 1_000_000
            tried += 1
    assert tried >= 250
    assert not target.exists()


@pytest.mark.parametrize("reward", ["exact", "numeric", "multiple_choice", "math"])
def test_T2_hacks_of_text_graders_score_nothing(tmp_path, reward):
    gold = "C" if reward == "multiple_choice" else "42"
    environment = make_text("dataset", [tmp_path], data=write_set(tmp_path, ("a?", gold)), reward=reward)
    others = "A B C D" if reward == "multiple_choice" else "40 41 42 43"
    hacks = [
        "",
        " ",
        "?",
        "a?",
        others,
        f"not {gold}5",
        "nan",
        "True",
        "None",
        "*",
        "answer",
        "42.0.0",
        "0x2a",
        "4 2",
        "٤٢",
        "4e1",
    ]
    hacks += ["[142", "{42,43}", "x", "42 or 43", "42=43"] if reward != "multiple_choice" else ["CC", "c", "ABCD"]
    for hack in hacks:
        assert environment.reward(0, [*environment.codec.encode(hack), 256]) == 0, hack
    assert environment.reward(0, [*environment.codec.encode(gold), 256]) == 1_000_000
    assert environment.reward(0, [256, *environment.codec.encode(gold)]) == 0, "an answer behind the end is none"


def test_a_file_under_another_files_name_is_never_used(tmp_path):
    digest = write_set(tmp_path, ("a?", "5"))
    data = (tmp_path / "data.jsonl").read_bytes()
    rng = np.random.default_rng(3)
    for _ in range(50):
        changed = bytearray(data)
        changed[int(rng.integers(len(data)))] ^= 1 << int(rng.integers(8))
        (tmp_path / "data.jsonl").write_bytes(bytes(changed))
        with pytest.raises(ConfigError, match=digest):
            make_text("dataset", [tmp_path], data=digest, reward="exact")
    (tmp_path / "data.jsonl").write_bytes(data)
    environment = make_text("dataset", [tmp_path], data=digest, reward="exact")
    (tmp_path / "data.jsonl").write_bytes(b"")
    assert environment.reward(0, [ord("5"), 256]) == 1_000_000, "read once"
