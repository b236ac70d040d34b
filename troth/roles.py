"""Running a role: connect, register, serve, and call the role's worker after every poll of the ledger.

One loop drives everything: poll the ledger, do what is due (beacons, the worker's step), push the outbox, sleep. A
`Fault` is logged and the loop goes on; everything a worker needs to resume is on disk, so being killed anywhere and
started again is the same as going on.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import shutil
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar

from contracts.client import EvmLedger
from inference.status import Condition
from protocol.errors import ConfigError, Fault, Ignore, Reject, TrothError
from protocol.ledger.events import Role
from protocol.ledger.state import Task
from protocol.ports import Environment, Scorer
from troth.connect import ensure_registered, open_ledger, pick_task, verify_terms
from troth.duties import BeaconDuty
from troth.engines import make_engine, preload_engine
from troth.environment_files import EnvironmentFinder
from troth.eventlog import EventLog
from troth.forms import require_fitting
from troth.keystore import Keys, load, read_password
from troth.lock import DirectoryLock
from troth.network import Mesh
from troth.operating import Operator
from troth.settings import RoleSettings

log = logging.getLogger("troth.roles")


class Worker(Protocol):
    """What a role package provides."""

    async def step(self) -> None: ...
    async def close(self) -> None: ...


T = TypeVar("T")

#: A task that starts later than this is not chosen by itself; name it in the settings to wait for it.
STARTS_SOON_BLOCKS = 2_000

#: Builds a worker for a task.
Factory = Callable[["Context", Task, Environment], Worker]


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


async def run_role(name: str, settings: RoleSettings, *, yes: bool, cheat: str = "") -> None:
    """Run a role until SIGINT or SIGTERM.

    Raises:
        ConfigError: for settings or registrations that cannot work.
        Fault: when the ledger cannot be reached at start.
    """
    lock = DirectoryLock(Path(settings.directory))
    operator = Operator(settings, _show) if Role[name.upper()] is Role.NODE else None
    ending = "it was told to stop"
    try:
        await _run_role(name, settings, yes=yes, cheat=cheat, operator=operator)
    except BaseException as error:
        ending = str(error) if isinstance(error, TrothError) else f"{type(error).__name__}: {error}"
        raise
    finally:
        if operator is not None:
            await operator.close(ending)
        lock.close()


async def _run_role(name: str, settings: RoleSettings, *, yes: bool, cheat: str, operator: Operator | None) -> None:
    """`run_role` once the directory is ours."""
    role = Role[name.upper()]
    keys = load(settings.keystore_path, read_password())
    _preload(role, settings)
    ledger = await open_ledger(settings, keys)
    events = EventLog(Path(settings.directory), name)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    relay_accept: list[Callable[[bytes, bytes, bytes], None]] = []
    mesh = Mesh(
        ledger,
        keys,
        Path(settings.directory),
        bind=settings.network.bind,
        accept=(lambda sender, key, data: relay_accept[0](sender, key, data)) if role is Role.RELAY else None,
        open_to_readers=role is Role.RELAY,
        events=events,
    )
    try:
        endpoint = await mesh.start()
        stake = settings.stake
        await ensure_registered(
            ledger, keys, role, stake=stake, endpoint=settings.network.advertise or endpoint, yes=yes
        )
        events("started", {"account": ledger.account, "endpoint": endpoint})
        context = Context(settings, keys, ledger, mesh, events, cheat)
        if operator is not None:
            operator.connect(ledger, keys, mesh, settings.network.advertise or endpoint)
            context.operator = operator
        if role is Role.RELAY:
            worker = _make_relay(context)
            relay_accept.append(worker.accept)
            await _drive(context, stop, _always(worker))
        else:
            await _drive(context, stop, _Chooser(context, role).get)
    finally:
        await mesh.close()
        await ledger.close()
        events("stopped", {"cpu_process": time.process_time()})
        events.close()


#: What a role's worker needs of the heavy packages.
_HEAVY = {
    Role.VERIFIER: ("verifier.scorer",),
    Role.TRAINER: ("trainer.worker", "verifier.scorer"),
}


def _preload(role: Role, settings: RoleSettings) -> None:
    """Import what the role's worker needs before any socket is open: it takes seconds, in which nobody would answer."""
    for module in _HEAVY.get(role, ()):
        importlib.import_module(module)
    if role is Role.NODE:
        preload_engine(settings.compute)


class _Chooser:
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
                worker = _FACTORIES[self._role](self._context, task, environment)
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
            operator.status.set(Condition("idle", "files of the task's environment are being fetched", "they are here"))
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


async def _drive(context: Context, stop: asyncio.Event, get_worker: Callable[[], Awaitable[Worker | None]]) -> None:
    """The loop of every role."""
    beacons = BeaconDuty(context.ledger)
    pause_s = context.settings.ledger.poll_seconds
    worker: Worker | None = None
    try:
        while not stop.is_set():
            worker = await _turn(context, beacons, get_worker) or worker
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), pause_s)
    finally:
        if worker is not None:
            await worker.close()


async def _turn(
    context: Context, beacons: BeaconDuty, get_worker: Callable[[], Awaitable[Worker | None]]
) -> Worker | None:
    """One turn of the loop; returns the worker, if there is one yet."""
    await _guarded(context, "ledger", context.ledger.poll)
    await _guarded(context, "beacons", beacons.step)
    operator = context.operator
    if operator is not None:
        operator.look()
    worker = await _guarded(context, "task", get_worker)
    if worker is not None:
        await _guarded(context, "step", worker.step)
    # What the step submitted goes out now rather than a poll later.
    if context.ledger.unsent:
        await _guarded(context, "ledger", context.ledger.poll)
    return worker


async def _guarded(context: Context, what: str, work: Callable[[], Awaitable[T]]) -> T | None:
    """Do one piece of work; what goes wrong is logged and the loop goes on. Only a `ConfigError` ends it.

    Strangers write tasks, records and policies. Whatever an unforeseen one of them makes raise must not stop a
    participant for good, so even an error that is a bug of ours costs one turn, with its traceback in the log.
    """
    try:
        return await work()
    except ConfigError:
        raise
    except (Fault, Ignore, Reject) as error:
        text = str(error)
        log.warning("%s: %s", what, text)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        log.exception("%s failed unexpectedly", what)
    context.events("fault", {"what": what, "text": text})
    if context.operator is not None:
        context.operator.fault(what, text)
    return None


def _show(condition: Condition) -> None:
    """One line that is overwritten on a terminal; elsewhere a plain line when somebody has to act or wait."""
    text = f"node: {condition.state}: {condition.reason} (until {condition.ends})"
    if sys.stderr.isatty():
        width = shutil.get_terminal_size().columns - 1
        print(f"\r\x1b[K{text[:width]}", end="", file=sys.stderr, flush=True)
    elif condition.state in ("waiting_task", "waiting_registration", "refused"):
        print(text, file=sys.stderr, flush=True)


def _always(worker: Worker) -> Callable[[], Awaitable[Worker | None]]:
    async def get() -> Worker | None:
        return worker

    return get


def _make_relay(context: Context) -> Any:
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
    from verifier.worker import VerifierWorker

    return VerifierWorker(
        ledger=context.ledger,
        task=task.task,
        environment=environment,
        scorer=_make_scorer(context, environment.vocab_size),
        policies=context.mesh.policies,
        blobs=context.mesh.blobs,
        key=context.keys.network,
        directory=context.directory,
        events=context.events,
    )


def _make_trainer(context: Context, task: Task, environment: Environment) -> Worker:
    from trainer.config import TrainerConfig
    from trainer.worker import TrainerWorker

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


_FACTORIES: dict[Role, Factory] = {
    Role.NODE: _make_node,
    Role.VERIFIER: _make_verifier,
    Role.TRAINER: _make_trainer,
}
