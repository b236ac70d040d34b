"""Data sets by hash: strict lines, reward functions by name, mathematical answers compared in a process that can be ended."""

from __future__ import annotations

import hashlib
import json
import time
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import environments
from environments import math_worker
from environments.dataset import ROWS_MAX, DataSet, Row, read_number, read_rows
from environments.grader_process import GraderProcess
from environments.math_answer import MathGrader, find_answer, screen
from protocol.errors import ConfigError, Fault
from protocol.task import Environment as EnvironmentSpec


def make_lines(*rows):
    return "".join(json.dumps({"prompt": prompt, "answer": answer}) + "\n" for prompt, answer in rows).encode()


def make(folder, data, entry="dataset", **args):
    folder.mkdir(exist_ok=True)
    (folder / "data.jsonl").write_bytes(data)
    text = json.dumps({"data": hashlib.sha256(data).hexdigest(), **args}, sort_keys=True, separators=(",", ":"))
    spec = EnvironmentSpec(entry, text, environments.content_hash(entry, text))
    return environments.load(spec, [folder])


def test_a_data_set_is_asked_and_graded(tmp_path):
    environment = make(tmp_path, make_lines(("1+1=", "2"), ("2+2=", "4"), ("3+3=", "6")), reward="exact", held_out=1)
    assert environment.num_prompts == 2
    assert bytes(environment.prompt(1)) == b"2+2="
    assert environment.reward(1, [ord("4"), 256]) == 1_000_000
    assert environment.reward(1, [ord("5"), 256]) == 0
    assert bytes(environment.held_out().prompt(0)) == b"3+3="
    assert environment.known_answer(0) == "2"


def test_the_hash_of_a_data_set_needs_no_file_and_covers_it():
    one, two = (
        environments.content_hash("dataset", json.dumps({"data": digit * 64, "reward": "exact"}, separators=(",", ":")))
        for digit in "12"
    )
    assert one != two


@pytest.mark.parametrize(
    ("reward", "gold", "answer", "right"),
    [
        ("exact", "7", "7", True),
        ("exact", "7", "7.", False),
        ("contains", "Paris", "It is Paris.", True),
        ("contains", "Paris", "It is paris.", False),
        ("prefix", "yes", "yes, it is", True),
        ("prefix", "yes", "oh yes", False),
        ("numeric", "1234.5", "about 3, so 1,234.50", True),
        ("numeric", "0.5", "1/2", True),
        ("numeric", "12", "12.", True),
        ("numeric", "12", "-12", False),
        ("numeric", "12", "12 or 13", False),
        ("numeric", "12", "1/0", False),
        ("numeric", "12", "twelve", False),
        ("numeric", "12", "١٢", False),
        ("multiple_choice", "C", "(C)", True),
        ("multiple_choice", "C", "Answer: C", True),
        ("multiple_choice", "C", "A, no: C.", True),
        ("multiple_choice", "C", "CD", False),
        ("multiple_choice", "C", "c", False),
    ],
)
def test_rewards_by_name(reward, gold, answer, right):
    assert DataSet([Row("?", gold)], reward).grade(0, answer) == (1_000_000 if right else 0)


@pytest.mark.parametrize("reward", ["exact", "contains", "prefix", "numeric", "multiple_choice"])
@given(answer=st.text())
def test_rewards_take_any_text(reward, answer):
    gold = {"numeric": "12", "multiple_choice": "A"}.get(reward, "x")
    assert DataSet([Row("?", gold)], reward).grade(0, answer) in (0, 1_000_000)


def test_numbers_of_any_length_are_read_in_no_time():
    start = time.perf_counter()
    for text in ("9" * 200_000, "1," * 100_000, "1/" * 100_000, "1." * 100_000, "-" * 200_000):
        read_number(text)
    assert read_number("9" * 31) is None
    assert time.perf_counter() - start < 2


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "no rows"),
        (b"\n\n", "no rows"),
        (b'{"prompt":"a","answer":"b"}\n{"prompt":"a"}\n', "line 2"),
        (b'{"prompt":"a","answer":"b","colour":1}', "line 1"),
        (b'{"prompt":"a","answer":5}', "line 1"),
        (b'{"prompt":"","answer":"b"}', "line 1"),
        (b'{"prompt":"a","answer":""}', "line 1"),
        (b'{"prompt":"a","answer":"' + b"b" * 5000 + b'"}', "line 1"),
        (b'{"prompt":"' + b"a" * (1 << 18) + b'","answer":"b"}', "line 1"),
        (b"[" * 100_000, "line 1"),
        (b'{"prompt":"\xff","answer":"b"}', "line 1"),
        (b"not json", "line 1"),
    ],
)
def test_a_line_that_is_no_row_is_named(data, says):
    with pytest.raises(ConfigError, match=says):
        read_rows(data)


def test_a_file_costs_about_its_size_in_memory():
    read_rows(make_lines(("a", "b")))
    info = b'{"prompt":"a","answer":"b","info":[' + b"[]," * 80_000 + b"[]]}\n"
    for data, rows in ((info * 10, 10), (b'{"prompt":"a","answer":"b"}' + b"\n" * 3_000_000, 1)):
        tracemalloc.start()
        try:
            assert len(read_rows(data)) == rows
            assert tracemalloc.get_traced_memory()[1] < 2 * len(data)
        finally:
            tracemalloc.stop()
    with pytest.raises(ConfigError, match="more than 4000000 lines"):
        read_rows(b"\n" * 4_000_001)


def test_the_number_of_rows_is_bounded(monkeypatch):
    monkeypatch.setattr("environments.dataset.ROWS_MAX", 2)
    assert ROWS_MAX > 100_000
    with pytest.raises(ConfigError, match="after 2 rows"):
        read_rows(make_lines(("a", "b"), ("c", "d"), ("e", "f")))


@pytest.mark.parametrize(
    ("reward", "gold"),
    [("numeric", "twelve"), ("numeric", "12 or 13"), ("multiple_choice", "AB"), ("multiple_choice", "a")],
)
def test_gold_that_cannot_be_compared_with_is_refused(reward, gold):
    with pytest.raises(ConfigError, match="row 2"):
        DataSet([Row("?", "1" if reward == "numeric" else "A"), Row("?", gold)], reward)


def test_an_unknown_reward_gets_a_hint():
    with pytest.raises(ConfigError, match="did you mean numeric"):
        environments.content_hash("dataset", '{"data":"' + "1" * 64 + '","reward":"numerik"}')


# ---- mathematics


@pytest.fixture(scope="module")
def grader():
    return MathGrader()


@pytest.mark.parametrize(
    ("gold", "answer", "right"),
    [
        ("1/2", r"so it is \boxed{0.5}", True),
        ("1/2", r"\boxed{\frac{1}{2}}", True),
        (r"\frac{1}{2}", "it is 1/2.", True),
        ("x^2+2x+1", r"\boxed{(x+1)^2}", True),
        ("12", "The answer is 12.", True),
        ("12", r"first \boxed{13}, no: \boxed{12}", True),
        ("12", "so $3*4$ is $12$.", True),
        (r"\{1,2\}", r"\boxed{\{2,1\}}", True),
        (r"50\%", r"\boxed{0.5}", True),
        (r"\sqrt{2}", r"\boxed{2^{1/2}}", True),
        (r"\text{east}", r"\boxed{\text{east}}", True),
        ("5", r"\boxed{5 \text{ cm}}", True),
        ("[0,1)", r"\boxed{[0,1)}", True),
        ("1000", "1,000", True),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\boxed{\begin{pmatrix}1\\2\end{pmatrix}}", True),
        ("12", r"\boxed{13}", False),
        ("12", r"\boxed{12", False),
        ("12", "no idea", False),
        ("12", "", False),
        ("12", "12 or rather 13", False),
        ("x", r"\boxed{y}", False),
        ("5", "__import__('os').abort()", False),
    ],
)
def test_mathematical_answers(grader, gold, answer, right):
    assert grader.grade(gold, answer) == (1_000_000 if right else 0)


@pytest.mark.parametrize(
    "text",
    [
        "9^9^9",
        "9**9**9",
        "9^{9^{9}}",
        "((((9^{999})^{20})^{20})^{20})",
        "10^{99999}",
        "1e99999",
        "9" * 31,
        "9 " * 31,
        "(((9!)!)!)",
        "9999!",
        r"\binom{99999}{500}",
        r"\sum_{i=1}^{9} i",
        r"\int x",
        r"\sin(\cos(\tan(x)))",
        "(x+y+z+w+1)^{20}",
        "((((((((((((((1))))))))))))))",
        "x" * 300,
        "2^{",
        "",
    ],
)
def test_what_could_take_long_is_no_answer(grader, text):
    assert screen(text)
    start = time.perf_counter()
    assert grader.grade("5", f"\\boxed{{{text}}}") == 0
    assert time.perf_counter() - start < 1


@given(text=st.text(alphabet=r"0123456789x+-*/^(){}[]\!$,. ", max_size=300))
def test_screening_takes_any_text_in_no_time(text):
    start = time.perf_counter()
    screen(find_answer(text)[0])
    assert time.perf_counter() - start < 0.5


@pytest.mark.parametrize("gold", ["", " ", "9^9^9", "no ^ idea ^", r"\frac{1}{", r"\weird"])
def test_gold_that_is_no_mathematics_is_refused_when_the_environment_is_made(tmp_path, gold):
    data = make_lines(("one", "1"), ("two", gold or " "))
    with pytest.raises(ConfigError, match="row 2"):
        make(tmp_path, data, entry="math")


def test_entry_math_is_a_data_set_with_that_reward(tmp_path):
    environment = make(tmp_path, make_lines(("half?", "1/2")), entry="math")
    assert environment.reward(0, [*environment.known_answer(0).encode(), 256]) == 1_000_000
    with pytest.raises(ConfigError, match="entry math has one reward"):
        environments.content_hash("math", '{"data":"' + "1" * 64 + '","reward":"math"}')


GRADER = """
import json, sys, time
print('{"ready": true}', flush=True)
for line in sys.stdin:
    what = json.loads(line)["do"]
    if what == "hang":
        time.sleep(60)
    if what == "die":
        sys.exit(0)
    print({"flood": "x" * 200_000, "nonsense": "[]"}.get(what, '{"right": true}'), flush=True)
"""


def test_a_grader_whose_package_does_not_work_gives_no_verdicts(tmp_path):
    """Public symptom: a missing dependency, and every answer is wrong."""
    (tmp_path / "math_verify.py").write_text(
        "class LatexExtractionConfig: pass\nclass ExprExtractionConfig: pass\nverify = None\n"
        "def parse(*args, **options): import absent_dependency\n"
    )
    script = tmp_path / "math_worker.py"
    source = Path(math_worker.__file__).read_text()
    script.write_text(source.replace("import sys\n", f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\n", 1))
    process = GraderProcess(script)
    try:
        with pytest.raises(Fault):
            process.ask({"gold": "$1$", "answer": "$1$"})
    finally:
        process.close()


def test_a_grader_that_hangs_dies_or_babbles_is_a_fault_and_starts_again(tmp_path):
    script = tmp_path / "grader.py"
    script.write_text(GRADER)
    process = GraderProcess(script, reply_s_max=1.0)
    try:
        for what in ("hang", "die", "flood", "nonsense"):
            with pytest.raises(Fault):
                process.ask({"do": what})
            assert process.ask({"do": "work"}) == {"right": True}
    finally:
        process.close()
