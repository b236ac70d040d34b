"""Signed manifests: what one version of a policy consists of, down to the hash of every shard.

A manifest is trusted for nothing but its signature until `verify_manifest` returns: names cannot leave a folder, sizes,
counts and hashes agree with each other, and the output root is the content hash that the ledger calls the policy. Its
own name, the *manifest hash*, is the SHA-256 of its signed bytes, so peers serve it like any other blob.

Two different bodies signed for one version are `Equivocation`: both byte strings together prove it to anybody.
Neighbours: `shardcast.store` remembers the highest version seen, `shardcast.fetch` downloads the shards.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Literal, Protocol

from msgspec import Meta

from protocol.codec import Domain, Message, decode, encode, tagged_hash
from protocol.errors import ConfigError, Reason, Reject
from protocol.identity import NetworkKey, verify_signature

FILES_MAX = 256
SHARDS_MAX = 65_536
SIZE_MAX = 1 << 40
NAME_LENGTH_MAX = 64
MANIFEST_BYTES_MAX = 4 << 20
SHARD_SIZE_MIN = 1 << 10
SHARD_SIZE_MAX = 64 << 20
VERSION_MAX = (1 << 32) - 1

#: A leading dot would hide a file, a leading dash would pass for an option; separators and NUL are not in the alphabet.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*", re.ASCII)

Digest = Annotated[bytes, Meta(min_length=32, max_length=32)]
_Size = Annotated[int, Meta(ge=0, le=SIZE_MAX)]
_Version = Annotated[int, Meta(ge=0, le=VERSION_MAX)]


class FileEntry(Message, frozen=True):
    """One file: its name inside the folder, its size in bytes, its SHA-256 and the SHA-256 of each of its shards."""

    name: str
    size: _Size
    sha256: Digest
    shards: Annotated[tuple[Digest, ...], Meta(max_length=SHARDS_MAX)]


class ManifestBody(Message, frozen=True):
    """Trainer to everybody. Stale when a higher version is on the ledger.

    Attributes:
        format: version of this schema.
        task: task id.
        epoch: epoch in which it was published.
        version: policy version, counted from 0.
        parent: version it was trained from, -1 for none.
        shard_size: bytes of every shard but the last of each file.
        files: sorted by name.
        root: `content_hash(files)`, which is the policy hash.
    """

    format: Literal[1]
    task: Digest
    epoch: _Version
    version: _Version
    parent: Annotated[int, Meta(ge=-1, le=VERSION_MAX)]
    shard_size: Annotated[int, Meta(ge=SHARD_SIZE_MIN, le=SHARD_SIZE_MAX)]
    files: Annotated[tuple[FileEntry, ...], Meta(min_length=1, max_length=FILES_MAX)]
    root: Digest


class SignedManifest(Message, frozen=True):
    """A body's canonical bytes under the trainer's network key."""

    body: Annotated[bytes, Meta(max_length=MANIFEST_BYTES_MAX)]
    key: Digest
    signature: Annotated[bytes, Meta(min_length=64, max_length=64)]


@dataclass(frozen=True)
class Manifest:
    """A manifest whose signature and structure were checked.

    Attributes:
        data: the signed bytes, as served to others.
        body: what they say.
        key: network key that signed them.
    """

    data: bytes = field(repr=False)
    body: ManifestBody = field(repr=False)
    key: bytes

    @cached_property
    def hash(self) -> bytes:
        """The manifest hash: SHA-256 of `data`."""
        return hashlib.sha256(self.data).digest()

    @property
    def task(self) -> bytes:
        """Task id, 32 bytes."""
        return self.body.task

    @property
    def version(self) -> int:
        """Policy version."""
        return self.body.version

    @property
    def root(self) -> bytes:
        """Policy hash: the content hash of the assembled folder."""
        return self.body.root

    @cached_property
    def shards(self) -> Mapping[bytes, int]:
        """Size in bytes of each distinct shard, in order of first appearance. Bitmaps are in this order."""
        return compute_shard_sizes(self.body)


class _Named(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def size(self) -> int: ...
    @property
    def sha256(self) -> bytes: ...


class Equivocation(Reject):
    """One key signed two different manifests for one version of one task.

    Attributes:
        first, second: the signed bytes, which `verify_equivocation` accepts as proof.
    """

    def __init__(self, first: bytes, second: bytes, version: int) -> None:
        self.first = first
        self.second = second
        super().__init__(
            Reason.MANIFEST,
            f"two different manifests are signed for version {version}",
            observed=f"{hashlib.sha256(first).hexdigest()[:16]} and {hashlib.sha256(second).hexdigest()[:16]}",
            todo="use neither before the ledger names one; both together are evidence",
        )


def _reject(what: str, *, observed: object = "", limit: object = "") -> Reject:
    return Reject(Reason.MANIFEST, what, observed=observed, limit=limit, todo="publish a manifest that obeys the rules")


def content_hash(files: Iterable[_Named]) -> bytes:
    """The policy hash: a tagged hash over (name, size, SHA-256) of every file, sorted by name."""
    parts: list[bytes] = []
    for file in sorted(files, key=lambda entry: entry.name):
        parts += (file.name.encode(), file.size.to_bytes(8, "big"), file.sha256)
    return tagged_hash("content", *parts)


def check_name(name: str, allowed_suffixes: Sequence[str] | None = None) -> None:
    """Check that a file name can only ever name a plain file directly inside a folder.

    Raises:
        Reject: `MANIFEST`.
    """
    if len(name) > NAME_LENGTH_MAX:
        raise _reject("file name is too long", observed=len(name), limit=NAME_LENGTH_MAX)
    if not _NAME.fullmatch(name) or ".." in name:
        raise _reject("file name is not allowed", observed=ascii(name), limit="letters, digits, '.', '_', '-'; no '..'")
    if allowed_suffixes is not None and not name.endswith(tuple(allowed_suffixes)):
        raise _reject("file type is not allowed", observed=ascii(name), limit=", ".join(allowed_suffixes))


def compute_shard_sizes(body: ManifestBody) -> dict[bytes, int]:
    """Size of each distinct shard.

    Raises:
        Reject: `MANIFEST` when one hash stands for shards of different sizes.
    """
    sizes: dict[bytes, int] = {}
    for file in body.files:
        for index, digest in enumerate(file.shards):
            size = min(body.shard_size, file.size - index * body.shard_size)
            if sizes.setdefault(digest, size) != size:
                raise _reject("one shard hash stands for two sizes", observed=digest.hex()[:16])
    return sizes


def _check_body(body: ManifestBody, allowed_suffixes: Sequence[str] | None) -> None:
    if body.parent >= body.version:
        raise _reject("parent is not older than the version", observed=body.parent, limit=body.version - 1)
    names = [file.name for file in body.files]
    for name in names:
        check_name(name, allowed_suffixes)
    # Case-insensitive file systems would let one file overwrite another.
    if len({name.lower() for name in names}) != len(names):
        raise _reject("file names are not unique")
    if names != sorted(names):
        raise _reject("files are not sorted by name")
    total = sum(file.size for file in body.files)
    if total > SIZE_MAX:
        raise _reject("policy is too large", observed=total, limit=SIZE_MAX)
    count = sum(len(file.shards) for file in body.files)
    if count > SHARDS_MAX:
        raise _reject("too many shards", observed=count, limit=SHARDS_MAX)
    for file in body.files:
        expected = -(-file.size // body.shard_size)
        if len(file.shards) != expected:
            raise _reject(f"shards do not cover {file.name}", observed=len(file.shards), limit=expected)
    compute_shard_sizes(body)
    if content_hash(body.files) != body.root:
        raise _reject("output root is not the content hash of the files", observed=body.root.hex()[:16])


def check_domain(domain: Domain) -> None:
    """Raises `ConfigError` unless the domain is one for manifests."""
    if domain.kind != "manifest":
        raise ConfigError(f"signing domain is for {domain.kind!r}: pass manifest_domain(chain_id, ledger, task)")


def manifest_domain(chain_id: int, ledger: bytes, task: bytes) -> Domain:
    """The domain under which manifests of a task are signed."""
    return Domain(chain_id, ledger, task, "manifest")


def sign_manifest(body: ManifestBody, key: NetworkKey, domain: Domain) -> Manifest:
    """Sign a body as it is; `shardcast.folder.build_manifest` makes one from a folder."""
    check_domain(domain)
    raw = encode(body)
    signed = SignedManifest(raw, key.public, key.sign(domain, raw))
    return Manifest(encode(signed), body, key.public)


def read_manifest(data: bytes) -> Manifest:
    """Parse signed bytes that this process verified earlier (its own disk); checks form, not signature."""
    signed = decode(SignedManifest, data, bytes_max=MANIFEST_BYTES_MAX)
    return Manifest(data, decode(ManifestBody, signed.body, bytes_max=MANIFEST_BYTES_MAX), signed.key)


def verify_manifest(
    data: bytes, key: bytes, domain: Domain, *, allowed_suffixes: Sequence[str] | None = None
) -> Manifest:
    """Check signed bytes from a stranger.

    Args:
        data: the signed manifest.
        key: network key of the task's trainer.
        domain: `manifest_domain(...)` of the task.
        allowed_suffixes: file name endings to accept, or None for any.

    Raises:
        Reject: `MALFORMED` (not a manifest, too long), `SIGNATURE` (another key or domain), `MANIFEST` (a broken rule).
    """
    check_domain(domain)
    signed = decode(SignedManifest, data, bytes_max=MANIFEST_BYTES_MAX)
    if signed.key != key:
        raise Reject(
            Reason.SIGNATURE,
            "manifest is not signed by the trainer",
            observed=signed.key.hex()[:16],
            limit=key.hex()[:16],
        )
    verify_signature(key, domain, signed.body, signed.signature)
    body = decode(ManifestBody, signed.body, bytes_max=MANIFEST_BYTES_MAX)
    if body.task != domain.task:
        raise _reject("manifest is of another task", observed=body.task.hex()[:16], limit=domain.task.hex()[:16])
    _check_body(body, allowed_suffixes)
    return Manifest(data, body, key)


def verify_equivocation(first: bytes, second: bytes, key: bytes, domain: Domain) -> None:
    """Check that two signed manifests prove equivocation by `key`. Anybody can run this.

    Raises:
        Reject: when either is not a valid manifest of this key and task, or they do not conflict.
    """
    one, two = verify_manifest(first, key, domain), verify_manifest(second, key, domain)
    if one.version != two.version or one.body == two.body:
        raise Reject(Reason.MANIFEST, "the two manifests do not conflict", observed=f"{one.version}, {two.version}")
