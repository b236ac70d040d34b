"""Everything one participant keeps on disk for its peers: shards, accepted manifests, letters.

    root/lock  root/tmp  root/shards/<sha256>  root/manifests  root/heads  root/mail

One process owns a root (a lock file says so). What a crash left half-written is in `tmp` and is removed on opening;
everything else is complete and hashed again, so a killed download resumes by asking for what is missing.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import threading
from collections import Counter
from collections.abc import Collection, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from protocol.codec import Domain
from protocol.errors import ConfigError, Fault
from shardcast.content import ContentDir, sha256
from shardcast.files import disk_errors
from shardcast.folder import assemble_folder, check_folder
from shardcast.mailbox import Mailbox
from shardcast.manifest import Manifest
from shardcast.ratchet import Ratchet

MAIL_BYTES_MAX = 8 << 30
MAIL_SENDER_BYTES_MAX = 1 << 30


class ShardStore:
    """The store of one participant. Thread-safe; close it, or use it as a context manager.

    Args:
        root: folder of the store; created when absent.
        bytes_max: most bytes of shards and blobs, or None for as many as the disk takes.
        mail_bytes_max: most bytes of letters.
        mail_sender_bytes_max: most bytes of letters of one sender.

    Raises:
        ConfigError: another process uses this root.
        Fault: the disk failed.
    """

    def __init__(
        self,
        root: Path,
        *,
        bytes_max: int | None = None,
        mail_bytes_max: int = MAIL_BYTES_MAX,
        mail_sender_bytes_max: int = MAIL_SENDER_BYTES_MAX,
    ) -> None:
        self.root = root
        temporary = root / "tmp"
        with disk_errors(f"opening {root}"):
            root.mkdir(parents=True, exist_ok=True)
            self._lock_fd = os.open(root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            self._claim()
            with disk_errors(f"opening {root}"):
                shutil.rmtree(temporary, ignore_errors=True)
                temporary.mkdir(exist_ok=True)
            self._shards = ContentDir(root / "shards", temporary, bytes_max=bytes_max)
            self._ratchet = Ratchet(root, temporary)
            self.mail = Mailbox(
                root / "mail", temporary, bytes_max=mail_bytes_max, sender_bytes_max=mail_sender_bytes_max
            )
        except BaseException:
            os.close(self._lock_fd)
            raise
        self._pins: Counter[bytes] = Counter()
        self._pins_lock = threading.Lock()

    def _claim(self) -> None:
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"{self.root} is in use by another process: stop it or choose another folder") from None

    def close(self) -> None:
        """Let another process use the root."""
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def __enter__(self) -> ShardStore:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    # Shards and blobs

    @property
    def bytes_total(self) -> int:
        """Bytes of shards and blobs."""
        return self._shards.bytes_total

    def has(self, digest: bytes) -> bool:
        """Whether the shard or blob is here, verified."""
        return self._shards.has(digest)

    def get(self, digest: bytes) -> bytes:
        """Bytes of a shard or blob, hashed again. Raises `NotFound` or `Fault`."""
        return self._shards.get(digest)

    def put(self, data: bytes | bytearray, digest: bytes | None = None) -> bytes:
        """Store a shard or blob durably; returns its hash.

        Raises:
            Reject: `SHARD` when `data` does not hash to `digest`.
            Fault: the disk or the store is full.
        """
        if digest is None:
            digest = sha256(data)
        self._shards.put(data, digest)
        return digest

    def read(self, digest: bytes, offset: int, length: int) -> tuple[int, bytes]:
        """Size of a shard, blob or accepted manifest, and up to `length` of its bytes. Raises `NotFound` or `Fault`."""
        if self._ratchet.knows(digest):
            data = self._ratchet.manifest(digest).data
            return len(data), data[offset : offset + length]
        return self._shards.size(digest), self._shards.read(digest, offset, length)

    def missing(self, manifest: Manifest) -> list[bytes]:
        """Distinct shards of `manifest` that are not here, in its order."""
        return [digest for digest in manifest.shards if not self.has(digest)]

    @contextmanager
    def pin(self, digests: Iterable[bytes]) -> Iterator[None]:
        """Keep these out of `collect` for a while."""
        held = list(digests)
        with self._pins_lock:
            self._pins.update(held)
        try:
            yield
        finally:
            with self._pins_lock:
                self._pins.subtract(held)
                self._pins += Counter()

    def collect(self, keep: Container[bytes]) -> int:
        """Delete every shard and blob that is neither in `keep` nor pinned; returns the bytes freed."""
        return self._shards.collect(lambda digest: digest in keep or self._pins[digest] > 0)

    # Manifests and folders

    def admit_manifest(
        self,
        data: bytes,
        key: bytes,
        domain: Domain,
        *,
        expected: bytes,
        historic: bool = False,
        allowed_suffixes: Sequence[str] | None = None,
    ) -> Manifest:
        """Accept signed manifest bytes, durably. See `shardcast.ratchet.Ratchet.admit`."""
        return self._ratchet.admit(
            data, key, domain, expected=expected, historic=historic, allowed_suffixes=allowed_suffixes
        )

    def manifest(self, digest: bytes) -> Manifest:
        """An accepted manifest by its hash. Raises `NotFound`."""
        return self._ratchet.manifest(digest)

    def manifests(self) -> list[Manifest]:
        """Accepted manifests that are still kept."""
        return self._ratchet.manifests()

    def highest_version(self, task: bytes, key: bytes) -> int:
        """Highest version ever accepted from `key` for `task`, -1 for none."""
        return self._ratchet.highest(task, key)

    def bitmap(self, manifest: Manifest) -> bytes:
        """Which shards are here: bit i, lowest first, is shard i of `manifest.shards`."""
        bits = bytearray(-(-len(manifest.shards) // 8))
        for i, digest in enumerate(manifest.shards):
            if self.has(digest):
                bits[i >> 3] |= 1 << (i & 7)
        return bytes(bits)

    def add_folder(self, manifest: Manifest, folder: Path, *, links: Collection[str] = ()) -> None:
        """Store every shard of a folder that was just described by `build_manifest`.

        Raises:
            Fault: the folder does not match the manifest (it changed meanwhile), or the disk is full.
        """
        check_folder(folder, manifest, links=links)
        for entry in manifest.body.files:
            with disk_errors(f"reading {entry.name}"), (folder / entry.name).open("rb") as file:
                for digest in entry.shards:
                    shard = file.read(manifest.body.shard_size)
                    if sha256(shard) != digest:
                        raise Fault(f"{folder / entry.name} changed while it was read: publish it again")
                    self._shards.put(shard, digest)

    def assemble(self, manifest: Manifest, target: Path, *, links: Collection[str] = ()) -> Path:
        """Write the manifest's folder to `target`, atomically. See `shardcast.folder.assemble_folder`."""
        return assemble_folder(manifest, target, self.get, links=links)
