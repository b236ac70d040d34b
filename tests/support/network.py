"""Real networks for tests: `troth` as a subprocess, roles in this process over real sockets, a wire that can be cut.

    done = run_troth("task", "list", "--json")       # a process; `done.stderr` was checked for tracebacks

    async with start_network(directory, 0.25) as network:      # a chain and an onlooker
        network.start("relay", "relay")                        # participants, one by one
        await network.until(lambda: network.registered("relay"))

    async with Wire("127.0.0.1", port) as wire:      # a TCP proxy; `wire.cut()` and `wire.mend()`

Roles are run by `troth.roles.run_role`, exactly as the command line does. Neighbours: troth.devnet, tests.support.scenario.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from unittest.mock import patch

from contracts.client import EvmLedger
from contracts.deploy import Deployment
from contracts.devnet.server import DevnetServer
from protocol.codec import encode
from protocol.ledger.calls import Publish
from protocol.ledger.events import Role
from protocol.ledger.state import Task
from protocol.task import TaskSpec
from troth.connect import ensure_registered, open_ledger, send
from troth.demo.launch import free_port
from troth.devnet import start_devnet
from troth.keystore import Keys, create
from troth.network import Mesh
from troth.roles import run_role
from troth.settings import LedgerSettings, NetworkSettings, RoleSettings

PASSWORD = "correct horse battery staple"
STAKE = 10**10
SCRYPT_N = 2**10


def run_troth(
    *arguments: object,
    password: str | None = PASSWORD,
    timeout_s: float = 60.0,
    file_bytes_max: int | None = None,
) -> Done:
    """Run a command to its end and check what holds for every command: no traceback, no noise of libraries.

    Args:
        password: of the keystore; None sets none.
        file_bytes_max: no file may grow beyond it, which to the program is a full disk.
    """
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TROTH_")} | {"OMP_NUM_THREADS": "1"}
    if password is not None:
        environment["TROTH_PASSWORD"] = password
    words = [str(argument) for argument in arguments]
    if file_bytes_max is None:
        done = _fork(words, environment, timeout_s)
    else:
        done = _run_limited(words, environment, timeout_s, file_bytes_max)
    assert "Traceback" not in done.stderr, done.stderr
    assert "Unclosed" not in done.stderr, done.stderr
    return done


class Done(NamedTuple):
    """How a command ended."""

    returncode: int
    stdout: str
    stderr: str


#: Forks commands from a process that has done the slow imports once; each is a process of its own, as on a command line.
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(
    ["tests.support.network", "troth.cli", "troth.commands", "troth.task_file", "troth.explain"]
)


def _fork(words: list[str], environment: dict[str, str], timeout_s: float) -> Done:
    with TemporaryDirectory(prefix="troth-command-") as folder:
        out, err = Path(folder) / "out", Path(folder) / "err"
        child = _FORKS.Process(target=_become, args=(words, environment, out, err))
        child.start()
        child.join(timeout_s)
        if child.exitcode is None:
            child.kill()
            raise AssertionError(f"troth {words} is not done after {timeout_s} s: {err.read_text()}")
        return Done(child.exitcode, out.read_text(), err.read_text())


def _become(words: list[str], environment: dict[str, str], out: Path, err: Path) -> None:
    """In the child: what the console script does, with its own environment and its output in files."""
    from troth.cli import main

    os.environ.clear()
    os.environ.update(environment)
    for number, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), number)
    sys.argv = ["troth", *words]
    main()


def _run_limited(words: list[str], environment: dict[str, str], timeout_s: float, file_bytes_max: int) -> Done:
    """A fresh process, because its output goes to pipes: a file would be limited too."""
    limit = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({file_bytes_max}, {file_bytes_max}))"
    done = subprocess.run(
        [sys.executable, "-c", f"{limit}; from troth.cli import main; main()", *words],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    return Done(done.returncode, done.stdout, done.stderr)


class Wire:
    """A TCP proxy to one port. Cutting it resets all connections and refuses new ones until it is mended."""

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self.port = 0
        self.connections = 0

    @property
    def url(self) -> str:
        """Where HTTP clients connect."""
        return f"http://127.0.0.1:{self.port}"

    async def __aenter__(self) -> Wire:
        await self.mend()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.cut()

    async def mend(self) -> None:
        """Listen (again, at the same port)."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def cut(self) -> None:
        """Drop everything at once."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for writer in list(self._writers):
            writer.transport.abort()
        self._writers.clear()
        await asyncio.sleep(0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.add(writer)
        try:
            there, back = await asyncio.open_connection(*self._target)
        except OSError:
            writer.transport.abort()
            return
        self._writers.add(back)
        await asyncio.gather(self._copy(reader, back), self._copy(there, writer))

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65_536):
                writer.write(data)
                await writer.drain()
        writer.transport.abort()
        self._writers.discard(writer)


class Network:
    """A devnet and the participants on it. Made by `start_network`.

    Attributes:
        ledger: an onlooker's connection; `task_id` is the published task.
        server / deployment: the chain.
    """

    def __init__(self, directory: Path, server: DevnetServer, deployment: Deployment) -> None:
        self.directory, self.server, self.deployment = directory, server, deployment
        self.task_id = b""
        self.keys: dict[str, Keys] = {}
        self.roles: dict[str, asyncio.Task[None]] = {}
        self._exits = contextlib.AsyncExitStack()
        self.ledger: EvmLedger

    @property
    def task(self) -> Task:
        """The task, as the onlooker's replica has it."""
        return self.ledger.state.tasks[self.task_id]

    def settings(self, name: str, *, rpc: str = "", serves: bool = True, **changes: Any) -> RoleSettings:
        """Settings, keystore and money of a participant (made on first use)."""
        folder = self.directory / name
        if name not in self.keys:
            self.keys[name] = create(folder / "keystore.json", PASSWORD, scrypt_n=SCRYPT_N)
            account = "0x" + self.keys[name].account.hex()
            self.server.methods.call("devnet_fund", [account, hex(10**19)])
            self.server.methods.call("devnet_mint", [account, hex(10 * STAKE)])
            self.server.methods.mine()
        return RoleSettings(
            directory=str(folder),
            stake=STAKE,
            ledger=LedgerSettings(rpc=rpc or self.server.url, poll_seconds=0.05),
            network=NetworkSettings(bind=f"tcp://127.0.0.1:{free_port()}" if serves else ""),
            **changes,
        )

    def start(self, name: str, role: str, **changes: Any) -> None:
        """Run a role in this process."""
        self.roles[name] = asyncio.create_task(run_role(role, self.settings(name, **changes), yes=True), name=name)

    async def connect(self, name: str) -> EvmLedger:
        """The ledger as `name` sees it, closed with the network."""
        ledger = await open_ledger(self.settings(name), self.keys[name])
        self._exits.push_async_callback(ledger.close)
        return ledger

    async def shelve(self, name: str, folder: Path) -> tuple[bytes, bytes]:
        """Register `name` as a trainer that serves a base policy and does nothing else; content and manifest hash."""
        settings = self.settings(name)
        keys = self.keys[name]
        ledger = await self.connect(name)
        mesh = Mesh(ledger, keys, self.directory / name, bind=settings.network.bind)
        endpoint = await mesh.start()
        self._exits.push_async_callback(mesh.close)
        await ensure_registered(ledger, keys, Role.TRAINER, stake=STAKE, endpoint=endpoint, yes=True)

        async def keep_polling() -> None:
            while True:
                await ledger.poll()
                await asyncio.sleep(0.2)

        self.roles[name] = asyncio.create_task(keep_polling(), name=name)
        return mesh.policies.publish_base(folder)

    async def publish(self, spec: TaskSpec, deposit: int) -> None:
        """Publish a task and wait until the onlooker sees it."""
        initiator = await self.connect("initiator")
        await send(initiator, "publish", Publish(encode(spec), deposit))
        [self.task_id] = initiator.state.tasks
        await self.until(lambda: self.task_id in self.ledger.state.tasks)

    async def until(self, condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
        """Wait for a condition on the onlooker's replica; a role that ended fails the wait with its error."""
        async with asyncio.timeout(timeout_s):
            while True:
                await self.ledger.poll()
                for role in self.roles.values():
                    if role.done():
                        await role
                        raise AssertionError(f"role {role.get_name()} ended by itself")
                if condition():
                    return
                await asyncio.sleep(0.1)

    def registered(self, *names: str) -> bool:
        """Whether all of them are on the ledger."""
        return all(self.keys[name].account in self.ledger.state.participants for name in names)

    async def close(self) -> None:
        """Stop all roles, then the chain."""
        for role in self.roles.values():
            role.cancel()
        await asyncio.gather(*self.roles.values(), return_exceptions=True)
        await self._exits.aclose()
        await self.server.stop()


@asynccontextmanager
async def start_network(directory: Path, block_seconds: float) -> AsyncIterator[Network]:
    """A chain with an onlooker and nobody else yet."""
    server, deployment = await start_devnet("127.0.0.1", 0, block_seconds, directory / "devnet")
    network = Network(directory, server, deployment)
    try:
        with patch.dict(os.environ, {"TROTH_PASSWORD": PASSWORD}):
            network.ledger = await network.connect("onlooker")
            yield network
    finally:
        await network.close()
