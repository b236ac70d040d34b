"""One run inside the sandbox: source and calls in, one line of JSON per call out.

Lines are `["ready"]` once the source is about to be looked at, then for each call `["value", v]`, or `["error", text]`, or
`["limit", which]` after which nothing follows. What a call should have given is not known here.
"""

from __future__ import annotations

import ast
import gc
import json
import os
import sys
import unicodedata
from typing import Any, NoReturn

from .arithmetic import Arithmetic
from .guards import Guards
from .library import Streams, make_builtins, make_importer
from .meter import Meter
from .screen import PREFIX, rewrite

#: Most characters that one call may print or return.
TEXT_CHARS_MAX = 65_536
#: Deepest recursion of a program, in calls.
RECURSION_MAX = 2000
_DEPTH_MAX = 64

#: Lines that are written when there may be no memory left to make them.
_LIMITS = {which: f'["limit","{which}"]\n'.encode() for which in ("steps", "memory", "size", "output")}
_PRELOADED = (ast, unicodedata)  # nothing can be imported once the files are gone


def main(request: dict[str, Any]) -> None:
    """Run a request; returns when all calls are done, ends the process when a limit is reached."""
    _write(["ready"])
    if request["bare"]:
        try:
            exec(compile(request["source"], "<bare>", "exec"), {"__name__": "__main__", "sys": sys})
        except BaseException as error:
            _write(["error", repr(error)[:1000]])
        return
    gc.disable()  # collections would make the moment of a finaliser, and the time of a run, depend on what ran before
    sys.setrecursionlimit(RECURSION_MAX)
    meter = Meter(request["steps"], _end)
    try:
        code = rewrite(request["source"])
        calls = request["calls"]
        if all(call["kind"] == "program" for call in calls):
            for call in calls:
                _answer(meter, lambda call=call: _run_program(meter, code, call["stdin"]))
        else:
            program = _Program(meter, "")
            program.run(code)
            for call in calls:
                _answer(meter, lambda call=call: _to_json(meter, program.call(call["name"], call["args"])))
    except MemoryError:
        _end("memory")
    except BaseException as error:
        _write(["error", _describe(error)])


class _Program:
    """A program's names, input and output."""

    def __init__(self, meter: Meter, stdin: str) -> None:
        self.globals: dict[str, Any] = {"__name__": "__main__"}
        self.streams = Streams(meter, stdin, TEXT_CHARS_MAX)
        self._guards = Guards(meter, self.globals)
        arithmetic = Arithmetic(meter)
        names = self._guards.names() | arithmetic.operators()
        names["module"] = make_importer(self._guards, meter, arithmetic, self.streams)
        self.globals["__builtins__"] = make_builtins(self._guards, meter, arithmetic, self.streams) | {
            f"{PREFIX}{name}_": function for name, function in names.items()
        }

    def run(self, code: Any) -> None:
        """Execute it from the top."""
        exec(code, self.globals)

    def call(self, name: str, args: list[Any]) -> Any:
        """Call one of its functions."""
        if name not in self.globals:
            raise NameError(f"the answer defines no {name}")
        return self._guards.call(self.globals[name])(*args)


def _run_program(meter: Meter, code: Any, stdin: str) -> str:
    program = _Program(meter, stdin)
    try:
        program.run(code)
    except SystemExit as error:
        if error.code not in (None, 0):
            raise
    return program.streams.output


def _answer(meter: Meter, run: Any) -> None:
    """One line for one call."""
    try:
        line = ["value", run()]
    except MemoryError:
        _end("memory")
    except BaseException as error:
        line = ["error", _describe(error)]
    _write(line)


def _to_json(meter: Meter, value: Any, depth: int = 0) -> Any:
    """A returned value as JSON has it, each of its elements charged. Tuples are lists there."""
    meter.tick()
    if value is None or type(value) in (bool, float):
        return value
    if depth > _DEPTH_MAX:
        raise ValueError("the returned value is nested too deeply")
    if isinstance(value, int):
        return int(value)
    if isinstance(value, str):
        meter.charge(len(value))
        return str.__str__(value)
    if isinstance(value, (list, tuple)):
        return [_to_json(meter, one, depth + 1) for one in value]
    if isinstance(value, dict) and all(type(key) in (str, int) for key in dict.keys(value)):
        return {str(key): _to_json(meter, one, depth + 1) for key, one in dict.items(value)}
    raise TypeError(f"the returned value is a {type(value).__name__}, which JSON does not have")


def _describe(error: BaseException) -> str:
    """The kind of an error alone: its text is the program's own, and may not even be had."""
    return type(error).__name__[:80] if not isinstance(error, (SyntaxError, NameError)) else str(error)[:200]


def _end(which: str) -> NoReturn:
    os.write(1, _LIMITS[which])
    os._exit(0)


def _write(line: list[Any]) -> None:
    data = json.dumps(line).encode() + b"\n"
    if len(data) > 2 * TEXT_CHARS_MAX:
        data = b'["error","the returned value is too large"]\n'
    while data:
        data = data[os.write(1, data) :]
