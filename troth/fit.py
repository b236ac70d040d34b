"""Does a policy fit on this machine? Asked of its manifest and config.json, before anything else of it is fetched.

The manifest names every file and size under the hash that the ledger lists; config.json alone says how much memory the
model takes. So a machine that is too small says so after kilobytes, not after the download. Neighbours:
inference.memory counts, troth.network fetches, troth.doctor_task shows the same numbers to people.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

from inference.memory import MemoryNeed, estimate_memory, read_free_bytes
from models.policy import CONFIG, CONFIG_BYTES_MAX
from protocol.errors import ConfigError, Fault, Ignore, Reject
from protocol.ledger.events import Role
from protocol.ledger.state import Task
from protocol.ports import Ledger, PolicyStore
from protocol.task import TaskSpec
from shardcast.client import Address
from shardcast.manifest import FileEntry, Manifest, manifest_domain
from troth.network import POLICIES_KEPT, POLICY_SUFFIXES, Mesh
from troth.settings import ComputeSettings

#: Prompt tokens allowed for when the prompts themselves are not known.
PROMPT_TOKENS_GUESS = 512
#: Bytes on disk per byte of a policy: its shards and the assembled folder.
DISK_COPIES = 2


class PolicyFacts(NamedTuple):
    """What is known of a policy without having it.

    Attributes:
        config: fields of config.json; None when the policy has none of its own (an adapter).
        bytes_total: of all its files.
    """

    version: int
    bytes_total: int
    config: dict[str, Any] | None


def get_servers(mesh: Mesh, *, reads_only: bool = False) -> list[Address]:
    """Who has policies first: relays and, for participants, the trainer (it admits nobody else)."""
    roles = (Role.RELAY,) if reads_only else (Role.RELAY, Role.TRAINER)
    return [Address(contact.endpoint, contact.curve_public) for contact in mesh.contacts.servers(*roles)]


async def fetch_manifest(mesh: Mesh, servers: list[Address], ledger: Ledger, task: Task, version: int) -> Manifest:
    """A policy's manifest, verified against the ledger.

    Args:
        servers: who is asked.

    Raises:
        Fault: when nobody has it, or it is not what the ledger says.
    """
    record = task.policies[version]
    trainer = ledger.state.participants.get(task.spec.trainer)
    if trainer is None:
        raise Fault(f"trainer 0x{task.spec.trainer.hex()} is not registered yet: its key is unknown")
    domain = manifest_domain(ledger.chain_id, ledger.address, task.task if version else record.policy)
    try:
        manifest = mesh.store.manifest(record.manifest)
    except Fault:
        try:
            manifest = await mesh.peer.fetch_manifest(
                record.manifest,
                servers,
                trainer.network_key,
                domain,
                historic=version < len(task.policies) - 1,
                allowed_suffixes=POLICY_SUFFIXES,
            )
        except (Reject, Ignore) as error:
            raise Fault(f"manifest of policy {version} cannot be used: {error}") from None
    if manifest.root != record.policy:
        raise Fault(
            f"manifest of policy {version} describes {manifest.root.hex()[:16]}, the ledger lists {record.policy.hex()[:16]}"
        )
    return manifest


async def fetch_facts(mesh: Mesh, servers: list[Address], ledger: Ledger, task: Task, version: int) -> PolicyFacts:
    """Sizes and configuration of a policy: its manifest and one small file. Raises `Fault`."""
    manifest = await fetch_manifest(mesh, servers, ledger, task, version)
    entries = {entry.name: entry for entry in manifest.body.files}
    config = None
    if CONFIG in entries:
        config = parse_config(await _fetch_file(mesh, servers, entries[CONFIG]))
    return PolicyFacts(version, sum(entry.size for entry in manifest.body.files), config)


async def _fetch_file(mesh: Mesh, servers: list[Address], entry: FileEntry) -> bytes:
    """One small file by its shards; nothing is kept."""
    if entry.size > CONFIG_BYTES_MAX:
        raise Fault(f"{entry.name} has {entry.size} bytes, limit {CONFIG_BYTES_MAX}")
    parts = []
    for digest in entry.shards:
        have = mesh.store.has(digest)
        parts.append(
            mesh.store.get(digest) if have else await mesh.peer.get_blob(digest, servers, size_max=CONFIG_BYTES_MAX)
        )
    return b"".join(parts)


def parse_config(data: bytes) -> dict[str, Any]:
    """Fields of a config.json. Raises `Fault` when it is no JSON object."""
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise Fault(f"{CONFIG} is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise Fault(f"{CONFIG} is not a JSON object")
    return fields


def compute_need(config: dict[str, Any], spec: TaskSpec, dtype: str, rollouts: int) -> MemoryNeed:
    """Memory to generate `rollouts` of the task's longest completions together. Raises like `estimate_memory`."""
    length = spec.sampling.max_tokens + PROMPT_TOKENS_GUESS
    return estimate_memory(config, dtype=dtype, batch_tokens=rollouts * length)


def compute_disk_need(bytes_base: int, bytes_next: int) -> int:
    """Bytes that a task's policies take on disk once `POLICIES_KEPT` of them are kept besides the base."""
    return DISK_COPIES * (bytes_base + POLICIES_KEPT * bytes_next)


def require_fit(facts: PolicyFacts, spec: TaskSpec, compute: ComputeSettings, directory: Path) -> None:
    """Refuse a policy that this machine cannot hold.

    Raises:
        ConfigError: with what it needs and what there is.
    """
    if facts.config is not None and compute.device == "cpu":
        try:
            need, free = compute_need(facts.config, spec, compute.dtype, 1).total_bytes, read_free_bytes()
        except Fault as error:
            raise ConfigError(f"policy {facts.version} cannot be run: {error}") from None
        if free is not None and need > free:
            raise ConfigError(
                f"policy {facts.version} does not fit: in {compute.dtype} it needs {need / 2**30:.2f} GiB of memory, "
                f"{free / 2**30:.2f} GiB are free; free some, use a smaller compute.dtype that the task's profile takes, "
                "or serve another task"
            )
    missing, free_disk = DISK_COPIES * facts.bytes_total, shutil.disk_usage(directory).free
    if missing > free_disk:
        raise ConfigError(
            f"policy {facts.version} does not fit: it takes {missing / 2**30:.2f} GiB of disk, {free_disk / 2**30:.2f} GiB "
            f"are free at {directory}; free some, or choose another directory"
        )


def require_dtype(spec: TaskSpec, compute: ComputeSettings) -> None:
    """Refuse to serve a task in another type of numbers than its limits were measured for: honest work would be refused.

    Raises:
        ConfigError: with both types.
    """
    if compute.dtype != spec.profile.dtype:
        raise ConfigError(
            f"compute.dtype is {compute.dtype}, the task's profile {spec.profile.name} was measured for "
            f"{spec.profile.dtype}: set compute.dtype = {spec.profile.dtype!r}, or serve another task"
        )


class FittingPolicies:
    """A `PolicyStore` that fetches no policy which does not fit on this machine.

    Attributes:
        misfits: tasks whose policies do not fit, with the reason.
    """

    def __init__(
        self, inner: PolicyStore, mesh: Mesh, ledger: Ledger, compute: ComputeSettings, directory: Path
    ) -> None:
        self._inner, self._mesh, self._ledger = inner, mesh, ledger
        self._compute, self._directory = compute, directory
        self.misfits: dict[bytes, str] = {}
        self._fits: set[tuple[bytes, int]] = set()

    async def check(self, task_id: bytes, version: int) -> None:
        """Fetch a manifest and a configuration and compare. Raises `Fault` for both "unknown" and "does not fit"."""
        if (task_id, version) in self._fits:
            return
        task = self._ledger.state.tasks[task_id]
        facts = await fetch_facts(self._mesh, get_servers(self._mesh), self._ledger, task, version)
        try:
            require_fit(facts, task.spec, self._compute, self._directory)
        except ConfigError as error:
            self.misfits[task_id] = str(error)
            raise Fault(str(error)) from None
        self.misfits.pop(task_id, None)
        self._fits.add((task_id, version))

    async def fetch(self, task: bytes, version: int) -> Path:
        """See `PolicyStore.fetch`."""
        await self.check(task, version)
        return await self._inner.fetch(task, version)

    async def publish(self, task: bytes, version: int, parent: int, folder: Path) -> tuple[bytes, bytes]:
        """See `PolicyStore.publish`."""
        return await self._inner.publish(task, version, parent, folder)
