"""Generations: everything a lineage needs to go on, as one unit that exists completely or not at all.

    generations/00000007/policy/config.json, policy/model.safetensors, optimizer.safetensors, state.json
    generations/00000007.complete      digests of the four files: the marker

A policy that is an adapter has policy/adapter_config.json and policy/adapter_model.safetensors instead, and a link `base` to
the base policy's folder, which is made again when a generation is taken up and is no part of it.

Written in this order: files and directories with fsync under a `.tmp` name, rename, marker. What has no valid marker does
not exist: it is removed before the same version is written again. The newest `KEEP` generations stay, because the
optimiser state of the parent is what an audit of the newest step starts from. A generation carries the leaves that were
consumed to make it, so after SIGKILL at any point no rollout is used twice in a lineage. There is no pickle anywhere.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from models.adapter import ADAPTER_CONFIG, ADAPTER_WEIGHTS, is_adapter, link_base
from models.policy import CONFIG, WEIGHTS
from protocol.errors import Fault
from trainer.files import disk_errors, remove_tree, sync_directory, write_atomic, write_synced

#: Generations that stay on disk.
KEEP = 2
POLICY = "policy"
OPTIMIZER = "optimizer.safetensors"
STATE = "state.json"
_WHOLE = (CONFIG, WEIGHTS)
_ADAPTER = (ADAPTER_CONFIG, ADAPTER_WEIGHTS)
_STATE_BYTES_MAX = 64 << 20


class State(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """state.json. Hashes are in hexadecimal.

    Attributes:
        task: task id.
        version: policy version of this generation.
        adopted: content hash of a policy that was taken from the ledger instead of made here, else empty.
        parent: content hash of the policy it was made from; empty when adopted.
        parent_lineage: hash of the parent's lineage record on or for the ledger.
        optimizer_before: SHA-256 of the optimiser state before the step.
        config_hash: see `TrainerConfig.compute_hash`.
        leaves: leaf hashes consumed by the step, in order.
        consumed: leaves consumed by earlier versions that could still be fresh, by version.
        reward_micro: mean reward of the rollouts in `leaves`, in millionths.
        seed: with `version`, all randomness of the next step.
    """

    task: str
    version: int
    adopted: str
    parent: str
    parent_lineage: str
    optimizer_before: str
    config_hash: str
    leaves: tuple[str, ...]
    consumed: dict[int, tuple[str, ...]]
    reward_micro: int
    seed: int


@dataclass(frozen=True)
class Generation:
    """A complete generation on disk."""

    folder: Path
    state: State

    @property
    def version(self) -> int:
        """Its policy version."""
        return self.state.version

    @property
    def policy(self) -> Path:
        """Its policy folder."""
        return self.folder / POLICY

    def read_optimizer(self) -> bytes:
        """Its optimiser state. Raises `Fault`."""
        with disk_errors(f"reading {self.folder}"):
            return (self.folder / OPTIMIZER).read_bytes()


class Generations:
    """The generations of one task in `root`, used by one process.

    Args:
        keep: newest generations that are not deleted.
    """

    def __init__(self, root: Path, *, keep: int = KEEP) -> None:
        self.root = root
        self.keep = keep
        with disk_errors(f"opening {root}"):
            root.mkdir(parents=True, exist_ok=True)

    def list_versions(self) -> list[int]:
        """Versions that have a marker, oldest first."""
        with disk_errors(f"reading {self.root}"):
            names = [path.stem for path in self.root.glob("*.complete")]
        return sorted(int(name) for name in names if name.isdecimal())

    def load(self, version: int) -> Generation:
        """Check a generation against its marker.

        Raises:
            Fault: when it is incomplete or damaged.
        """
        folder = self._folder(version)
        with disk_errors(f"reading {folder}"):
            digests = _digest_files(folder)
            marker = self._marker(version).read_bytes()
            state_bytes = (folder / STATE).read_bytes()
        if marker != digests:
            raise Fault(f"{folder} is not what its marker says: it is damaged")
        try:
            state = msgspec.json.decode(state_bytes[:_STATE_BYTES_MAX], type=State)
        except msgspec.DecodeError as error:
            raise Fault(f"{folder / STATE} does not parse: {error}") from None
        return Generation(folder, state)

    def load_newest(self) -> Generation | None:
        """The newest generation that is complete; damaged ones are passed over. None when there is none."""
        for version in reversed(self.list_versions()):
            try:
                return self.load(version)
            except Fault:
                continue
        return None

    def write(
        self, state: State, *, policy: Mapping[str, bytes], optimizer: bytes, base: Path | None = None
    ) -> Generation:
        """Make a generation durable, then delete all but the newest `keep`.

        Args:
            policy: files of the policy by name.
            base: folder of the base policy, when this one is an adapter.

        Raises:
            Fault: the disk failed. Older generations are as they were.
        """
        folder, marker = self._folder(state.version), self._marker(state.version)
        draft = folder.with_suffix(".tmp")
        with disk_errors(f"writing {folder}"):
            self._clear(marker, folder, draft)
            (draft / POLICY).mkdir(parents=True)
            for name, data in policy.items():
                write_synced(draft / POLICY / name, data)
            if base is not None:
                link_base(draft / POLICY, base)
            sync_directory(draft / POLICY)
            write_synced(draft / OPTIMIZER, optimizer)
            write_synced(draft / STATE, msgspec.json.encode(state))
            sync_directory(draft)
            draft.rename(folder)
            sync_directory(self.root)
            write_atomic(marker, _digest_files(folder))
            self._prune(state.version)
        return Generation(folder, state)

    def _prune(self, newest: int) -> None:
        """Delete what is older than the newest `keep`, and anything newer than `newest`, which is no longer our lineage."""
        versions = self.list_versions()
        kept = [version for version in versions if version <= newest][-self.keep :]
        for version in versions:
            if version not in kept:
                self._clear(self._marker(version), self._folder(version))
        for path in self.root.iterdir():
            if path.is_dir() and not (path.name.isdecimal() and int(path.name) in kept):
                remove_tree(path)

    def _clear(self, marker: Path, *folders: Path) -> None:
        """Remove the marker durably first, so that a half-deleted generation never counts."""
        if marker.exists():
            marker.unlink()
            sync_directory(self.root)
        for folder in folders:
            if folder.exists():
                remove_tree(folder)

    def _folder(self, version: int) -> Path:
        return self.root / f"{version:08d}"

    def _marker(self, version: int) -> Path:
        return self.root / f"{version:08d}.complete"


def _digest_files(folder: Path) -> bytes:
    """What a marker holds: one line "digest name" per file."""
    lines = []
    policy = _ADAPTER if is_adapter(folder / POLICY) else _WHOLE
    for name in (*(f"{POLICY}/{name}" for name in policy), OPTIMIZER, STATE):
        path = folder / name
        if path.is_symlink():
            raise Fault(f"{path} is a link")
        lines.append(f"{hashlib.sha256(path.read_bytes()).hexdigest()} {name}\n")
    return "".join(lines).encode()
