"""Files that an environment needs, found by hash: a tokenizer, the lines of a data set.

A task names such a file by its SHA-256 in the environment's arguments and never by a path, so it is the same file for
everybody or none at all. It is looked for in given folders (the base policy's, and the participant's own). The bytes
that are used are the bytes that were hashed: a file is read once, and never more than its kind may have.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from protocol.errors import ConfigError, Fault


class Kind(NamedTuple):
    """What a file is, as far as finding it goes.

    Attributes:
        name: for people.
        suffix: how its name ends. Only such files are opened.
        bytes_max: largest file that is read.
    """

    name: str
    suffix: str
    bytes_max: int


class MissingFile(ConfigError):
    """A file is in none of the folders."""


TOKENIZER = Kind("tokenizer", ".json", 64 << 20)
DATA = Kind("data set", ".jsonl", 256 << 20)

#: Files of a fitting name that are looked at in one folder, before the search is called off.
CANDIDATES_MAX = 1000
_SHA256 = re.compile(r"[0-9a-f]{64}")


def read_hash(where: str, text: str) -> str:
    """A SHA-256 in an argument. Raises `ConfigError` unless it is 64 lower-case hex digits."""
    if not _SHA256.fullmatch(text):
        raise ConfigError(f"{where} is {text[:80]!r}, expected a SHA-256: 64 lower-case hex digits")
    return text


def hash_file(path: Path) -> str:
    """SHA-256 of a file as arguments name it. Raises `ConfigError` when it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None


def find_files(wanted: Mapping[str, Kind], folders: Iterable[Path]) -> dict[str, bytes]:
    """Contents of files by hash.

    Args:
        wanted: SHA-256 in hex -> kind.
        folders: where to look, in this order, not in what they contain. A folder that does not exist holds nothing.

    Raises:
        MissingFile: when one is nowhere: names the hash, the kind and the folders.
        Fault: when a file or folder cannot be read.
    """
    folders = list(folders)
    found: dict[str, bytes] = {}
    for digest, kind in wanted.items():
        data = next((data for folder in folders if (data := _find(folder, digest, kind)) is not None), None)
        if data is None:
            looked = ", ".join(str(folder) for folder in folders) or "no folder at all"
            raise MissingFile(
                f"no {kind.name} file with SHA-256 {digest} (*{kind.suffix}, at most {kind.bytes_max} bytes) in {looked}: "
                "it belongs into the base policy's folder, or into one of environment_folders"
            )
        found[digest] = data
    return found


def _find(folder: Path, digest: str, kind: Kind) -> bytes | None:
    try:
        if not folder.is_dir():
            return None
        paths = sorted(path for path in folder.iterdir() if path.suffix == kind.suffix and path.is_file())
        if len(paths) > CANDIDATES_MAX:
            raise Fault(f"{folder} holds {len(paths)} files like *{kind.suffix}, limit {CANDIDATES_MAX}")
        for path in paths:
            with path.open("rb") as file:
                data = file.read(kind.bytes_max + 1)
            if len(data) <= kind.bytes_max and hashlib.sha256(data).hexdigest() == digest:
                return data
    except OSError as error:
        raise Fault(f"cannot read {error.filename or folder}: {error.strerror}") from None
    return None
