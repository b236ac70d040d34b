"""A folder of immutable blobs whose names are the SHA-256 of their bytes, and nothing else.

Only bytes whose hash was checked are ever renamed into place. On opening, every blob is hashed again and whatever does
not match its name is removed, so a crash or a rotten sector costs a download, never a wrong byte.
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from protocol.errors import Fault, Reason, Reject
from shardcast.files import disk_errors, write_durably

_HEX = re.compile(r"[0-9a-f]{64}", re.ASCII)


class NotFound(Fault):
    """The blob is not here. Nobody's lie: ask somebody else."""


def sha256(data: bytes | bytearray | memoryview) -> bytes:
    """SHA-256 of `data`, 32 bytes."""
    return hashlib.sha256(data).digest()


def _hash_file(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


class ContentDir:
    """Thread-safe: callers use it from the event loop and from worker threads.

    Args:
        root: folder of the blobs; created when absent.
        temporary: folder for unfinished files, on the same file system.
        bytes_max: most bytes to hold, or None for as many as the disk takes.
    """

    def __init__(self, root: Path, temporary: Path, *, bytes_max: int | None = None) -> None:
        self._root = root
        self._temporary = temporary
        self._bytes_max = bytes_max
        self._lock = threading.Lock()
        self._sizes: dict[bytes, int] = {}
        self.bytes_total = 0
        with disk_errors(f"opening {root}"):
            root.mkdir(parents=True, exist_ok=True)
            self._scan()

    def _scan(self) -> None:
        for path in self._root.iterdir():
            intact = (
                _HEX.fullmatch(path.name)
                and path.is_file()
                and not path.is_symlink()
                and _hash_file(path) == bytes.fromhex(path.name)
            )
            if intact:
                self._sizes[bytes.fromhex(path.name)] = path.stat().st_size
            elif not path.is_dir() or path.is_symlink():
                path.unlink()
        self.bytes_total = sum(self._sizes.values())

    def _path(self, digest: bytes) -> Path:
        return self._root / digest.hex()

    def has(self, digest: bytes) -> bool:
        """Whether the blob is here."""
        return digest in self._sizes

    def size(self, digest: bytes) -> int:
        """Size in bytes. Raises `NotFound`."""
        try:
            return self._sizes[digest]
        except KeyError:
            raise NotFound(f"blob {digest.hex()[:16]} is not here") from None

    def put(self, data: bytes | bytearray | memoryview, digest: bytes) -> None:
        """Store `data` durably under its hash. Storing what is there already does nothing.

        Raises:
            Reject: `SHARD` when `data` does not hash to `digest`.
            Fault: the disk or this store is full.
        """
        observed = sha256(data)
        if observed != digest:
            raise Reject(Reason.SHARD, "bytes do not match their hash", observed=observed.hex(), limit=digest.hex())
        size = len(data)
        with self._lock:
            if digest in self._sizes:
                return
            if self._bytes_max is not None and self.bytes_total + size > self._bytes_max:
                raise Fault(
                    f"store is full: {self.bytes_total} + {size} bytes, limit {self._bytes_max}; collect what is unused"
                )
            self.bytes_total += size  # reserved before the write, so that concurrent puts keep to the limit
        try:
            write_durably(self._path(digest), data, temporary=self._temporary)
        except BaseException:
            with self._lock:
                self.bytes_total -= size
            raise
        with self._lock:
            if digest in self._sizes:
                self.bytes_total -= size  # a concurrent put of the same blob counted it too
            self._sizes[digest] = size

    def read(self, digest: bytes, offset: int, length: int) -> bytes:
        """Up to `length` bytes from `offset`. Raises `NotFound`, or `Fault` when the disk fails."""
        self.size(digest)
        with disk_errors(f"reading {digest.hex()[:16]}"):
            try:
                fd = os.open(self._path(digest), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            except FileNotFoundError:
                self._forget(digest)
                raise NotFound(f"blob {digest.hex()[:16]} vanished from the disk") from None
            try:
                return os.pread(fd, length, offset)
            finally:
                os.close(fd)

    def get(self, digest: bytes) -> bytes:
        """The whole blob, hashed again. Raises `NotFound`, or `Fault` when the disk changed it (it is then removed)."""
        data = self.read(digest, 0, self.size(digest))
        if sha256(data) != digest:
            self.remove(digest)
            raise Fault(f"blob {digest.hex()[:16]} changed on disk and was removed: fetch it again, check the disk")
        return data

    def _forget(self, digest: bytes) -> int:
        with self._lock:
            size = self._sizes.pop(digest, 0)
            self.bytes_total -= size
        return size

    def remove(self, digest: bytes) -> int:
        """Delete a blob; returns the bytes freed."""
        size = self._forget(digest)
        with suppress(FileNotFoundError), disk_errors(f"removing {digest.hex()[:16]}"):
            self._path(digest).unlink(missing_ok=True)
        return size

    def collect(self, is_kept: Callable[[bytes], bool]) -> int:
        """Delete every blob that `is_kept` does not name; returns the bytes freed."""
        return sum(self.remove(digest) for digest in list(self._sizes) if not is_kept(digest))
