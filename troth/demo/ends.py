"""The two ends of a demo: the base policy measured before anything runs, and settlement, claims and the last evaluation.

Neighbours: troth.demo.main calls `measure_base` first and `finish` last; troth.demo.check judges what they return.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

from contracts.client import EvmLedger
from protocol.errors import Fault
from protocol.rounds import get_num_epochs
from troth.demo import check
from troth.demo.launch import Launcher
from troth.demo.plan import Plan
from troth.demo.watch import Screen
from troth.network import Reader

POLL_SECONDS = 0.5


async def measure_base(plan: Plan, launcher: Launcher, screen: Screen) -> dict[str, Any]:
    """Make the base policy and evaluate it; the row of the evaluation, with the seconds that it took."""
    base = launcher.root / "trainer" / "base"
    screen.say("making the base policy")
    command = [*plan.base_command(base), "--json"]
    await asyncio.to_thread(launcher.ask, *command, timeout_s=plan.command_seconds_max)
    screen.say("evaluating it on the held-out prompts, which also tells this machine's pace")
    started = time.monotonic()
    row: dict[str, Any] = (await asyncio.to_thread(_evaluate, plan, launcher, [base]))[0]
    row["seconds"] = time.monotonic() - started
    screen.say(f"base policy: mean reward {row['reward']:.3f} on {row['prompts']} prompts, {row['seconds']:.0f} s")
    return row


async def finish(
    plan: Plan,
    launcher: Launcher,
    ledger: EvmLedger,
    reader: Reader,
    task_id: bytes,
    screen: Screen,
    first: dict[str, Any] | None,
) -> check.Evaluation:
    """Evaluate while the last epoch settles, then claim and close. `first` is the base policy's row, when it is known."""
    launcher.stop("trainer", *plan.nodes)
    task = ledger.state.tasks[task_id]
    eligible = [policy.version for policy in task.policies if policy.eligible_block is not None]
    wanted = (0, max(eligible)) if first is None else (max(eligible),)
    folders = [await reader.policies.fetch(task_id, version) for version in wanted]
    evaluation = asyncio.create_task(asyncio.to_thread(_evaluate, plan, launcher, folders))
    screen.say(f"the last round is over; settling {get_num_epochs(task)} epochs")
    deadline = time.monotonic() + plan.settle_seconds_max
    while True:
        await ledger.poll()
        launcher.require_alive()
        task = ledger.state.tasks[task_id]
        screen.show(ledger.state, task, None)
        if task.final is not None and task.final.epoch + 1 >= get_num_epochs(task):
            break
        if time.monotonic() > deadline:
            settled = "none" if task.final is None else task.final.epoch
            raise Fault(f"not settled after {plan.settle_seconds_max:.0f} s: last final epoch is {settled}")
        await asyncio.sleep(POLL_SECONDS)
    verifiers = [name for name in plan.participants if name.startswith("verifier")]
    launcher.stop(*verifiers)
    honest = [name for name in plan.nodes if name not in plan.cheats]
    screen.say("settled; claiming")
    await asyncio.gather(*(asyncio.to_thread(_claim, launcher, name, task_id) for name in (*honest, *verifiers)))
    await asyncio.to_thread(_close, launcher, task_id)
    rows = await evaluation
    if first is not None:
        rows = [first, *rows]
    return check.Evaluation(
        rows[0]["reward"], rows[1]["reward"], rows[0]["prompts"], rows[0]["error"], rows[1]["error"]
    )


def _claim(launcher: Launcher, name: str, task: bytes) -> None:
    config = str(launcher.root / name / "troth.toml")
    launcher.ask("claim", "--yes", "--json", "--config", config, "--task", task.hex())


def _close(launcher: Launcher, task: bytes) -> None:
    config = str(launcher.root / "initiator" / "troth.toml")
    launcher.ask("task", "close", task.hex(), "--yes", "--json", "--config", config)


def _evaluate(plan: Plan, launcher: Launcher, folders: list[Path]) -> list[dict[str, Any]]:
    """Sample policies on held-out prompts, in a process of its own (it needs torch, this one does not); a row for each."""
    rows: list[dict[str, Any]] = launcher.ask(
        "policy", "evaluate", *map(str, folders), "--entry", plan.entry, "--args", plan.arguments,
        "--max-tokens", str(plan.max_tokens), "--stop-token", str(plan.stop_token), "--samples", str(plan.samples),
        "--json", timeout_s=plan.command_seconds_max,
    )  # fmt: skip
    return rows
