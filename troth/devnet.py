"""`troth devnet`: a local chain with the ledger's contracts on it, so that trying Troth needs nothing but pip.

Starts py-evm behind JSON-RPC (`contracts.devnet`), deploys the committed contracts and writes `deployment.json`. State is
in memory: stopping it ends the chain. The faucet gives money to anyone; none of it is worth anything.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Before eth_hash is imported for the first time: the C keccak is several times faster.
os.environ.setdefault("ETH_HASH_BACKEND", "pysha3")

from contracts.deploy import Deployment, deploy_contracts
from contracts.devnet.chain import DevChain
from contracts.devnet.methods import Methods
from contracts.devnet.server import DevnetServer
from contracts.jsonrpc import RpcError
from contracts.signing import Account
from protocol.errors import ConfigError

CHAIN_ID = 31_337
FAUCET_WEI = 10**27

#: Longest an epoch and its settlement may take on the devnet, in blocks.
UNBOND_BLOCKS = 1_000


class _InProcessRpc:
    """The chain before it has a port: every transaction is mined at once, so deployment takes no ticks."""

    def __init__(self, methods: Methods) -> None:
        self._methods = methods

    async def call(self, method: str, *params: Any) -> Any:
        result = self._methods.call(method, list(params))
        if method == "eth_sendRawTransaction":
            self._methods.mine()
        return result

    async def batch(self, requests: Sequence[tuple[str, Sequence[Any]]]) -> list[Any]:
        results: list[Any] = []
        for method, params in requests:
            try:
                results.append(await self.call(method, *params))
            except RpcError as error:
                results.append(error)
        return results


def _secret(seed: bytes, purpose: str) -> bytes:
    return hashlib.sha256(b"troth/devnet/" + purpose.encode() + b"/" + seed).digest()


async def start_devnet(
    host: str,
    port: int,
    block_seconds: float,
    directory: Path,
    *,
    chain_id: int = CHAIN_ID,
    seed: int = 0,
    unbond_blocks: int = UNBOND_BLOCKS,
) -> tuple[DevnetServer, Deployment]:
    """Start a devnet in this event loop; the caller stops it.

    Args:
        block_seconds: tick; 0 mines only when `server.methods.mine()` is called.
        directory: where `deployment.json` goes, atomically.
        seed: contract addresses and the faucet are functions of it.
        unbond_blocks: how long stake stays slashable; a task's epoch and settlement must fit in.

    Raises:
        ConfigError: when the port is taken or the directory cannot be used.
    """
    _make_directory(directory)
    seed_bytes = seed.to_bytes(8, "big")
    faucet, deployer = _secret(seed_bytes, "faucet"), _secret(seed_bytes, "deployer")
    addresses = [bytes.fromhex(Account.from_key(secret).address[2:]) for secret in (faucet, deployer)]
    chain = DevChain(chain_id, dict.fromkeys(addresses, FAUCET_WEI), seed_bytes)
    methods = Methods(chain, faucet)
    server = DevnetServer(methods, host, port, block_seconds)
    deployment = await deploy_contracts(_InProcessRpc(methods), deployer, unbond_blocks=unbond_blocks)
    methods.deployment = deployment.to_json()
    await server.start()
    write_deployment(directory / "deployment.json", deployment)
    return server, deployment


def _make_directory(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"directory {directory} cannot be used: {error.strerror}; choose another") from None


def write_deployment(path: Path, deployment: Deployment) -> None:
    """Write `deployment.json` so that a reader sees all of it or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(json.dumps(deployment.to_json(), indent=1) + "\n")
    temporary.replace(path)


def run_devnet(
    host: str,
    port: int,
    block_seconds: float,
    chain_id: int,
    directory: Path,
    seed: int,
    unbond_blocks: int = UNBOND_BLOCKS,
) -> None:
    """Run a devnet until the process is told to stop (SIGINT, SIGTERM by the caller's handler).

    Raises:
        ConfigError: when the port is taken.
    """

    async def run() -> None:
        server, _ = await start_devnet(
            host, port, block_seconds, directory, chain_id=chain_id, seed=seed, unbond_blocks=unbond_blocks
        )
        try:
            await server.run_forever()
        finally:
            await server.stop()

    asyncio.run(run())
