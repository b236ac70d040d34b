"""A devnet in the test's own event loop, accounts on it, and a task small enough to run there."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from contracts.client import EvmLedger
from contracts.deploy import Deployment
from contracts.devnet.server import DevnetServer
from contracts.jsonrpc import HttpRpc
from protocol.task import Economics, Environment, ProofProfile, Sampling, Schedule, TaskSpec
from troth.devnet import start_devnet

TICK_S = 0.05


class World:
    """A running devnet and the clients that a test has opened on it."""

    def __init__(self, server: DevnetServer, deployment: Deployment, directory: Path) -> None:
        self.server = server
        self.deployment = deployment
        self.directory = directory
        self._open: list[EvmLedger] = []

    @property
    def chain(self):
        return self.server.methods.chain

    def mine(self, blocks: int = 1) -> None:
        for _ in range(blocks):
            self.server.methods.mine()

    def client(self, secret: bytes, *, url: str = "", name: str = "outbox", **options) -> EvmLedger:
        ledger = EvmLedger(
            url or self.server.url,
            self.deployment,
            secret,
            self.directory / f"{name}-{secret.hex()[:8]}.sqlite",
            **options,
        )
        self._open.append(ledger)
        return ledger

    async def funded(self, *, tokens: int = 10**9, **options) -> EvmLedger:
        """A client of a new account with ether and tokens."""
        ledger = self.client(os.urandom(32), **options)
        await self.fund(ledger.account, tokens)
        return ledger

    async def fund(self, account: bytes, tokens: int = 10**9) -> None:
        methods = self.server.methods
        methods.call("devnet_fund", ["0x" + account.hex(), 10**18])
        methods.call("devnet_mint", ["0x" + account.hex(), tokens])
        self.mine()

    async def close(self) -> None:
        for ledger in self._open:
            await ledger.close()
        await self.server.stop()


@asynccontextmanager
async def devnet(directory: Path, block_seconds: float = TICK_S) -> AsyncIterator[World]:
    """A devnet that ticks; with block_seconds 0 it mines only when the test says so."""
    server, deployment = await start_devnet("127.0.0.1", 0, block_seconds, directory)
    world = World(server, deployment, directory)
    try:
        yield world
    finally:
        await world.close()


async def until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    """Wait for a condition."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)


async def rpc_call(url: str, method: str, *params):
    async with HttpRpc(url) as rpc:
        return await rpc.call(method, *params)


def small_task(trainer: bytes, token: bytes, **schedule) -> TaskSpec:
    """A task whose rounds fit into a few blocks."""
    blocks = {
        "start_delay_blocks": 8,
        "round_blocks": 20,
        "epoch_rounds": 2,
        "num_epochs": 3,
        "grace_blocks": 1,
        "commit_blocks": 12,
        "receipt_blocks": 4,
        "finality_blocks": 0,
        "verdict_commit_blocks": 4,
        "verdict_reveal_blocks": 4,
        "challenge_blocks": 4,
        "timeout_blocks": 10,
    } | schedule
    return TaskSpec(
        version=1,
        name="sort",
        base_policy=b"\x01" * 32,
        base_manifest=b"\x02" * 32,
        environment=Environment("sort", "{}", b"\x03" * 32),
        licence_data="Apache-2.0",
        licence_model="Apache-2.0",
        sampling=Sampling(1000, 8, (1,)),
        group_size=4,
        groups_per_round=8,
        slots_max=4,
        max_staleness=2,
        profile=ProofProfile(
            "p", "float32", 128, 32, 10, 1500, 1, 65_433, 1000, 100_000, 1, 1, 10_000, 20_000, 100, 20_000
        ),
        schedule=Schedule(**blocks),
        economics=Economics(10, 1, 1, 100, 100, 1000, 50, 1_000_000, 2),
        verifiers_per_round=1,
        trainer=trainer,
        token=token,
    )
