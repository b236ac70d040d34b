"""Sums that a model works out with a calculator: what it writes before the tool's token is evaluated and the result appended.

    What is 482 * 17 + 95?   482*17=8194\\n8194+95=8289\\nThe answer is 8289

where `8194` and `8289` behind the equals signs are the environment's tokens. Arguments: `seed`, `size` (number of
questions), `terms` (numbers in a question), `digits` (of the largest number), `tool` (a text that is one token, "=" unless
given), `calls_max` (answers in a completion), and those of environments.text but `length`. The tool's token and the end token
must be stop tokens of the task.

An expression is the run of digits, + - * / % ( ) and spaces in front of the tool's token. Integers only: / and % round down.
What cannot be evaluated, or passes `DIGITS_MAX`, is answered with "?". The reward is 1 when the last number of the
completion is right.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from environments.arguments import Field, read_arguments
from environments.files import Kind
from environments.text import (
    REWARD_MAX,
    TEXT_FIELDS,
    TextEnvironment,
    TextOptions,
    list_text_files,
    make_codec,
    read_options,
    read_text_sources,
)
from environments.tokenizer import Codec
from protocol.errors import ConfigError

EXPRESSION_CHARS_MAX = 128
DIGITS_MAX = 30
DEPTH_MAX = 16
UNKNOWN = "?"

_LIMIT = 10**DIGITS_MAX
_EXPRESSION = re.compile(r"[0-9+\-*/%() ]*\Z", re.ASCII)
_NUMBER = re.compile(r"-?[0-9]{1,40}", re.ASCII)


class _Parser:
    """sum := product (("+" | "-") product)*; product := factor (("*" | "/" | "%") factor)*;
    factor := "-" factor | "(" sum ")" | digits."""

    def __init__(self, text: str) -> None:
        self._text = text.replace(" ", "")
        self._at = 0
        self._depth = 0

    def parse(self) -> int:
        """Value of the whole text. Raises `ValueError`."""
        value = self._sum()
        if self._at != len(self._text):
            raise ValueError("something is left over")
        return value

    def _next(self, characters: str) -> str:
        """The next character if it is one of these."""
        if self._at < len(self._text) and self._text[self._at] in characters:
            self._at += 1
            return self._text[self._at - 1]
        return ""

    def _sum(self) -> int:
        value = self._product()
        while sign := self._next("+-"):
            other = self._product()
            value = _bound(value + other if sign == "+" else value - other)
        return value

    def _product(self) -> int:
        value = self._factor()
        while sign := self._next("*/%"):
            other = self._factor()
            if sign == "*":
                value = _bound(value * other)
            elif not other:
                raise ValueError("division by zero")
            else:
                value = value // other if sign == "/" else value % other
        return value

    def _factor(self) -> int:
        self._depth += 1
        if self._depth > DEPTH_MAX:
            raise ValueError("nested too deeply")
        try:
            if self._next("-"):
                return -self._factor()
            if self._next("("):
                value = self._sum()
                if not self._next(")"):
                    raise ValueError("a bracket is open")
                return value
            digits = ""
            while digit := self._next("0123456789"):
                digits += digit
            return _bound(int(digits))
        finally:
            self._depth -= 1


def _bound(value: int) -> int:
    if not -_LIMIT < value < _LIMIT:
        raise ValueError("too large")
    return value


def evaluate(expression: str) -> str:
    """Value of an expression as text, `UNKNOWN` when it has none."""
    if len(expression) > EXPRESSION_CHARS_MAX:
        return UNKNOWN
    try:
        return str(_Parser(expression).parse())
    except ValueError:
        return UNKNOWN


class Sums:
    """Questions drawn from a seed; see `environments.text.Questions`."""

    def __init__(self, seed: int, size: int, terms: int, digits: int) -> None:
        self._seed, self._size, self._terms, self._high = seed, size, terms, 10**digits

    @property
    def num_questions(self) -> int:
        return self._size

    def _expression(self, index: int) -> str:
        drawn = hashlib.shake_256(f"troth/calculator/{self._seed}/{index}".encode()).digest(16 * self._terms)
        numbers = [int.from_bytes(drawn[16 * i : 16 * i + 12], "big") % self._high for i in range(self._terms)]
        signs = ["+-*"[drawn[16 * i + 15] % 3] for i in range(self._terms - 1)]
        return str(numbers[0]) + "".join(f" {sign} {number}" for sign, number in zip(signs, numbers[1:], strict=True))

    def question(self, index: int) -> str:
        """`What is 12 * 3 - 4?`"""
        return f"What is {self._expression(index)}?"

    def known_answer(self, index: int) -> str | None:
        """The value."""
        return evaluate(self._expression(index))

    def grade(self, index: int, answer: str) -> int:
        """1,000,000 when the last number of the answer is the value, else 0."""
        numbers = _NUMBER.findall(answer)
        return REWARD_MAX if numbers and numbers[-1] == self.known_answer(index) else 0


class CalculatorEnvironment(TextEnvironment):
    """Questions whose completions may call a calculator.

    Args:
        tool: text of the token that calls it.
        calls_max: answers in one completion.

    Raises:
        ConfigError: when `tool` is not exactly one token.
    """

    def __init__(
        self,
        sums: Sums,
        codec: Codec,
        options: TextOptions,
        *,
        tool: str,
        calls_max: int,
        first: int = 0,
        count: int | None = None,
    ) -> None:
        super().__init__(sums, codec, options, first=first, count=count)
        self._sums = sums
        tokens = codec.encode(tool)
        if len(tokens) != 1:
            raise ConfigError(f"calculator: tool {tool!r} is {len(tokens)} tokens of this tokenizer, expected one")
        self.tool_token, self._tool, self._calls_max = tokens[0], tool, calls_max

    def held_out(self) -> CalculatorEnvironment:
        """The same environment over the questions that no round assigns. Raises `ConfigError` when there are none."""
        plain = super().held_out()
        first = self._sums.num_questions - plain.num_prompts
        return CalculatorEnvironment(
            self._sums,
            self.codec,
            self.options,
            tool=self._tool,
            calls_max=self._calls_max,
            first=first,
            count=plain.num_prompts,
        )

    def respond(self, index: int, completion: Sequence[int]) -> tuple[int, ...]:
        """Tokens of the value of what stands before the tool's token; nothing behind another, or after too many calls."""
        if completion[-1] != self.tool_token or completion.count(self.tool_token) > self._calls_max:
            return ()
        before = self.codec.decode(completion[:-1])[-2 * EXPRESSION_CHARS_MAX :]
        found = _EXPRESSION.search(before)
        return tuple(self.codec.encode(evaluate(found.group() if found else "")))


_FIELDS = {
    "seed": Field(int, 0, low=0, high=2**63 - 1),
    "size": Field(int, 10_000, low=1, high=10_000_000),
    "terms": Field(int, 3, low=2, high=8),
    "digits": Field(int, 3, low=1, high=9),
    "tool": Field(str, "=", low=1, high=16),
    "calls_max": Field(int, 8, low=1, high=64),
    **{name: field for name, field in TEXT_FIELDS.items() if name != "length"},
}


def _read(args: Mapping[str, Any]) -> tuple[dict[str, Any], TextOptions]:
    table = read_arguments("calculator", args, _FIELDS)
    return table, read_options("calculator", {**table, "length": None})


def make(args: Mapping[str, Any], files: Mapping[str, bytes]) -> CalculatorEnvironment:
    """Environment of task arguments; see the module's head. Raises `ConfigError`."""
    table, options = _read(args)
    sums = Sums(table["seed"], table["size"], table["terms"], table["digits"])
    return CalculatorEnvironment(
        sums, make_codec(options, files), options, tool=table["tool"], calls_max=table["calls_max"]
    )


def list_files(args: Mapping[str, Any]) -> dict[str, Kind]:
    """The tokenizer, if one is named. Raises `ConfigError`."""
    return list_text_files(_read(args)[1])


def read_sources(args: Mapping[str, Any]) -> list[tuple[str, bytes]]:
    """What decides prompts, answers and rewards: this file and the text modules."""
    return [("calculator.py", Path(__file__).read_bytes()), *read_text_sources(_read(args)[1])]
