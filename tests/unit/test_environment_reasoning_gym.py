"""Every set of reasoning-gym that is taken gives the same questions, answers and rewards in another process, in another order
and under another hash seed, and has a reward for whatever a model may write; every other set is refused with its reason."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys

import pytest
from reasoning_gym.factory import DATASETS

import environments
from environments.reasoning_gym import REFUSED, ReasoningGym
from protocol.errors import ConfigError
from protocol.task import Environment as EnvironmentSpec

TAKEN = sorted(set(DATASETS) - set(REFUSED))

HOSTILE = (
    *(
        "",
        " ",
        "0",
        "-1",
        "1/0",
        "nan",
        "-inf",
        "1e999",
        "9" * 5000,
        "-" + "9" * 400,
        "0x10",
        "½",
        "²",
        "x**2",
        "None",
        "True",
    ),
    *(
        "[" * 4000,
        "[" * 3000 + "]" * 3000,
        '{"a":' * 1000,
        "((((" * 300,
        "[[1]]",
        "{}",
        "[]",
        '{"a":1}',
        "[null]",
        '"',
        "null",
    ),
    *(
        "\x00\ufffd",
        "a\n" * 500,
        "1 2 3",
        "1,,2",
        ",",
        "->",
        "25:61",
        "2024-13-45",
        "w,A1,B1",
        "<answer></answer>",
        "1 + 1 = 2",
    ),
    *("__import__('os').abort()", "9**9**9**9", "99999999999999999999999"),
)


def mutate(rng, answer):
    """A right answer, damaged: it gets deeper into a scorer than noise does."""
    at, to = rng.randrange(len(answer)), rng.randrange(len(answer))
    return rng.choice(
        [
            answer[:at] + answer[at + 1 :],
            answer[:at] + rng.choice('07Xz ,[]{}()"-.\n#|:') + answer[at + 1 :],
            answer[:at],
            answer + answer,
            answer[:at] + answer[to:],
            "\n".join(answer.split("\n")[::-1]),
        ]
    )


def look(names, order, num_entries, num_mutations):
    """Questions, known answers and rewards of some entries of sets, as JSON."""
    found = {}
    for name in names:
        questions = ReasoningGym(name, seed=11, size=1000, config={})
        rows = {}
        for index in range(900, 900 + num_entries)[::order]:
            rng = random.Random(index)
            answer = questions.known_answer(index)
            tries = [*(HOSTILE if index < 902 else ()), *([answer] if answer else [])]
            tries += [mutate(rng, answer) for _ in range(num_mutations) if answer]
            rows[index] = [questions.question(index), answer, [questions.grade(index, text) for text in tries]]
        found[name] = [rows[index] for index in sorted(rows)]
    return found


def look_elsewhere(names, num_entries, num_mutations, hash_seed):
    code = (
        "import json, sys\nfrom tests.unit.test_environment_reasoning_gym import look\n"
        f"found = look({names!r}, -1, {num_entries}, {num_mutations})\nprint('\\n' + json.dumps(found))"
    )
    env = {**os.environ, "PYTHONHASHSEED": hash_seed, "TZ": "Pacific/Kiritimati", "LC_ALL": "C"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    return json.loads(done.stdout.splitlines()[-1])


def assert_alike(mine, theirs):
    assert mine.keys() == theirs.keys()
    for name in mine:
        assert json.loads(json.dumps(mine[name])) == theirs[name], name


def test_some_sets_are_the_same_in_another_process():
    names = [
        "basic_arithmetic",
        "chain_sum",
        "leg_counting",
        "spell_backward",
        "calendar_arithmetic",
        "family_relationships",
    ]
    assert_alike(look(names, 1, 4, 6), look_elsewhere(names, 4, 6, "12345"))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_all_sets_that_are_taken_are_the_same_in_another_process_and_grade_anything():
    mine = look(TAKEN, 1, 5, 10)
    assert_alike(mine, look_elsewhere(TAKEN, 5, 10, "12345"))
    assert len(mine) >= 80
    rewards = [reward for rows in mine.values() for _, _, graded in rows for reward in graded]
    assert all(0 <= reward <= 1_000_000 for reward in rewards)


def test_a_right_answer_is_worth_more_than_an_empty_one():
    for name in ("basic_arithmetic", "chain_sum", "leg_counting", "number_sorting", "letter_counting"):
        questions = ReasoningGym(name, seed=1, size=10, config={})
        for index in range(5):
            assert questions.grade(index, questions.known_answer(index)) == 1_000_000
            assert questions.grade(index, "") < 1_000_000


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_refused_set_says_why(name):
    assert name in DATASETS
    with pytest.raises(ConfigError, match=r"is not taken: .+; choose another set"):
        environments.content_hash("reasoning_gym", json.dumps({"dataset": name}, separators=(",", ":")))


def test_a_set_that_evaluates_answers_would_run_them(tmp_path):
    """Why those sets are refused: this is what a model's answer could do to a verifier."""
    from reasoning_gym import create_dataset

    for name in ("n_queens", "binary_matrix", "spiral_matrix"):
        made = create_dataset(name, seed=1, size=3)
        target = tmp_path / name
        made.score_answer(f"open({str(target)!r}, 'w')", made[0])
        assert target.exists()


def test_options_that_name_files_are_refused():
    args = '{"config":{"data_file":"/etc/passwd"},"dataset":"spell_backward"}'
    with pytest.raises(ConfigError, match="cannot read this machine's files"):
        environments.load(EnvironmentSpec("reasoning_gym", args, bytes(32)))


def test_how_deep_a_process_may_recurse_decides_no_reward():
    """Libraries raise the recursion limit of a process; a set that reads JSON would then follow a deeper answer."""
    questions = ReasoningGym("graph_color", seed=11, size=1000, config={})
    assert questions.grade(900, "[" * 32 + "]" * 32) == 10_000
    limit = sys.getrecursionlimit()
    for raised in (limit, 20_000):
        try:
            sys.setrecursionlimit(raised)
            assert questions.grade(900, "[" * 900 + "]" * 900) == 0
            assert questions.grade(900, "[" * 3000 + "]" * 3000) == 0
        finally:
            sys.setrecursionlimit(limit)
