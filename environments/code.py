"""Programming questions: an answer is run against hidden tests in the sandbox.

Arguments: `data` (SHA-256 of a JSONL file), `score` ("all": 1 when every test passes, else 0; "fraction": the share that
passes), and those of environments.text. Each line of the data is an object with `prompt`, `tests` and optionally `function` and
`solution` (a source that passes, for people and `known_answer`). With a `function`, a test is [arguments, expected result];
without one the answer is a program and a test is [standard input, expected output].

Of an answer the first block fenced by ``` is run, or all of it when there is none. Only a test's input enters the
sandbox; results are compared here, so no answer can read what is expected or pass for one that was right.
"""

from __future__ import annotations

import math
import platform
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from environments.arguments import Field, read_arguments
from environments.files import DATA, Kind, read_hash
from environments.jail.screen import SOURCE_CHARS_MAX
from environments.rows import decode_rows
from environments.sandbox import FunctionCall, Outcome, ProgramRun, Sandbox
from environments.text import (
    TEXT_FIELDS,
    TextEnvironment,
    TextOptions,
    list_text_files,
    make_codec,
    read_options,
    read_text_sources,
)
from protocol.errors import ConfigError, Fault

LINE_BYTES_MAX = 1 << 20
ROWS_MAX = 200_000
TESTS_MAX = 64
DEPTH_MAX = 32
#: Values in all tests of a file, each at most about a hundred bytes of memory beside its text.
VALUES_MAX = 4_000_000
RIGHT = 1_000_000
#: Relative difference of floating-point results that are taken as equal: libraries of mathematics differ in their last bit.
FLOAT_TOLERANCE = 1e-9

_FENCED = re.compile(r"```[^\n`]*\n(.*?)(?:```|\Z)", re.DOTALL)
_FIELDS = {
    "data": Field(str),
    "score": Field(str, "all", choices=("all", "fraction")),
    **TEXT_FIELDS,
}


class Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One line of a data file."""

    prompt: str
    tests: list[tuple[Any, Any]]
    function: str = ""
    solution: str = ""


def read_rows(data: bytes) -> list[Row]:
    """Rows of a data file. Blank lines are none.

    Raises:
        ConfigError: with the number of the line.
    """
    count = _Count()
    return decode_rows("code", data, Row, count.validate, line_bytes_max=LINE_BYTES_MAX, rows_max=ROWS_MAX)


class _Count:
    """Checks rows one by one, and counts the values in all of their tests."""

    def __init__(self) -> None:
        self._values = 0

    def validate(self, row: Row) -> None:
        """Raises `ConfigError`."""
        if not 1 <= len(row.tests) <= TESTS_MAX:
            raise ConfigError(f"{len(row.tests)} tests, expected 1 to {TESTS_MAX}")
        if row.function and not row.function.isidentifier():
            raise ConfigError(f"function is {row.function[:80]!r}, expected a name")
        for given, expected in row.tests:
            if row.function and not isinstance(given, list):
                raise ConfigError(f"a test's arguments are {str(given)[:80]}, expected a list")
            if not row.function and not (isinstance(given, str) and isinstance(expected, str)):
                raise ConfigError(f"a test of a program holds {str(given)[:80]}, expected two texts")
            self._add(given)
            self._add(expected)
        if self._values > VALUES_MAX:
            raise ConfigError(f"the tests up to here hold {self._values} values, limit {VALUES_MAX}")

    def _add(self, value: Any, depth: int = 1) -> None:
        if depth > DEPTH_MAX:
            raise ConfigError(f"a test is nested deeper than {DEPTH_MAX}")
        self._values += 1
        for inside in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            self._add(inside, depth + 1)


def extract_source(answer: str) -> str:
    """What is run: the first fenced block, closed or not; without one the whole answer."""
    found = _FENCED.search(answer)
    return found.group(1) if found else answer


def is_equal(value: Any, expected: Any) -> bool:
    """Whether a result is the expected one: JSON equality, where a truth value is no number and floats are compared closely."""
    if isinstance(expected, list):
        if not isinstance(value, list) or len(value) != len(expected):
            return False
        return all(is_equal(one, other) for one, other in zip(value, expected, strict=True))
    if isinstance(expected, dict):
        if not isinstance(value, dict) or value.keys() != expected.keys():
            return False
        return all(is_equal(value[key], other) for key, other in expected.items())
    kinds = {type(value), type(expected)}
    if kinds == {float} or kinds == {int, float}:
        try:
            return math.isclose(value, expected, rel_tol=FLOAT_TOLERANCE, abs_tol=FLOAT_TOLERANCE)
        except OverflowError:
            return False
    return len(kinds) == 1 and bool(value == expected)


def is_same_output(value: Any, expected: str) -> bool:
    """Whether two outputs have the same lines, but for spaces at their ends and empty lines at the end."""
    return isinstance(value, str) and _lines(value) == _lines(expected)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


class CodeQuestions:
    """The questions of a data file; see `environments.text.Questions`.

    Args:
        rows: its rows.
        score: "all" or "fraction".
        sandbox: what runs the answers.
    """

    def __init__(self, rows: Sequence[Row], score: str, sandbox: Sandbox) -> None:
        self.rows = rows
        self._score = score
        self._sandbox = sandbox

    @property
    def num_questions(self) -> int:
        return len(self.rows)

    def question(self, index: int) -> str:
        """The row's prompt."""
        return self.rows[index].prompt

    def known_answer(self, index: int) -> str | None:
        """The row's solution, fenced."""
        solution = self.rows[index].solution
        return f"```python\n{solution}\n```" if solution else None

    def grade(self, index: int, answer: str) -> int:
        """Score of an answer in millionths.

        Raises:
            Fault: when the sandbox cannot run it, which says nothing about the answer.
        """
        row, source = self.rows[index], extract_source(answer)
        if len(source) > SOURCE_CHARS_MAX:
            return 0
        outcomes = self._run(row, source)
        compare = is_equal if row.function else is_same_output
        passed = sum(
            not outcome.error and compare(outcome.value, expected)
            for outcome, (_, expected) in zip(outcomes, row.tests, strict=True)
        )
        return RIGHT * passed // len(row.tests) if self._score == "fraction" else RIGHT * (passed == len(row.tests))

    def _run(self, row: Row, source: str) -> list[Outcome]:
        try:
            if row.function:
                return self._sandbox.run(source, [FunctionCall(row.function, tuple(given)) for given, _ in row.tests])
            return self._sandbox.run(source, [ProgramRun(given) for given, _ in row.tests])
        except ConfigError as error:  # it was there when the environment was made
            raise Fault(str(error)) from error


def _read(args: Mapping[str, Any]) -> tuple[str, str, TextOptions]:
    """Hash of the data, kind of score, shared options."""
    table = read_arguments("code", args, _FIELDS)
    return read_hash("code: data", table["data"]), table["score"], read_options("code", table)


def make(args: Mapping[str, Any], files: Mapping[str, bytes]) -> TextEnvironment:
    """Environment of task arguments; see the module's head.

    Raises:
        ConfigError: for arguments or data that are not as they should be, or where answers cannot be run without risk.
    """
    data, score, options = _read(args)
    rows, sandbox = read_rows(files[data]), Sandbox()
    layers = sandbox.probe()
    if layers.missing:
        raise ConfigError(layers.missing)
    return TextEnvironment(CodeQuestions(rows, score, sandbox), make_codec(options, files), options)


def list_files(args: Mapping[str, Any]) -> dict[str, Kind]:
    """The data, and the tokenizer if one is named. Raises `ConfigError`."""
    data, _, options = _read(args)
    return {data: DATA, **list_text_files(options)}


def read_sources(args: Mapping[str, Any]) -> list[tuple[str, bytes]]:
    """What decides prompts and rewards: this file, the sandbox, the text modules, and the language's version."""
    _, _, options = _read(args)
    folder = Path(__file__).parent
    inside = sorted(path for path in (folder / "jail").iterdir() if path.suffix == ".py")
    files = [Path(__file__), folder / "rows.py", folder / "sandbox.py", *inside]
    version = ".".join(platform.python_version_tuple()[:2])
    sources = [(path.relative_to(folder).as_posix(), path.read_bytes()) for path in files]
    return [*sources, ("python", version.encode()), *read_text_sources(options)]
