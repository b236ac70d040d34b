"""What trustlessness costs: CPU of a whole network per accepted rollout, against a bare training loop on the same work.

Starts a real network (one devnet, relay, trainer, three verifiers, nodes; every role a process), lets it train for a number of
rounds, and sums the CPU time of every process from the first round's start to the last round's end. Then runs the bare
loop of `bare_grpo.py` with the same model, rollouts per step and number of steps in one process of this machine. Parts
are named by what the roles measured of themselves; what they did not measure of their own CPU is split by process.

    python benchmarks/overhead.py --json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from bare_grpo import run as run_bare

from contracts.client import EvmLedger
from protocol.rounds import get_end_round, get_times
from trainer.config import TrainerConfig
from troth.demo import main as demo
from troth.demo.launch import Launcher
from troth.demo.plan import EPOCH_ROUNDS, Plan
from troth.demo.watch import Screen
from troth.views import count_rollouts

#: Highest ratio that is acceptable in this version; see docs/overhead.md.
TARGET = 5.0


async def run_network(plan: Plan, launcher: Launcher) -> dict[str, Any]:
    """Run the network; returns rollouts, steps, and CPU seconds by part between the first round and the last."""
    launcher.open_nursery()
    launcher.make_keys(plan.participants)
    with Screen({launcher.keys[name].account: name for name in plan.participants}) as screen:
        ledger = await demo.start_chain(plan, launcher)
        try:
            await demo.start_roles(plan, launcher, ledger, screen)
            task_id = await demo.publish(plan, launcher, ledger, screen)
            before = {name: launcher.cpu_seconds(name) for name in launcher.running}
            while True:
                await ledger.poll()
                task = ledger.state.tasks[task_id]
                screen.show(ledger.state, task, None)
                if ledger.state.block_number > get_times(task, get_end_round(task) - 1).verdict_reveal_deadline:
                    break
                await asyncio.sleep(1.0)
            after = {name: launcher.cpu_seconds(name) for name in launcher.running}
            return _summarise(launcher, ledger, task_id, {name: after[name] - before[name] for name in before})
        finally:
            await ledger.close()


def _measured(launcher: Launcher, name: str) -> dict[str, float]:
    """Sums of the cpu_* fields a role wrote into its events."""
    sums: dict[str, float] = {}
    for line in (launcher.root / name / "events.jsonl").read_text().splitlines():
        for key, value in json.loads(line).items():
            if key.startswith("cpu_") and key != "cpu_process":
                sums[key] = sums.get(key, 0.0) + value
    return sums


def _summarise(launcher: Launcher, ledger: EvmLedger, task_id: bytes, cpu: dict[str, float]) -> dict[str, Any]:
    parts = dict.fromkeys(("generation", "commitment", "verification", "training", "ledger", "transport"), 0.0)
    for name, seconds in cpu.items():
        if name == "devnet":
            parts["ledger"] += seconds
            continue
        own = _measured(launcher, name)
        named = {
            "generation": own.get("cpu_generation", 0.0) + own.get("cpu_load", 0.0),
            "commitment": own.get("cpu_commitment", 0.0) + own.get("cpu_self_check", 0.0),
            "verification": own.get("cpu_verification", 0.0),
            "training": own.get("cpu_training", 0.0),
        }
        for part, value in named.items():
            parts[part] += value
        # Following the ledger and moving bytes share one event loop; they cannot be told apart from outside.
        parts["transport"] += max(0.0, seconds - sum(named.values()))
    task = ledger.state.tasks[task_id]
    accepted = count_rollouts(ledger.state, task)["accepted"]
    return {
        "accepted": accepted,
        "steps": len(task.policies) - 1,
        "cpu_seconds": round(sum(cpu.values()), 2),
        "cpu_ms_per_rollout": round(sum(cpu.values()) / max(accepted, 1) * 1000, 3),
        "parts_ms_per_rollout": {part: round(s / max(accepted, 1) * 1000, 3) for part, s in parts.items()},
    }


def main() -> None:
    """Measure and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=5, help="epochs of the network")
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print JSON only (always the case)")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    root = Path(tempfile.mkdtemp(prefix="troth-overhead-"))
    launcher = Launcher(root)
    try:
        plan = Plan(options.seed, options.nodes, (), options.epochs)
        network = asyncio.run(run_network(plan, launcher))
    finally:
        launcher.close()
        shutil.rmtree(root, ignore_errors=True)
    steps = max(1, network["steps"])
    groups = max(1, round(network["accepted"] / steps / 16))
    bare = run_bare(steps, groups, 16, options.seed, config=TrainerConfig(total_steps=options.epochs * EPOCH_ROUNDS))
    result = {
        "overhead_ratio": round(network["cpu_ms_per_rollout"] / bare["cpu_ms_per_rollout"], 2),
        "target": TARGET,
        "network": network,
        "bare": {
            "steps": steps,
            "groups": groups,
            "rollouts": bare["rollouts"],
            "cpu_ms_per_rollout": round(bare["cpu_ms_per_rollout"], 3),
        },
        "nodes": options.nodes,
        "verifiers": 3,
    }
    json.dump(result, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
