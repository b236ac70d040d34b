"""What a node must find again after kill -9: who it was, and the exact bytes it committed to.

Layout of the folder: `journal.json` (task, account, first round it may sign in, last round whose verdict was told, what
other machines were seen to send), `<round>.bundle` (the sealed bundle) and the parts of a round in progress
(inference.parts). A bundle is on disk, synced, before its root goes to the ledger, so a restart uploads identical bytes
and never makes a second root. Every write is temp, fsync, rename, directory fsync.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import NamedTuple

from protocol.codec import decode
from protocol.errors import ConfigError, Fault, Reject
from protocol.messages import Bundle, Signed, compute_bundle_root

JOURNAL_VERSION = 1
#: Largest file that is read back.
FILE_BYTES_MAX = 1 << 31


class Record(NamedTuple):
    """A bundle on disk and what its commitment says."""

    round_index: int
    root: bytes
    leaves: int
    policy: bytes
    path: Path


def write_atomic(path: Path, data: bytes) -> None:
    """Write a file so that after any crash it is there complete or not at all.

    Raises:
        Fault: when the disk refuses.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise Fault(f"cannot write {path}: {error.strerror}; free some space or mend the disk") from error


class Journal:
    """One node's files of one task.

    Args:
        directory: made when missing.

    Attributes:
        existed: whether an earlier run left a journal here.
        first_round: earliest round this directory may sign in.
        judged_round: newest round whose verdict was told to the operator, -1 at first.
        foreign_round / foreign_record: newest round and node record of this account, known to come from another
            machine, for which a round was watched already; -1 at first.

    Raises:
        ConfigError: when the directory belongs to another task or account, or to a newer version of the software.
    """

    def __init__(self, directory: Path, task: bytes, account: bytes) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self._path = directory / "journal.json"
        self._names = {"version": JOURNAL_VERSION, "task": task.hex(), "account": account.hex()}
        self.existed = self._path.exists()
        self.first_round, self.judged_round = 0, -1
        self.foreign_round, self.foreign_record = -1, -1
        if self.existed:
            self._read()
        self.records: dict[int, Record] = {}
        for path in directory.glob("*.bundle"):
            record = self._open(path, task, account)
            self.records[record.round_index] = record

    def _read(self) -> None:
        try:
            table = json.loads(self._path.read_text())
            self.first_round, self.judged_round = int(table["first_round"]), int(table["judged_round"])
            self.foreign_round = int(table.get("foreign_round", -1))
            self.foreign_record = int(table.get("foreign_record", -1))
        except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise ConfigError(f"{self._path} is not a node's journal ({error!r}): use another directory") from None
        for name, value in self._names.items():
            if table.get(name) != value:
                raise ConfigError(
                    f"{self._path} belongs to another node: {name} is {table.get(name)}, expected {value}; "
                    "use one directory per node and task"
                )

    def _open(self, path: Path, task: bytes, account: bytes) -> Record:
        try:
            signed = decode(Signed, path.read_bytes(), bytes_max=FILE_BYTES_MAX)
            bundle = decode(Bundle, signed.body, bytes_max=FILE_BYTES_MAX)
        except (OSError, Reject) as error:
            raise ConfigError(f"{path} is damaged ({error}): move it away to go on without that round") from None
        if (bundle.task, bundle.account) != (task, account) or bundle.round < 0:
            raise ConfigError(f"{path} was made by another node or for another task: move it away")
        return Record(bundle.round, compute_bundle_root(bundle), len(bundle.groups), bundle.policy, path)

    def save(self) -> None:
        """Write `journal.json`. Raises `Fault` when the disk refuses."""
        table = {
            **self._names,
            "first_round": self.first_round,
            "judged_round": self.judged_round,
            "foreign_round": self.foreign_round,
            "foreign_record": self.foreign_record,
        }
        write_atomic(self._path, json.dumps(table).encode())

    def add(self, bundle: Bundle, root: bytes, data: bytes) -> Record:
        """Make a sealed bundle durable. Raises `Fault` when the disk refuses."""
        path = self.directory / f"{bundle.round}.bundle"
        write_atomic(path, data)
        record = Record(bundle.round, root, len(bundle.groups), bundle.policy, path)
        self.records[bundle.round] = record
        return record

    def drop(self, round_index: int) -> None:
        """Forget a round's bundle."""
        self.records.pop(round_index).path.unlink(missing_ok=True)
