"""What a role's worker is built from, and the one place where ports and role packages are put together.

Heavy packages are imported when a worker is made, or ahead of it by `preload`. Neighbours: troth.chooser asks for workers,
troth.roles drives them, troth.engines knows the engines.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from contracts.client import EvmLedger
from protocol.errors import ConfigError
from protocol.ledger.events import Role
from protocol.ledger.state import Task
from protocol.ports import Environment, Scorer
from troth.engines import make_engine, preload_engine
from troth.eventlog import EventLog
from troth.fit import require_dtype
from troth.forms import require_fitting
from troth.keystore import Keys
from troth.network import Mesh
from troth.operating import Operator
from troth.settings import RoleSettings
from verifier.isolation import Keeper


class Worker(Protocol):
    """What a role package provides."""

    async def step(self) -> None:
        """Do what is due. Called after every poll of the ledger."""
        ...

    async def close(self) -> None:
        """Stop background work."""
        ...


class Context:
    """Everything a worker is built from."""

    def __init__(
        self, settings: RoleSettings, keys: Keys, ledger: EvmLedger, mesh: Mesh, events: EventLog, cheat: str
    ) -> None:
        self.settings, self.keys, self.ledger = settings, keys, ledger
        self.mesh, self.events, self.cheat = mesh, events, cheat
        self.directory = Path(settings.directory)
        #: Of a node only.
        self.operator: Operator | None = None
        #: Of a verifier only: started ahead of the first task, which takes it.
        self.keeper: Keeper | None = None


#: Builds a worker for a task.
Factory = Callable[["Context", Task, Environment], Worker]


#: What a role's worker needs of the heavy packages.
_HEAVY = {
    Role.TRAINER: ("trainer.worker", "verifier.scorer"),
}


def preload(role: Role, settings: RoleSettings) -> Keeper | None:
    """Import what the role's worker needs before any socket is open: it takes seconds, in which nobody would answer.

    A verifier imports nothing heavy itself; the keeper of its judging process, which does, is started and returned.
    """
    if role is Role.VERIFIER:
        from troth.judging import make_keeper

        return make_keeper(settings.verifier)
    for module in _HEAVY.get(role, ()):
        importlib.import_module(module)
    if role is Role.NODE:
        preload_engine(settings.compute)
    return None


def make_relay(context: Context) -> Any:
    """The relay's worker, which serves all tasks."""
    from troth.relay import RelayWorker

    return RelayWorker(
        ledger=context.ledger,
        directory=context.mesh.contacts,
        has_blob=context.mesh.has_letter,
        policies=context.mesh.policies,
        events=context.events,
    )


def _make_node(context: Context, task: Task, environment: Environment) -> Worker:
    from troth.cheats import get_node_class

    require_dtype(task.spec, context.settings.compute)
    operator = context.operator
    assert operator is not None
    return get_node_class(context.cheat)(
        ledger=context.ledger,
        task=task.task,
        environment=environment,
        engine=make_engine(context.settings.compute, environment.vocab_size),
        policies=operator.policies or context.mesh.policies,
        blobs=context.mesh.blobs,
        key=context.keys.network,
        directory=context.directory,
        events=context.events,
        slots=context.settings.slots,
        **operator.worker_options(),
    )


def _make_scorer(context: Context, vocab_size: int) -> Scorer:
    from verifier.scorer import TorchScorer

    compute = context.settings.compute
    return TorchScorer(compute.device, compute.dtype, compute.threads, vocab_size=vocab_size)


def _make_verifier(context: Context, task: Task, environment: Environment) -> Worker:
    """The environment was made to see that it can be; the one that judges is made in the judging process."""
    from troth.judging import make_judge, make_keeper
    from verifier.worker import VerifierWorker

    require_dtype(task.spec, context.settings.compute)
    keeper, context.keeper = context.keeper or make_keeper(context.settings.verifier), None
    return VerifierWorker(
        ledger=context.ledger,
        task=task.task,
        judge=make_judge(keeper, context.settings, task.spec.environment, context.directory, context.events),
        policies=context.mesh.policies,
        blobs=context.mesh.blobs,
        key=context.keys.network,
        directory=context.directory,
        events=context.events,
    )


def _make_trainer(context: Context, task: Task, environment: Environment) -> Worker:
    from trainer.config import TrainerConfig
    from trainer.worker import TrainerWorker

    require_dtype(task.spec, context.settings.compute)
    settings = context.settings.trainer
    if settings.base:
        policy, manifest = context.mesh.policies.publish_base(Path(settings.base))
        if (policy, manifest) != (task.spec.base_policy, task.spec.base_manifest):
            raise ConfigError(
                f"trainer.base {settings.base} is policy {policy.hex()[:16]} (manifest {manifest.hex()[:16]}), the task "
                f"names {task.spec.base_policy.hex()[:16]} ({task.spec.base_manifest.hex()[:16]})"
            )
        require_fitting(task.spec, Path(settings.base))

    def make_scorer(folder: Path) -> Scorer:
        scorer = _make_scorer(context, environment.vocab_size)
        scorer.load(folder)
        return scorer

    return TrainerWorker(
        ledger=context.ledger,
        task=task.task,
        environment=environment,
        make_scorer=make_scorer,
        policies=context.mesh.policies,
        blobs=context.mesh.blobs,
        key=context.keys.network,
        directory=context.directory,
        events=context.events,
        config=TrainerConfig(**settings.model_dump(exclude={"base"})),
        device=context.settings.compute.device,
        threads=context.settings.compute.threads,
    )


FACTORIES: dict[Role, Factory] = {
    Role.NODE: _make_node,
    Role.VERIFIER: _make_verifier,
    Role.TRAINER: _make_trainer,
}
