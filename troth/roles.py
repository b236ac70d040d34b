"""Running a role: connect, register, serve, and call the role's worker after every poll of the ledger.

One loop drives everything: poll the ledger, do what is due (beacons, the worker's step), push the outbox, sleep. A
`Fault` is logged and the loop goes on; everything a worker needs to resume is on disk, so being killed anywhere and
started again is the same as going on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol

from contracts.client import EvmLedger
from protocol.errors import ConfigError, Fault, Ignore, Reject
from protocol.ledger.events import Role
from protocol.ledger.state import Task
from troth.connect import ensure_registered, open_ledger, pick_task
from troth.duties import BeaconDuty
from troth.eventlog import EventLog
from troth.keystore import Keys, load, read_password
from troth.network import Mesh
from troth.settings import RoleSettings

log = logging.getLogger("troth.roles")


class Worker(Protocol):
    """What a role package provides."""

    async def step(self) -> None: ...


#: Builds a worker for a task.
Factory = Callable[["Context", Task], Worker]


class Context:
    """Everything a worker is built from."""

    def __init__(
        self, settings: RoleSettings, keys: Keys, ledger: EvmLedger, mesh: Mesh, events: EventLog, cheat: str
    ) -> None:
        self.settings, self.keys, self.ledger = settings, keys, ledger
        self.mesh, self.events, self.cheat = mesh, events, cheat
        self.directory = Path(settings.directory)


async def run_role(name: str, settings: RoleSettings, *, yes: bool, cheat: str = "") -> None:
    """Run a role until SIGINT or SIGTERM.

    Raises:
        ConfigError: for settings or registrations that cannot work.
        Fault: when the ledger cannot be reached at start.
    """
    role = Role[name.upper()]
    keys = load(Path(settings.keystore), read_password())
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
        if role is Role.RELAY:
            worker = _make_relay(context)
            relay_accept.append(worker.accept)
            await _drive(context, stop, lambda: worker)
        else:
            await _drive(context, stop, _worker_of_task(context, role))
    finally:
        await mesh.close()
        await ledger.close()
        events("stopped", {"cpu_process": time.process_time()})
        events.close()


def _worker_of_task(context: Context, role: Role) -> Callable[[], Worker | None]:
    """The worker of the chosen task, made when the task appears on the ledger."""
    made: dict[bytes, Worker] = {}

    def get() -> Worker | None:
        picked = pick_task(context.ledger, context.settings.task)
        if picked is None:
            return next(iter(made.values()), None)
        if picked not in made:
            made[picked] = _FACTORIES[role](context, context.ledger.state.tasks[picked])
            context.events("serving", {"task": picked})
            print(f"{role.name.lower()}: serving task {picked.hex()[:12]}", file=sys.stderr)
        return made[picked]

    return get


async def _drive(context: Context, stop: asyncio.Event, get_worker: Callable[[], Worker | None]) -> None:
    """The loop of every role."""
    beacons = BeaconDuty(context.ledger)
    idle = context.settings.ledger.poll_seconds
    while not stop.is_set():
        await _guarded(context, "ledger", context.ledger.poll)
        await _guarded(context, "beacons", beacons.step)
        worker = get_worker()
        if worker is not None:
            await _guarded(context, "step", worker.step)
        # What the step submitted goes out now rather than a poll later.
        await _guarded(context, "ledger", context.ledger.poll)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), idle)


async def _guarded(context: Context, what: str, work: Callable[[], Awaitable[Any]]) -> None:
    """Do one piece of work; its `Fault`, `Ignore` or `Reject` is logged and the loop goes on. Only `ConfigError` ends it."""
    try:
        await work()
    except ConfigError:
        raise
    except (Fault, Ignore, Reject) as error:
        log.warning("%s: %s", what, error)
        context.events("fault", {"what": what, "text": str(error)})


def _make_relay(context: Context) -> Any:
    from troth.relay import RelayWorker

    return RelayWorker(
        ledger=context.ledger,
        directory=context.mesh.contacts,
        has_blob=context.mesh.has_letter,
        events=context.events,
    )


_FACTORIES: dict[Role, Factory] = {}
