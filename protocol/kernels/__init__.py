"""Compiled forms of the loops that dominate sampling and commitments, and when they are worth loading.

A kernel gives the same result as the array form it stands for, so when to use it is a matter of time alone. Loading both costs
half a second, and some seconds where nothing is cached yet (`python -m protocol.kernels` fills the cache), which a
short-lived process or a tiny model never earns back: a kernel is loaded for the first large call, or once the array forms
have used a second. Where numba is missing or does not work the array forms serve, and that is said once.
"""

from __future__ import annotations

import importlib
import logging
from types import ModuleType
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

#: Array-form work after which kernels are loaded, as the callers estimate it.
BUDGET_NS = 1_000_000_000

Name = Literal["gumbel", "toploc"]
NAMES: tuple[Name, ...] = ("gumbel", "toploc")

_log = logging.getLogger("troth.protocol.kernels")


class Kernels:
    """The kernels of one process."""

    def __init__(self) -> None:
        self._loaded: dict[str, ModuleType | None] = {}
        self._spent_ns = 0

    def get(self, name: Name, *, cost_ns: int, large: bool) -> Any | None:
        """The kernel module for a call, or None when the array form should serve it.

        Args:
            cost_ns: what the array form of this call costs, roughly.
            large: the call is of a size where the kernel pays at once.
        """
        if name not in self._loaded:
            self._spent_ns += cost_ns
            if not large and self._spent_ns < BUDGET_NS:
                return None
            self._loaded[name] = self._load(name)
        return self._loaded[name]

    def load(self) -> bool:
        """Load all kernels now; returns whether they serve from here on."""
        return all(self.get(name, cost_ns=0, large=True) is not None for name in NAMES)

    def _load(self, name: Name) -> ModuleType | None:
        try:
            return importlib.import_module(f"protocol.kernels.{name}")
        except Exception as error:  # a compiler has its own ways to fail, and none of them matters to the result
            _log.warning(
                "no compiled %s (%s: %s): results are the same, large vocabularies and hidden sizes take many times "
                "as long; install the numba of requirements/base.txt",
                name,
                type(error).__name__,
                error,
            )
            return None


def dense(array: NDArray[Any], dtype: type[np.generic]) -> NDArray[Any]:
    """The array as kernels take it: contiguous, writeable, of one type; a copy only where it is not."""
    return np.require(array, dtype, ("C", "W"))


#: What protocol.sampling and protocol.toploc ask.
kernels = Kernels()
