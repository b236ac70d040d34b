"""The functions a rewritten program's calls go through.

`call` gives back what needs no guard (the program's own functions, and built-in ones that do a bounded amount of work) and
wraps every other: the sizes of its arguments and of what it is bound to are charged, iterators are counted as they are
consumed, functions passed along are guarded too, and what it returns is charged as a copy.
"""

from __future__ import annotations

import builtins
import itertools
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from functools import partial
from types import (
    BuiltinFunctionType,
    FunctionType,
    GeneratorType,
    MethodDescriptorType,
    MethodType,
)
from typing import Any

from .meter import CONTAINERS, Meter
from .screen import METHODS_ONLY, Screened, is_allowed_attribute

_ATOMS = frozenset({int, float, bool, type(None), complex})
#: Built-in functions and types whose work does not depend on the size of anything.
_CONSTANT_FUNCTIONS = frozenset(
    {len, isinstance, issubclass, callable, iter, next, abs, ord, chr, bool, float, complex, object, range, slice}
    | {property, staticmethod, classmethod, super}
)
#: Methods likewise, by the exact type they are bound to.
_CONSTANT_METHODS: dict[type, frozenset[str]] = {
    list: frozenset({"append", "clear"}),
    dict: frozenset({"keys", "values", "items", "popitem", "clear"}),
    OrderedDict: frozenset({"keys", "values", "items", "popitem", "clear"}),
    deque: frozenset({"append", "appendleft", "pop", "popleft", "clear"}),
    set: frozenset({"pop", "clear"}),
    GeneratorType: frozenset({"send", "close", "throw"}),
}
#: Methods that look one key up.
_KEYED_METHODS = frozenset({"get", "setdefault", "add", "discard", "move_to_end"})
_KEYED_OWNERS = (dict, set)
#: Functions of heaps and sorted lists that look at a few elements only.
_FEW = frozenset(
    {"heappush", "heappop", "heapreplace", "heappushpop", "bisect", "bisect_left", "bisect_right"}
    | {"insort", "insort_left", "insort_right"}
)
_FEW_STEPS = 16


class Guards:
    """The guards of one run.

    Args:
        meter: what they charge.
        own: the globals of the program, by which its functions are known.
    """

    def __init__(self, meter: Meter, own: dict[str, Any]) -> None:
        self._meter = meter
        self._own = own
        self._plain: set[type] = set()
        self._serials = itertools.count(1)

    def names(self) -> dict[str, Callable[..., Any]]:
        """What the rewriting refers to, by its short names."""
        meter = self._meter
        return {
            "tick": meter.tick,
            "operand": meter.operand,
            "made": meter.made,
            "wide": meter.wide,
            "spread": meter.spread,
            "call": self.call,
            "contains": self.contains,
            "caught": self.caught,
        }

    def caught(self) -> None:
        """First line of every handler: the end of memory is not to be caught."""
        if isinstance(sys.exc_info()[1], MemoryError):
            self._meter.end("memory")

    def contains(self, needle: Any, whole: Any) -> bool:
        """`needle in whole`."""
        if isinstance(whole, (dict, set, frozenset)):
            self._meter.operand(needle)
        elif isinstance(whole, range):
            self._meter.charge(0 if type(needle) is int else len(whole))
        elif isinstance(whole, Iterator):
            return needle in self._meter.counted(whole)
        else:
            self._meter.operand(whole)
            self._meter.operand(needle)
        return needle in whole

    def call(self, function: Any) -> Any:
        """The function to call in the place of `function`."""
        kind = type(function)
        if kind is FunctionType:
            if self._is_ours(function):
                return function
        elif kind is MethodType:
            inner = function.__func__
            if type(inner) is FunctionType and self._is_ours(inner):
                return function
        elif kind is BuiltinFunctionType:
            return self._call_builtin(function)
        elif issubclass(kind, type):
            if issubclass(function, type):
                return _get_type
            if kind is type and (function in self._plain or function in _CONSTANT_FUNCTIONS):
                return function
        elif kind in self._plain:
            return function
        if (
            kind is MethodDescriptorType
            and function.__objclass__ is str
            and function.__name__ in ("format", "format_map")
        ):
            return _bind(self._format, function.__name__)
        return _bind(self._charged, function)

    def _is_ours(self, function: FunctionType) -> bool:
        spaces = function.__globals__
        return spaces is self._own or spaces.get("__package__") == __package__

    def _call_builtin(self, function: Any) -> Any:
        owner, name = function.__self__, function.__name__
        kind = type(owner)
        if function in _CONSTANT_FUNCTIONS or name in _CONSTANT_METHODS.get(kind, ()):
            return function
        if name in _KEYED_METHODS and isinstance(owner, _KEYED_OWNERS):
            return _bind(self._keyed, function)
        if kind is list and name in ("pop", "insert"):
            return _bind(self._shifted, function)
        if kind is dict and name == "pop":
            return _bind(self._keyed, function)
        if name in _FEW and function.__module__ in ("_heapq", "_bisect"):
            return _bind(self._few, function)
        if isinstance(owner, str) and name in ("format", "format_map"):
            return _bind(self._format, name, owner)
        return _bind(self._charged, function)

    def _keyed(self, function: Any, *args: Any) -> Any:
        self._meter.charge(1)
        if args:
            self._meter.operand(args[0])
        return function(*args)

    def _shifted(self, function: Any, *args: Any) -> Any:
        if args and args != (-1,):
            self._meter.wide(function.__self__)
        return function(*args)

    def _few(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        self._meter.charge(_FEW_STEPS)
        if len(args) > 1:
            self._meter.operand(args[1])
        if function.__name__.startswith("insort"):
            self._meter.wide(args[0] if args else None)
        return function(*args, **{name: self._prepare(value) for name, value in kwargs.items()})

    def _format(self, name: str, text: Any, *args: Any, **kwargs: Any) -> Any:
        """`str.format`, whose fields could otherwise look up any attribute."""
        text = str.__str__(text)  # not what a subclass makes of it
        if "__" in text or any(inside in text for inside in (".gi_", ".tb_", ".f_", ".co_", "._troth")):
            raise Screened("a format field looks up an attribute that is not available")
        return self._charged(getattr(text, name), *args, **kwargs)

    def _charged(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        meter = self._meter
        meter.charge(1)
        owner = getattr(function, "__self__", None)
        if type(owner) not in _ATOMS:
            meter.operand(owner)
        args = tuple([value if type(value) in _ATOMS else self._prepare(value) for value in args])
        if kwargs:
            kwargs = {name: self._prepare(value) for name, value in kwargs.items()}
        if function is sorted or getattr(function, "__name__", "") in ("sort", "nlargest", "nsmallest", "heapify"):
            many = owner if isinstance(owner, list) else args[-1] if args else ()
            size = len(many) if isinstance(many, CONTAINERS) else 0
            meter.charge(size * size.bit_length() >> 3)
        result = function(*args, **kwargs)
        if type(result).__module__ == "itertools":
            return result if isinstance(result, (itertools.groupby,)) else meter.counted(result)
        return meter.made(result)

    def _prepare(self, value: Any) -> Any:
        """An argument of a built-in function: charged, or guarded while it is used."""
        kind = type(value)
        if kind is int or isinstance(value, (*CONTAINERS, str, bytes, bytearray)):
            return self._meter.operand(value)
        if kind is range:
            self._meter.charge(len(value))
            return value
        if kind in (FunctionType, MethodType, BuiltinFunctionType, MethodDescriptorType, type, partial):
            return self.call(value)
        if isinstance(value, Iterator):
            return self._meter.counted(value)
        return value

    # Built-in functions that a program gets in the place of the interpreter's

    def build_class(self, body: Any, name: str, /, *bases: Any) -> type:
        """`class`: objects hash and print by their number, not by their address."""
        made: Any = builtins.__build_class__(body, name, *bases)
        if made.__hash__ is object.__hash__:
            made.__hash__ = _as_method(self._hash_serial)
        if made.__repr__ is object.__repr__:
            made.__repr__ = _repr_plain
        if all(base is object or base in self._plain or issubclass(base, BaseException) for base in made.__bases__):
            self._plain.add(made)
        return made  # type: ignore[no-any-return]

    def _hash_serial(self, value: Any) -> int:
        try:
            return value._troth_serial_  # type: ignore[no-any-return]
        except AttributeError:
            pass
        serial = next(self._serials)
        try:
            object.__setattr__(value, "_troth_serial_", serial)
        except AttributeError:  # a class with __slots__
            return hash(type(value).__name__)
        return serial

    def hash(self, value: Any, /) -> int:
        """`hash`, of what is not hashed by its address."""
        if getattr(type(value), "__hash__", None) is object.__hash__:
            raise TypeError(f"hash of a {type(value).__name__} is not available")
        return hash(self._meter.operand(value))

    def getattr(self, value: Any, name: str, /, *default: Any) -> Any:
        """`getattr` of names that may be looked up."""
        _require_attribute(name)
        return getattr(value, name, *default)

    def hasattr(self, value: Any, name: str, /) -> bool:
        """`hasattr` likewise."""
        _require_attribute(name)
        return hasattr(value, name)

    def setattr(self, value: Any, name: str, new: Any, /) -> None:
        """`setattr` likewise."""
        _require_attribute(name)
        if name in METHODS_ONLY:
            raise Screened(f"{name} can only be defined as a method")
        setattr(value, name, new)


def _bind(guard: Callable[..., Any], *first: Any) -> Callable[..., Any]:
    """`functools.partial` that shows neither the guard nor its arguments to whom it is handed."""

    def bound(*args: Any, **kwargs: Any) -> Any:
        return guard(*first, *args, **kwargs)

    return bound


def _as_method(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def method(self: Any) -> Any:
        return function(self)

    return method


def _repr_plain(self: Any) -> str:
    return f"<{type(self).__name__} object>"


def _require_attribute(name: Any) -> None:
    if type(name) is not str or not is_allowed_attribute(name):  # a subclass could answer for itself
        raise Screened("the attribute is not available")


def get_attribute(names: tuple[str, ...]) -> Callable[[Any], Any]:
    """`operator.attrgetter` of names that may be looked up, without dots."""
    for name in names:
        _require_attribute(name)

    def get(value: Any) -> Any:
        found = tuple([getattr(value, name) for name in names])
        return found if len(found) > 1 else found[0]

    return get


def _get_type(value: Any, /) -> type:
    return type(value)
