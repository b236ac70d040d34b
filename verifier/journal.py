"""What a verifier said, on disk before it says it: one file per judged round, durable before its commitment is submitted.

A verdict that was committed must be revealed with the same rows, report and salt; after a crash they are read back from
here. Files of rounds whose reveals are over are removed.
"""

from __future__ import annotations

import os
from pathlib import Path

from protocol.codec import Message, decode, encode
from protocol.errors import Fault, Reject

RECORD_BYTES_MAX = 4 << 20


class VerdictRecord(Message, frozen=True):
    """One round's verdict. `sealed_report` is the signed report as it will be published."""

    round: int
    rows: bytes
    sealed_report: bytes
    salt: bytes
    commitment: bytes


class Journal:
    """Verdict records of one task. Raises `Fault` when the disk refuses."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.records: dict[int, VerdictRecord] = {}
        try:
            directory.mkdir(parents=True, exist_ok=True)
            for path in directory.glob("*.verdict"):
                self._load(path)
        except OSError as error:
            raise Fault(f"verdict journal {directory} cannot be opened: {error.strerror}") from None

    def _load(self, path: Path) -> None:
        try:
            record = decode(VerdictRecord, path.read_bytes(), bytes_max=RECORD_BYTES_MAX)
        except Reject as error:
            raise Fault(f"verdict record {path} is damaged: {error}; remove it, the round goes unjudged") from None
        self.records[record.round] = record

    def add(self, record: VerdictRecord) -> None:
        """Write a record durably: temporary file, fsync, rename, fsync of the folder."""
        path = self._directory / f"{record.round:08d}.verdict"
        temporary = path.with_suffix(".tmp")
        try:
            with temporary.open("wb") as file:
                file.write(encode(record))
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
            folder = os.open(self._directory, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except OSError as error:
            raise Fault(
                f"verdict of round {record.round} cannot be written: {error.strerror}; free some disk"
            ) from None
        self.records[record.round] = record

    def drop(self, round_index: int) -> None:
        """Forget a round that is over."""
        if self.records.pop(round_index, None) is not None:
            (self._directory / f"{round_index:08d}.verdict").unlink(missing_ok=True)
