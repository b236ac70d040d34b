"""`eth_account`, imported without its side effect on the whole process.

`py_ecc`, which it loads, raises the interpreter's recursion limit to 100,000. With that limit a few kilobytes of nested
JSON or MessagePack from a stranger overflow the C stack of a decoder and kill the process, where the ordinary limit ends
in a `RecursionError`. So everything here imports `Account` from this module.
"""

from __future__ import annotations

import sys

#: Deepest recursion that is left allowed: what py-evm asks for, a third of what overflows a stack of 8 MiB.
RECURSION_MAX = 12 * 1024

_limit = min(sys.getrecursionlimit(), RECURSION_MAX)

from eth_account import Account  # noqa: E402

sys.setrecursionlimit(_limit)

__all__ = ["RECURSION_MAX", "Account"]
