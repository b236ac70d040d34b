"""One process per directory: a lock that the system releases when its holder dies, however it dies.

The same lock tells whoever only looks (`troth node status`, health checks) whether the process is alive.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from protocol.errors import ConfigError

NAME = "process.lock"
#: Longest text that is read from a lock file.
_TEXT_BYTES_MAX = 64


class DirectoryLock:
    """Held from construction to `close`, or to the end of the process.

    Raises:
        ConfigError: when another process holds it, naming that process, or the directory cannot be used.
    """

    def __init__(self, directory: Path) -> None:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._file = os.open(directory / NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise ConfigError(f"directory {directory} cannot be used: {error.strerror}") from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(self._file, _TEXT_BYTES_MAX).decode(errors="replace").strip() or "unknown"
            os.close(self._file)
            raise ConfigError(
                f"directory {directory} is in use by process {holder}: two processes with the same keys would sign "
                "against each other; stop that one, or give this one a directory and keys of its own"
            ) from None
        os.ftruncate(self._file, 0)
        os.write(self._file, f"{os.getpid()}\n".encode())

    def close(self) -> None:
        """Let another process use the directory."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def is_running(directory: Path) -> bool:
    """Whether a process holds the lock of a directory. Changes nothing."""
    try:
        file = os.open(directory / NAME, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(file)
    return False
