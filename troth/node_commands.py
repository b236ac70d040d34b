"""What the one-shot commands around a node do: look at its status, test it against a verifier's checks.

Neighbours: troth.cli.node prints what these return; troth.commands holds the commands that are not about nodes.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, NamedTuple

from inference.status import read_status
from protocol.errors import ConfigError
from protocol.task import TaskSpec
from troth import selftest
from troth.commands import reading
from troth.connect import pick_task
from troth.engines import make_engine
from troth.lock import is_running
from troth.network import Reader
from troth.settings import RoleSettings


def node_status(settings: RoleSettings) -> dict[str, Any]:
    """The status file of a node, and whether its process is alive.

    Raises:
        Fault: when no node ever ran in the directory.
    """
    directory = Path(settings.directory)
    shown = read_status(directory / "status.json")
    running = is_running(directory)
    for_s = max(0.0, time.time() - float(shown.get("since", 0.0)))
    shown |= {"running": running, "for_s": round(for_s, 1)}
    if not running and shown["state"] != "stopped":
        shown["last_state"], shown["state"] = shown["state"], "stopped"
        shown["reason"] = f"the process is gone; the last it said was {shown['last_state']}: {shown['reason']}"
        shown["ends"] = "`troth node run`: it goes on where it was"
    return shown


def find_task_file(settings: RoleSettings) -> Path | None:
    """The task file that `task` names, None when it names a task on the ledger."""
    path = Path(settings.task)
    return path if settings.task.endswith(".toml") or (settings.task and path.is_file()) else None


def load_spec(path: Path) -> TaskSpec:
    """The spec in a task file; the token is that of no ledger. Raises `ConfigError`."""
    from environments import content_hash
    from troth.task_file import load_task_file

    return load_task_file(path, token=bytes(20), content_hash=content_hash)[0]


class Target(NamedTuple):
    """What is tested: a task's terms, a policy's folder, and where the environment's files are looked for."""

    spec: TaskSpec
    policy: Path
    folders: list[Path]


async def node_selftest(
    settings: RoleSettings,
    *,
    policy: Path | None,
    entry: str,
    args: str,
    max_tokens: int,
    stops: list[int],
    groups: int,
    verifier_dtype: str,
) -> dict[str, Any]:
    """Make a few groups with this node's engine and judge them as a verifier would.

    Args:
        policy: a local policy folder; without one the task's newest is fetched.
        entry, args, max_tokens, stops: the task, where neither a task id nor a task file is given.
        verifier_dtype: numeric type of the prefill; the profile's when empty.

    Raises:
        ConfigError: when it is not said what to test, or the parts do not go together.
        Fault: when the policy cannot be had, or something of this machine fails.
    """
    import environments
    from verifier.scorer import TorchScorer

    path = find_task_file(settings)
    if path is not None or (policy is not None and not settings.task):
        if policy is None:
            raise ConfigError("a task file names no place to fetch a policy from: give --policy FOLDER")
        if path is not None:
            spec = load_spec(path)
        elif entry:
            spec = selftest.make_local_spec(policy, entry, args, max_tokens, stops, groups)
        else:
            raise ConfigError("give --task ID, --task FILE.toml or --environment ENTRY: rewards need one")
        target = Target(spec, policy, [policy, policy / "base"])
    else:
        target = await _fetch_target(settings, policy)
    compute = settings.compute
    folders = [*target.folders, *(Path(folder) for folder in settings.environment_folders)]
    environment = environments.load(target.spec.environment, [folder for folder in folders if folder.is_dir()])
    dtype = verifier_dtype or target.spec.profile.dtype
    result = selftest.run_selftest(
        target.spec,
        environment,
        make_engine(compute, environment.vocab_size),
        TorchScorer(compute.device, dtype, compute.threads, vocab_size=environment.vocab_size),
        target.policy,
        slots=groups,
    )
    shown = {"task": target.spec.name, "policy": str(target.policy), "verifier_dtype": dtype}
    return {**shown, **selftest.describe(result)}


async def _fetch_target(settings: RoleSettings, policy: Path | None) -> Target:
    """The task on the ledger, with its newest policy unless another is given."""
    import environments

    async with reading(settings) as ledger:
        picked = pick_task(ledger, settings.task)
        if picked is None:
            raise ConfigError("no open task on this ledger: give --policy FOLDER and --environment ENTRY to test with")
        task = ledger.state.tasks[picked]
        folders = [] if policy is None else [policy, policy / "base"]
        async with Reader(ledger, Path(settings.directory) / "selftest") as reader:
            if environments.needs_files(task.spec.environment):
                folders.append(await reader.policies.fetch(picked, 0))
            if policy is None:
                policy = await reader.policies.fetch(picked, task.policies[-1].version)
        return Target(task.spec, policy, folders)
