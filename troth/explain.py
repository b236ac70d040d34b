"""`troth explain TASK/ROUND/ACCOUNT/SLOT/SAMPLE`: fetch what is public, run the verifier's checks, show every number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from contracts.client import EvmLedger
from protocol.errors import ConfigError, Fault
from protocol.messages import compute_bundle_key
from protocol.rounds import get_round_policy
from troth.connect import pick_task
from troth.environment_files import load_environment
from troth.network import Reader
from troth.settings import RoleSettings
from verifier.explain import Rollout, explain


def parse_rollout(text: str) -> tuple[str, Rollout]:
    """Task prefix and rollout of a path like `5958/17/0x37b3.../0/3`.

    Raises:
        ConfigError: when it is not of that form.
    """
    parts = text.split("/")
    try:
        task, round_index, account, slot, sample = parts
        rollout = Rollout(int(round_index), bytes.fromhex(account.removeprefix("0x")), int(slot), int(sample))
    except ValueError:
        rollout = None
    if rollout is None or len(rollout.account) != 20 or min(rollout.round_index, rollout.slot, rollout.sample) < 0:
        raise ConfigError(f"rollout is {text!r}, expected TASK/ROUND/ACCOUNT/SLOT/SAMPLE")
    return task, rollout


async def explain_rollout(settings: RoleSettings, ledger: EvmLedger, text: str) -> list[dict[str, Any]]:
    """All checks of one rollout, in order.

    Raises:
        ConfigError: when the rollout's name makes no sense on this ledger.
        Fault: when the round's policy cannot be had.
    """
    from models.policy import read_hidden_size
    from verifier.scorer import TorchScorer

    wanted, rollout = parse_rollout(text)
    picked = pick_task(ledger, wanted)
    if picked is None:
        raise ConfigError(f"no task {wanted!r} on this ledger")
    task = ledger.state.tasks[picked]
    policy = get_round_policy(task, rollout.round_index)
    if policy is None:
        raise ConfigError(f"round {rollout.round_index} has no policy yet")
    async with Reader(ledger, Path(settings.directory) / "explain") as reader:
        own = [Path(folder) for folder in settings.environment_folders]
        environment = await load_environment(task, reader.policies, own)
        folder = await reader.policies.fetch(task.task, policy.version)
        try:
            data = await reader.blobs.get(compute_bundle_key(task.task, rollout.round_index, rollout.account))
        except Fault:
            data = None
    compute = settings.compute
    scorer = TorchScorer(compute.device, compute.dtype, compute.threads, vocab_size=environment.vocab_size)
    scorer.load(folder)
    checks = explain(
        ledger.state,
        task,
        rollout,
        data,
        environment=environment,
        scorer=scorer,
        hidden=read_hidden_size(folder),
        chain_id=ledger.chain_id,
        ledger=ledger.address,
    )
    return [check._asdict() for check in checks]
