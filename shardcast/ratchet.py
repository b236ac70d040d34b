"""The manifests this participant has accepted, and the highest version of each (task, key), on disk.

A version below the highest is refused after any restart, a version that the ledger does not list is refused by its
hash, and a second manifest for a known version is turned into evidence. Neighbour: `shardcast.store` owns one.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

from protocol.codec import Domain, Message, decode, encode, tagged_hash
from protocol.errors import Fault, Ignore, Reason, Reject
from shardcast.content import NotFound, sha256
from shardcast.files import disk_errors, write_durably
from shardcast.manifest import (
    Digest,
    Equivocation,
    Manifest,
    read_manifest,
    verify_manifest,
)

_HEAD_BYTES_MAX = 256
#: Accepted manifests kept per (task, key): older ones can be fetched again by their hash.
MANIFESTS_KEPT = 16


class Head(Message, frozen=True):
    """Highest version accepted from one key for one task."""

    task: Digest
    key: Digest
    version: int


class Ratchet:
    """Thread-safe.

    Args:
        root: folder of the records; created when absent.
        temporary: folder for unfinished files, on the same file system.
    """

    def __init__(self, root: Path, temporary: Path) -> None:
        self._heads_dir, self._manifests_dir, self._temporary = root / "heads", root / "manifests", temporary
        self._lock = threading.Lock()
        self._heads: dict[tuple[bytes, bytes], int] = {}
        self._manifests: dict[bytes, Manifest] = {}
        self._versions: dict[tuple[bytes, bytes], dict[int, bytes]] = {}
        with disk_errors(f"opening {root}"):
            self._heads_dir.mkdir(parents=True, exist_ok=True)
            self._manifests_dir.mkdir(parents=True, exist_ok=True)
            self._load()

    def _load(self) -> None:
        for path in self._heads_dir.iterdir():
            try:
                head = decode(Head, path.read_bytes(), bytes_max=_HEAD_BYTES_MAX)
            except Reject as error:  # our own disk: starting without the record would allow a rollback
                raise Fault(f"{path} is damaged ({error}): restore it, or start with a new store") from error
            self._heads[head.task, head.key] = head.version
        for path in self._manifests_dir.iterdir():
            data = path.read_bytes()
            if sha256(data).hex() == path.name:
                self._remember(read_manifest(data))
            else:
                path.unlink()

    def _remember(self, manifest: Manifest) -> None:
        self._manifests[manifest.hash] = manifest
        self._versions.setdefault((manifest.task, manifest.key), {})[manifest.version] = manifest.hash

    def highest(self, task: bytes, key: bytes) -> int:
        """Highest version accepted, -1 for none."""
        return self._heads.get((task, key), -1)

    def knows(self, digest: bytes) -> bool:
        """Whether this is the hash of an accepted manifest that is still kept."""
        return digest in self._manifests

    def manifest(self, digest: bytes) -> Manifest:
        """An accepted manifest by its hash. Raises `NotFound`."""
        try:
            return self._manifests[digest]
        except KeyError:
            raise NotFound(f"manifest {digest.hex()[:16]} is not here") from None

    def manifests(self) -> list[Manifest]:
        """Accepted manifests that are still kept."""
        return list(self._manifests.values())

    def admit(
        self,
        data: bytes,
        key: bytes,
        domain: Domain,
        *,
        expected: bytes,
        historic: bool = False,
        allowed_suffixes: Sequence[str] | None = None,
    ) -> Manifest:
        """Accept signed manifest bytes, durably.

        Args:
            data: from a stranger.
            key: network key of the task's trainer.
            domain: `manifest_domain(...)` of the task.
            expected: manifest hash that the ledger lists. A version that it does not list cannot have this hash.
            historic: an older version is wanted on purpose (to judge an earlier round); the highest stays as it is.
            allowed_suffixes: see `verify_manifest`.

        Raises:
            Equivocation: another manifest of this version was accepted before.
            Reject: `MANIFEST` (not the one on the ledger), `ROLLBACK`, or what `verify_manifest` raises.
            Fault: the disk failed; nothing was accepted.
        """
        manifest = verify_manifest(data, key, domain, allowed_suffixes=allowed_suffixes)
        with self._lock:
            self._check_conflict(manifest)
            if manifest.hash != expected:
                raise Reject(
                    Reason.MANIFEST,
                    f"manifest of version {manifest.version} is not the one on the ledger",
                    observed=manifest.hash.hex(),
                    limit=expected.hex(),
                    todo="fetch the manifest by the hash that the ledger lists",
                )
            highest = self.highest(manifest.task, key)
            if manifest.version < highest and not historic:
                raise Reject(
                    Reason.ROLLBACK,
                    "manifest is older than one already accepted",
                    observed=manifest.version,
                    limit=highest,
                    todo="fetch the newest version on the ledger",
                )
            if manifest.hash in self._manifests:
                return self._manifests[manifest.hash]
            self._record(manifest, highest)
        return manifest

    def _check_conflict(self, manifest: Manifest) -> None:
        known_hash = self._versions.get((manifest.task, manifest.key), {}).get(manifest.version)
        if known_hash is None:
            return
        known = self._manifests[known_hash]
        if known.body != manifest.body:
            raise Equivocation(known.data, manifest.data, manifest.version)
        if known_hash != manifest.hash:
            raise Ignore(f"version {manifest.version} is known under manifest hash {known_hash.hex()[:16]}")

    def _record(self, manifest: Manifest, highest: int) -> None:
        # The head first: after a crash in between, the version is refused as a rollback only if it is lower.
        if manifest.version > highest:
            head = Head(manifest.task, manifest.key, manifest.version)
            name = tagged_hash("head", manifest.task, manifest.key).hex()
            write_durably(self._heads_dir / name, encode(head), temporary=self._temporary)
            self._heads[manifest.task, manifest.key] = manifest.version
        write_durably(self._manifests_dir / manifest.hash.hex(), manifest.data, temporary=self._temporary)
        self._remember(manifest)
        versions = self._versions[manifest.task, manifest.key]
        while len(versions) > MANIFESTS_KEPT:
            oldest = versions.pop(min(versions))
            self._manifests.pop(oldest)
            with disk_errors("removing an old manifest"):
                (self._manifests_dir / oldest.hex()).unlink(missing_ok=True)
