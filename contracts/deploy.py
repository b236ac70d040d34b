"""Deploying the contracts, and the small file that says where they are.

Registry, court and task book name each other in constructors, so their addresses are computed from the deployer's nonces
beforehand (CREATE: keccak(rlp([sender, nonce]))). The deployer has no power afterwards. Neighbours: `contracts.client`
reads a `Deployment`, `troth.devnet` makes one.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import rlp
from eth_abi.abi import encode as abi_encode
from eth_utils.crypto import keccak

from contracts.abi import CONTRACTS
from contracts.artifacts import Artifact, load_artifact
from contracts.jsonrpc import Rpc, RpcError
from contracts.signing import Account
from protocol.errors import ConfigError, Fault

DEPLOYMENT_BYTES_MAX = 64 * 1024


class Deployment(msgspec.Struct, frozen=True):
    """Where a ledger lives. Addresses are 20 bytes, `block` is the first block that can hold its events."""

    chain_id: int
    block: int
    token: bytes
    beacons: bytes
    registry: bytes
    court: bytes
    book: bytes
    canaries: bytes

    def to_json(self) -> dict[str, Any]:
        """The form of `deployment.json`: addresses as 0x hex."""
        shown: dict[str, Any] = {"chain_id": self.chain_id, "block": self.block}
        return shown | {name: "0x" + getattr(self, name).hex() for name in CONTRACTS}

    @classmethod
    def from_json(cls, shown: Any, where: str) -> Deployment:
        """Parse the form of `to_json`.

        Raises:
            ConfigError: naming `where` it came from and the field that is wrong.
        """
        if not isinstance(shown, dict):
            raise ConfigError(f"{where} is not a deployment: expected a JSON object")
        values: dict[str, Any] = {}
        for name in ("chain_id", "block"):
            values[name] = shown.get(name)
            if not isinstance(values[name], int) or values[name] < 0:
                raise ConfigError(f"{where}: {name} is {values[name]!r}, expected a whole number")
        for name in CONTRACTS:
            try:
                values[name] = bytes.fromhex(shown[name].removeprefix("0x"))
            except (KeyError, AttributeError, ValueError):
                values[name] = b""
            if len(values[name]) != 20:
                raise ConfigError(f"{where}: {name} is {shown.get(name)!r}, expected an address of 20 bytes")
        return cls(**values)

    @classmethod
    def load(cls, path: Path) -> Deployment:
        """Read `deployment.json`.

        Raises:
            ConfigError: when it is missing or not one.
        """
        try:
            if path.stat().st_size > DEPLOYMENT_BYTES_MAX:
                raise ConfigError(f"{path} is longer than {DEPLOYMENT_BYTES_MAX} bytes: not a deployment file")
            return cls.from_json(json.loads(path.read_text()), str(path))
        except FileNotFoundError:
            raise ConfigError(f"no deployment file at {path}: start `troth devnet`, or name another") from None
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} cannot be read as a deployment: {error}") from None


def compute_create_address(sender: bytes, nonce: int) -> bytes:
    """Address of the contract that `sender` creates with its transaction `nonce`."""
    return bytes(keccak(rlp.encode([sender, nonce]))[12:])


async def deploy_contracts(
    rpc: Rpc, secret: bytes, *, unbond_blocks: int, token: bytes | None = None, timeout_s: float = 120.0
) -> Deployment:
    """Deploy the ledger and wait for every contract.

    Args:
        rpc: the node.
        secret: key of the deployer, which needs ether for gas and must not be used elsewhere meanwhile.
        unbond_blocks: how long stake stays slashable; bounds the length of epochs.
        token: an existing ERC-20 for stakes and escrow; None deploys `DevToken`, which anyone can mint.

    Raises:
        Fault: when a transaction fails or is not mined in time.
        ConfigError: when an artifact is missing.
    """
    deployer = Account.from_key(secret)
    sender = bytes.fromhex(deployer.address[2:])
    chain_id = int(await rpc.call("eth_chainId"), 16)
    first_block = int(await rpc.call("eth_blockNumber"), 16)
    first_nonce = int(await rpc.call("eth_getTransactionCount", deployer.address, "pending"), 16)
    names = [name for name in CONTRACTS if name != "token" or token is None]
    known: dict[str, Any] = {
        name: compute_create_address(sender, first_nonce + index) for index, name in enumerate(names)
    }
    if token is not None:
        known["token"] = token
    known["unbondBlocks"] = unbond_blocks
    for index, name in enumerate(names):
        artifact = load_artifact(CONTRACTS[name])
        code = artifact.bytecode + _constructor_arguments(artifact, known)
        await _create(rpc, deployer, chain_id, first_nonce + index, code, CONTRACTS[name], timeout_s)
    return Deployment(chain_id, first_block, *(known[name] for name in CONTRACTS))


def _constructor_arguments(artifact: Artifact, known: dict[str, Any]) -> bytes:
    """Encode a constructor's arguments by their names in the source (`court_` is the court's address)."""
    constructors = [entry for entry in artifact.abi if entry["type"] == "constructor"]
    inputs = constructors[0]["inputs"] if constructors else []
    names = [entry["name"].strip("_") for entry in inputs]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise Fault(f"constructor of {artifact.name} wants {', '.join(unknown)}: update deploy.py")
    return bytes(abi_encode([entry["type"] for entry in inputs], [known[name] for name in names]))


async def _create(rpc: Rpc, deployer: Any, chain_id: int, nonce: int, code: bytes, name: str, timeout_s: float) -> None:
    try:
        gas = int(await rpc.call("eth_estimateGas", {"from": deployer.address, "data": "0x" + code.hex()}), 16)
        tip = int(await rpc.call("eth_maxPriorityFeePerGas"), 16)
        block = await rpc.call("eth_getBlockByNumber", "latest", False)
        signed = deployer.sign_transaction(
            {
                "type": 2,
                "chainId": chain_id,
                "nonce": nonce,
                "to": "",
                "value": 0,
                "data": code,
                "gas": gas,
                "maxFeePerGas": 2 * int(block["baseFeePerGas"], 16) + tip,
                "maxPriorityFeePerGas": tip,
            }
        )
        tx_hash = await rpc.call("eth_sendRawTransaction", "0x" + bytes(signed.raw_transaction).hex())
    except RpcError as error:
        raise Fault(f"{name} cannot be deployed: {error.message} {error.data or ''}") from None
    async with asyncio.timeout(timeout_s):
        while (receipt := await rpc.call("eth_getTransactionReceipt", tx_hash)) is None:
            await asyncio.sleep(0.2)
    if int(receipt["status"], 16) != 1:
        raise Fault(f"the constructor of {name} failed in transaction {tx_hash}")
