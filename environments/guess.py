"""Find a hidden digit by asking: a task of several turns, small enough for a model of 0.1 M parameters.

The prompt says between which digits the hidden one is, `@ 2 7 ?`. A sampled digit is a guess; the environment answers with a
sign and what is left, `> 5 7 ?` for a guess of 4 when the hidden digit is higher. The right digit ends the completion, and
so does the end token. Reward: 1 for the first guess, less `price_micro` for every further one; 0 when it is not found.

All digits and the end token must be stop tokens of the task (`STOP_TOKENS`). Digits stand in answers too: there they stop
nothing. An answer is a function of the prompt index and of what was guessed so far.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from environments.arguments import Field, read_arguments

VOCABULARY = ("<pad>", "<eos>", *"0123456789", "@", "?", "<", ">", *"abcd")
EOS = VOCABULARY.index("<eos>")
ZERO, START, ASK, LOWER, HIGHER = (VOCABULARY.index(one) for one in "0@?<>")
STOP_TOKENS = (EOS, *range(ZERO, ZERO + 10))
ANSWER_TOKENS = 4
REWARD_MAX = 1_000_000


class _Round(NamedTuple):
    """Digits between which the hidden one is, as the prompt says it."""

    low: int
    high: int
    hidden: int


#: Every range of at least two digits, with every digit that may be hidden in it.
_ROUNDS = tuple(
    _Round(low, high, hidden) for low in range(10) for high in range(low + 1, 10) for hidden in range(low, high + 1)
)


class GuessEnvironment:
    """The environment of one price.

    Args:
        price_micro: what a further guess costs, in millionths.
    """

    def __init__(self, price_micro: int = 200_000) -> None:
        self._price_micro = price_micro

    @property
    def num_prompts(self) -> int:
        return len(_ROUNDS)

    @property
    def vocab_size(self) -> int:
        return len(VOCABULARY)

    def prompt(self, index: int) -> tuple[int, ...]:
        """`@` low high `?`."""
        one = _find(index)
        return (START, ZERO + one.low, ZERO + one.high, ASK)

    def respond(self, index: int, completion: Sequence[int]) -> tuple[int, ...]:
        """Sign, low, high, `?` behind a wrong guess; nothing behind the right one or the end token."""
        answers = [answer for _, answer in self._turns(index, completion)]
        return answers[-1] if answers else ()

    def reward(self, index: int, completion: Sequence[int]) -> int:
        """By the number of guesses up to the right one, in millionths."""
        hidden = ZERO + _find(index).hidden
        for guesses, (token, _) in enumerate(self._turns(index, completion)):
            if token == hidden:
                return max(REWARD_MAX - guesses * self._price_micro, 0)
        return 0

    def solution(self, index: int) -> tuple[int, ...]:
        """A completion by halving what is left, with the environment's answers."""
        low, high, hidden = _find(index)
        made: tuple[int, ...] = ()
        while True:
            guess = (low + high) // 2
            made = (*made, ZERO + guess)
            if guess == hidden:
                return made
            made = (*made, *self.respond(index, made))
            low, high = (guess + 1, high) if hidden > guess else (low, guess - 1)

    def _turns(self, index: int, completion: Sequence[int]) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Guesses of a completion and the answer to each; the tokens of an answer are passed over."""
        low, high, hidden = _find(index)
        position = 0
        while position < len(completion):
            token = completion[position]
            position += 1
            if token == EOS:
                yield token, ()
                return
            if not ZERO <= token < ZERO + 10:
                continue  # neither a guess nor an end: a token that says nothing
            guess = token - ZERO
            if guess == hidden:
                yield token, ()
                return
            low, high = (max(low, guess + 1), high) if hidden > guess else (low, min(high, guess - 1))
            yield token, (HIGHER if hidden > guess else LOWER, ZERO + low, ZERO + high, ASK)
            position += ANSWER_TOKENS


def _find(index: int) -> _Round:
    if not 0 <= index < len(_ROUNDS):
        raise IndexError(f"prompt index is {index}, expected 0 to {len(_ROUNDS) - 1}")
    return _ROUNDS[index]


_FIELDS = {"price_micro": Field(int, 200_000, low=0, high=REWARD_MAX)}


def make(args: Mapping[str, Any], files: Mapping[str, bytes]) -> GuessEnvironment:
    """Environment of task arguments `{"price_micro": n}`. Raises `ConfigError` for any other argument."""
    return GuessEnvironment(**read_arguments("guess", args, _FIELDS))


def read_sources(args: Mapping[str, Any]) -> list[tuple[str, bytes]]:
    """What decides prompts, answers and rewards: this file. Raises `ConfigError` like `make`."""
    make(args, {})
    return [("guess.py", Path(__file__).read_bytes())]
