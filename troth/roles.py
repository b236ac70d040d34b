"""Running a role: connect, register, serve, and call the role's worker after every poll of the ledger.

One loop drives everything: poll the ledger, do what is due (beacons, the worker's step), push the outbox, sleep. A
`Fault` is logged and the loop goes on; everything a worker needs to resume is on disk, so being killed anywhere and
started again is the same as going on. Neighbours: troth.chooser picks the task, troth.workers makes the worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from inference.status import Condition
from protocol.errors import ConfigError, Fault, Ignore, Reject, TrothError
from protocol.ledger.events import Role
from troth.chooser import Chooser
from troth.connect import ensure_registered, open_ledger
from troth.duties import BeaconDuty
from troth.eventlog import EventLog
from troth.keystore import load, read_password
from troth.lock import DirectoryLock
from troth.network import Mesh
from troth.operating import Operator
from troth.settings import RoleSettings
from troth.workers import Context, Worker, make_relay, preload

log = logging.getLogger("troth.roles")


T = TypeVar("T")


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
    keeper = preload(role, settings)
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
        context.keeper = keeper
        if operator is not None:
            operator.connect(ledger, keys, mesh, settings.network.advertise or endpoint)
            context.operator = operator
        if role is Role.RELAY:
            worker = make_relay(context)
            relay_accept.append(worker.accept)
            await _drive(context, stop, _always(worker))
        else:
            await _drive(context, stop, Chooser(context, role).get)
    finally:
        if keeper is not None:
            keeper.close()
        await mesh.close()
        await ledger.close()
        events("stopped", {"cpu_process": time.process_time()})
        events.close()


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
