"""sort-N: put N digits in order. Small enough that a model of 0.1 M parameters learns it on one CPU core.

Prompt `s:3142=` (digits drawn with repetition, so 10^N prompts), right answer `1234<eos>`, reward 1 for exactly that and 0
for anything else. One prompt in ten, chosen by a hash of its digits, is held out: rounds never assign it, because
`num_prompts` counts the training part only; `held_out()` gives the rest for evaluation.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from protocol.errors import ConfigError

PAD, EOS = 0, 1
#: Characters by token id. The size is a round number for the model; ids without a character are never right.
VOCABULARY = ("<pad>", "<eos>", *"0123456789", *"s:=", *"abcdefghijklmnop", "?")
_ZERO, _S, _COLON, _EQUALS = VOCABULARY.index("0"), *(VOCABULARY.index(c) for c in "s:=")

DIGITS_MAX = 6
REWARD_RIGHT = 1_000_000


@lru_cache(maxsize=4)
def _split(digits: int) -> tuple[array[int], array[int]]:
    """All numbers of `digits` digits: those for training, those held out (one in ten)."""
    training, held_out = array("L"), array("L")
    for number in range(10**digits):
        digest = hashlib.sha256(f"troth/sort/held-out/{number:0{digits}d}".encode()).digest()
        (held_out if int.from_bytes(digest[:8], "big") % 10 == 0 else training).append(number)
    return training, held_out


class SortEnvironment:
    """The environment of one N.

    Args:
        digits: N, 1 to 6.
        held_out: number the held-out prompts instead of the training prompts.
    """

    def __init__(self, digits: int = 4, *, held_out: bool = False) -> None:
        if not 1 <= digits <= DIGITS_MAX:
            raise ConfigError(f"sort: digits is {digits}, expected 1 to {DIGITS_MAX}")
        self.digits = digits
        self._numbers = _split(digits)[held_out]

    @property
    def num_prompts(self) -> int:
        return len(self._numbers)

    @property
    def vocab_size(self) -> int:
        return len(VOCABULARY)

    def held_out(self) -> SortEnvironment:
        """The same environment over the prompts that no round assigns."""
        return SortEnvironment(self.digits, held_out=True)

    def _digits(self, index: int) -> list[int]:
        if not 0 <= index < len(self._numbers):
            raise IndexError(f"prompt index is {index}, expected 0 to {len(self._numbers) - 1}")
        return [int(character) for character in f"{self._numbers[index]:0{self.digits}d}"]

    def prompt(self, index: int) -> tuple[int, ...]:
        """`s:` digits `=`, N + 3 tokens."""
        return (_S, _COLON, *(_ZERO + digit for digit in self._digits(index)), _EQUALS)

    def solution(self, index: int) -> tuple[int, ...]:
        """The one completion that is rewarded: the digits in order, then the end token."""
        return (*(_ZERO + digit for digit in sorted(self._digits(index))), EOS)

    def respond(self, index: int, completion: Sequence[int]) -> tuple[int, ...]:
        """Nothing: a stop token ends the completion."""
        return ()

    def reward(self, index: int, completion: Sequence[int]) -> int:
        """1,000,000 for the solution, else 0."""
        return REWARD_RIGHT if tuple(completion) == self.solution(index) else 0


def render(tokens: Sequence[int]) -> str:
    """Tokens as text, for people."""
    return "".join(VOCABULARY[token] if 0 <= token < len(VOCABULARY) else f"<{token}>" for token in tokens)


def make(args: dict[str, Any], files: Mapping[str, bytes]) -> SortEnvironment:
    """Environment of task arguments `{"digits": N}`. It needs no files.

    Raises:
        ConfigError: for any other argument.
    """
    unknown = sorted(set(args) - {"digits"})
    if unknown:
        raise ConfigError(f"sort: unknown argument {unknown[0]!r}, expected digits")
    digits = args.get("digits", 4)
    if type(digits) is not int:
        raise ConfigError(f"sort: digits is {digits!r}, expected a whole number")
    return SortEnvironment(digits)


def read_sources(args: dict[str, Any]) -> list[tuple[str, bytes]]:
    """What decides prompts and rewards: this file."""
    make(args, {})
    return [("sort.py", Path(__file__).read_bytes())]
