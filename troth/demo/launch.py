"""Processes of a demo: each role is started from its own settings file, in its own directory, with its own key."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from protocol.errors import Fault
from troth.keystore import Keys, create

#: scrypt work factor of throw-away keys whose money is worthless.
WORK_FACTOR = 2**10
STOP_SECONDS = 8.0
NURSERY_SECONDS_MAX = 90.0
#: Every process uses one thread, and no more memory than it needs: there are more processes than cores.
THRIFT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # A role that loads model after model gives the memory of the old one back, instead of keeping it in pieces.
    "MALLOC_ARENA_MAX": "2",
    "MALLOC_MMAP_THRESHOLD_": str(4 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(64 << 20),
}


def free_port() -> int:
    """A TCP port on loopback that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Process(Protocol):
    """What the launcher needs of a child, started by itself or forked by the nursery."""

    pid: int

    def poll(self) -> int | None: ...
    def send_signal(self, number: int) -> None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def kill(self) -> None: ...


class Forked:
    """A child of the nursery; like `subprocess.Popen` as far as the launcher goes."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.code: int | None = None
        self.ended = threading.Event()

    def poll(self) -> int | None:
        """Exit code, None while it runs."""
        return self.code

    def send_signal(self, number: int) -> None:
        """Signal it, if it still runs."""
        if self.code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end."""
        if not self.ended.wait(timeout):
            raise subprocess.TimeoutExpired("nursery", timeout or 0.0)
        assert self.code is not None
        return self.code

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)


class Nursery:
    """The process that forks model roles; see troth.demo.nursery."""

    def __init__(self, environment: dict[str, str], log: Path) -> None:
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "troth.demo.nursery"],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )
        self._started_at = self._ready_at = time.monotonic()
        self._children: dict[int, Forked] = {}
        self._started: queue.Queue[int] = queue.Queue()
        self._ready = threading.Event()
        self._lock = threading.Lock()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            message = json.loads(line)
            if "ready" in message:
                self._ready_at = time.monotonic()
                self._ready.set()
            elif "code" in message:
                child = self._children[message["pid"]]
                child.code = message["code"]
                child.ended.set()
            else:
                self._children[message["pid"]] = Forked(message["pid"])
                self._started.put(message["pid"])

    def wait_ready(self) -> float:
        """Wait until it is warm; returns the seconds that took since its start.

        Raises:
            Fault: when it does not get there.
        """
        if not self._ready.wait(NURSERY_SECONDS_MAX):
            raise Fault("the nursery did not start: see nursery.txt")
        return self._ready_at - self._started_at

    def fork(self, name: str, arguments: list[str], out: Path, log: Path) -> Forked:
        """Start a `troth` command in a forked process, with stdout in `out` and stderr in `log`. Thread-safe.

        Raises:
            Fault: when the nursery does not answer.
        """
        assert self._process.stdin is not None
        self.wait_ready()
        request = {"name": name, "arguments": arguments, "out": str(out), "log": str(log)}
        with self._lock:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            return self._children[self._started.get(timeout=NURSERY_SECONDS_MAX)]

    def close(self) -> None:
        """End the nursery; its children are not touched."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(NURSERY_SECONDS_MAX)


@dataclass
class Launcher:
    """Starts, asks and stops the processes of one run.

    Attributes:
        root: directory of the run; each participant has a folder in it.
        keys: keys of every participant, made here and written to keystores.
    """

    root: Path
    rpc: str = ""
    keys: dict[str, Keys] = field(default_factory=dict)
    running: dict[str, Process] = field(default_factory=dict)
    nursery: Nursery | None = None
    asked: set[Process] = field(default_factory=set)
    _password: str = field(default_factory=lambda: secrets.token_hex(16))

    def environment(self) -> dict[str, str]:
        """Environment of every child."""
        return {**os.environ, **THRIFT, "TROTH_PASSWORD": self._password, "PYTHONUNBUFFERED": "1"}

    def make_keys(self, names: list[str]) -> None:
        """One keystore per participant."""
        for name in names:
            folder = self.root / name
            folder.mkdir(parents=True)
            self.keys[name] = create(folder / "keystore.json", self._password, scrypt_n=WORK_FACTOR)

    def write_settings(self, name: str, extra: str = "", *, serves: bool, seconds: float) -> Path:
        """Settings file of one participant. `extra` comes first (top-level keys, then tables)."""
        folder = self.root / name
        bind = f"tcp://127.0.0.1:{free_port()}" if serves else ""
        path = folder / "troth.toml"
        path.write_text(
            f"""\
directory = "{folder}"
{extra}
[ledger]
rpc = "{self.rpc}"
poll_seconds = {seconds}

[network]
bind = "{bind}"
"""
        )
        return path

    def open_nursery(self) -> Nursery:
        """Start the process that model roles are forked from."""
        self.nursery = Nursery(self.environment(), self.root / "nursery.txt")
        return self.nursery

    def start(self, name: str, *arguments: str, forked: bool = False) -> None:
        """Start a long-running `troth` process; its output goes to `log.txt` in its folder.

        Args:
            forked: from the nursery, for roles that need torch.
        """
        folder = self.root / name
        folder.mkdir(parents=True, exist_ok=True)
        if forked and self.nursery is not None:
            self.running[name] = self.nursery.fork(name, list(arguments), folder / "log.txt", folder / "log.txt")
            return
        with (folder / "log.txt").open("ab") as log:
            self.running[name] = subprocess.Popen(
                [sys.executable, "-m", "troth", *arguments],
                env=self.environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def ask(self, *arguments: str, timeout_s: float = 120.0) -> Any:
        """Run a `troth ... --json` command to its end and return what it printed. Thread-safe.

        Raises:
            Fault: when it fails, with what it said.
        """
        assert self.nursery is not None
        folder = self.root / "commands"
        folder.mkdir(exist_ok=True)
        name = f"{'-'.join(arguments[:2])}-{secrets.token_hex(4)}"
        out, log = folder / f"{name}.json", folder / f"{name}.txt"
        child = self.nursery.fork(name, list(arguments), out, log)
        self.asked.add(child)
        try:
            code = child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            child.kill()
            raise Fault(f"`troth {' '.join(arguments)}` is not done after {timeout_s:.0f} s") from None
        finally:
            self.asked.discard(child)
        if code:
            raise Fault(f"`troth {' '.join(arguments)}` failed: {log.read_text(errors='replace')[-2000:]}")
        return json.loads(out.read_text())

    def find_dead(self) -> list[str]:
        """Processes that ended by themselves, which none should."""
        return [name for name, process in self.running.items() if process.poll() is not None]

    def require_alive(self) -> None:
        """Raises `Fault` with its last words when a process ended by itself."""
        for name in self.find_dead():
            raise Fault(f"process {name} ended by itself: {self.read_log(name)}")

    def read_log(self, name: str) -> str:
        """The last lines a process wrote."""
        path = self.root / name / "log.txt"
        return path.read_text(errors="replace")[-2000:] if path.exists() else ""

    def cpu_seconds(self, name: str) -> float:
        """CPU time so far of a running process and of those it started, user and system, from /proc; 0 when it is gone."""
        return _read_cpu_ticks(self.running[name].pid) / os.sysconf("SC_CLK_TCK") if name in self.running else 0.0

    def stop(self, *names: str) -> None:
        """End processes: SIGTERM, and SIGKILL for those that do not listen."""
        chosen = [name for name in (names or tuple(self.running)) if name in self.running]
        for name in chosen:
            self.running[name].send_signal(signal.SIGTERM)
        deadline = time.monotonic() + STOP_SECONDS
        for name in chosen:
            process = self.running.pop(name)
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def close(self) -> None:
        """End everything, commands that are under way included: whoever waits for one gets a `Fault`."""
        for child in tuple(self.asked):
            child.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(STOP_SECONDS)
        self.stop()
        if self.nursery is not None:
            self.nursery.close()
            self.nursery = None


def _read_cpu_ticks(pid: int) -> int:
    """Clock ticks of a process, of its children that have ended, and of those that have not."""
    folder = Path(f"/proc/{pid}")
    try:
        fields = (folder / "stat").read_text().rsplit(")", 1)[1].split()
        children = [int(child) for path in folder.glob("task/*/children") for child in path.read_text().split()]
    except OSError:
        return 0
    return sum(map(int, fields[11:15])) + sum(map(_read_cpu_ticks, children))
