"""Operators with a price: what `a + b`, `a ** b` and their like become in a rewritten program, and `math` on big integers.

Small numbers take a fast path. Big integers are charged for their digits and end the run when they would pass
`INT_BITS_MAX`; sequences are charged for what is copied, before it is copied.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable
from typing import Any

from .meter import CHARS_A_STEP, ELEMENTS_A_STEP, INT_BITS_MAX, Meter

_SMALL = 1 << 64
_NUMBERS = frozenset({int, float, bool})
_FACTORIAL_MAX = 50_000

OPERATORS = {
    "Add": operator.add,
    "Sub": operator.sub,
    "Mult": operator.mul,
    "Div": operator.truediv,
    "FloorDiv": operator.floordiv,
    "Mod": operator.mod,
    "Pow": operator.pow,
    "LShift": operator.lshift,
    "RShift": operator.rshift,
    "BitOr": operator.or_,
    "BitXor": operator.xor,
    "BitAnd": operator.and_,
    "MatMult": operator.matmul,
}
_INPLACE = {
    "Add": operator.iadd,
    "Sub": operator.isub,
    "Mult": operator.imul,
    "Div": operator.itruediv,
    "FloorDiv": operator.ifloordiv,
    "Mod": operator.imod,
    "Pow": operator.ipow,
    "LShift": operator.ilshift,
    "RShift": operator.irshift,
    "BitOr": operator.ior,
    "BitXor": operator.ixor,
    "BitAnd": operator.iand,
    "MatMult": operator.imatmul,
}

Binary = Callable[[Any, Any], Any]


class Arithmetic:
    """Operators that charge one run's meter."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._price: dict[str, Callable[[Any, Any], None]] = {
            "Mult": self._price_product,
            "Pow": self._price_power,
            "LShift": self._price_shift,
            "FloorDiv": self._price_digits,
            "Mod": self._price_digits,
            "Div": self._price_digits,
        }

    def operators(self) -> dict[str, Binary]:
        """`Add`, `iAdd` and so on, by the names of the syntax tree."""
        made = {
            name: self._make(function, self._price.get(name, self._price_both)) for name, function in OPERATORS.items()
        }
        inplace = {
            f"i{name}": self._make(function, self._price.get(name, self._price_both), spread=True)
            for name, function in _INPLACE.items()
        }
        return made | inplace

    def _make(self, function: Binary, price: Callable[[Any, Any], None], *, spread: bool = False) -> Binary:
        cheap = price == self._price_both
        made = self._meter.made

        def apply(left: Any, right: Any) -> Any:
            if type(left) in _NUMBERS and type(right) in _NUMBERS:
                if not cheap and not (type(left) is float or type(right) is float):
                    price(left, right)
                result = function(left, right)
                return result if -_SMALL < result < _SMALL else made(result)
            price(left, right)
            if spread:
                right = self._meter.spread(right)
            return made(function(left, right))

        def apply_power(left: Any, right: Any) -> Any:  # its result may be complex, which has no order
            price(left, right)
            return made(function(left, right))

        return apply_power if price == self._price_power else apply

    def _price_both(self, left: Any, right: Any) -> None:
        """What is copied or looked at: both sides."""
        for value in (left, right):
            if isinstance(value, (str, bytes, bytearray)):
                self._meter.charge(len(value) // CHARS_A_STEP)
            elif isinstance(value, (list, tuple)):
                self._meter.charge(len(value) // ELEMENTS_A_STEP)
            else:
                self._meter.operand(value)

    def _price_digits(self, left: Any, right: Any) -> None:
        """Long division; `%` of a text formats what is on its right."""
        if isinstance(left, int) and isinstance(right, int):
            if not (-_SMALL < left < _SMALL):
                self._charge_digits(left.bit_length(), right.bit_length())
        else:
            self._price_both(left, right)
            self._meter.operand(right)

    def _price_product(self, left: Any, right: Any) -> None:
        if isinstance(left, int) and isinstance(right, int):
            if not (-_SMALL < left < _SMALL and -_SMALL < right < _SMALL):
                self._require_bits(left.bit_length() + right.bit_length())
                self._charge_digits(left.bit_length(), right.bit_length())
            return
        for sequence, times in ((left, right), (right, left)):
            if isinstance(times, int) and isinstance(sequence, (str, bytes, bytearray)):
                self._meter.charge(len(sequence) * max(times, 0) // CHARS_A_STEP)
            elif isinstance(times, int) and hasattr(sequence, "__len__"):
                self._meter.charge(len(sequence) * max(times, 0) // ELEMENTS_A_STEP)

    def _price_power(self, left: Any, right: Any) -> None:
        if isinstance(left, int) and isinstance(right, int) and right > 1 and not -2 < left < 2:
            bits = left.bit_length() * right
            self._require_bits(bits)
            self._charge_digits(bits, bits)

    def _price_shift(self, left: Any, right: Any) -> None:
        if isinstance(left, int) and isinstance(right, int) and left:
            self._require_bits(left.bit_length() + max(right, 0))

    def _require_bits(self, bits: int) -> None:
        if bits > INT_BITS_MAX:
            self._meter.end("size")

    def _charge_digits(self, left_bits: int, right_bits: int) -> None:
        self._meter.charge((left_bits // 30 + 1) * (right_bits // 30 + 1) >> 6)

    # Functions

    def power(self, base: Any, exp: Any, mod: Any = None) -> Any:
        """`pow`."""
        if mod is None:
            return self.operators()["Pow"](base, exp)
        if all(isinstance(value, int) for value in (base, exp, mod)):
            digits = max(mod.bit_length(), base.bit_length() if exp.bit_length() < 2 else 0) // 30 + 1
            self._meter.charge((exp.bit_length() + 1) * digits * digits >> 5)
            self._charge_digits(base.bit_length(), mod.bit_length())
        return pow(base, exp, mod)

    def divide(self, left: Any, right: Any) -> Any:
        """`divmod`."""
        self._price_digits(left, right)
        return divmod(left, right)

    def total(self, iterable: Iterable[Any], /, start: Any = 0) -> Any:
        """`sum`, one addition after the other where the elements are not numbers."""
        add = self._meter
        values = list(add.spread(iterable))
        if type(start) in _NUMBERS and all(type(value) in _NUMBERS for value in values):
            add.operand(values)
            return add.made(sum(values, start))
        if isinstance(start, (str, bytes, bytearray)):
            raise TypeError("sum() can't sum strings")
        plus = self._make(operator.add, self._price_both)
        for value in values:
            start = plus(start, value)
        return start

    def product(self, iterable: Iterable[Any], /, *, start: Any = 1) -> Any:
        """`math.prod`."""
        times = self._make(operator.mul, self._price_product)
        for value in self._meter.spread(iterable):
            start = times(start, value)
        return start

    def reduce(self, function: Callable[[Any, Any], Any], iterable: Iterable[Any], /, *initial: Any) -> Any:
        """`functools.reduce`."""
        values = iter(self._meter.spread(iterable))
        try:
            result = initial[0] if initial else next(values)
        except StopIteration:
            raise TypeError("reduce() of empty iterable with no initial value") from None
        for value in values:
            result = function(result, value)
        return result

    def factorial(self, n: Any, /) -> int:
        """`math.factorial`."""
        if isinstance(n, int) and n > 1:
            self._require_bits(n * n.bit_length() if n < _FACTORIAL_MAX * 2 else INT_BITS_MAX + 1)
            self._charge_digits(n * n.bit_length(), 30 * n >> 3)
        return math.factorial(n)

    def choose(self, n: Any, k: Any, /) -> int:
        """`math.comb`."""
        if isinstance(n, int) and isinstance(k, int) and 0 <= k <= n:
            smaller = min(k, n - k)
            self._require_bits(smaller * n.bit_length())
            self._charge_digits(smaller * n.bit_length(), 30 * smaller)
        return math.comb(n, k)

    def arrange(self, n: Any, k: Any = None, /) -> int:
        """`math.perm`."""
        if isinstance(n, int) and (k is None or isinstance(k, int)):
            count = n if k is None else k
            if 0 <= count <= n:
                self._require_bits(count * n.bit_length())
                self._charge_digits(count * n.bit_length(), 30 * count)
        return math.perm(n, k)

    def root(self, n: Any, /) -> int:
        """`math.isqrt`."""
        if isinstance(n, int):
            self._charge_digits(n.bit_length(), n.bit_length())
        return math.isqrt(n)

    def divisor(self, *values: Any) -> int:
        """`math.gcd`."""
        for value in values:
            if isinstance(value, int):
                self._charge_digits(value.bit_length(), value.bit_length())
        return math.gcd(*values)

    def multiple(self, *values: Any) -> int:
        """`math.lcm`."""
        bits = sum(value.bit_length() for value in values if isinstance(value, int))
        self._require_bits(bits)
        self._charge_digits(bits, bits)
        return math.lcm(*values)
