"""How the kernels of this package are compiled: for explicit types, cached on disk where there is a place for it.

Importing a kernel module compiles it, or loads it from the cache in a few milliseconds. Compiled code holds no lock
(`nogil`) and keeps IEEE arithmetic (no `fastmath`), so that its results can be reasoned about.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numba

F = TypeVar("F", bound=Callable[..., object])

if numba.config.DISABLE_JIT:
    raise ImportError("NUMBA_DISABLE_JIT is set")


def compiled(*signatures: str, inline: str = "never") -> Callable[[F], F]:
    """Compile a function for the given signatures; without any, for what the kernels that call it pass.

    Args:
        inline: "always" puts it into its callers before they are compiled, so that their loops can become vectors.
    """

    def decorate(function: F) -> F:
        def compile_with(cache: bool) -> F:
            if signatures:
                return numba.njit(list(signatures), cache=cache, nogil=True, boundscheck=False)(function)  # type: ignore[no-any-return]
            return numba.njit(cache=cache, nogil=True, boundscheck=False, inline=inline)(function)  # type: ignore[no-any-return]

        try:
            return compile_with(cache=True)
        except (
            RuntimeError,
            OSError,
        ):  # no directory that may be written, or a full one: compile for this process only
            return compile_with(cache=False)

    return decorate
