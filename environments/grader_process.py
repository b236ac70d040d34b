"""A grader that runs in a process of its own, so that one that hangs can be ended: no reply in time is a `Fault`, never a 0.

The process starts on first use, with a fixed hash seed, locale and time zone and no other environment; it is started again
after it was ended. Calls are one at a time.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from protocol.errors import Fault

REPLY_BYTES_MAX = 1 << 16
_ENVIRONMENT = {"PYTHONHASHSEED": "0", "LC_ALL": "C.UTF-8", "TZ": "UTC", "OMP_NUM_THREADS": "1"}


class GraderProcess:
    """Asks a script that answers one line of JSON with another.

    Args:
        script: its path. It says one line when it is ready.
        start_s_max: longest start, in seconds.
        reply_s_max: longest reply, in seconds. It is generous: it tells a hang from work, not right from wrong.
    """

    def __init__(self, script: Path, *, start_s_max: float = 120.0, reply_s_max: float = 30.0) -> None:
        self._script, self._start_s_max, self._reply_s_max = script, start_s_max, reply_s_max
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        atexit.register(self.close)

    def ask(self, request: dict[str, str]) -> dict[str, Any]:
        """The reply to a request.

        Raises:
            Fault: when there is none in time, or it is none.
        """
        with self._lock:
            try:
                process = self._process or self._start()
                assert process.stdin is not None
                process.stdin.write(json.dumps(request).encode() + b"\n")
                process.stdin.flush()
                return self._read(process, self._reply_s_max)
            except (OSError, ValueError) as error:
                self._end()
                raise Fault(f"{self._script.name} gives no reply: {error}") from None
            except BaseException:
                self._end()
                raise

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._end()

    def _start(self) -> subprocess.Popen[bytes]:
        # -P: the script's own folder is no place to import from; -s: nor is the user's.
        command = [sys.executable, "-P", "-s", str(self._script)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=_ENVIRONMENT, cwd="/"
        )
        self._read(self._process, self._start_s_max)
        return self._process

    def _read(self, process: subprocess.Popen[bytes], seconds: float) -> dict[str, Any]:
        assert process.stdout is not None
        data, deadline, stream = b"", time.monotonic() + seconds, process.stdout.fileno()
        while not data.endswith(b"\n"):
            ready, _, _ = select.select([stream], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise Fault(
                    f"{self._script.name} gave no reply in {seconds:g} s: it was ended, and the work is not judged"
                )
            part = os.read(stream, REPLY_BYTES_MAX)
            data += part
            if not part or len(data) > REPLY_BYTES_MAX:
                raise Fault(f"{self._script.name} ended or said too much ({len(data)} bytes, limit {REPLY_BYTES_MAX})")
        reply = json.loads(data)
        if not isinstance(reply, dict):
            raise Fault(f"{self._script.name} replied {data[:80]!r}, expected an object")
        return reply

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        with contextlib.suppress(OSError):
            process.communicate()
