"""A data set of prompts and answers in a JSONL file, graded by an installed function.

Arguments: `data` (SHA-256 of the file), `reward` (a name in `REWARDS`, or "math"), and those of environments.text. Each line is
an object with the texts `prompt` and `answer`, and optionally `info`, which nothing here reads. Everything is read and checked
when the environment is made: a line that is not as it should be is a `ConfigError` that names it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import msgspec

from environments.arguments import Field, read_arguments
from environments.files import DATA, Kind, read_hash
from environments.math_answer import MathGrader, read_math_sources
from environments.rows import decode_rows
from environments.text import (
    TEXT_FIELDS,
    TextEnvironment,
    TextOptions,
    list_text_files,
    make_codec,
    read_options,
    read_text_sources,
)
from protocol.errors import ConfigError

LINE_BYTES_MAX = 1 << 18
ROWS_MAX = 2_000_000
ANSWER_CHARS_MAX = 4096
RIGHT = 1_000_000

#: What may be a number in a text, found in one pass; and a number as people write it, with separators, decimals, a denominator.
_CANDIDATE = re.compile(r"[-+]?\d[\d,.]*(?:/\d+)?", re.ASCII)
_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3}){1,9}|\d{1,30})(?:\.\d{1,30}|/\d{1,30})?", re.ASCII)
_LETTER = re.compile(r"(?<![A-Za-z0-9])[A-Z](?![A-Za-z0-9])")


class Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One line of a data file. `info` stays as the bytes it is: parsed, it could take twenty times the memory."""

    prompt: str
    answer: str
    info: msgspec.Raw = msgspec.Raw()


def read_rows(data: bytes) -> list[Row]:
    """Rows of a data file. Blank lines are none.

    Raises:
        ConfigError: with the number of the line.
    """
    return decode_rows("data set", data, Row, _validate_row, line_bytes_max=LINE_BYTES_MAX, rows_max=ROWS_MAX)


def _validate_row(row: Row) -> None:
    if not row.prompt or not 1 <= len(row.answer) <= ANSWER_CHARS_MAX:
        raise ConfigError(
            f"prompt has {len(row.prompt)} characters, answer {len(row.answer)}; expected some, and at most "
            f"{ANSWER_CHARS_MAX} in an answer"
        )


def _exact(gold: str, answer: str) -> bool:
    return answer == gold


def _contains(gold: str, answer: str) -> bool:
    return gold in answer


def _prefix(gold: str, answer: str) -> bool:
    return answer.startswith(gold)


def read_number(text: str) -> Fraction | None:
    """The last number in a text, exactly; None when there is none, or it is not well-formed."""
    found = _CANDIDATE.findall(text)
    last = found[-1].rstrip(",.") if found else ""
    if not _NUMBER.fullmatch(last):
        return None
    try:
        return Fraction(last.replace(",", ""))
    except ZeroDivisionError:
        return None


def _numeric(gold: str, answer: str) -> bool:
    number = read_number(answer)
    return number is not None and number == read_number(gold)


def _multiple_choice(gold: str, answer: str) -> bool:
    letters = _LETTER.findall(answer)
    return bool(letters) and letters[-1] == gold


#: Reward functions: (gold answer, graded answer) -> right or not. `math` is the one that runs in a process of its own.
#: exact: the same text; contains: the gold answer stands somewhere in it; prefix: it begins with it; numeric: its last number
#: is equal as a fraction; multiple_choice: its last capital letter that stands alone is the gold letter.
REWARDS: dict[str, Callable[[str, str], bool]] = {
    "exact": _exact,
    "contains": _contains,
    "prefix": _prefix,
    "numeric": _numeric,
    "multiple_choice": _multiple_choice,
}
MATH = "math"

_FIELDS = {
    "data": Field(str),
    "reward": Field(str, choices=(*REWARDS, MATH)),
    **TEXT_FIELDS,
}


class DataSet:
    """The questions of a data file; see `environments.text.Questions`.

    Args:
        rows: its rows.
        reward: name of the reward function.

    Raises:
        ConfigError: for a gold answer that the reward function cannot compare with.
    """

    def __init__(self, rows: Sequence[Row], reward: str) -> None:
        self.rows = rows
        self._is_right = REWARDS.get(reward)
        self._math = MathGrader() if reward == MATH else None
        seen: set[str] = set()
        for number, row in enumerate(rows, start=1):
            if row.answer not in seen:
                self._validate_gold(number, row.answer, reward)
                seen.add(row.answer)

    def _validate_gold(self, number: int, gold: str, reward: str) -> None:
        if reward == "numeric" and (read_number(gold) is None or not _NUMBER.fullmatch(gold)):
            raise ConfigError(f"data set row {number}: answer is {gold[:80]!r}, expected a number")
        if reward == "multiple_choice" and not re.fullmatch("[A-Z]", gold):
            raise ConfigError(f"data set row {number}: answer is {gold[:80]!r}, expected one capital letter")
        if self._math is not None:
            try:
                self._math.validate_gold(gold)
            except ConfigError as error:
                raise ConfigError(f"data set row {number}: {error}") from None

    @property
    def num_questions(self) -> int:
        return len(self.rows)

    def question(self, index: int) -> str:
        """The row's prompt."""
        return self.rows[index].prompt

    def known_answer(self, index: int) -> str | None:
        """The row's answer; boxed where it is mathematics."""
        gold = self.rows[index].answer
        return f"\\boxed{{{gold}}}" if self._math is not None else gold

    def grade(self, index: int, answer: str) -> int:
        """1,000,000 for a right answer, else 0. Raises `Fault` when math-verify fails."""
        gold = self.rows[index].answer
        if self._math is not None:
            return self._math.grade(gold, answer)
        assert self._is_right is not None
        return RIGHT if self._is_right(gold, answer) else 0


def _read(args: Mapping[str, Any]) -> tuple[str, str, TextOptions]:
    """Hash of the data, name of the reward, shared options."""
    table = read_arguments("dataset", args, _FIELDS)
    return read_hash("dataset: data", table["data"]), table["reward"], read_options("dataset", table)


def make(args: Mapping[str, Any], files: Mapping[str, bytes]) -> TextEnvironment:
    """Environment of task arguments; see the module's head. Raises `ConfigError`."""
    data, reward, options = _read(args)
    return TextEnvironment(DataSet(read_rows(files[data]), reward), make_codec(options, files), options)


def list_files(args: Mapping[str, Any]) -> dict[str, Kind]:
    """The data, and the tokenizer if one is named. Raises `ConfigError`."""
    data, _, options = _read(args)
    return {data: DATA, **list_text_files(options)}


def read_sources(args: Mapping[str, Any]) -> list[tuple[str, bytes]]:
    """What decides prompts and rewards: this file, the text modules, and what compares mathematics where it does."""
    _, reward, options = _read(args)
    folder = Path(__file__).parent
    here = [(name, (folder / name).read_bytes()) for name in ("dataset.py", "rows.py")]
    return [*here, *(read_math_sources() if reward == MATH else []), *read_text_sources(options)]
