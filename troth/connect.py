"""Connecting a participant to the ledger: deployment, keys, registration, and calls that a person confirms.

Used by every command that touches the ledger. Money is never moved without showing chain, amount and address, unless
`--yes` was given.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from contracts.client import EvmLedger
from contracts.deploy import Deployment
from contracts.jsonrpc import HttpRpc, RpcError, Unreachable
from inference.twin import find_foreign_record, name_record
from protocol.codec import PROTOCOL_VERSION
from protocol.errors import ConfigError, Fault, Reason, Reject, TrothError
from protocol.ledger.calls import Call, Register, SetRecord
from protocol.ledger.events import Role
from protocol.messages import NodeRecord, make_domain, open_record, seal
from protocol.ports import IntentStatus
from protocol.task import Terms, compute_terms
from troth.keystore import Keys
from troth.settings import LedgerSettings, RoleSettings

#: How long a command waits for its transaction.
TRANSACTION_TIMEOUT_S = 120.0


async def find_deployment(settings: LedgerSettings) -> Deployment:
    """The contracts' addresses: from the named file, else from a devnet that says its own.

    Raises:
        ConfigError: when neither says, or the chain id is not the one the settings expect.
        Fault: when the node is away.
    """
    if settings.deployment:
        deployment = Deployment.load(Path(settings.deployment))
    else:
        try:
            async with HttpRpc(settings.rpc) as rpc:
                shown = await rpc.call("devnet_deployment")
        except RpcError:
            raise ConfigError(
                f"{settings.rpc} is not a Troth devnet: name the contracts with ledger.deployment = "
                '"path/to/deployment.json"'
            ) from None
        except Unreachable as error:
            raise Fault(f"no ledger node at {settings.rpc}: {error}; start one with `troth devnet`") from None
        deployment = Deployment.from_json(shown, settings.rpc)
    if settings.chain_id is not None and settings.chain_id != deployment.chain_id:
        raise ConfigError(f"ledger.chain_id is {settings.chain_id}, the deployment is on chain {deployment.chain_id}")
    return deployment


async def open_ledger(settings: RoleSettings, keys: Keys) -> EvmLedger:
    """A connected ledger whose replica is at the chain's head. Raises `ConfigError`, or `Fault` when the node is away."""
    directory = Path(settings.directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"directory {directory} cannot be used: {error.strerror}") from None
    deployment = await find_deployment(settings.ledger)
    ledger = EvmLedger(
        settings.ledger.rpc,
        deployment,
        keys.ledger_secret,
        directory / "outbox.sqlite",
        finality_depth=settings.ledger.finality_blocks,
    )
    try:
        await ledger.poll()
        if not ledger.reachable:
            raise Fault(f"no ledger node at {settings.ledger.rpc}: check ledger.rpc, or start one with `troth devnet`")
        await verify_deployment(ledger, settings.ledger.rpc)
    except TrothError:
        await ledger.close()
        raise
    return ledger


async def verify_deployment(ledger: EvmLedger, rpc_url: str) -> None:
    """Check that the contracts name each other as the deployment does: money must not go to an address beside them.

    Raises:
        ConfigError: naming the address that differs, or a first block that is still to come.
        Fault: when the node is away.
    """
    names = ("token", "beacons", "registry", "court")
    for name, (shown,) in zip(names, await asyncio.gather(*(ledger.view("book", name) for name in names)), strict=True):
        own = getattr(ledger.deployment, name)
        if shown != own:
            raise ConfigError(
                f"the deployment says that the {name} is 0x{own.hex()}, the task contract says 0x{shown.hex()}: "
                "deployment.json is damaged or mixed from two, get the right one"
            )
    if ledger.deployment.block > ledger.state.block_number:
        # The replica starts with the deployment's block once that is final: ask how far the chain itself is.
        try:
            async with HttpRpc(rpc_url) as rpc:
                head = int(await rpc.call("eth_blockNumber"), 16)
        except (RpcError, Unreachable) as error:
            raise Fault(f"no ledger node at {rpc_url}: {error}") from None
        if ledger.deployment.block > head:
            raise ConfigError(
                f"the deployment begins at block {ledger.deployment.block}, the chain is at block {head}: earlier events "
                "would be missed, correct block in deployment.json"
            )


def confirm(ledger: EvmLedger, what: str, amount: int, to: str, *, yes: bool) -> None:
    """Show what will be sent and ask.

    Raises:
        ConfigError: when the answer is no, or nobody can be asked.
    """
    print(f"{what}\n  chain {ledger.chain_id}  amount {amount}  to {to}", file=sys.stderr)
    if yes:
        return
    if not sys.stdin.isatty():
        raise ConfigError("nobody to ask: repeat with --yes to send it")
    if input("send? [y/N] ").strip().lower() not in ("y", "yes"):
        raise ConfigError("not sent")


async def send(ledger: EvmLedger, intent: str, call: Call) -> IntentStatus:
    """Submit a call and wait until it is final.

    Raises:
        Reject: when the contract refuses it, with its reason.
        Fault: when it is not mined in time (it stays in the outbox and is not lost).
    """
    await ledger.submit(intent, call)
    status = await ledger.wait(intent, TRANSACTION_TIMEOUT_S)
    if status.status == "reverted":
        raise Reject(Reason.MALFORMED, f"the ledger refused {type(call).__name__}: {status.error}")
    return status


def make_record(ledger: EvmLedger, keys: Keys, endpoint: str, sequence: int) -> bytes:
    """This participant's signed node record."""
    record = NodeRecord(PROTOCOL_VERSION, keys.account, keys.curve_public, endpoint, sequence)
    return seal(keys.network, make_domain(ledger.chain_id, ledger.address, bytes(32), NodeRecord), record)


async def ensure_registered(ledger: EvmLedger, keys: Keys, role: Role, *, stake: int, endpoint: str, yes: bool) -> None:
    """Register with a stake, or publish a new record when the endpoint changed.

    Raises:
        ConfigError: when the account holds another role, or owns too little to stake.
    """
    known = ledger.state.participants.get(ledger.account)
    if known is None:
        balance = await ledger.token_balance()
        if balance < stake:
            raise ConfigError(
                f"account 0x{ledger.account.hex()} holds {balance} token units, the stake is {stake}: fund it first"
            )
        confirm(
            ledger,
            f"register 0x{ledger.account.hex()} as {role.name.lower()} and bond its stake",
            stake,
            f"registry 0x{ledger.deployment.registry.hex()}",
            yes=yes,
        )
        record = make_record(ledger, keys, endpoint, 1)
        await send(ledger, "register", Register(int(role), keys.network.public, record, stake))
        return
    if known.role != role:
        raise ConfigError(
            f"account 0x{ledger.account.hex()} is registered as {known.role.name.lower()}, not {role.name.lower()}: "
            "one account has one role, make other keys with `troth keys new`"
        )
    if known.network_key != keys.network.public:
        raise ConfigError("the registered network key is another one: this keystore does not belong to the account")
    if role is Role.NODE and find_foreign_record(ledger) is not None:
        return  # another machine may be at work under it: the node watches first, and claims the account when it signs
    sequence = _current_sequence(ledger, keys, known.record, endpoint)
    if sequence is not None:
        await send(ledger, name_record(sequence), SetRecord(make_record(ledger, keys, endpoint, sequence)))


def _current_sequence(ledger: EvmLedger, keys: Keys, record: bytes, endpoint: str) -> int | None:
    """Sequence of the next record, None when the registered one already says what is true."""
    try:
        old = open_record(
            record,
            account=ledger.account,
            network_key=keys.network.public,
            chain_id=ledger.chain_id,
            ledger=ledger.address,
        )
    except Reject:
        return 1
    return None if (old.endpoint, old.curve_public) == (endpoint, keys.curve_public) else old.sequence + 1


async def verify_terms(ledger: EvmLedger, task: bytes) -> None:
    """Check that the contract enforces what a task's spec says: it cannot read the spec itself.

    Raises:
        ConfigError: naming the first term that differs; such a task is served by nobody.
        Fault: when the node is away.
    """
    expected = compute_terms(ledger.state.tasks[task].spec)
    [enforced] = await ledger.view("book", "termsOf", task)
    for name, own, theirs in zip(Terms._fields, expected, enforced, strict=True):
        if isinstance(theirs, str):
            theirs = bytes.fromhex(theirs.removeprefix("0x"))
        if own != theirs:
            shown = [value.hex() if isinstance(value, bytes) else value for value in (theirs, own)]
            raise ConfigError(
                f"task {task.hex()[:12]} says one thing and enforces another: {name} is {shown[0]} in the contract, "
                f"{shown[1]} by its spec; do not serve it"
            )


def pick_task(ledger: EvmLedger, wanted: str) -> bytes | None:
    """Task id from a prefix, or the newest open task when `wanted` is empty; None when there is none yet.

    Raises:
        ConfigError: when the prefix names no task, several, or one whose terms nobody serves.
    """
    tasks = ledger.state.tasks
    if not wanted:
        running = [t for t in tasks.values() if not t.closed]
        return max(running, key=lambda t: t.start_block).task if running else None
    text = wanted.removeprefix("0x").lower()
    for task, why in ledger.state.invalid_tasks.items():
        if task.hex().startswith(text):
            raise ConfigError(f"task {wanted} breaks a rule of the protocol, nobody serves it: {why}")
    found = [task for task in tasks if task.hex().startswith(text)]
    if len(found) != 1:
        known = ", ".join(task.hex()[:12] for task in tasks) or "none"
        raise ConfigError(f"task {wanted!r} names {len(found)} tasks on this ledger, expected one; known: {known}")
    return found[0]
