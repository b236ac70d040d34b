"""Folders to manifests and back.

`build_manifest` reads a folder of plain files. `assemble_folder` writes the folder of a verified manifest: files are
called 0, 1, 2 ... until every byte has been checked, only then do they get the names that the manifest gives them (which
were checked too), and only a complete folder is renamed to its final path. Neighbour: `shardcast.store` holds the shards.

A folder may also hold symbolic links that its owner made for itself. Where the caller names them as `links` they are no part
of the content: neither read nor followed, published or compared.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from protocol.codec import Domain
from protocol.errors import ConfigError, Fault
from protocol.identity import NetworkKey
from shardcast.content import sha256
from shardcast.files import CREATE_FLAGS, disk_errors, sync_directory, write_all
from shardcast.manifest import (
    FILES_MAX,
    MANIFEST_BYTES_MAX,
    SHARD_SIZE_MAX,
    SHARD_SIZE_MIN,
    FileEntry,
    Manifest,
    ManifestBody,
    content_hash,
    sign_manifest,
    verify_manifest,
)

SHARD_SIZE_DEFAULT = 1 << 20
#: The default shard size doubles until a policy has at most this many shards.
_SHARDS_COMFORTABLE = 16_384


def _entries(folder: Path, links: Collection[str]) -> list[Path]:
    """What is in a folder, without the links that are not part of its content."""
    return [path for path in folder.iterdir() if not (path.name in links and path.is_symlink())]


def _plain_files(folder: Path, links: Collection[str]) -> list[Path]:
    paths = sorted(_entries(folder, links), key=lambda path: path.name)
    for path in paths:
        if not stat.S_ISREG(path.lstat().st_mode):
            raise ConfigError(f"{path} is not a plain file: a policy folder holds plain files only")
    if not 1 <= len(paths) <= FILES_MAX:
        raise ConfigError(f"{folder} holds {len(paths)} files, allowed 1 to {FILES_MAX}")
    return paths


def _hash_file(path: Path, shard_size: int) -> FileEntry:
    whole, shards, size = hashlib.sha256(), [], 0
    with path.open("rb") as file:
        while shard := file.read(shard_size):
            whole.update(shard)
            shards.append(sha256(shard))
            size += len(shard)
    return FileEntry(path.name, size, whole.digest(), tuple(shards))


def choose_shard_size(total: int) -> int:
    """Power-of-two shard size for a policy of `total` bytes, from 1 MiB up."""
    size = SHARD_SIZE_DEFAULT
    while total > size * _SHARDS_COMFORTABLE and size < SHARD_SIZE_MAX:
        size *= 2
    return size


def build_manifest(
    folder: Path,
    key: NetworkKey,
    domain: Domain,
    *,
    version: int,
    parent: int = -1,
    epoch: int = 0,
    shard_size: int | None = None,
    allowed_suffixes: Sequence[str] | None = None,
    links: Collection[str] = (),
) -> Manifest:
    """Describe and sign the files of `folder`.

    Args:
        folder: plain files only, no subfolders; no links but those that `links` names, which are left out.
        key: the trainer's network key.
        domain: `manifest_domain(...)` of the task.
        version, parent, epoch: see `ManifestBody`.
        shard_size: bytes per shard; None chooses by total size.

    Raises:
        ConfigError: the folder holds something that cannot be published.
        Reject: a name, suffix or count that receivers would refuse.
    """
    if shard_size is not None and not SHARD_SIZE_MIN <= shard_size <= SHARD_SIZE_MAX:
        raise ConfigError(f"shard_size is {shard_size}: allowed {SHARD_SIZE_MIN} to {SHARD_SIZE_MAX}")
    with disk_errors(f"reading {folder}"):
        paths = _plain_files(folder, links)
        size = shard_size or choose_shard_size(sum(path.stat().st_size for path in paths))
        files = tuple(_hash_file(path, size) for path in paths)
    body = ManifestBody(1, domain.task, epoch, version, parent, size, files, content_hash(files))
    signed = sign_manifest(body, key, domain)
    if len(signed.data) > MANIFEST_BYTES_MAX:
        raise ConfigError(f"manifest has {len(signed.data)} bytes, limit {MANIFEST_BYTES_MAX}: use larger shards")
    return verify_manifest(signed.data, key.public, domain, allowed_suffixes=allowed_suffixes)


def hash_folder(folder: Path, *, links: Collection[str] = ()) -> bytes:
    """Content hash of a folder as it is on disk now: what a manifest of it would have as root.

    Raises:
        ConfigError: the folder holds something else than plain files.
        Fault: the disk failed.
    """
    with disk_errors(f"reading {folder}"):
        return content_hash([_hash_file(path, SHARD_SIZE_DEFAULT) for path in _plain_files(folder, links)])


def check_folder(folder: Path, manifest: Manifest, *, links: Collection[str] = ()) -> None:
    """Check that `folder` holds exactly the manifest's files. Raises `Fault` naming the first difference."""
    if folder.is_symlink() or not folder.is_dir():
        raise Fault(f"{folder} is in the way (a link or not a folder): remove it")
    with disk_errors(f"reading {folder}"):
        present = {path.name: path for path in _entries(folder, links)}
        expected = {file.name: file for file in manifest.body.files}
        if odd := sorted(present.keys() ^ expected.keys()):
            raise Fault(f"{folder} differs from its manifest at {odd[0]}: remove the folder and assemble it again")
        for name, path in present.items():
            plain = stat.S_ISREG(path.lstat().st_mode)
            if not plain or _hash_file(path, manifest.body.shard_size) != expected[name]:
                raise Fault(f"{folder} differs from its manifest at {name}: remove the folder and assemble it again")


def _write_file(path: Path, entry: FileEntry, get: Callable[[bytes], bytes]) -> FileEntry:
    whole, size = hashlib.sha256(), 0
    fd = os.open(path, CREATE_FLAGS, 0o600)
    try:
        for digest in entry.shards:
            shard = get(digest)
            write_all(fd, shard)
            whole.update(shard)
            size += len(shard)
        os.fsync(fd)
    finally:
        os.close(fd)
    return FileEntry(entry.name, size, whole.digest(), entry.shards)


def assemble_folder(
    manifest: Manifest, target: Path, get: Callable[[bytes], bytes], *, links: Collection[str] = ()
) -> Path:
    """Write the manifest's folder to `target`, atomically.

    Args:
        manifest: verified.
        target: final path. When it exists it is checked, and used or refused.
        get: returns the verified bytes of a shard.
        links: names of links that `target` may hold besides.

    Raises:
        Fault: a shard is missing, the disk failed, `target` holds something else, or the shards do not add up to the
            output root.
    """
    if target.is_symlink() or target.exists():
        check_folder(target, manifest, links=links)
        return target
    draft = target.parent / f".{target.name}.{secrets.token_hex(8)}.partial"
    with disk_errors(f"assembling {target}"):
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            draft.mkdir(mode=0o700)
            entries = manifest.body.files
            written = [_write_file(draft / str(i), entry, get) for i, entry in enumerate(entries)]
            if content_hash(written) != manifest.root:
                raise Fault(f"shards of version {manifest.version} do not add up to policy {manifest.root.hex()[:16]}")
            # Two passes: a manifest may call file 0 "1".
            for i in range(len(entries)):
                (draft / str(i)).rename(draft / f".{i}")
            for i, entry in enumerate(entries):
                (draft / f".{i}").rename(draft / entry.name)
            sync_directory(draft)
            draft.rename(target)
            sync_directory(target.parent)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    return target
