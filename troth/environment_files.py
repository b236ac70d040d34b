"""A task's environment where it needs files, which come with the base policy, or where arguments can ask for any amount of
work, so that it is tried in a process of its own first.

Both take as long as they take, and a participant has a ledger to follow meanwhile: `EnvironmentFinder` does them in the
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
from protocol.task import Environment as EnvironmentSpec
from troth.environment_check import require_bounded

#: After a base policy could not be had, the task is left alone for so long, and others have their turn.
RETRY_SECONDS = 30.0

Events = Callable[[str, dict[str, object]], None]


def _load(spec: EnvironmentSpec, folders: Iterable[Path]) -> Environment:
    """An environment that has made a prompt.

    Its files are a stranger's. A tokenizer.json that the package panics on ends in a `BaseException` that is no
    `Exception`; left alone it would end the role that only looks at the task.
    """
    try:
        environment = environments.load(spec, folders)
        environment.prompt(0)
    except Exception:
        raise
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise ConfigError(f"environment {spec.entry}: its tokenizer does not work: {str(error)[:200]}") from None
    return environment


def _load_tried(spec: EnvironmentSpec, folders: Iterable[Path]) -> Environment:
    """An environment, once a try of it came to an end."""
    environments.require_files(spec, folders)
    if environments.is_open_ended(spec):
        require_bounded(spec, folders)
    return _load(spec, folders)


async def load_environment(
    task: Task, policies: PolicyStore, folders: Iterable[Path], *, tried: bool = False
) -> Environment:
    """A task's environment, its files from `folders` or else from the base policy.

    Args:
        tried: try one that is open-ended in a process of its own first.

    Raises:
        ConfigError: when it is not installed, or its files are not in the base policy either.
        Fault: when the base policy cannot be had.
    """
    spec, folders = task.spec.environment, [*folders]
    load = _load_tried if tried else _load
    try:
        return await asyncio.to_thread(load, spec, folders)
    except MissingFile:
        base = await policies.fetch(task.task, 0)
        return await asyncio.to_thread(load, spec, [*folders, base])


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
        """The environment; None while it is tried or its files are being fetched.

        Args:
            misfits: tasks whose policies do not fit on this machine, with the reason, as `policies` fills it.

        Raises:
            ConfigError: when it is not installed, hangs, its files are nowhere, or the base policy does not fit.
            Fault: when the base policy cannot be had at present.
        """
        spec = task.spec.environment
        if not environments.needs_files(spec) and not environments.is_open_ended(spec):
            return environments.load(spec)
        running = self._pending.get(task.task)
        if running is None:
            self._pending[task.task] = asyncio.create_task(load_environment(task, policies, self._folders, tried=True))
            self._say(task, f"environment {spec.entry} is made, with files from the base policy if need be")
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
