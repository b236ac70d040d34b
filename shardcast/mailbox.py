"""Letters under 32-byte keys: small blobs that other participants leave at a relay.

The first letter under a key wins. An entry is its index file (key, hash, size, sender) beside the content-addressed
bytes; the index is written last, so a crash leaves at most bytes that nobody refers to, which opening removes. Total
bytes and bytes per sender are bounded; the owner collects what is no longer needed.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from protocol.codec import Message, decode, encode
from protocol.errors import Reason, Reject
from shardcast.content import ContentDir, NotFound, sha256
from shardcast.files import disk_errors, write_durably
from shardcast.manifest import Digest

_ENTRY_BYTES_MAX = 256
#: Largest letter.
LETTER_BYTES_MAX = 16 << 20


class Entry(Message, frozen=True):
    """Index entry of one letter. `sender` is the CURVE public key that left it."""

    key: Digest
    digest: Digest
    size: Annotated[int, Meta(ge=0, le=LETTER_BYTES_MAX)]
    sender: Digest


class Mailbox:
    """Letters on disk.

    Args:
        root: folder of this mailbox.
        temporary: folder for unfinished files, on the same file system.
        bytes_max: most bytes in all letters.
        sender_bytes_max: most bytes in the letters of one sender.
    """

    def __init__(self, root: Path, temporary: Path, *, bytes_max: int, sender_bytes_max: int) -> None:
        self._index_dir = root / "index"
        self._temporary = temporary
        self._bytes_max = bytes_max
        self._sender_bytes_max = sender_bytes_max
        self._lock = threading.Lock()
        self._entries: dict[bytes, Entry] = {}
        self._sender_bytes: defaultdict[bytes, int] = defaultdict(int)
        self._bytes_total = 0
        with disk_errors(f"opening {root}"):
            self._index_dir.mkdir(parents=True, exist_ok=True)
            self._content = ContentDir(root / "content", temporary)
            self._scan()

    def _scan(self) -> None:
        for path in self._index_dir.iterdir():
            try:
                entry = decode(Entry, path.read_bytes(), bytes_max=_ENTRY_BYTES_MAX)
            except Reject:
                path.unlink()
                continue
            if path.name == entry.key.hex() and self._content.has(entry.digest):
                self._count(entry)
            else:
                path.unlink()
        referred = {entry.digest for entry in self._entries.values()}
        self._content.collect(referred.__contains__)

    def _count(self, entry: Entry) -> None:
        self._entries[entry.key] = entry
        self._sender_bytes[entry.sender] += entry.size
        self._bytes_total += entry.size

    def _uncount(self, entry: Entry) -> None:
        del self._entries[entry.key]
        self._bytes_total -= entry.size
        self._sender_bytes[entry.sender] -= entry.size
        if self._sender_bytes[entry.sender] == 0:
            del self._sender_bytes[entry.sender]

    def check(self, sender: bytes, key: bytes, digest: bytes, size: int) -> bool:
        """Whether the same letter is here already; otherwise that there is room for it.

        Raises:
            Reject: `LENGTH` (too long), `DUPLICATE` (another letter has this key), `QUOTA` (no room).
        """
        if size > LETTER_BYTES_MAX:
            raise Reject(Reason.LENGTH, "letter is too long", observed=size, limit=LETTER_BYTES_MAX)
        known = self._entries.get(key)
        if known is not None:
            if known.digest == digest:
                return True
            raise Reject(
                Reason.DUPLICATE,
                f"another letter is stored under key {key.hex()[:16]}",
                observed=digest.hex()[:16],
                limit=known.digest.hex()[:16],
                todo="the first letter under a key stays",
            )
        used = self._sender_bytes.get(sender, 0)
        if used + size > self._sender_bytes_max:
            raise Reject(
                Reason.QUOTA,
                "your quota at this relay is used up",
                observed=used + size,
                limit=self._sender_bytes_max,
                todo="use another relay, or wait until old letters are collected",
            )
        if self._bytes_total + size > self._bytes_max:
            raise Reject(
                Reason.QUOTA,
                "mailbox is full",
                observed=self._bytes_total + size,
                limit=self._bytes_max,
                todo="use another relay",
            )
        return False

    def put(self, sender: bytes, key: bytes, data: bytes) -> None:
        """Store a letter durably. Raises what `check` raises, and `Fault` when the disk fails."""
        digest = sha256(data)
        entry = Entry(key, digest, len(data), sender)
        with self._lock:  # held over the write: an equal letter must not be confirmed before this one is durable
            if self.check(sender, key, digest, len(data)):
                return
            self._content.put(data, digest)
            write_durably(self._index_dir / key.hex(), encode(entry), temporary=self._temporary)
            self._count(entry)

    def entry(self, key: bytes) -> Entry:
        """Index entry under `key`. Raises `NotFound`."""
        try:
            return self._entries[key]
        except KeyError:
            raise NotFound(f"no letter under key {key.hex()[:16]}") from None

    def get(self, key: bytes) -> bytes:
        """The letter under `key`. Raises `NotFound`."""
        return self._content.get(self.entry(key).digest)

    def read(self, key: bytes, offset: int, length: int) -> tuple[int, bytes]:
        """Size of the letter, and up to `length` of its bytes from `offset`. Raises `NotFound`."""
        entry = self.entry(key)
        return entry.size, self._content.read(entry.digest, offset, length)

    def keys(self) -> list[bytes]:
        """Keys of all letters."""
        return list(self._entries)

    def collect(self, is_kept: Callable[[bytes], bool]) -> int:
        """Delete the letters whose key `is_kept` does not name; returns how many."""
        with self._lock:
            gone = [entry for key, entry in self._entries.items() if not is_kept(key)]
            for entry in gone:
                with disk_errors(f"removing letter {entry.key.hex()[:16]}"):
                    (self._index_dir / entry.key.hex()).unlink(missing_ok=True)
                self._uncount(entry)
            referred = {entry.digest for entry in self._entries.values()}
            self._content.collect(referred.__contains__)
        return len(gone)
