"""The verifier's hold on its judging process: started once, asked one thing at a time, killed at any limit.

`Keeper` is the process that forks workers (verifier.isolated_main); `Child` is one worker, ready for work. Whatever is
wrong with either is a `Fault`, after which the worker is dead: of a job that did not end well, nothing is known. No method
is safe to be called by two threads at once; `verifier.isolated_judge` uses one thread. Loads no torch.
"""

from __future__ import annotations

import contextlib
import json
import select
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from protocol.errors import ConfigError, Fault
from verifier.isolated_layers import read_memory
from verifier.isolated_main import END, FORK
from verifier.isolated_wire import TEXT_REPLY_BYTES_MAX, Done, Failed, Limits, Reply, Request, receive_reply, send

#: Longest time that a keeper may take to import what it needs, and to fork or end a worker.
START_S_MAX = 300.0
ORDER_S_MAX = 60.0
ANSWER_BYTES_MAX = 4096
_TODO = (
    "allow user namespaces (sysctl user.max_user_namespaces above 0, kernel.unprivileged_userns_clone=1, "
    "kernel.apparmor_restrict_unprivileged_userns=0) or seccomp filters; in a container add "
    "--security-opt seccomp=unconfined; or set verifier.allow_network = true, if a judging process that a submission has "
    "taken over may reach the network"
)


class WorkerDied(Fault):
    """The worker is gone, or was killed at a limit, while it did a job."""


class Keeper:
    """The process that workers are forked from.

    Args:
        command: starts it; its standard input is the control socket.
        variables: all of its environment.
    """

    def __init__(self, command: Sequence[str], variables: Mapping[str, str]) -> None:
        self._command, self._variables = [*command], dict(variables)
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._closed = False
        #: How the network was cut off; empty until the keeper has said so.
        self.network = ""
        self.start()

    def start(self) -> None:
        """Start it, without waiting for it."""
        self._stop()
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                self._command,
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                env=self._variables,
                cwd="/",
                start_new_session=True,  # an interrupt from the terminal is for the verifier to handle
            )
        self._control = ours

    @property
    def pid(self) -> int:
        """Process number of the keeper, 0 when it was closed."""
        return self._process.pid if self._process is not None else 0

    def fork(self) -> tuple[int, socket.socket]:
        """A new worker's process number and socket; an older worker is ended.

        Raises:
            ConfigError: when the network cannot be cut off here.
            Fault: when the keeper does not answer. It is started anew for the next call.
        """
        if self._closed:
            raise Fault("the verifier is stopping")
        if self._process is None or self._process.poll() is not None:
            self.start()
        try:
            if not self.network:
                self._wait_ready()
            assert self._control is not None
            self._control.sendall(FORK)
            answer, links = self._receive(ORDER_S_MAX)
            return int(answer["pid"]), socket.socket(fileno=links[0])
        except (OSError, EOFError, ValueError, KeyError, IndexError) as error:
            self._stop()
            raise Fault(f"the judging process cannot be started: {error!r}; see the messages above this one") from error

    def end_worker(self) -> int:
        """Kill the worker; its exit code, or minus the signal that ended it (it may have ended before). Raises `Fault`."""
        if self._control is None:
            return 0
        try:
            self._control.sendall(END)
            return int(self._receive(ORDER_S_MAX)[0]["code"])
        except (OSError, EOFError, ValueError, KeyError) as error:
            self._stop()
            raise Fault(f"the judging process's keeper is gone: {error!r}") from error

    def close(self) -> None:
        """End keeper and worker, for good. Another thread that waits for the worker finds it dead."""
        self._closed = True
        self._stop()

    def _stop(self) -> None:
        self.network = ""
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(0.2)
            self._process.kill()
            self._process.wait()
            self._process = None

    def _wait_ready(self) -> None:
        hello, _ = self._receive(START_S_MAX)
        if "missing" in hello:
            self._stop()
            raise ConfigError(
                f"submissions cannot be judged here without a way to the network being open: {hello['missing']}; {_TODO}"
            )
        self.network = str(hello["network"])

    def _receive(self, timeout_s: float) -> tuple[dict[str, Any], list[int]]:
        """One answer of the keeper, and the descriptors that came with it."""
        assert self._control is not None
        data = b""
        links: list[int] = []
        deadline = time.monotonic() + timeout_s
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        while not data.endswith(b"\n"):
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise EOFError(f"no answer in {timeout_s:.0f} s")
            chunk, new, _, _ = socket.recv_fds(self._control, ANSWER_BYTES_MAX, 1)
            if not chunk or len(data) > ANSWER_BYTES_MAX:
                raise EOFError("closed")
            data, links = data + chunk, links + new
        answer: dict[str, Any] = json.loads(data)
        return answer, links


class Usage(NamedTuple):
    """What jobs of a worker have used at most.

    Attributes:
        memory_bytes: resident memory beyond what it had when the job began.
    """

    memory_bytes: int


class Child:
    """One worker. Dead once a call has raised `WorkerDied` or `Fault`.

    Args:
        keeper: has no other worker.
    """

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper
        self._pid, self._link = keeper.fork()
        self.alive = True
        self.usage = Usage(0)

    @property
    def pid(self) -> int:
        """Its process number."""
        return self._pid

    def ask(self, request: Request, limits: Limits, *, bytes_max: int = TEXT_REPLY_BYTES_MAX) -> Reply:
        """Do one job.

        Args:
            limits: of resident memory and seconds; those of CPU are the worker's own to keep.
            bytes_max: longest reply that is taken.

        Raises:
            WorkerDied: it ended, or was killed at a limit: nothing is known about the job.
            Fault: it answered what is no answer, and was killed for it.
        """
        if not self.alive:
            raise WorkerDied("the judging process has ended")
        deadline, base = time.monotonic() + limits.wall_s, self._read_resident()
        peak = base

        def look() -> None:
            nonlocal peak
            peak = max(peak, self._read_resident())
            if limits.memory_bytes and peak - base > limits.memory_bytes:
                self._die(
                    f"used {peak - base >> 20} MiB beyond its {base >> 20}, limit {limits.memory_bytes >> 20} "
                    "(verifier.memory_mib)"
                )
            if time.monotonic() > deadline:
                self._die(f"was not done in {limits.wall_s:.1f} s (verifier.job_seconds, or the verdict's deadline)")

        try:
            send(self._link, request, look)
            reply = receive_reply(self._link, bytes_max=bytes_max, look=look)
        except (EOFError, OSError):
            self._die("")
        except WorkerDied:
            raise
        except Fault:
            self.end()
            raise
        self.usage = Usage(max(self.usage.memory_bytes, peak - base))
        return reply

    def end(self) -> int:
        """Kill it; exit code, or minus the signal."""
        if not self.alive:
            return 0
        self.alive = False
        self._link.close()
        return self._keeper.end_worker()

    def _read_resident(self) -> int:
        try:
            return read_memory(self._pid)[1]
        except (OSError, ValueError, IndexError):
            return 0

    def _die(self, text: str) -> None:
        code = self.end()
        if not text:
            text = f"ended with status {code}"
            if code < 0:
                name = signal.Signals(-code).name
                text = f"was ended by {name}" + (": CPU seconds used up" if -code == signal.SIGPROF else "")
        raise WorkerDied(f"the judging process {text}: nothing is known about what it judged")


def require_done(reply: Reply, what: str) -> str:
    """The text of a `Done`. Raises `Fault` for anything else."""
    if isinstance(reply, Done):
        return reply.text
    raise Fault(f"{what}: {reply.text}" if isinstance(reply, Failed) else f"{what}: an answer to another question")
