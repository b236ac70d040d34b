"""Bundles that could not be judged, kept with the reason for whoever runs the verifier: bounded, oldest first to go.

Being here says nothing about a node: its submission has no row, as any that is not known. `<round>-<account>.bundle` holds the
bytes as served, `.txt` the reason. Nothing reads them again but a person.
"""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

log = logging.getLogger("troth.verifier")

#: Most bundles that are kept.
FILES_MAX = 64


class Quarantine:
    """A folder of bundles and reasons.

    Args:
        bytes_max: of all bundles together; one that is longer by itself is left out, its reason is kept.
    """

    def __init__(self, folder: Path, bytes_max: int) -> None:
        self._folder, self._bytes_max = folder, bytes_max

    def add(self, round_index: int, account: bytes, data: bytes, reason: str) -> Path:
        """Keep a bundle; the path of its reason. A full disk loses the bundle and nothing else."""
        name = f"{round_index:08d}-{account.hex()}"
        path = self._folder / f"{name}.txt"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._make_room(len(data))
            if len(data) <= self._bytes_max:
                (self._folder / f"{name}.bundle").write_bytes(data)
            path.write_text(f"round {round_index}, node 0x{account.hex()}, {len(data)} bytes\n{reason}\n")
        except OSError as error:
            log.warning("bundle of round %d, node 0x%s is not kept: %s", round_index, account.hex(), error)
        return path

    def _make_room(self, size: int) -> None:
        """Drop the oldest until one more of `size` bytes fits."""
        kept = sorted(self._folder.glob("*.txt"), key=lambda path: path.stat().st_mtime)
        while kept:
            bundles = [path.with_suffix(".bundle") for path in kept]
            used = sum(path.stat().st_size for path in bundles if path.exists())
            if len(kept) < FILES_MAX and used + min(size, self._bytes_max) <= self._bytes_max:
                return
            oldest = kept.pop(0)
            with contextlib.suppress(FileNotFoundError):
                oldest.with_suffix(".bundle").unlink()
            oldest.unlink()
