"""Counts a run's steps. One step is about the work of one line of Python; the count depends on the program alone.

Work that the interpreter does in C is charged before it is done, by the size of what it is done on: sequences by their
elements, nested ones through and through (a comparison of `a = [a, a]`, forty times, walks 2^40 elements without a line of
Python), text and numbers by their length. A run that has no steps left ends there; nothing in it can catch that.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

#: Longest integer that arithmetic may make, in bits.
INT_BITS_MAX = 1 << 20
#: Characters, and elements moved without being looked at, that make a step.
CHARS_A_STEP = 64
ELEMENTS_A_STEP = 8

_SMALL = 1 << 64
_ATOMS = frozenset({float, bool, type(None), complex, type(Ellipsis)})
_TEXTS = (str, bytes, bytearray)
_DICTS: tuple[Any, ...] = ({}, OrderedDict())
_VIEWS: tuple[type[Any], ...] = tuple(
    type(getattr(one, name)()) for one in _DICTS for name in ("keys", "values", "items")
)
_SEQUENCES: tuple[type[Any], ...] = (list, tuple, set, frozenset, deque)
CONTAINERS: tuple[type[Any], ...] = (*_SEQUENCES, dict, *_VIEWS)


class Meter:
    """The steps of one run.

    Args:
        steps: how many there are.
        end: ends the process; its argument says why.
    """

    def __init__(self, steps: int, end: Callable[[str], NoReturn]) -> None:
        self.left = steps
        self.end = end

    def charge(self, steps: int) -> None:
        """Take steps away, or end the run."""
        self.left -= steps
        if self.left < 0:
            self.end("steps")

    def tick(self) -> bool:
        """One step. True, so that it can stand in a condition."""
        self.left -= 1
        if self.left < 0:
            self.end("steps")
        return True

    def operand(self, value: Any) -> Any:
        """Charge for looking at all of a value once (comparing, hashing, printing it); returns it."""
        kind = type(value)
        if kind is int:
            if not -_SMALL < value < _SMALL:
                self.charge(value.bit_length() >> 9)
        elif kind not in _ATOMS:
            if isinstance(value, _TEXTS):
                if len(value) > CHARS_A_STEP:
                    self.charge(len(value) // CHARS_A_STEP)
            elif isinstance(value, CONTAINERS):
                self._walk(value)
        return value

    def _walk(self, value: Any) -> None:
        """Charge for every element, and for what is within it, as often as it occurs."""
        waiting = [value]
        while waiting:
            one = waiting.pop()
            size, parts = _open(one)
            self.charge(size + 1)
            for part in parts:
                kind = type(part)
                if kind is int:
                    if not -_SMALL < part < _SMALL:
                        self.charge(part.bit_length() >> 9)
                elif kind not in _ATOMS:
                    if isinstance(part, _TEXTS):
                        self.charge(len(part) // CHARS_A_STEP)
                    elif isinstance(part, CONTAINERS):
                        waiting.append(part)

    def made(self, value: Any) -> Any:
        """Charge for a value that was made by copying; returns it."""
        if isinstance(value, _TEXTS):
            if len(value) > CHARS_A_STEP:
                self.charge(len(value) // CHARS_A_STEP)
        elif isinstance(value, CONTAINERS):
            self.charge(_open(value)[0] // ELEMENTS_A_STEP)
        elif type(value) is int and not -_SMALL < value < _SMALL:
            self.charge(value.bit_length() >> 9)
        return value

    def wide(self, value: Any) -> Any:
        """Charge for moving a sequence's elements; returns it."""
        if isinstance(value, (list, bytearray, deque)):
            self.charge(len(value) // CHARS_A_STEP)
        return value

    def counted(self, values: Iterator[Any]) -> Iterator[Any]:
        """The same elements, each charged when it is taken."""
        for value in values:
            self.left -= 1 + (len(value) // ELEMENTS_A_STEP if type(value) is tuple else 0)
            if self.left < 0:
                self.end("steps")
            yield value

    def spread(self, value: Any) -> Any:
        """Something whose elements are taken by the interpreter: sized ones are charged now, iterators as they go."""
        if isinstance(value, CONTAINERS):
            self.charge(_open(value)[0])
        elif isinstance(value, (str, bytes, bytearray, range)):
            self.charge(len(value))
        elif isinstance(value, Iterator):
            return self.counted(value)
        return value


def _open(value: Any) -> tuple[int, Iterator[Any]]:
    """Number of elements and the elements of a container, whatever a subclass of it would say."""
    if isinstance(value, dict):
        return 2 * dict.__len__(value), _pairs(value)
    for base in _SEQUENCES:
        if isinstance(value, base):
            known: Any = base
            return known.__len__(value), known.__iter__(value)
    return len(value), iter(value)


def _pairs(value: dict[Any, Any]) -> Iterator[Any]:
    yield from dict.keys(value)
    yield from dict.values(value)
