"""Gathering what `troth doctor --task` judges: from the ledger, the manifest and this machine; no policy is downloaded.

Everything that cannot be had is a text saying why, never an exception: a doctor that stops at the first trouble helps
nobody. What is fetched: a manifest, a config.json, and a bounded sample of shards to time the link. Neighbours:
troth.doctor_task judges, troth.doctor_speed times a synthetic model.
"""

from __future__ import annotations

import json
import secrets
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from contracts.client import EvmLedger
from inference.memory import read_free_bytes
from protocol.errors import ConfigError, Fault, TrothError
from protocol.ledger.state import LedgerState, Task
from protocol.task import TaskSpec
from shardcast.client import Address
from troth.connect import pick_task
from troth.fit import PolicyFacts, fetch_facts, fetch_manifest, get_servers
from troth.keystore import Keys
from troth.network import Mesh
from troth.operating import BlockClock
from troth.settings import RoleSettings

#: The link is timed on at most this much, for at most this long.
SAMPLE_BYTES_MAX = 4 << 20
SAMPLE_SECONDS_MAX = 3.0
#: Environments that run answers in the sandbox.
SANDBOXED = ("code",)


@dataclass
class Facts:
    """What was found. Texts named `*_error` are empty when the thing beside them is known.

    Attributes:
        task / state: None for a task that is only a file.
        base: version 0; `latest` the newest version, or None before there is one.
        bytes_per_s: measured from the servers of the task's policies, None when it could not be measured.
        account / tokens / wei: of the keystore in the settings; None when there is no keystore.
        tokens_per_s: speed of generation at `batch` rollouts, None when unknown; `speed_from` says how it is known.
    """

    spec: TaskSpec
    settings: RoleSettings
    task: Task | None = None
    state: LedgerState | None = None
    clock: BlockClock | None = None
    ledger_error: str = ""
    base: PolicyFacts | None = None
    latest: PolicyFacts | None = None
    policy_error: str = ""
    bytes_per_s: float | None = None
    account: bytes | None = None
    tokens: int = 0
    wei: int = 0
    free_memory: int | None = None
    free_disk: int = 0
    engine_error: str = ""
    environment_error: str = ""
    environment_files: tuple[str, ...] = ()
    sandbox_missing: str = ""
    sandbox_active: tuple[str, ...] = ()
    tokens_per_s: float | None = None
    speed_from: str = ""


def read_account(settings: RoleSettings) -> bytes | None:
    """The account of the keystore, which is public: no password is asked for."""
    try:
        return bytes.fromhex(json.loads(settings.keystore_path.read_text())["address"].removeprefix("0x"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def examine_machine(facts: Facts) -> None:
    """Memory, disk, engine, environment, sandbox."""
    import environments
    from troth.engines import preload_engine

    place = Path(facts.settings.directory)
    while not place.exists():
        place = place.parent
    facts.free_memory, facts.free_disk = read_free_bytes(), shutil.disk_usage(place).free
    try:
        preload_engine(facts.settings.compute)
    except (ConfigError, ImportError) as error:
        facts.engine_error = str(error)
    wanted = facts.spec.environment
    try:
        installed = environments.content_hash(wanted.entry, wanted.args)
        if installed != wanted.content_hash:
            facts.environment_error = (
                f"installed {installed.hex()[:16]}, the task names {wanted.content_hash.hex()[:16]}: install the version of "
                "troth the task was published with"
            )
        facts.environment_files = tuple(environments.needs_files(wanted))
    except ConfigError as error:
        facts.environment_error = str(error)
    if wanted.entry in SANDBOXED:
        from environments.sandbox import Sandbox

        try:
            layers = Sandbox().probe()
        except TrothError as error:
            facts.sandbox_missing = str(error)
        else:
            facts.sandbox_missing, facts.sandbox_active = layers.missing, layers.active


async def examine_ledger(facts: Facts, ledger: EvmLedger) -> None:
    """Clock, account, policies, link."""
    facts.clock = BlockClock(facts.settings.ledger.rpc)
    try:
        await facts.clock.look()
    except Fault as error:
        facts.ledger_error = str(error)
    facts.account = read_account(facts.settings)
    if facts.account is not None:
        try:
            facts.tokens = await ledger.token_balance(facts.account)
            facts.wei = await ledger.ether_balance(facts.account)
        except TrothError as error:
            facts.ledger_error = str(error)
    if facts.task is None:
        return
    keys = Keys(secrets.token_bytes(32))
    with tempfile.TemporaryDirectory(prefix="troth-doctor-") as folder:
        mesh = Mesh(ledger, keys, Path(folder), reads_only=True)
        try:
            await mesh.start()
            await examine_policies(facts, ledger, mesh)
        finally:
            await mesh.close()


async def examine_policies(facts: Facts, ledger: EvmLedger, mesh: Mesh) -> None:
    """Sizes and configuration of the base and of the newest policy, and the speed of the link to them."""
    task, servers = facts.task, get_servers(mesh, reads_only=True)
    assert task is not None
    try:
        facts.base = await fetch_facts(mesh, servers, ledger, task, 0)
        if len(task.policies) > 1:
            facts.latest = await fetch_facts(mesh, servers, ledger, task, len(task.policies) - 1)
        facts.bytes_per_s = await measure_link(mesh, servers, ledger, task)
    except (Fault, ConfigError) as error:
        facts.policy_error = str(error)


async def measure_link(mesh: Mesh, servers: list[Address], ledger: EvmLedger, task: Task) -> float | None:
    """Bytes per second of a bounded sample of the base policy's shards; None when nothing came. Nothing is kept."""
    manifest = await fetch_manifest(mesh, servers, ledger, task, 0)
    started, received = time.monotonic(), 0
    for digest, size in manifest.shards.items():
        late = time.monotonic() - started > SAMPLE_SECONDS_MAX
        if late or (received and received + size > SAMPLE_BYTES_MAX):
            break
        received += len(await mesh.peer.get_blob(digest, servers, size_max=size))
    return received / max(time.monotonic() - started, 1e-6) if received else None


def find_task(ledger: EvmLedger, wanted: str) -> Task:
    """The task a name means. Raises `ConfigError`."""
    picked = pick_task(ledger, wanted)
    if picked is None:
        raise ConfigError("no open task on this ledger: name a task file instead, or wait for one")
    return ledger.state.tasks[picked]
