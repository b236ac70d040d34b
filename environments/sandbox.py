"""Runs a stranger's Python: what a policy answered, called with inputs that it may see, judged by whoever called it.

    sandbox = Sandbox()
    sandbox.run("def f(x): return x + 1", [FunctionCall("f", (1,))])    # [Outcome(value=2, error="")]

The source runs in an interpreter of its own, without files, network, further processes or rights (environments.jail), and
only values come back, as bounded JSON: what a right answer would have been is never in that process, so no code can
forge a result other than by computing it.

An outcome is a function of source and calls. Work is bounded by counted steps, integers by their length, memory by an
address space, each with the same limits everywhere; reaching one is the answer's own failure, an `Outcome` with an error.
CPU and wall time are bounded far above what the steps allow; reaching those, or a process that something else killed,
is a `Fault`. Where the kernel refuses a layer nothing is run at all (`ConfigError`).
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from environments.jail.keeper import EXIT_SETUP
from protocol.errors import ConfigError, Fault

#: Bytes that a worker may write, and that a request may have.
RESULT_BYTES_MAX = 4 << 20
REQUEST_BYTES_MAX = 8 << 20
CALLS_MAX = 256

_BOOT = "import sys; sys.path.append(sys.argv[1]); from jail.keeper import main; main()"
_FOLDER = Path(__file__).parent
_START_S = 60.0
_MARGIN_S = 30.0
_TODO = (
    "run as root with CAP_SYS_ADMIN, or allow user namespaces (sysctl user.max_user_namespaces above 0, "
    "kernel.unprivileged_userns_clone=1, kernel.apparmor_restrict_unprivileged_userns=0); in a container add "
    "--security-opt seccomp=unconfined --security-opt apparmor=unconfined, or --cap-add SYS_ADMIN"
)


class Limits(NamedTuple):
    """What one run may use.

    Attributes:
        steps: counted steps, about lines of Python; the answer's limit.
        memory_bytes: address space beyond the interpreter's own; the answer's limit.
        cpu_s / wall_s: ours: many times what the steps take on a slow machine.
    """

    steps: int = 3_000_000
    memory_bytes: int = 256 << 20
    cpu_s: int = 120
    wall_s: int = 600


LIMITS = Limits()


class FunctionCall(NamedTuple):
    """A call of a function that the source defines; arguments and result are JSON."""

    name: str
    args: tuple[Any, ...]


class ProgramRun(NamedTuple):
    """A run of the source as a program; the result is its standard output."""

    stdin: str


class Outcome(NamedTuple):
    """What a call gave.

    Attributes:
        value: the result, when `error` is empty.
        error: how the call failed, for people.
    """

    value: Any = None
    error: str = ""


class Layers(NamedTuple):
    """What stands between an answer and this machine.

    Attributes:
        active: layers that are in place, each tried out.
        missing: what the kernel refused and what to do about it; empty when answers can be run.
    """

    active: tuple[str, ...]
    missing: str = ""


class Sandbox:
    """One shut-in interpreter, started when first needed and kept; every run gets a fork of it. Safe to share by threads.

    Args:
        limits: of every run.
    """

    def __init__(self, limits: Limits = LIMITS) -> None:
        self.limits = limits
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0
        self._hello: dict[str, Any] = {}
        self._stop: Any = None

    def run(self, source: str, calls: Sequence[FunctionCall | ProgramRun]) -> list[Outcome]:
        """Run calls of one kind, in order, in one process; one outcome for each.

        The functions of a source share its state from call to call; programs start anew. When a limit is reached, the
        call that reached it and those behind it have failed.

        Raises:
            ConfigError: the sandbox cannot be had here, or there are more calls than `CALLS_MAX`.
            Fault: time ran out or the process was killed from outside: nothing is known about the answer.
        """
        if not 1 <= len(calls) <= CALLS_MAX or len({type(call) for call in calls}) > 1:
            raise ConfigError(f"a run has {len(calls)} calls, expected 1 to {CALLS_MAX} of one kind")
        return _read_outcomes(self._ask(source, [_describe(call) for call in calls], bare=False), len(calls))

    def run_bare(self, source: str) -> bytes:
        """Run a source with the kernel's layers only, all of Python at its hands; what it wrote to descriptor 1.

        For `probe`, and for attacks that suppose the counted Python was escaped from. Raises as `run`.
        """
        return self._ask(source, [], bare=True)

    def probe(self) -> Layers:
        """Start the sandbox and try its layers out."""
        try:
            tried = json.loads(self.run_bare(_PROBE))
        except ConfigError as error:
            return Layers((), str(error))
        namespaces = [f"namespace of {name}" for name in self._hello["namespaces"]]
        addresses = ["fixed addresses"] if self._hello["fixed"] else []
        return Layers((*namespaces, *tried, *addresses))

    def close(self) -> None:
        """End its processes."""
        with self._lock:
            self._end()

    # The keeper

    def _ask(self, source: str, calls: list[dict[str, Any]], *, bare: bool) -> bytes:
        limits = self.limits
        request = {
            "source": source,
            "calls": calls,
            "bare": bare,
            "steps": limits.steps,
            "memory_bytes": limits.memory_bytes,
            "cpu_s": limits.cpu_s,
            "wall_s": limits.wall_s,
            "bytes_max": RESULT_BYTES_MAX,
        }
        data = json.dumps(request).encode()
        if len(data) > REQUEST_BYTES_MAX:
            raise ConfigError(f"source and calls have {len(data)} bytes, limit {REQUEST_BYTES_MAX}")
        with self._lock:
            try:
                self._start()
                self._send(data)
                reply = self._receive(limits.wall_s + _MARGIN_S)
            except (OSError, EOFError) as error:
                self._end()
                raise Fault(f"the sandbox ended or stopped answering: {error!r}") from error
        head, _, written = reply.partition(b"\n")
        return _judge_end(json.loads(head), written)

    def _start(self) -> None:
        if self._process is not None and self._owner == os.getpid() and self._process.poll() is None:
            return
        self._end()
        self._process = subprocess.Popen(
            [sys.executable, "-s", "-S", "-P", "-B", "-c", _BOOT, str(_FOLDER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={"PYTHONHASHSEED": "0"},
            cwd="/",
            start_new_session=True,  # an interrupt from the terminal is for the role to handle
        )
        self._owner = os.getpid()
        self._stop = weakref.finalize(self, _kill, self._process)
        try:
            self._hello = json.loads(self._receive(_START_S))
        except EOFError:
            self._end()
            raise ConfigError(f"the sandbox does not start with {sys.executable}: is it a complete Python?") from None
        if self._hello["missing"]:
            self._end()
            raise ConfigError(f"answers cannot be run here without risk: {self._hello['missing']}; {_TODO}")

    def _send(self, data: bytes) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(len(data).to_bytes(4, "big") + data)
        self._process.stdin.flush()

    def _receive(self, timeout_s: float) -> bytes:
        deadline = time.monotonic() + timeout_s
        size = int.from_bytes(self._read(4, deadline), "big")
        if size > RESULT_BYTES_MAX + 1024:
            raise EOFError(f"a reply of {size} bytes")
        return self._read(size, deadline)

    def _read(self, size: int, deadline: float) -> bytes:
        assert self._process is not None
        assert self._process.stdout is not None
        number, data = self._process.stdout.fileno(), b""
        poll = select.poll()
        poll.register(number, select.POLLIN)
        while len(data) < size:
            left_ms = (deadline - time.monotonic()) * 1000
            if left_ms <= 0 or not poll.poll(left_ms):
                raise EOFError("no answer in time")
            chunk = os.read(number, size - len(data))
            if not chunk:
                raise EOFError("closed")
            data += chunk
        return data

    def _end(self) -> None:
        if self._process is not None and self._owner == os.getpid():
            self._stop()
        elif self._stop is not None:  # a fork of this process: the keeper is another's
            self._stop.detach()
        self._process = None


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            try:
                pipe.close()
            except BrokenPipeError:
                continue


def _describe(call: FunctionCall | ProgramRun) -> dict[str, Any]:
    if isinstance(call, ProgramRun):
        return {"kind": "program", "stdin": call.stdin}
    return {"kind": "function", "name": call.name, "args": list(call.args)}


def _judge_end(end: Mapping[str, Any], written: bytes) -> bytes:
    """What a worker wrote behind its ready line, or `Fault` when its end says nothing about the answer."""
    ready = b'["ready"]\n'
    if end["code"] == EXIT_SETUP or not written.startswith(ready):
        raise Fault(f"the sandbox could not start a run ({end['end']} {end['code']}): {written[:200]!r}")
    if end["end"] == "wall" or (end["end"] == "signal" and end["code"] in (signal.SIGKILL, signal.SIGXCPU)):
        raise Fault(
            f"a run was ended by {end['end']} {end['code']}: time ran out, or the machine is short of memory; "
            "nothing is known about the answer"
        )
    return written[len(ready) :]


def _read_outcomes(written: bytes, num_calls: int) -> list[Outcome]:
    """Outcomes of lines that a worker wrote; whatever is not one is a failed call."""
    outcomes: list[Outcome] = []
    for line in written.split(b"\n")[:num_calls]:
        try:
            kind, content = json.loads(line)
        except (ValueError, TypeError, RecursionError):
            break
        if kind == "value":
            outcomes.append(Outcome(content))
            continue
        outcomes.append(Outcome(error=f"{kind}: {str(content)[:200]}"))
        if kind == "limit":
            break
    last = outcomes[-1].error if outcomes and outcomes[-1].error else "error: it ended without a result"
    return outcomes + [Outcome(error=last)] * (num_calls - len(outcomes))


#: Run bare: names of the layers that hold, as JSON.
_PROBE = """
import ctypes, json, os
held = []
def refused(name, attempt):
    try:
        attempt()
    except OSError:
        held.append(name)
libc = ctypes.CDLL(None, use_errno=True)
def call(name, *args):
    if getattr(libc, name)(*args) < 0:
        raise OSError(ctypes.get_errno(), name)
refused("no files", lambda: os.open("/", os.O_RDONLY))
refused("no sockets", lambda: call("socket", 2, 1, 0))
refused("no processes", os.fork)
refused("no signals", lambda: os.kill(1, 0))
refused("no new rights", lambda: call("setuid", 0))
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 4]
refused("bounded memory", lambda: call("mmap", None, 1 << 40, 0, 0x4022, -1, 0))
os.write(1, json.dumps(held).encode())
"""
