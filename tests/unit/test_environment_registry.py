"""Environments: what a task names is what is installed, prompts and rewards are functions, sizes are bounded."""

from __future__ import annotations

import subprocess
import sys

import pytest

import environments
from environments.sort import EOS, VOCABULARY, SortEnvironment, render
from protocol.errors import ConfigError
from protocol.task import Environment as EnvironmentSpec

LEGS = '{"dataset":"leg_counting","seed":3,"size":50}'


def make(entry, args):
    return environments.load(EnvironmentSpec(entry, args, environments.content_hash(entry, args)))


@pytest.mark.parametrize("digits", [1, 2, 4])
def test_sort_prompts_solutions_and_rewards(digits):
    environment = SortEnvironment(digits)
    seen = set()
    for index in range(environment.num_prompts):
        text = render(environment.prompt(index))
        assert text[:2] == "s:"
        assert text[-1] == "="
        assert len(environment.prompt(index)) == digits + 3
        solution = environment.solution(index)
        assert render(solution) == "".join(sorted(text[2:-1])) + "<eos>"
        assert environment.reward(index, solution) == 1_000_000
        seen.add(text)
    assert len(seen) == environment.num_prompts


def test_sort_rewards_nothing_but_the_exact_answer():
    environment = SortEnvironment(4)
    index = 77
    right = environment.solution(index)
    wrong = [right[:-1], (*right, EOS), right[::-1], (), (EOS,), (*right[:-1], 0), right[:2] + right[3:]]
    wrong += [tuple((t + 1) % 32 if i == at else t for i, t in enumerate(right)) for at in range(5)]
    assert [environment.reward(index, tokens) for tokens in wrong] == [0] * len(wrong)
    assert environment.reward(index, list(right)) == 1_000_000


def test_sort_holds_out_a_tenth_that_no_round_assigns():
    environment = SortEnvironment(4)
    held_out = environment.held_out()
    training = {environment.prompt(i) for i in range(environment.num_prompts)}
    rest = {held_out.prompt(i) for i in range(held_out.num_prompts)}
    assert not training & rest
    assert len(training) + len(rest) == 10_000
    assert 900 < len(rest) < 1_100


def test_sort_vocabulary_and_bounds():
    environment = SortEnvironment(4)
    assert environment.vocab_size == len(VOCABULARY) == len(set(VOCABULARY)) == 32
    for index in (-1, environment.num_prompts):
        with pytest.raises(IndexError):
            environment.prompt(index)
    for digits in (0, 7):
        with pytest.raises(ConfigError, match="expected 1 to 6"):
            SortEnvironment(digits)


@pytest.mark.parametrize(("entry", "args"), [("sort", '{"digits":3}'), ("reasoning_gym", LEGS)])
def test_another_process_makes_the_same_prompts_rewards_and_hash(entry, args):
    environment = make(entry, args)
    count = min(environment.num_prompts, 20)
    mine = [list(environment.prompt(i)) for i in range(count)]
    mine.append([environment.reward(i, (ord("4"), environment.vocab_size - 1)) for i in range(count)])
    code = (
        "import environments as e, json\nfrom protocol.task import Environment as S\n"
        f"h = e.content_hash({entry!r}, {args!r})\nv = e.load(S({entry!r}, {args!r}, h))\n"
        f"rows = [list(v.prompt(i)) for i in range({count})]\n"
        f"rows.append([v.reward(i, (ord('4'), v.vocab_size - 1)) for i in range({count})])\n"
        "print(json.dumps([h.hex(), rows]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    import json

    digest, rows = json.loads(done.stdout)
    assert digest == environments.content_hash(entry, args).hex()
    assert rows == mine


def test_the_hash_covers_entry_arguments_and_source(tmp_path, monkeypatch):
    import environments.sort as module

    before = environments.content_hash("sort", '{"digits":4}')
    assert before != environments.content_hash("sort", '{"digits":3}')
    changed = tmp_path / "sort.py"
    changed.write_bytes(open(module.__file__, "rb").read() + b"\n")  # noqa: PTH123, SIM115
    monkeypatch.setattr(module, "__file__", str(changed))
    assert environments.content_hash("sort", '{"digits":4}') != before


def test_another_version_of_an_environment_is_refused_with_both_hashes():
    spec = EnvironmentSpec("sort", '{"digits":4}', b"\7" * 32)
    with pytest.raises(ConfigError) as caught:
        environments.load(spec)
    assert (b"\7" * 32).hex() in str(caught.value)
    assert environments.content_hash("sort", '{"digits":4}').hex() in str(caught.value)


@pytest.mark.parametrize(
    ("entry", "args"),
    [
        ("os.system", "{}"),
        ("../sort", "{}"),
        ("environments.sort", "{}"),
        ("sort", '{"digits": 4}'),
        ("sort", '{"digits":4,"digits":4}'),
        ("sort", '{"digits":"4"}'),
        ("sort", '{"digits":true}'),
        ("sort", '{"digits":7}'),
        ("sort", '{"colour":1}'),
        ("sort", "[]"),
        ("sort", "nonsense"),
        ("sort", "[" * 100_000),
        ("reasoning_gym", "{}"),
        ("reasoning_gym", '{"dataset":"leg_countin"}'),
        ("reasoning_gym", '{"dataset":"leg_counting","size":0}'),
        ("reasoning_gym", '{"dataset":"leg_counting","prompt_tokens_max":0}'),
        ("reasoning_gym", '{"config":{"seed":1},"dataset":"leg_counting"}'),
        ("reasoning_gym", '{"dataset":"leg_counting","seed":-1}'),
        ("reasoning_gym", '{"dataset":"leg_counting","size":true}'),
        ("reasoning_gym", '{"dataset":"leg_counting","template":"no place for it"}'),
        ("reasoning_gym", '{"dataset":"leg_counting","template":"{question}{question}"}'),
        ("reasoning_gym", '{"dataset":"leg_counting","tokenizer":"../../tokenizer.json"}'),
        ("reasoning_gym", '{"answer":"xml","dataset":"leg_counting"}'),
        ("reasoning_gym", '{"dataset":"leg_counting","length":{"alpha_micro":1,"targets":[]}}'),
        ("reasoning_gym", '{"dataset":"leg_counting","length":{"alpha_micro":1,"targets":[0]}}'),
        ("reasoning_gym", '{"dataset":"leg_counting","length":{"alpha_micro":0.5,"targets":[9]}}'),
        ("reasoning_gym", '{"dataset":"leg_counting","length":{"alpha_micro":1,"note":"no place","targets":[9]}}'),
        ("reasoning_gym", '{"dataset":"countdown"}'),
        ("reasoning_gym", '{"config":{"nonsense":1},"dataset":"leg_counting"}'),
        ("reasoning_gym", '{"config":{"min_animals":-4},"dataset":"leg_counting"}'),
    ],
    ids=lambda value: value[:40],
)
def test_what_an_environment_does_not_take_is_a_config_error(entry, args):
    with pytest.raises(ConfigError):
        environments.content_hash(entry, args)


def test_a_near_miss_of_a_data_sets_name_gets_a_hint():
    with pytest.raises(ConfigError, match="did you mean leg_counting"):
        environments.content_hash("reasoning_gym", '{"dataset":"leg_countin"}')
