"""The mesh as the roles see it: `LedgerBlobs` and `MeshPolicies` over one shardcast peer, addressed by the ledger.

Peers, relays and keys all come from the directory of signed records on the ledger. Nothing that arrives here is used
before it was checked against a hash that the ledger lists (policies) or by the caller (blobs). Where a task's policies are
adapters, the base policy is fetched once, before the first of them, and a manifest that does not have exactly the files and
sizes of such an adapter is refused before anything it names is asked for (`troth.forms`).
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from models.adapter import BASE, get_base, is_adapter, link_base, read_adapter_config
from protocol.errors import ConfigError, Fault, Ignore, Reject, TrothError
from protocol.identity import NetworkKey
from protocol.ledger.events import Role
from protocol.ledger.state import Policy
from protocol.ports import Ledger
from shardcast.client import Address
from shardcast.fetch import LANES, RATE_BYTES_PER_S_MIN
from shardcast.folder import build_manifest, hash_folder
from shardcast.manifest import Manifest, manifest_domain
from shardcast.peer import Peer
from shardcast.server import Accept
from shardcast.store import ShardStore
from troth.directory import Contact, Directory
from troth.forms import require_form, validate_content
from troth.keystore import Keys

log = logging.getLogger("troth.network")

#: What a policy folder may hold: weights that cannot carry code, plain descriptions, and data of environments.
POLICY_SUFFIXES = (".safetensors", ".json", ".jsonl")
#: Newest policies kept on disk besides version 0.
POLICIES_KEPT = 12
#: A fetch ends when nothing has arrived for this long, besides the time that the slowest peer we bear needs for what it is
#: asked at once. It has no limit as a whole: a large base policy may take an hour, as long as it comes.
SILENCE_S_MAX = 30.0
#: Links in a policy's folder that are our own: neither published, nor fetched, nor compared.
LINKS = (BASE,)
PUT_ATTEMPTS = 6
PUT_PAUSE_S = 0.5

Events = Callable[[str, dict[str, object]], None]


def build_base_manifest(folder: Path, keys: Keys, chain_id: int, ledger: bytes) -> Manifest:
    """Signed manifest of a base policy. There is no task yet, so its own content hash stands in the task's place."""
    return _base_manifest(folder, keys.network, chain_id, ledger)


def _base_manifest(folder: Path, key: NetworkKey, chain_id: int, ledger: bytes) -> Manifest:
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder: make a base policy with `troth policy init {folder}`")
    nowhere = manifest_domain(chain_id, ledger, bytes(32))
    root = build_manifest(folder, key, nowhere, version=0, allowed_suffixes=POLICY_SUFFIXES).root
    domain = manifest_domain(chain_id, ledger, root)
    return build_manifest(folder, key, domain, version=0, allowed_suffixes=POLICY_SUFFIXES)


def get_silence_s_max(manifest: Manifest) -> float:
    """How long a fetch of a policy may stand still, in seconds: the larger its shards, the longer."""
    return SILENCE_S_MAX + LANES * max(manifest.shards.values(), default=0) / RATE_BYTES_PER_S_MIN


def verify_policy(folder: Path, expected: bytes) -> None:
    """Hash a policy's folder again, and that of the base under an adapter: what is on disk is what the ledger lists.

    Args:
        expected: the policy's content hash on the ledger.

    Raises:
        Fault: a file changed, is missing or was added.
    """
    wanted = [(folder, expected)]
    if is_adapter(folder):
        wanted.append((get_base(folder), read_adapter_config(folder)[1]))
    for path, policy in wanted:
        try:
            observed = hash_folder(path, links=LINKS)
        except ConfigError as error:
            raise Fault(f"{path} is not a policy's folder any more: {error}") from None
        if observed != policy:
            raise Fault(
                f"{path} hashes to {observed.hex()[:16]}, the ledger lists {policy.hex()[:16]}: a file changed on disk; remove "
                "the folder and it is made again"
            )


def _addresses(contacts: Iterable[Contact]) -> list[Address]:
    return [Address(contact.endpoint, contact.curve_public) for contact in contacts]


class LedgerBlobs:
    """`BlobStore` over the relays on the ledger."""

    def __init__(self, peer: Peer, directory: Directory) -> None:
        self._peer = peer
        self._directory = directory

    async def put(self, key: bytes, data: bytes) -> None:
        """Store at every relay; enough that one takes it. See `BlobStore.put`.

        A relay that has not seen our ledger record yet ignores the blob, so it is offered again a few times.
        """
        relays = _addresses(self._directory.servers(Role.RELAY))
        if not relays:
            raise Fault("no relay is registered on the ledger: blobs have nowhere to go")
        said: list[TrothError] = []
        for attempt in range(PUT_ATTEMPTS):
            said = []
            for relay in relays:
                try:
                    await self._peer.put(relay, key, data)
                    return
                except (Ignore, Fault) as error:
                    said.append(error)
                except Reject as error:
                    log.info("relay %s refused a blob: %s", relay.endpoint, error)
                    raise
            if attempt + 1 < PUT_ATTEMPTS:
                await asyncio.sleep(PUT_PAUSE_S)
        raise Fault(f"no relay took the blob: {'; '.join(str(error) for error in said)}")

    async def get(self, key: bytes) -> bytes:
        """See `BlobStore.get`; the caller checks the bytes."""
        relays = _addresses(self._directory.servers(Role.RELAY))
        return await self._peer.get(key, relays, verify=lambda data: None)


class MeshPolicies:
    """`PolicyStore` over the mesh.

    Args:
        ledger: says which manifest belongs to which version.
        root: folders of assembled policies.
        network_key: signs what we publish; None for those who only read.
    """

    def __init__(
        self,
        peer: Peer,
        store: ShardStore,
        directory: Directory,
        ledger: Ledger,
        root: Path,
        network_key: NetworkKey | None,
        events: Events,
    ) -> None:
        self._peer, self._store, self._directory = peer, store, directory
        self._ledger, self._root, self._key, self._events = ledger, root, network_key, events
        self._locks: dict[tuple[bytes, int], asyncio.Lock] = {}
        self._ready: dict[tuple[bytes, int], Path] = {}
        root.mkdir(parents=True, exist_ok=True)

    async def fetch(self, task: bytes, version: int) -> Path:
        """See `PolicyStore.fetch`."""
        key = (task, version)
        async with self._locks.setdefault(key, asyncio.Lock()):
            if key not in self._ready or not self._ready[key].is_dir():
                try:
                    self._ready[key] = await self._fetch(task, version)
                except (Reject, Ignore) as error:
                    raise Fault(f"policy {version} cannot be had: {error}") from None
            return self._ready[key]

    async def _fetch(self, task_id: bytes, version: int) -> Path:
        task = self._ledger.state.tasks[task_id]
        record: Policy = task.policies[version]
        trainer = self._ledger.state.participants.get(task.spec.trainer)
        if trainer is None:
            raise Fault(f"trainer 0x{task.spec.trainer.hex()} is not registered yet: its key is unknown")
        chain_id, address = self._ledger.chain_id, self._ledger.address
        domain = manifest_domain(chain_id, address, task_id if version else record.policy)
        # The relays and the trainer have a new policy first, and are the ones who should be up.
        roles = (Role.RELAY,) if self._key is None else (Role.RELAY, Role.TRAINER)
        first = _addresses(self._directory.servers(*roles))
        others = [] if self._key is None else _addresses(self._directory.servers(Role.VERIFIER, Role.NODE))
        historic = version < len(task.policies) - 1
        try:
            manifest = self._store.manifest(record.manifest)
        except Fault:
            manifest = await self._peer.fetch_manifest(
                record.manifest,
                first,
                trainer.network_key,
                domain,
                historic=historic,
                allowed_suffixes=POLICY_SUFFIXES,
            )
        if manifest.root != record.policy or (version and manifest.version != version):
            raise Fault(
                f"manifest of policy {version} describes {manifest.root.hex()[:16]} (version {manifest.version}), the "
                f"ledger lists {record.policy.hex()[:16]}: the trainer recorded something it did not publish"
            )
        base = await self.fetch(task_id, 0) if version and task.spec.adapter.rank else None
        require_form(task.spec, version, {entry.name: entry.size for entry in manifest.body.files}, base)
        if self._store.missing(manifest):
            silence_s_max = get_silence_s_max(manifest)
            await self._peer.fetch(manifest, first + others, timeout_s=silence_s_max, historic=historic)
        target = self._root / f"{task_id.hex()[:12]}-{version:06d}-{manifest.root.hex()[:12]}"
        folder = await asyncio.to_thread(self._assemble, manifest, target)
        if base is not None:
            await asyncio.to_thread(link_base, folder, base)
            await asyncio.to_thread(validate_content, task.spec, folder)
        self._events("policy", {"version": version, "policy": manifest.root})
        await self._collect(task_id, version)
        return folder

    def _assemble(self, manifest: Manifest, target: Path) -> Path:
        """The policy's folder; one that is there but is not what it should be is made again from verified shards."""
        try:
            return self._store.assemble(manifest, target, links=LINKS)
        except Fault as error:
            if target.is_symlink() or not target.is_dir():
                raise
            log.warning("%s", error)
            shutil.rmtree(target, ignore_errors=True)
        return self._store.assemble(manifest, target, links=LINKS)

    async def publish(self, task: bytes, version: int, parent: int, folder: Path) -> tuple[bytes, bytes]:
        """See `PolicyStore.publish`. Publishing the same folder again gives the same hashes."""
        if self._key is None:
            raise ConfigError("this participant only reads: it has no key to sign a policy with")
        domain = manifest_domain(self._ledger.chain_id, self._ledger.address, task)
        manifest = build_manifest(
            folder,
            self._key,
            domain,
            version=version,
            parent=parent,
            allowed_suffixes=POLICY_SUFFIXES,
            links=LINKS,
        )
        spec = self._ledger.state.tasks[task].spec
        base = await self.fetch(task, 0) if spec.adapter.rank else None
        require_form(spec, version, {entry.name: entry.size for entry in manifest.body.files}, base)
        await asyncio.to_thread(self._adopt, manifest, folder, task, version)
        return manifest.root, manifest.hash

    def _adopt(self, manifest: Manifest, folder: Path, domain_task: bytes, version: int) -> None:
        domain = manifest_domain(self._ledger.chain_id, self._ledger.address, domain_task)
        historic = version < self._store.highest_version(domain_task, manifest.key)
        self._store.admit_manifest(
            manifest.data,
            manifest.key,
            domain,
            expected=manifest.hash,
            historic=historic,
            allowed_suffixes=POLICY_SUFFIXES,
        )
        self._store.add_folder(manifest, folder, links=LINKS)

    def publish_base(self, folder: Path) -> tuple[bytes, bytes]:
        """Serve a base policy; returns its content hash and manifest hash."""
        if self._key is None:
            raise ConfigError("this participant only reads: it has no key to sign a policy with")
        manifest = _base_manifest(folder, self._key, self._ledger.chain_id, self._ledger.address)
        self._adopt(manifest, folder, manifest.root, 0)
        return manifest.root, manifest.hash

    async def _collect(self, task: bytes, version: int) -> None:
        """Remove assembled folders and shards of old versions. Version 0, which adapters need, the newest, and what is near
        the version just asked for stay."""
        newest = len(self._ledger.state.tasks[task].policies) - 1
        kept = {0}.union(*(range(near - POLICIES_KEPT, near + POLICIES_KEPT) for near in (version, newest)))
        for key in [k for k in self._ready if k[0] == task and k[1] not in kept]:
            shutil.rmtree(self._ready.pop(key), ignore_errors=True)
            self._locks.pop(key, None)
        if version % POLICIES_KEPT == 0 and version:
            keep = {
                digest
                for manifest in self._store.manifests()
                if manifest.task != task or manifest.version in kept
                for digest in manifest.shards
            }
            await asyncio.to_thread(self._store.collect, keep)


class Mesh:
    """One participant's place in the mesh: store, peer, blobs, policies.

    Args:
        directory: working directory; the store and the policies live in it.
        bind: endpoint to serve at, empty to only dial out.
        accept: decides about letters (relays only).
        open_to_readers: admit keys that are not on the ledger; they can read, never write.
        reads_only: we are not on the ledger ourselves: ask relays only, publish nothing.
    """

    def __init__(
        self,
        ledger: Ledger,
        keys: Keys,
        directory: Path,
        *,
        bind: str = "",
        accept: Accept | None = None,
        open_to_readers: bool = False,
        reads_only: bool = False,
        events: Events = lambda kind, fields: None,
    ) -> None:
        self.contacts = Directory(ledger)
        self.store = ShardStore(directory / "store")
        self.peer = Peer(
            self.store,
            keys.curve_secret,
            bind=bind or None,
            admit=lambda key: open_to_readers or bool(self.contacts.find_curve(key)),
            accept=accept,
            on_event=events,
        )
        self.blobs = LedgerBlobs(self.peer, self.contacts)
        self.policies = MeshPolicies(
            self.peer,
            self.store,
            self.contacts,
            ledger,
            directory / "policies",
            None if reads_only else keys.network,
            events,
        )

    async def start(self) -> str:
        """Open sockets; returns the endpoint others reach us at, empty when we only dial out."""
        await self.peer.start()
        try:
            return self.peer.address.endpoint
        except ConfigError:
            return ""

    async def close(self) -> None:
        """Close sockets and let go of the store."""
        await self.peer.stop()
        self.store.close()

    def has_letter(self, key: bytes) -> bool:
        """Whether a blob key is on our own shelf."""
        try:
            self.store.mail.entry(key)
        except Fault:
            return False
        return True


class Reader:
    """Public data without being a participant: a throw-away key, blobs and policies from whoever serves them.

    Use as an async context manager, or `start` and `close`.
    """

    def __init__(self, ledger: Ledger, directory: Path) -> None:
        self._mesh = Mesh(ledger, Keys(secrets.token_bytes(32)), directory, reads_only=True)
        self.blobs = self._mesh.blobs
        self.policies = self._mesh.policies

    async def start(self) -> None:
        """Open sockets."""
        await self._mesh.start()

    async def close(self) -> None:
        """Close sockets."""
        await self._mesh.close()

    async def __aenter__(self) -> Reader:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()
