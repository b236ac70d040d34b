"""Environments that each break one rule, for tests of `troth env check`. Importing this registers them as entries `bad_*`."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import environments
from environments.tokenizer import BytesCodec
from protocol.errors import Fault


class Good:
    """Two prompts in bytes; a completion of one token has a reward."""

    num_prompts, vocab_size, codec = 20, 257, BytesCodec()

    def prompt(self, index: int) -> tuple[int, ...]:
        return (65, index)

    def respond(self, index: int, completion: Sequence[int]) -> tuple[int, ...]:
        return ()

    def reward(self, index: int, completion: Sequence[int]) -> int:
        return 1_000_000 if len(completion) == 1 else 0


class Hash(Good):
    def reward(self, index, completion):
        return hash(str(completion)) % 2


class Zone(Good):
    def prompt(self, index):
        return (65, time.localtime(0).tm_hour)


class Order(Good):
    calls = 0

    def prompt(self, index):
        Order.calls += 1
        return (65, Order.calls % 200)


class Folder(Good):
    def reward(self, index, completion):
        return zlib.crc32(str(Path.cwd()).encode()) % 1000


class Empty(Good):
    def prompt(self, index):
        return ()


class Range(Good):
    def prompt(self, index):
        return (65, 257)


class Answer(Good):
    def respond(self, index, completion):
        return (300,)


class High(Good):
    def reward(self, index, completion):
        return 1_000_001


class Float(Good):
    def reward(self, index, completion):
        return 0.5


class Faulty(Good):
    def reward(self, index, completion):
        if len(completion) > 200:
            raise Fault("out of memory")
        return 0


class Slow(Good):
    def prompt(self, index):
        time.sleep(0.6 if index == 0 else 0)
        return (65,)


class Network(Good):
    def reward(self, index, completion):
        try:
            socket.create_connection(("127.0.0.1", 9), timeout=1)
        except OSError:
            return 0
        return 1


class Process(Good):
    def reward(self, index, completion):
        try:
            subprocess.run([sys.executable, "-c", ""], check=False)
        except OSError:
            return 0
        return 1


class Write(Good):
    def reward(self, index, completion):
        try:
            with open("/var/tmp/troth-bad-environment", "w") as file:  # noqa: PTH123
                file.write("x")
        except OSError:
            return 0
        return 1


class Variable(Good):
    def reward(self, index, completion):
        return 0 if os.environ.get("LC_ALL") else 1


class Code(Good):
    def reward(self, index, completion):
        try:
            return 1 if eval(self.codec.decode(completion)) == 4 else 0
        except Exception:
            return 0


class Wrong(Good):
    def known_answer(self, index):
        return "four"

    def reward(self, index, completion):
        return 0


def make(args: dict[str, Any], files: dict[str, bytes]) -> Good:
    """The environment of `{"kind": name}`."""
    found: Good = globals()[args["kind"]]()
    return found


def read_sources(args: dict[str, Any]) -> list[tuple[str, bytes]]:
    """Nothing decides anything here."""
    return []


environments.ENTRIES["bad"] = "tests.support.bad_environments"
