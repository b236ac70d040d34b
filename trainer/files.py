"""Durable writes of the trainer: what this module returned from survives SIGKILL and loss of power.

Operating system errors become `Fault`. Neighbours: trainer.checkpoint composes these into generations.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from protocol.errors import Fault


@contextmanager
def disk_errors(doing: str) -> Iterator[None]:
    """Turn `OSError` into `Fault`."""
    try:
        yield
    except OSError as error:
        raise Fault(f"{doing} failed: {error}; free space or mend the disk, nothing stored before is lost") from error


def sync_directory(path: Path) -> None:
    """Make the entries of a directory durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_synced(path: Path, data: bytes) -> None:
    """Write a new file and fsync it. Its directory entry is durable only after `sync_directory`."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(descriptor, view) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomic(path: Path, data: bytes) -> None:
    """Make `path` hold exactly `data`, or leave it as it was."""
    draft = path.with_name(path.name + ".tmp")
    write_synced(draft, data)
    draft.replace(path)
    sync_directory(path.parent)


def remove_tree(path: Path) -> None:
    """Delete a directory of plain files and directories, deepest first. A half-deleted tree can be deleted again."""
    for entry in sorted(path.iterdir()):
        if entry.is_dir() and not entry.is_symlink():
            remove_tree(entry)
        else:
            entry.unlink()
    path.rmdir()
