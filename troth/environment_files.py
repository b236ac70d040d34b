"""A task's environment where it needs files: they come with the base policy, which is fetched first.

Fetching takes as long as it takes, and a participant has a ledger to follow meanwhile: `EnvironmentFinder` does it in the
background and says so. Files that are in the participant's own folders (`environment_folders`) are not waited for.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import environments
from environments.files import MissingFile
from protocol.errors import ConfigError, Fault
from protocol.ledger.state import Task
from protocol.ports import Environment, PolicyStore

#: After a base policy could not be had, the task is left alone for so long, and others have their turn.
RETRY_SECONDS = 30.0

Events = Callable[[str, dict[str, object]], None]


async def load_environment(task: Task, policies: PolicyStore, folders: Iterable[Path]) -> Environment:
    """A task's environment, its files from `folders` or else from the base policy.

    Raises:
        ConfigError: when it is not installed, or its files are not in the base policy either.
        Fault: when the base policy cannot be had.
    """
    spec, folders = task.spec.environment, [*folders]
    if not environments.needs_files(spec):
        return environments.load(spec)
    try:
        return await asyncio.to_thread(environments.load, spec, folders)
    except MissingFile:
        base = await policies.fetch(task.task, 0)
        return await asyncio.to_thread(environments.load, spec, [*folders, base])


class EnvironmentFinder:
    """Environments of tasks, without waiting for them.

    Args:
        folders: where files may be besides the base policy.
        events: told `idle` with the reason while a base policy is being fetched, and when it cannot be had.
    """

    def __init__(self, folders: Iterable[Path], events: Events) -> None:
        self._folders = [*folders]
        self._events = events
        self._pending: dict[bytes, asyncio.Task[Environment]] = {}
        self._retry_at: dict[bytes, float] = {}

    def is_waiting(self, task: Task) -> bool:
        """Whether the task's base policy could not be had a moment ago."""
        return time.monotonic() < self._retry_at.get(task.task, 0.0)

    def get(self, task: Task, policies: PolicyStore, misfits: Mapping[bytes, str]) -> Environment | None:
        """The environment; None while its files are being fetched.

        Args:
            misfits: tasks whose policies do not fit on this machine, with the reason, as `policies` fills it.

        Raises:
            ConfigError: when it is not installed, its files are nowhere, or the base policy does not fit.
            Fault: when the base policy cannot be had at present.
        """
        spec = task.spec.environment
        if not environments.needs_files(spec):
            return environments.load(spec)
        running = self._pending.get(task.task)
        if running is None:
            self._pending[task.task] = asyncio.create_task(load_environment(task, policies, self._folders))
            self._say(task, f"the files of environment {spec.entry} are looked for, in the base policy if need be")
            return None
        if not running.done():
            return None
        del self._pending[task.task]
        try:
            return running.result()
        except Fault as error:
            if task.task in misfits:
                raise ConfigError(misfits[task.task]) from None
            self._retry_at[task.task] = time.monotonic() + RETRY_SECONDS
            self._say(task, f"the base policy, with the files of environment {spec.entry}, cannot be had: {error}")
            raise

    def _say(self, task: Task, reason: str) -> None:
        self._events("idle", {"task": task.task, "reason": reason})
