"""What a program finds: built-in functions, a few modules, and its standard input and output.

Modules are tables of names, made anew for every run. There is no file, clock, randomness, `id`, `eval` or `re` (whose
matching may take exponential time without a step): a result follows from the program and its input alone.
"""

from __future__ import annotations

import bisect
import builtins
import collections
import collections.abc
import functools
import heapq
import itertools
import math
import operator
import string
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

from .arithmetic import OPERATORS, Arithmetic
from .meter import Meter

_TYPING = (
    "Any Callable ClassVar Counter DefaultDict Deque Dict Final FrozenSet Generator Generic Hashable Iterable Iterator "
    "List Literal Mapping MutableMapping NoReturn Optional OrderedDict Sequence Set Tuple Type TypeVar Union"
)
_OPERATOR = (
    "add and_ attrgetter concat contains eq floordiv ge getitem gt index itemgetter le lshift lt mod mul ne neg not_ or_ "
    "pow rshift sub truediv truth xor"
)
_ABC = "Callable Generator Hashable Iterable Iterator Mapping MutableMapping MutableSequence Sequence Set Sized"

#: Names of each module that may be imported.
NAMES: dict[str, tuple[str, ...]] = {
    "bisect": tuple(name for name in dir(bisect) if not name.startswith("_")),
    "collections": ("Counter", "OrderedDict", "defaultdict", "deque"),
    "collections.abc": tuple(_ABC.split()),
    "copy": ("copy", "deepcopy"),
    "functools": ("cache", "cmp_to_key", "lru_cache", "partial", "reduce", "total_ordering", "wraps"),
    "heapq": tuple(name for name in heapq.__all__ if name != "merge"),
    "itertools": tuple(name for name in dir(itertools) if not name.startswith("_")),
    "math": tuple(name for name in dir(math) if not name.startswith("_")),
    "operator": tuple(_OPERATOR.split()),
    "string": (
        "ascii_letters",
        "ascii_lowercase",
        "ascii_uppercase",
        "digits",
        "hexdigits",
        "punctuation",
        "whitespace",
    ),
    "sys": ("argv", "exit", "maxsize", "setrecursionlimit", "stdin", "stdout"),
    "typing": tuple(_TYPING.split()),
}

_BUILTINS = (
    "ArithmeticError AssertionError AttributeError BaseException Ellipsis EOFError Exception False IndexError KeyError "
    "KeyboardInterrupt LookupError NameError None NotImplemented NotImplementedError OverflowError RecursionError RuntimeError "
    "StopIteration SystemExit True TypeError UnboundLocalError UnicodeError ValueError ZeroDivisionError MemoryError "
    "abs all any ascii bin bool bytearray bytes callable chr classmethod complex dict enumerate filter float format "
    "frozenset hex int isinstance issubclass iter len list map max min next object oct ord property range repr reversed "
    "round set slice sorted staticmethod str super tuple type zip"
)


class Hint:
    """Stands for anything from `typing`: annotations are dropped, so it only has to exist."""

    def __getitem__(self, _: Any) -> Hint:
        return self

    def __call__(self, *_: Any, **__: Any) -> Hint:
        return self

    def __or__(self, _: Any) -> Hint:
        return self


class Streams:
    """Standard input and output of one program run.

    Args:
        text: all of the input.
        chars_max: most characters of output.

    A program holds this object, so its own names are among those that the screen refuses.
    """

    def __init__(self, meter: Meter, text: str, chars_max: int) -> None:
        self._troth_meter = meter
        self._troth_lines: list[str] = text.splitlines(keepends=True)[::-1]
        self._troth_chars_left = chars_max
        self._troth_parts: list[str] = []

    @property
    def output(self) -> str:
        return "".join(self._troth_parts)

    def write(self, text: str) -> int:
        """Append to the output. Too much of it ends the run."""
        if not isinstance(text, str):
            raise TypeError("write() takes a str")
        self._troth_chars_left -= len(text)
        if self._troth_chars_left < 0:
            self._troth_meter.end("output")
        self._troth_parts.append(text)
        return len(text)

    def flush(self) -> None:
        """Nothing is buffered."""

    def print(
        self, *values: Any, sep: str | None = " ", end: str | None = "\n", file: Any = None, flush: Any = None
    ) -> None:
        """`print`."""
        self._troth_meter.operand(values)
        text = (" " if sep is None else sep).join([str(value) for value in values]) + ("\n" if end is None else end)
        self.write(self._troth_meter.made(text))

    def input(self, prompt: Any = "", /) -> str:
        """`input`."""
        self.print(prompt, end="")
        if not self._troth_lines:
            raise EOFError("the input has no further line")
        return self._troth_lines.pop().rstrip("\n")

    def readline(self) -> str:
        """One line with its end, or nothing."""
        self._troth_meter.tick()
        return self._troth_lines.pop() if self._troth_lines else ""

    def readlines(self) -> list[str]:
        """All lines that are left."""
        lines, self._troth_lines = self._troth_lines[::-1], []
        return self._troth_meter.spread(lines)  # type: ignore[no-any-return]

    def read(self) -> str:
        """All that is left."""
        return self._troth_meter.made("".join(self.readlines()))  # type: ignore[no-any-return]

    def __iter__(self) -> Iterator[str]:
        while self._troth_lines:
            yield self.readline()


def make_builtins(guards: Any, meter: Meter, arithmetic: Arithmetic, streams: Streams) -> dict[str, Any]:
    """The built-in names of one run."""
    table = {name: getattr(builtins, name) for name in _BUILTINS.split()}
    table |= {
        "__build_class__": guards.build_class,
        "__name__": "__main__",
        "divmod": arithmetic.divide,
        "exit": _exit,
        "getattr": guards.getattr,
        "hasattr": guards.hasattr,
        "hash": guards.hash,
        "input": streams.input,
        "pow": arithmetic.power,
        "print": streams.print,
        "quit": _exit,
        "setattr": guards.setattr,
        "sum": arithmetic.total,
    }
    return table


def make_importer(guards: Any, meter: Meter, arithmetic: Arithmetic, streams: Streams) -> Callable[[str], Any]:
    """What an import calls: module name to a table of its names, the same one for each name within a run."""
    made: dict[str, Any] = {}

    def get(name: str) -> Any:
        if name not in made:
            special = _make_special(name, guards, meter, arithmetic, streams)
            source = _SOURCES.get(name)
            table = {key: special[key] if key in special else getattr(source, key) for key in NAMES[name]}
            if name == "collections":
                table["abc"] = get("collections.abc")
            made[name] = SimpleNamespace(**table)
        return made[name]

    return get


_SOURCES = {
    "bisect": bisect,
    "collections": collections,
    "collections.abc": collections.abc,
    "functools": functools,
    "heapq": heapq,
    "itertools": itertools,
    "math": math,
    "operator": operator,
    "string": string,
}
_OPERATOR_NAMES = {
    "add": "Add",
    "and_": "BitAnd",
    "concat": "Add",
    "floordiv": "FloorDiv",
    "lshift": "LShift",
    "mod": "Mod",
    "mul": "Mult",
    "or_": "BitOr",
    "pow": "Pow",
    "rshift": "RShift",
    "sub": "Sub",
    "truediv": "Div",
    "xor": "BitXor",
}


def _make_special(name: str, guards: Any, meter: Meter, arithmetic: Arithmetic, streams: Streams) -> dict[str, Any]:
    """Names that are not what the interpreter has."""
    if name == "typing":
        return dict.fromkeys(NAMES["typing"], Hint())
    if name == "math":
        return {
            "comb": arithmetic.choose,
            "factorial": arithmetic.factorial,
            "gcd": arithmetic.divisor,
            "isqrt": arithmetic.root,
            "lcm": arithmetic.multiple,
            "perm": arithmetic.arrange,
            "prod": arithmetic.product,
        }
    if name == "functools":
        return {"reduce": lambda function, *rest: arithmetic.reduce(guards.call(function), *rest), "wraps": _wraps}
    if name == "operator":
        guarded = arithmetic.operators()
        assert set(_OPERATOR_NAMES.values()) <= set(OPERATORS)
        return {key: guarded[node] for key, node in _OPERATOR_NAMES.items()} | {"attrgetter": _get_attribute}
    if name == "copy":
        return {"copy": lambda value: _copy(meter, value), "deepcopy": lambda value: _deepcopy(meter, value)}
    if name == "sys":
        return {
            "argv": ["answer"],
            "exit": _exit,
            "maxsize": 2**63 - 1,
            "setrecursionlimit": _set_nothing,
            "stdin": streams,
            "stdout": streams,
        }
    return {}


def _exit(code: Any = None, /) -> None:
    raise SystemExit(code)


def _set_nothing(_: Any, /) -> None:
    """The recursion limit is fixed: a result must not depend on it."""


def _get_attribute(*names: str) -> Callable[[Any], Any]:
    from .guards import get_attribute

    return get_attribute(names)


def _wraps(wrapped: Any) -> Callable[[Any], Any]:
    """`functools.wraps`, without a choice of what is looked up."""

    def decorate(wrapper: Any) -> Any:
        for name in ("__name__", "__doc__"):
            if hasattr(wrapped, name):
                setattr(wrapper, name, getattr(wrapped, name))
        return wrapper

    return decorate


def _copy(meter: Meter, value: Any) -> Any:
    """`copy.copy`."""
    meter.made(value)
    if isinstance(value, (list, dict, set, bytearray, collections.deque)):
        return value.copy()
    if hasattr(value, "__dict__") and not callable(value):
        made = object.__new__(type(value))
        made.__dict__.update(value.__dict__)
        made.__dict__.pop("_troth_serial_", None)
        return made
    return value


def _deepcopy(meter: Meter, value: Any, memo: dict[int, Any] | None = None) -> Any:
    """`copy.deepcopy`, of plain data and of objects with a dictionary."""
    memo = {} if memo is None else memo
    meter.tick()
    if id(value) in memo:
        return memo[id(value)][0]
    if isinstance(value, (tuple, frozenset)):
        parts: Sequence[Any] = [_deepcopy(meter, part, memo) for part in value]
        memo[id(value)] = (type(value)(parts), value)
    elif isinstance(value, dict):
        made = _copy(meter, value)
        made.clear()
        memo[id(value)] = (made, value)
        for key, part in value.items():
            made[_deepcopy(meter, key, memo)] = _deepcopy(meter, part, memo)
    elif isinstance(value, (list, set, collections.deque)):
        made = _copy(meter, value)
        made.clear()
        memo[id(value)] = (made, value)
        grow = made.add if isinstance(made, set) else made.append
        for part in value:
            grow(_deepcopy(meter, part, memo))
    elif hasattr(value, "__dict__") and not callable(value):
        made = _copy(meter, value)
        memo[id(value)] = (made, value)
        for name, part in value.__dict__.items():
            if name != "_troth_serial_":
                made.__dict__[name] = _deepcopy(meter, part, memo)
    else:
        return value
    return memo[id(value)][0]
