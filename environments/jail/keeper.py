"""The sandbox's first process: shuts itself in once, then forks one handler per request, which forks the worker.

Requests and replies are frames (4 bytes of length, big-endian) on standard input and output. The first reply says which
layers are in place, or what is missing. A reply to a request is a line of JSON, `end` and `code`, and the worker's bytes
behind it. The keeper trusts its requests and nothing a worker does: it reads a bounded number of bytes for a bounded
time, then kills everything in the process namespace, whose first process it is. When its own parent is gone, so is it.

The first process itself touches no request and no reply: its memory is the same before every run, so how much a worker has, and
where things lie in it, follows from the request alone and not from what ran before.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import sys
import time

from . import layers, worker

#: Exit code of a worker that did not get as far as the source.
EXIT_SETUP = 70
_FIXED = "addresses-fixed"


def main() -> None:
    """Never returns."""
    if _FIXED not in sys.argv and layers.fix_addresses():
        os.execv(sys.executable, [*sys.orig_argv, _FIXED])
    try:
        namespaces = layers.enter_namespaces()
        base_bytes = layers.get_memory_bytes()
        layers.hide_files()
        pid = os.fork()
    except OSError as error:
        _send(json.dumps({"missing": str(error)}).encode())
        os._exit(1)
    if pid:
        os.close(0)
        os.close(1)
        os.waitpid(pid, 0)
        os._exit(0)
    layers.die_with_parent()
    namespaces += ["processes"] if os.getpid() == 1 else []
    gc.collect()
    gc.freeze()
    _send(json.dumps({"missing": "", "namespaces": namespaces, "fixed": _FIXED in sys.argv}).encode())
    waiting = select.poll()
    waiting.register(0, select.POLLIN)
    while any(event & select.POLLIN for _, event in waiting.poll()):
        pid = os.fork()
        if pid == 0:
            _handle(base_bytes)
        _, status = os.waitpid(pid, 0)
        _kill_others()
        if status:
            os._exit(1)
    os._exit(0)


def _handle(base_bytes: int) -> None:
    """Take one request and answer it. Never returns."""
    code = 1
    try:
        _send(_serve(json.loads(_receive()), base_bytes))
        code = 0
    finally:
        os._exit(code)


def _kill_others() -> None:
    """Kill and reap what is left in the namespace."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)


def _serve(request: dict[str, object], base_bytes: int) -> bytes:
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        _become_worker(request, writing, base_bytes)
    os.close(writing)
    deadline, data_max = time.monotonic() + float(str(request["wall_s"])), int(str(request["bytes_max"]))
    poll = select.poll()
    poll.register(reading, select.POLLIN)
    poll.register(0, 0)  # hang-up only: the one who asked is gone
    data, end = bytearray(), ""
    while not end:
        left_ms = (deadline - time.monotonic()) * 1000
        events = poll.poll(left_ms) if left_ms > 0 else []
        if any(number == 0 for number, _ in events):
            os._exit(0)
        if not events:
            end = "wall"
        elif chunk := os.read(reading, 65_536):
            data += chunk
            end = "flood" if len(data) > data_max else ""
        else:
            end = _wait(pid, deadline)
    os.close(reading)
    end, code = _clear(pid, end)
    return json.dumps({"end": end, "code": code}).encode() + b"\n" + bytes(data[:data_max])


def _wait(pid: int, deadline: float) -> str:
    """A worker's pipe is closed: it is about to end."""
    while time.monotonic() < deadline:
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            return "exit"
        time.sleep(0.0005)
    return "wall"


def _clear(pid: int, end: str) -> tuple[str, int]:
    """Kill and reap all other processes of the namespace; how the worker ended, and its exit code or signal."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)
    code = 0
    with contextlib.suppress(ChildProcessError):
        while True:
            one, status = os.waitpid(-1, 0)
            if one == pid and end == "exit":
                code = os.waitstatus_to_exitcode(status)
    return ("signal", -code) if code < 0 else (end, code)


def _become_worker(request: dict[str, object], writing: int, base_bytes: int) -> None:
    """Everything a worker must not have is taken from it before it sees the source. Never returns."""
    try:
        os.dup2(writing, 1)
        os.close(0)
        os.closerange(2, 256)
        layers.drop_privileges()
        layers.limit_resources(base_bytes + int(str(request["memory_bytes"])), int(str(request["cpu_s"])))
        layers.filter_calls()
    except BaseException as error:
        os.write(1, str(error).encode()[:1000])
        os._exit(EXIT_SETUP)
    try:
        worker.main(request)
    finally:
        os._exit(0)


def _receive() -> bytes:
    return _read(int.from_bytes(_read(4), "big"))


def _read(size: int) -> bytes:
    data = b""
    while len(data) < size:
        chunk = os.read(0, size - len(data))
        if not chunk:
            os._exit(0)
        data += chunk
    return data


def _send(data: bytes) -> None:
    frame = len(data).to_bytes(4, "big") + data
    while frame:
        frame = frame[os.write(1, frame) :]
