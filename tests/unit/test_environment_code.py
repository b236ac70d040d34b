"""Programming questions: what is run of an answer, how results are compared, what a data file may hold."""

from __future__ import annotations

import hashlib
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from environments import content_hash, load
from environments import sandbox as sandbox_module
from environments.code import CodeQuestions, Row, extract_source, is_equal, is_same_output, read_rows
from environments.sandbox import Limits, Sandbox
from protocol.errors import ConfigError, Fault
from protocol.task import Environment as EnvironmentSpec

ROWS = [
    {
        "prompt": "double x",
        "function": "f",
        "tests": [[[1], 2], [[4], 8], [["a"], "aa"]],
        "solution": "def f(x): return x * 2",
    },
    {
        "prompt": "add two numbers",
        "tests": [["1 2\n", "3\n"], ["5 5", "10"]],
        "solution": "print(sum(map(int, input().split())))",
    },
]


def write_data(folder, rows=ROWS):
    data = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
    (folder / "data.jsonl").write_bytes(data)
    return hashlib.sha256(data).hexdigest()


def make(folder, **args):
    table = {"data": write_data(folder), **args}
    text = json.dumps(table, sort_keys=True, separators=(",", ":"))
    return load(EnvironmentSpec("code", text, content_hash("code", text)), [folder])


def answer(text):
    return (*text.encode(), 256)


def test_solutions_are_right_and_others_are_not(tmp_path):
    environment = make(tmp_path)
    assert environment.num_prompts == 2
    assert bytes(environment.prompt(0)) == b"double x"
    for index in range(2):
        assert environment.reward(index, answer(environment.known_answer(index))) == 1_000_000
        assert environment.reward(1 - index, answer(environment.known_answer(index))) == 0
    assert environment.reward(0, answer("def f(x): return x + x if x != 4 else 0")) == 0
    assert environment.reward(0, answer("")) == 0
    assert environment.reward(0, (256,)) == 0


def test_a_fraction_is_rounded_down(tmp_path):
    environment = make(tmp_path, score="fraction")
    assert environment.reward(0, answer("def f(x): return x + x if x != 4 else 0")) == 666_666
    assert environment.reward(0, answer("def f(x): return 2 * x if x != 1 else 1 / 0")) == 666_666
    assert environment.reward(0, answer("def f(x):\n  while x == 4: pass\n  return 2 * x")) == 333_333


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("x = 1", "x = 1"),
        ("Sure!\n```python\nx = 1\n```\nor\n```\ny\n```", "x = 1\n"),
        ("```\nx = 1\n```", "x = 1\n"),
        ("```py\nx = 1", "x = 1"),
        ("`x` and ``y``", "`x` and ``y``"),
        ("```python x = 1```", "```python x = 1```"),
    ],
)
def test_what_is_run_of_an_answer(text, source):
    assert extract_source(text) == source


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**6), 10**6)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None)
@given(JSON)
def test_a_value_is_equal_to_itself_after_the_journey(value):
    assert is_equal(json.loads(json.dumps(value)), value)


@settings(max_examples=60, deadline=None)
@given(JSON, JSON)
def test_equality_is_symmetric(one, other):
    assert is_equal(one, other) == is_equal(other, one)


@pytest.mark.parametrize(
    ("value", "expected", "same"),
    [
        (True, 1, False),
        (1, True, False),
        (0, False, False),
        (None, 0, False),
        (1.0, 1, True),
        (0.1 + 0.2, 0.3, True),
        (0.31, 0.3, False),
        (float("nan"), float("nan"), False),
        (float("inf"), 1e308, False),
        (10**400, 1.5, False),
        (10**400, 10**400, True),
        ("1", 1, False),
        ([1], [1, 2], False),
        ([[]], [[]], True),
        ({"a": 1}, {"a": 1, "b": 2}, False),
        ({}, [], False),
    ],
)
def test_how_values_are_compared(value, expected, same):
    assert is_equal(value, expected) is same


def test_outputs_are_compared_line_by_line():
    assert is_same_output("a \nb\n\n", "a\nb")
    assert not is_same_output("a\n\nb", "a\nb")
    assert not is_same_output(" a", "a")
    assert not is_same_output(["a"], "a")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "x", "tests": []}, "0 tests"),
        ({"prompt": "x", "tests": [["a", "b"]] * 65}, "65 tests"),
        ({"prompt": "x", "tests": [[1, 2]]}, "two texts"),
        ({"prompt": "x", "tests": [[1, 2]], "function": "f"}, "expected a list"),
        ({"prompt": "x", "tests": [[[1], 2]], "function": "f("}, "expected a name"),
        ({"prompt": "x", "tests": [[[1]]], "function": "f"}, "line 1"),
        ({"prompt": "x", "tests": [[[1], 2]], "function": "f", "more": 1}, "more"),
        ({"tests": [["", ""]]}, "prompt"),
        ({"prompt": "x", "tests": [[json.loads("[" * 40 + "]" * 40), 1]], "function": "f"}, "nested deeper"),
    ],
)
def test_rows_that_are_not_as_they_should_be(row, message):
    with pytest.raises(ConfigError, match=message):
        read_rows(json.dumps(row).encode())


def test_the_values_of_a_file_are_bounded(monkeypatch):
    line = json.dumps({"prompt": "x", "tests": [[[[], []], {"a": 0}]], "function": "f"}).encode() + b"\n"
    monkeypatch.setattr("environments.code.VALUES_MAX", 10)  # a line holds five
    assert len(read_rows(line * 2)) == 2
    with pytest.raises(ConfigError, match="line 3: the tests up to here hold 15 values, limit 10"):
        read_rows(line * 3)


@pytest.mark.parametrize("data", [b"", b"\n\n", b"{", b"[]", b"\xff", b"[" * 100_000])
def test_data_that_is_none(data):
    with pytest.raises(ConfigError):
        read_rows(data)


def test_a_failing_sandbox_is_a_fault_and_never_a_zero(monkeypatch):
    questions = CodeQuestions([Row("x", [([1], 2)], "f")], "all", Sandbox(Limits(steps=10**9, wall_s=1)))
    with pytest.raises(Fault):
        questions.grade(0, "def f(x):\n  while True: pass")
    monkeypatch.setattr(sandbox_module, "_BOOT", "raise SystemExit(1)")
    with pytest.raises(Fault, match="does not start"):
        CodeQuestions([Row("x", [([1], 2)], "f")], "all", Sandbox()).grade(0, "def f(x): return 2")


def test_where_there_is_no_sandbox_there_is_no_environment(tmp_path, monkeypatch):
    monkeypatch.setattr(sandbox_module, "_BOOT", "raise SystemExit(1)")
    with pytest.raises(ConfigError, match="does not start"):
        make(tmp_path)


def test_the_hash_covers_the_sandbox(tmp_path):
    """Two participants whose sandboxes differ refuse the task instead of disagreeing about rewards."""
    from environments import code

    data = write_data(tmp_path)
    names = [name for name, _ in code.read_sources({"data": data})]
    assert {"code.py", "sandbox.py", "jail/screen.py", "jail/guards.py", "jail/layers.py", "text.py", "python"} <= set(
        names
    )
