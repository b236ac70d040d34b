"""Durable writes: a file is either absent or complete, also after SIGKILL or a full disk.

Every write goes to a temporary name, is fsynced, renamed, and its directory fsynced. Operating system errors become
`Fault` with a text that says what to do; the temporary file is removed and nothing that existed before is touched.
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from protocol.errors import Fault

_FULL = {errno.ENOSPC, errno.EDQUOT}
#: Never follow a symlink, never reuse a file that somebody else put there.
CREATE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


@contextmanager
def disk_errors(doing: str) -> Iterator[None]:
    """Turn `OSError` into `Fault`."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise Fault(f"disk is full while {doing}: free space and retry; nothing that was stored is lost") from error
        raise Fault(f"{doing} failed: {error}; nothing that was stored is lost") from error


def write_all(fd: int, data: bytes | bytearray | memoryview) -> None:
    """Write every byte of `data` to `fd`."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def sync_directory(path: Path) -> None:
    """Make renames inside `path` durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_durably(target: Path, data: bytes | bytearray | memoryview, *, temporary: Path) -> None:
    """Make `target` hold exactly `data`.

    Args:
        target: final path; an existing file is replaced atomically.
        data: the whole content.
        temporary: folder on the same file system for the unfinished file.

    Raises:
        Fault: the disk is full or broken. `target` is as it was.
    """
    draft = temporary / secrets.token_hex(16)
    with disk_errors(f"writing {target.name}"):
        try:
            fd = os.open(draft, CREATE_FLAGS, 0o600)
            try:
                write_all(fd, data)
                os.fsync(fd)
            finally:
                os.close(fd)
            draft.rename(target)
        except BaseException:
            with suppress(OSError):
                draft.unlink()
            raise
        sync_directory(target.parent)
