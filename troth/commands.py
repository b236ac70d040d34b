"""What the one-shot commands of the CLI do: each opens the ledger, does one thing, returns plain data to print."""

from __future__ import annotations

import asyncio
import json
import secrets
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from contracts.client import EvmLedger
from contracts.jsonrpc import HttpRpc, RpcError, Unreachable
from protocol.adapter import WHOLE_POLICIES, Adapter, validate_adapter
from protocol.codec import encode, tagged_hash
from protocol.errors import ConfigError, Fault
from protocol.ledger.calls import AddStake, Cancel, Claim, ClaimMany, Close, Publish, StartUnbond, WithdrawStake
from protocol.ledger.state import Task
from protocol.settlement import compute_claim
from protocol.task import TaskSpec
from troth.connect import confirm, open_ledger, pick_task, send
from troth.keystore import Keys, load, read_password
from troth.settings import RoleSettings
from troth.views import describe_nodes, describe_spec, describe_task, get_final_earnings, hex_account

#: Accounts paid by one batched claim.
CLAIM_BATCH = 50


@asynccontextmanager
async def reading(settings: RoleSettings) -> AsyncIterator[EvmLedger]:
    """The ledger for somebody who only reads: no keystore, nothing written, a running role is not disturbed."""
    with tempfile.TemporaryDirectory(prefix="troth-read-") as folder:
        keys = Keys(secrets.token_bytes(32))
        ledger = await open_ledger(settings.model_copy(update={"directory": folder}), keys)
        try:
            yield ledger
        finally:
            await ledger.close()


@asynccontextmanager
async def session(settings: RoleSettings) -> AsyncIterator[tuple[EvmLedger, Keys]]:
    """The account's keys and its connected ledger."""
    keys = load(settings.keystore_path, read_password())
    ledger = await open_ledger(settings, keys)
    try:
        yield ledger, keys
    finally:
        await ledger.close()


def _task(ledger: EvmLedger, wanted: str) -> Task:
    picked = pick_task(ledger, wanted)
    if picked is None:
        raise ConfigError("no open task on this ledger: publish one with `troth task publish task.toml`")
    return ledger.state.tasks[picked]


def _address_of(text: str) -> str:
    """An address, given itself or the path of a keystore."""
    path = Path(text)
    if not path.exists():
        return hex_account(_account(text))
    try:
        return hex_account(bytes.fromhex(json.loads(path.read_text())["address"]))
    except (OSError, ValueError, KeyError, TypeError):
        raise ConfigError(f"{path} is neither an address nor a keystore") from None


async def fund(rpc_url: str, accounts: list[str], tokens: int, ether: float) -> None:
    """Devnet faucet: ether for gas and tokens for stakes."""
    if tokens < 0 or ether < 0:
        raise ConfigError(f"cannot give {tokens} token units and {ether} ether: expected nothing below 0")
    addresses = [_address_of(text) for text in accounts]
    try:
        async with HttpRpc(rpc_url) as rpc:
            for address in addresses:
                if ether:
                    await rpc.call("devnet_fund", address, hex(int(ether * 10**18)))
                if tokens:
                    await rpc.call("devnet_mint", address, hex(tokens))
    except RpcError as error:
        raise ConfigError(f"{rpc_url} did not fund {accounts[0]}: {error}; only a devnet has a faucet") from None
    except Unreachable as error:
        raise Fault(f"no ledger node at {rpc_url}: {error}") from None


def policy_init(folder: Path, entry: str, args: str, seed: int) -> dict[str, Any]:
    """Make a base policy; returns what was measured."""
    import environments
    from protocol.task import Environment
    from trainer.warmup import make_base_policy

    if folder.exists():
        raise ConfigError(f"{folder} exists: choose another folder or remove it")
    environment = environments.load(Environment(entry, args, environments.content_hash(entry, args)))
    return make_base_policy(folder, environment, seed=seed)


def policy_evaluate(
    folders: list[Path], entry: str, args: str, *, max_tokens: int, stop_token: int, samples: int
) -> list[dict[str, Any]]:
    """Mean reward and its standard error of each folder on the environment's held-out prompts."""
    import environments
    from models.adapter import BASE
    from protocol.task import Environment
    from trainer.evaluate import evaluate_policy

    spec = Environment(entry, args, environments.content_hash(entry, args))
    environment = environments.load(spec, [*folders, *(folder / BASE for folder in folders)])
    if not hasattr(environment, "held_out"):
        raise ConfigError(f"environment {entry} keeps no prompts back: nothing to evaluate on")
    held_out = environment.held_out()
    rows = []
    for folder in folders:
        found = evaluate_policy(
            folder,
            held_out,
            range(held_out.num_prompts),
            num_samples=samples,
            temperature=1.0,
            max_tokens=max_tokens,
            stop_tokens=[stop_token],
        )
        rows.append(
            {
                "folder": str(folder),
                "reward": found.reward_mean,
                "error": found.reward_error,
                "prompts": found.num_prompts,
                "samples": found.num_samples,
            }
        )
    return rows


async def policy_describe(settings: RoleSettings, folder: Path, adapter: Adapter = WHOLE_POLICIES) -> dict[str, Any]:
    """Content hash and signed base manifest hash of a policy folder, with the trainer's key; and an adapter on it.

    Raises:
        ConfigError: when the adapter is none, or too large to be worth being one.
        Fault: when the policy has no such modules.
    """
    from troth.forms import measure_adapter, require_small
    from troth.network import build_base_manifest

    validate_adapter(adapter)
    keys = load(settings.keystore_path, read_password())
    async with reading(settings) as ledger:
        manifest = build_base_manifest(folder, keys, ledger.chain_id, ledger.address)
    shown: dict[str, Any] = {
        "base_policy": manifest.root.hex(),
        "base_manifest": manifest.hash.hex(),
        "trainer": hex_account(keys.account),
    }
    if adapter.rank:
        size = measure_adapter(adapter, folder)
        require_small(size)
        terms = {"rank": adapter.rank, "alpha": adapter.alpha, "modules": list(adapter.modules)}
        shown |= {"adapter": terms, "adapter_bytes": size.adapter_bytes, "base_bytes": size.base_bytes}
    return shown


def policy_merge(folder: Path, target: Path, base: Path | None, dtype: str) -> dict[str, Any]:
    """Write an adapter's policy as whole weights."""
    from trainer.export import merge_policy

    return merge_policy(folder, target, base=base, dtype=dtype)


def check_adapter(spec: TaskSpec, base: Path | None) -> None:
    """What only the base policy's folder can tell about a task with an adapter, before its escrow is paid in."""
    from troth.forms import require_fitting
    from troth.network import verify_policy

    if not spec.adapter.rank:
        return
    if base is None:
        raise ConfigError(
            "the task's policies are adapters: give --base FOLDER, so that they can be checked against it"
        )
    try:
        verify_policy(base, spec.base_policy)
    except Fault as error:
        raise ConfigError(f"base_policy and --base do not go together: {error}") from None
    require_fitting(spec, base)


async def task_publish(
    settings: RoleSettings, file: Path, *, yes: bool, base: Path | None = None, check: bool = True
) -> dict[str, Any]:
    """Publish a task file.

    A task whose policies are adapters is checked against the folder of its base policy; its environment is looked at in
    processes of its own (troth.environment_check) unless `check` is off.
    """
    from environments import content_hash
    from troth.environment_check import require_sound
    from troth.task_file import load_task_file

    async with session(settings) as (ledger, keys):
        spec, deposit = load_task_file(file, token=ledger.deployment.token, content_hash=content_hash)
        check_adapter(spec, base)
        balance = await ledger.token_balance()
        if balance < deposit:
            raise ConfigError(f"account {hex_account(keys.account)} holds {balance} token units, deposit is {deposit}")
        if check:
            own = [Path(folder) for folder in (settings.trainer.base, *settings.environment_folders) if folder]
            folders = [base, *own] if base else own
            await asyncio.to_thread(require_sound, spec.environment, folders, max_tokens=spec.sampling.max_tokens)
        confirm(ledger, f"publish task {spec.name}", deposit, f"escrow {hex_account(ledger.address)}", yes=yes)
        before = set(ledger.state.tasks)
        data = encode(spec)
        await send(
            ledger, f"publish/{tagged_hash('publish', data, encode_count(before)).hex()}", Publish(data, deposit)
        )
        mine = [
            task for task in ledger.state.tasks.values() if task.initiator == keys.account and task.task not in before
        ]
        if not mine:
            raise Fault("the task was published, but this client does not see it: check `troth task list`")
        return {
            "task": mine[0].task.hex(),
            "start_block": mine[0].start_block,
            "deposit": deposit,
            **describe_spec(spec),
        }


def encode_count(tasks: set[bytes]) -> bytes:
    """Tasks known before a publication, so that publishing the same file again is a new intent, but a retry is not."""
    return len(tasks).to_bytes(8, "big")


async def task_list(settings: RoleSettings) -> list[dict[str, Any]]:
    """All tasks, newest first."""
    async with reading(settings) as ledger:
        tasks = sorted(ledger.state.tasks.values(), key=lambda task: -task.start_block)
        return [describe_task(ledger.state, task) for task in tasks]


async def escrow_of(ledger: EvmLedger, task: bytes) -> dict[str, Any]:
    """The contract's own accounting of a task."""
    names = ("deposit", "paid", "refunded", "burned", "remaining")
    amounts = dict(zip(names, await ledger.view("book", "escrowOf", task), strict=True))
    out = amounts["paid"] + amounts["refunded"] + amounts["burned"] + amounts["remaining"]
    return {**amounts, "conserved": amounts["deposit"] == out}


async def task_show(settings: RoleSettings, wanted: str) -> dict[str, Any]:
    """One task's terms, state and escrow."""
    async with reading(settings) as ledger:
        task = _task(ledger, wanted)
        return {
            **describe_task(ledger.state, task),
            "spec": describe_spec(task.spec),
            "escrow": await escrow_of(ledger, task.task),
        }


async def task_cancel(settings: RoleSettings, wanted: str, *, yes: bool) -> str:
    """Cancel from the next epoch on."""
    async with session(settings) as (ledger, _):
        task = _task(ledger, wanted)
        if task.initiator != ledger.account:
            raise ConfigError(f"only the initiator {hex_account(task.initiator)} can cancel this task")
        confirm(ledger, f"cancel task {task.task.hex()[:12]}", 0, hex_account(ledger.address), yes=yes)
        await send(ledger, f"cancel/{task.task.hex()}", Cancel(task.task))
        return f"cancelled: no round opens from round {ledger.state.tasks[task.task].cancelled_end} on"


async def task_close(settings: RoleSettings, wanted: str, *, yes: bool) -> dict[str, Any]:
    """Refund what is left."""
    async with session(settings) as (ledger, _):
        task = _task(ledger, wanted)
        confirm(ledger, f"close task {task.task.hex()[:12]}", 0, hex_account(ledger.address), yes=yes)
        await send(ledger, f"close/{task.task.hex()}/{ledger.state.block_number}", Close(task.task))
        closed = ledger.state.tasks[task.task]
        return {
            "task": closed.task.hex(),
            "initiator": hex_account(closed.initiator),
            "refunded": closed.refunded,
            "burned": closed.burned_at_close,
        }


async def stake(settings: RoleSettings, action: str, amount: int, *, yes: bool) -> dict[str, Any]:
    """Show, add, unbond or withdraw stake."""
    if amount < 0 or (amount == 0 and action in ("add", "unbond")):
        raise ConfigError(f"--amount is {amount}, expected token units above 0")
    async with session(settings) as (ledger, keys):
        registry = hex_account(ledger.deployment.registry)
        name = f"stake/{action}/{ledger.state.block_number}"
        if action == "add":
            confirm(ledger, "bond more stake", amount, f"registry {registry}", yes=yes)
            await send(ledger, name, AddStake(amount))
        elif action == "unbond":
            confirm(ledger, "start unbonding stake", amount, f"account {hex_account(keys.account)}", yes=yes)
            await send(ledger, name, StartUnbond(amount))
        elif action == "withdraw":
            confirm(ledger, "withdraw unbonded stake", 0, f"account {hex_account(keys.account)}", yes=yes)
            await send(ledger, name, WithdrawStake())
        elif action != "show":
            raise ConfigError(f"stake action is {action!r}, expected show, add, unbond or withdraw")
        participant = ledger.state.participants.get(keys.account)
        shown: dict[str, Any] = {"account": hex_account(keys.account), "balance": await ledger.token_balance()}
        if participant is None:
            return {**shown, "role": None, "bonded": 0, "unbonding": 0, "slashed": 0}
        return {
            **shown,
            "role": participant.role.name.lower(),
            "bonded": participant.bonded,
            "unbonding": participant.unbonding,
            "slashed": participant.slashed,
        }


async def claim(settings: RoleSettings, accounts: list[str], *, everybody: bool, yes: bool) -> list[dict[str, Any]]:
    """Claim final earnings for this account, for named ones, or for all."""
    async with session(settings) as (ledger, keys):
        task = _task_or_closed(ledger, settings.task)
        earnings = get_final_earnings(ledger.state, task)
        if everybody:
            wanted = sorted(earnings)
        else:
            wanted = [_account(text) for text in accounts] or [keys.account]
        due = [a for a in wanted if earnings.get(a, 0) > task.claimed.get(a, 0)]
        before = {account: task.claimed.get(account, 0) for account in wanted}
        total = sum(earnings[account] - before[account] for account in due)
        if due:
            to = ", ".join(hex_account(account) for account in due[:3]) + (" and others" if len(due) > 3 else "")
            confirm(ledger, f"claim for {len(due)} accounts", total, to, yes=yes)
        for start in range(0, len(due), CLAIM_BATCH):
            batch = due[start : start + CLAIM_BATCH]
            claims = [compute_claim(task.task, earnings, account) for account in batch]
            label = tagged_hash("claim", *batch, *(c.to_bytes(32, "big") for c, _ in claims)).hex()
            if len(batch) == 1:
                await send(ledger, f"claim/{label}", Claim(task.task, batch[0], *claims[0]))
            else:
                cumulatives, proofs = tuple(c for c, _ in claims), tuple(p for _, p in claims)
                await send(ledger, f"claim/{label}", ClaimMany(task.task, tuple(batch), cumulatives, proofs))
        after = ledger.state.tasks[task.task].claimed
        return [
            {
                "account": hex_account(account),
                "claimed": after.get(account, 0) - before[account],
                "cumulative": after.get(account, 0),
            }
            for account in wanted
        ]


def _account(text: str) -> bytes:
    try:
        account = bytes.fromhex(text.removeprefix("0x"))
    except ValueError:
        account = b""
    if len(account) != 20:
        raise ConfigError(f"account is {text!r}, expected an address of 20 bytes")
    return account


def _task_or_closed(ledger: EvmLedger, wanted: str) -> Task:
    """Like `_task`, but earnings of a closed task stay claimable, so the newest task of all will do."""
    if not wanted and ledger.state.tasks:
        return max(ledger.state.tasks.values(), key=lambda task: task.start_block)
    return _task(ledger, wanted)


async def status(settings: RoleSettings) -> dict[str, Any]:
    """The task and its nodes."""
    async with reading(settings) as ledger:
        task = _task_or_closed(ledger, settings.task)
        return {"task": describe_task(ledger.state, task), "nodes": describe_nodes(ledger.state, task)}


async def explain(settings: RoleSettings, rollout: str) -> list[dict[str, Any]]:
    """Run every check on one rollout from public data."""
    from troth.explain import explain_rollout, parse_rollout

    parse_rollout(rollout)  # a mistyped name is told before anything is fetched
    async with reading(settings) as ledger:
        return await explain_rollout(settings, ledger, rollout)


async def replay(
    settings: RoleSettings, rollout: str, *, case: Path | None, save: Path | None, link: bool, compare: bool
) -> dict[str, Any]:
    """Do a verdict again: of a rollout from public data, or of a case from its own files."""
    from troth.explain import parse_rollout
    from troth.replay import compare_facts, read_events, replay_case, replay_rollout

    if case is not None:
        opened, shown = await replay_case(settings, case)
        if compare:
            async with reading(settings) as ledger:
                compare_facts(opened, ledger, await read_events(ledger, settings))
        return shown
    parse_rollout(rollout)  # a mistyped name is told before anything is fetched
    async with reading(settings) as ledger:
        return await replay_rollout(settings, ledger, rollout, save=save, link=link)
