"""The course of a demo: start everything, publish, watch, settle, claim, close, judge. See `run_demo`."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from contracts.client import EvmLedger
from contracts.jsonrpc import HttpRpc, RpcError, Unreachable
from protocol.codec import decode
from protocol.errors import Fault, TrothError
from protocol.ledger.state import Task
from protocol.messages import LINEAGE_BYTES_MAX, Lineage, Signed, compute_lineage_key
from protocol.rounds import get_end_round, get_times
from troth.connect import find_deployment
from troth.demo import check
from troth.demo import plan as plans
from troth.demo.curve import Curve, Point
from troth.demo.ends import finish, measure_base
from troth.demo.launch import Launcher, free_port
from troth.demo.watch import Screen
from troth.keystore import Keys
from troth.network import Reader
from troth.settings import LedgerSettings

START_SECONDS_MAX = 120.0
POLL_SECONDS = 0.5


def run_demo(
    *,
    seed: int,
    num_nodes: int,
    cheats: str,
    minutes: float,
    directory: Path | None,
    keep: bool,
    as_json: bool,
) -> int:
    """Run the demo of sort-4; see `run_plan`. Raises `ConfigError` for options that make no sense, too."""
    plan = plans.make_plan(seed, num_nodes, cheats, minutes)
    return run_plan(plan, directory=directory, keep=keep, as_json=as_json)


def run_plan(
    plan: plans.Plan, *, directory: Path | None, keep: bool, as_json: bool, results: Path | None = None
) -> int:
    """Run a demo; returns the exit code: 0 when every claim of the summary holds.

    Args:
        directory: where processes keep their state; a temporary one, removed after a good run, when None.
        results: folder for report.json, curve.csv and curve.svg; they stay in the run's directory when None.

    Raises:
        Fault: when a process dies or the run does not get on.
    """
    root = Path(tempfile.mkdtemp(prefix="troth-demo-")) if directory is None else directory.absolute()
    root.mkdir(parents=True, exist_ok=True)
    launcher = Launcher(root)
    results = root if results is None else results.absolute()
    curve = Curve(results)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # told to stop, it stops its processes like at Ctrl-C
    failed = True
    try:
        summary, failures = asyncio.run(_run(plan, launcher, curve))
        failed = bool(failures)
        text = summary.pop("text")
        (results / "report.json").write_text(json.dumps({**summary, "failures": failures}, indent=1) + "\n")
    finally:
        launcher.close()
        if directory is None and not keep and not failed:
            shutil.rmtree(root, ignore_errors=True)
        elif failed or keep:
            print(f"logs and state are in {root}", file=sys.stderr)
        if failed and curve.points:
            curve.draw("mean reward (the run did not end well)")
            print(f"{len(curve.points)} training steps were done: {results / 'curve.csv'}", file=sys.stderr)
    if as_json:
        print(json.dumps({**summary, "failures": failures}, indent=1))
    else:
        print(text)
        for failure in failures:
            print(f"FAILED: {failure}")
        print("demo: " + ("FAILED" if failures else "OK"))
    return 1 if failures else 0


async def _run(plan: plans.Plan, launcher: Launcher, curve: Curve) -> tuple[dict[str, Any], list[str]]:
    try:
        return await _run_all(plan, launcher, curve)
    except asyncio.CancelledError:
        launcher.close()  # before the event loop waits for threads, which wait for processes
        raise


async def _run_all(plan: plans.Plan, launcher: Launcher, curve: Curve) -> tuple[dict[str, Any], list[str]]:
    started = time.monotonic()
    nursery = launcher.open_nursery()
    launcher.make_keys(plan.participants)
    names = {launcher.keys[name].account: name for name in plan.participants}
    warm_up_seconds = await asyncio.to_thread(nursery.wait_ready)
    with Screen(names) as screen:
        first: dict[str, Any] | None = None
        if plan.is_measured_first:
            first = await measure_base(plan, launcher, screen)
            plan = plan.fit(first["seconds"])
        else:
            plan = plan.fit(warm_up_seconds)
        pace = plan.describe_pace()
        screen.say(f"starting {len(plan.participants)} participants, each a process with its own key; {pace}")
        ledger = await start_chain(plan, launcher)
        reader = Reader(ledger, launcher.root / "observer")
        await reader.start()
        try:
            await start_roles(plan, launcher, ledger, screen)
            task = await publish(plan, launcher, ledger, screen)
            await _watch(launcher, ledger, reader, task, screen, curve)
            evaluation = await finish(plan, launcher, ledger, reader, task, screen, first)
            await ledger.poll()
            final = ledger.state.tasks[task]
            summary = await check.summarise(plan, ledger, final, names, evaluation)
            summary["seconds"] = round(time.monotonic() - started, 1)
            summary["seed"] = plan.seed
            summary["block_seconds"] = plan.block_seconds
            summary["curve"] = [point._asdict() for point in curve.points]
            curve.draw(f"{final.spec.name}: mean reward", (evaluation.reward_first, evaluation.reward_last))
            failures = check.find_failures(plan, summary, final)
            summary["text"] = check.render(summary, names)
            return summary, failures
        finally:
            await reader.close()
            await ledger.close()


async def start_chain(plan: plans.Plan, launcher: Launcher) -> EvmLedger:
    """Start the devnet, wait for its contracts, give everybody ether and tokens; returns an observer's ledger."""
    port = free_port()
    launcher.rpc = f"http://127.0.0.1:{port}"
    launcher.start(
        "devnet", "devnet", "--port", str(port), "--block-seconds", str(plan.block_seconds), "--seed",
        str(plan.seed), "--directory", str(launcher.root / "devnet"),
    )  # fmt: skip
    deadline = time.monotonic() + START_SECONDS_MAX
    settings = LedgerSettings(rpc=launcher.rpc)
    while True:
        try:
            deployment = await find_deployment(settings)
            break
        except TrothError:
            if time.monotonic() > deadline or launcher.find_dead():
                raise Fault(f"the devnet did not come up: {launcher.read_log('devnet')}") from None
            await asyncio.sleep(0.3)
    async with HttpRpc(launcher.rpc) as rpc:
        requests: list[tuple[str, list[Any]]] = []
        for name in plan.participants:
            account = "0x" + launcher.keys[name].account.hex()
            requests.append(("devnet_fund", [account, hex(10 * 10**18)]))
            requests.append(("devnet_mint", [account, hex(100 * plans.STAKE if name == "initiator" else plans.STAKE)]))
        try:
            for answer in await rpc.batch(requests):
                if isinstance(answer, RpcError):
                    raise Fault(f"the faucet refused: {answer}")
        except Unreachable as error:
            raise Fault(f"the devnet went away: {error}") from None
    observer = Keys(plan.seed.to_bytes(32, "big"))
    ledger = EvmLedger(launcher.rpc, deployment, observer.ledger_secret, launcher.root / "observer.sqlite")
    accounts = [launcher.keys[name].account for name in plan.participants]
    deadline = time.monotonic() + START_SECONDS_MAX
    while min([await ledger.token_balance(account) for account in accounts]) < plans.STAKE:  # not mined yet
        if time.monotonic() > deadline:
            raise Fault(f"the faucet's money is not there after {START_SECONDS_MAX:.0f} s")
        await asyncio.sleep(POLL_SECONDS)
    await ledger.poll()
    return ledger


async def start_roles(plan: plans.Plan, launcher: Launcher, ledger: EvmLedger, screen: Screen) -> None:
    """Start every role and wait until all are registered on the ledger."""
    stake, pause = f"stake = {plans.STAKE}", plan.poll_seconds
    config = launcher.write_settings("relay", stake, serves=True, seconds=pause)
    launcher.start("relay", "relay", "run", "--yes", "--config", str(config))
    for i in range(3):
        config = launcher.write_settings(f"verifier{i}", stake, serves=True, seconds=pause)
        launcher.start(f"verifier{i}", "verifier", "run", "--yes", "--config", str(config), forked=True)
    for name in plan.nodes:
        top = f"{stake}\nslots = {plan.slots}"
        config = launcher.write_settings(name, top, serves=True, seconds=pause)
        cheat = ["--cheat", name] if name in plan.cheats else []
        launcher.start(name, "node", "run", "--yes", *cheat, "--config", str(config), forked=True)
    base = launcher.root / "trainer" / "base"
    if not plan.is_measured_first:
        await asyncio.to_thread(launcher.ask, *plan.base_command(base), "--json")
    top = f'{stake}\n[trainer]\nbase = "{base}"\n{plan.trainer_table()}\n'
    config = launcher.write_settings("trainer", top, serves=True, seconds=pause)
    launcher.start("trainer", "trainer", "run", "--yes", "--config", str(config), forked=True)
    launcher.write_settings("initiator", serves=False, seconds=pause)
    wanted = {launcher.keys[name].account for name in plan.participants if name != "initiator"}
    deadline = time.monotonic() + START_SECONDS_MAX
    while not wanted <= set(ledger.state.participants):
        launcher.require_alive()
        if time.monotonic() > deadline:
            missing = [
                n for n in plan.participants if launcher.keys[n].account in wanted - set(ledger.state.participants)
            ]
            raise Fault(f"not registered after {START_SECONDS_MAX:.0f} s: {', '.join(missing)}")
        await ledger.poll()
        await asyncio.sleep(POLL_SECONDS)
    screen.say(f"{len(wanted)} participants are registered and staked")


async def publish(plan: plans.Plan, launcher: Launcher, ledger: EvmLedger, screen: Screen) -> bytes:
    """The initiator publishes the task; returns its id once our replica has it."""
    root = launcher.root
    config = str(root / "trainer" / "troth.toml")
    base = str(root / "trainer" / "base")
    described = await asyncio.to_thread(
        launcher.ask, "policy", "describe", base, *plan.describe_options(), "--json", "--config", config
    )
    file = root / "initiator" / "task.toml"
    file.write_text(plan.task_text(described))
    published = await asyncio.to_thread(
        launcher.ask,
        "task",
        "publish",
        str(file),
        *plan.publish_options(Path(base)),
        "--yes",
        "--json",
        "--config",
        str(root / "initiator" / "troth.toml"),
    )
    task = bytes.fromhex(published["task"])
    while task not in ledger.state.tasks:
        await ledger.poll()
        await asyncio.sleep(POLL_SECONDS)
    screen.say(f"task {task.hex()[:12]} is published with {published['deposit']} in escrow")
    return task


async def _watch(
    launcher: Launcher, ledger: EvmLedger, reader: Reader, task_id: bytes, screen: Screen, curve: Curve
) -> None:
    """Show progress until the last round's rollouts are committed; the curve grows with every recorded policy."""
    lineage: Lineage | None = None
    started = time.monotonic()
    while True:
        await ledger.poll()
        launcher.require_alive()
        task = ledger.state.tasks[task_id]
        known = lineage.policy_version if lineage is not None else 0
        for version in range(known + 1, task.policies[-1].version + 1):
            found = await _fetch_lineage(reader, task, version)
            if found is None:
                break
            lineage = found
            rollouts = len(found.leaves) * task.spec.group_size
            curve.add(Point(version, time.monotonic() - started, rollouts, found.reward_micro / 1e6))
        screen.show(ledger.state, task, lineage)
        if ledger.state.block_number > get_times(task, get_end_round(task) - 1).receipt_deadline:
            return
        await asyncio.sleep(POLL_SECONDS)


async def _fetch_lineage(reader: Reader, task: Task, version: int) -> Lineage | None:
    """A policy's public lineage record; None when it cannot be had now."""
    try:
        data = await reader.blobs.get(compute_lineage_key(task.task, version))
        return decode(Lineage, decode(Signed, data, bytes_max=LINEAGE_BYTES_MAX).body, bytes_max=LINEAGE_BYTES_MAX)
    except TrothError:
        return None
