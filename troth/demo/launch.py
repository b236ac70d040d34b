"""Processes of a demo: each role is started from its own settings file, in its own directory, with its own key."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from protocol.errors import Fault
from troth.keystore import Keys, create

#: scrypt work factor of throw-away keys whose money is worthless.
WORK_FACTOR = 2**10
STOP_SECONDS = 8.0
#: Every process uses one thread: there are more processes than cores.
THREADS = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def free_port() -> int:
    """A TCP port on loopback that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


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
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    _password: str = field(default_factory=lambda: secrets.token_hex(16))

    def environment(self) -> dict[str, str]:
        """Environment of every child."""
        return {**os.environ, **THREADS, "TROTH_PASSWORD": self._password, "PYTHONUNBUFFERED": "1"}

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
keystore = "{folder / "keystore.json"}"
{extra}
[ledger]
rpc = "{self.rpc}"
poll_seconds = {seconds}

[network]
bind = "{bind}"
"""
        )
        return path

    def start(self, name: str, *arguments: str) -> None:
        """Start a long-running `troth` process; its output goes to `log.txt` in its folder."""
        folder = self.root / name
        folder.mkdir(parents=True, exist_ok=True)
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
        """Run a `troth ... --json` command to its end and return what it printed."""
        done = subprocess.run(
            [sys.executable, "-m", "troth", *arguments],
            env=self.environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout_s,
            check=False,
        )
        if done.returncode:
            raise Fault(f"`troth {' '.join(arguments)}` failed: {done.stderr.decode(errors='replace')[-2000:]}")
        return json.loads(done.stdout)

    def find_dead(self) -> list[str]:
        """Processes that ended by themselves, which none should."""
        return [name for name, process in self.running.items() if process.poll() is not None]

    def read_log(self, name: str) -> str:
        """The last lines a process wrote."""
        path = self.root / name / "log.txt"
        return path.read_text(errors="replace")[-2000:] if path.exists() else ""

    def cpu_seconds(self, name: str) -> float:
        """CPU time of a running process so far, user and system, from /proc; 0 when it is gone."""
        try:
            fields = Path(f"/proc/{self.running[name].pid}/stat").read_text().rsplit(")", 1)[1].split()
        except (OSError, KeyError):
            return 0.0
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

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
