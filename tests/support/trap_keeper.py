"""A judging process whose environment has a trap in it, for tests: some completions do to the process what a hole in it might.

The environment is the one of sort; a completion of six times the same token springs that token's trap when it is rewarded. The
kinds are in `KINDS`: `forge` writes a reply of its own to every socket the process has, `once` ends it
unless the file in the environment variable `OMP_TRAP_FILE` is there, which it makes (the prefix is one that a judging process
is given).
"""

from __future__ import annotations

import ctypes
import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import environments
from environments.sort import make as make_sort
from protocol.task import Environment as EnvironmentSpec

#: How a keeper is started with `main` below in place of the real one's.
BOOT = (
    "import sys; sys.path.insert(0, sys.argv[1]); from verifier.isolated_layers import start_keeper; "
    "started = start_keeper(tuple(sys.argv[2].split(','))); from tests.support.trap_keeper import main; main(*started)"
)
#: What six times a token does.
KINDS = {
    0: "segv",
    2: "oom",
    3: "hang",
    4: "spin",
    5: "exit",
    6: "raise",
    7: "forge",
    8: "dial",
    9: "once",
    10: "variables",
}
#: A reply that says every account is good, as whoever has taken a process over would like to.
FORGED = b"\x93\xa6Judged\x94\x90\x90\x00\x90\x00"


class Trapped:
    """Sort, with traps."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def reward(self, index: int, completion: Sequence[int]) -> int:
        if len(completion) == 6 and len({*completion}) == 1 and completion[0] in KINDS:
            spring(KINDS[completion[0]])
        return int(self._inner.reward(index, completion))


def spring(kind: str) -> None:
    """Do to this process what the trap says."""
    if kind == "segv":
        ctypes.string_at(0)
    elif kind == "oom":
        kept = []
        while True:
            kept.append(bytearray(os.urandom(1 << 20)) * 16)
    elif kind == "hang":
        time.sleep(3600)
    elif kind == "spin":
        while True:
            pass
    elif kind == "exit":
        os._exit(0)
    elif kind == "raise":
        raise RuntimeError("not foreseen")
    elif kind == "forge":
        for number in range(3, 64):
            try:
                link = socket.socket(fileno=os.dup(number))
                link.sendall(len(FORGED).to_bytes(4, "big") + FORGED)
            except OSError:
                continue
        os._exit(0)
    elif kind == "once":
        path = Path(os.environ["OMP_TRAP_FILE"])
        if not path.exists():
            path.touch()
            os._exit(3)


def load(spec: EnvironmentSpec, folders: Sequence[Path] = ()) -> Any:
    """`environments.load`, with traps in what it gives."""
    if spec.entry == "sort":
        return Trapped(make_sort({"digits": 4}, {}))
    return environments.load(spec, folders)


def main(control: socket.socket, network: str) -> None:
    """The keeper."""
    from troth import judging

    judging.main(control, network, load)
