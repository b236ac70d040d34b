"""Which task a participant serves: the named one, the one from before a restart, or the best it can serve.

Neighbours: troth.workers makes the worker of a task, troth.environment_files finds what its environment needs.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from inference.status import Condition
from protocol.errors import ConfigError
from protocol.ledger.events import Role
from protocol.ledger.state import Task
from protocol.ports import Environment
from troth.connect import pick_task, verify_terms
from troth.environment_files import EnvironmentFinder
from troth.workers import FACTORIES, Context, Worker

log = logging.getLogger("troth.roles")

#: A task that starts later than this is not chosen by itself; name it in the settings to wait for it.
STARTS_SOON_BLOCKS = 2_000


class Chooser:
    """Finds the task to serve and makes its worker.

    With a task named in the settings it is that one, and anything wrong with it ends the process. Otherwise it is the one
    served before a restart, else the open task with the largest deposit that starts soon and can be served; it stays
    that one until it is closed. So a stranger who publishes tasks cannot pull participants away.
    """

    def __init__(self, context: Context, role: Role) -> None:
        self._context, self._role = context, role
        self._refused: set[bytes] = set()
        self._serving: bytes | None = None
        self._worker: Worker | None = None
        self._memory = context.directory / "serving"
        settings = context.settings
        folders = [*settings.environment_folders, *([settings.trainer.base] if settings.trainer.base else [])]
        self._environments = EnvironmentFinder([Path(folder) for folder in folders], context.events)

    async def get(self) -> Worker | None:
        """The worker, None while there is no task to serve.

        Raises:
            ConfigError: when the named task cannot be served.
        """
        tasks = self._context.ledger.state.tasks
        await self._drop_misfit()
        if self._worker is not None and self._serving in tasks and not tasks[self._serving].closed:
            return self._worker
        for task in self._candidates():
            try:
                await verify_terms(self._context.ledger, task.task)
                environment = self._find_environment(task)
                if environment is None:
                    return self._worker
                worker = FACTORIES[self._role](self._context, task, environment)
            except ConfigError as error:
                if self._context.settings.task:
                    raise
                self._refused.add(task.task)
                log.warning("task %s cannot be served: %s", task.task.hex()[:12], error)
                self._context.events("refused_task", {"task": task.task, "text": str(error)})
                continue
            if self._worker is not None:
                await self._worker.close()
            self._serving, self._worker = task.task, worker
            self._memory.write_text(task.task.hex() + "\n")
            self._context.events("serving", {"task": task.task})
            print(f"{self._role.name.lower()}: serving task {task.task.hex()[:12]}", file=sys.stderr)
            break
        if self._worker is None and self._context.operator is not None:
            waiting = sum(self._environments.is_waiting(task) for task in tasks.values())
            self._context.operator.no_worker(len(self._refused), waiting)
        return self._worker

    def _find_environment(self, task: Task) -> Environment | None:
        """The task's environment, None while its files are on their way. See `EnvironmentFinder.get` for what it raises."""
        operator, policies = self._context.operator, self._context.mesh.policies
        if operator is None or operator.policies is None:
            return self._environments.get(task, policies, {})
        found = self._environments.get(task, operator.policies, operator.policies.misfits)
        if found is None:
            operator.status.set(
                Condition("idle", "the task's environment is being made, or its files fetched", "it is here")
            )
        return found

    async def _drop_misfit(self) -> None:
        """Stop serving a task whose policy does not fit on this machine, before it is fetched."""
        operator, serving = self._context.operator, self._serving
        policies = None if operator is None else operator.policies
        if policies is None or serving is None or serving not in policies.misfits:
            return
        text = policies.misfits.pop(serving)
        if self._context.settings.task:
            raise ConfigError(text)
        self._refused.add(serving)
        self._context.events("refused_task", {"task": serving, "text": text})
        if self._worker is not None:
            await self._worker.close()
        self._worker = self._serving = None

    def _candidates(self) -> list[Task]:
        ledger = self._context.ledger
        if self._context.settings.task:
            picked = pick_task(ledger, self._context.settings.task)
            return [] if picked in (None, self._serving) else [ledger.state.tasks[picked]]
        remembered = self._memory.read_text().strip() if self._memory.exists() else ""
        is_trainer = self._role is Role.TRAINER
        found = [
            task
            for task in ledger.state.tasks.values()
            if not task.closed
            and task.task not in self._refused
            and task.task != self._serving
            and not self._environments.is_waiting(task)
            and task.start_block <= ledger.state.block_number + STARTS_SOON_BLOCKS
            and (not is_trainer or task.spec.trainer == ledger.account)
        ]
        return sorted(found, key=lambda task: (task.task.hex() != remembered, -task.deposit, task.start_block))
