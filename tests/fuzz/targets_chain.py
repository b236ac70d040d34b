"""Harnesses of the chain's side: logs, views and reverts by the ABI, a node's JSON answers, the follower, the devnet's door."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from eth_abi.abi import encode as abi_encode

from contracts import answers
from contracts.abi import CONTRACTS, LedgerAbi
from contracts.deploy import Deployment
from contracts.devnet.chain import DevChain
from contracts.devnet.methods import Methods
from contracts.devnet.server import answer_bytes
from contracts.follower import Follower
from contracts.jsonrpc import HttpRpc, RpcError, Unreachable, decode_answer
from contracts.signing import Account
from protocol.codec import encode
from protocol.errors import ConfigError, Fault
from protocol.ledger.state import apply
from tests.fuzz.kit import Harness, Target, attempt
from tests.fuzz.targets_messages import make_task_spec

DEPLOYMENT = Deployment(31_337, 1, **{name: bytes([at + 1]) * 20 for at, name in enumerate(CONTRACTS)})


def run_now(coroutine: Any) -> Any:
    """Run a coroutine that waits for nothing."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("it waited")


def make_logs(abi: LedgerAbi, scratch: Path) -> list[dict[str, Any]]:
    """A log of every event, in the form a node gives them, with small values."""
    spec = encode(make_task_spec(scratch))
    shown = []
    order = sorted(abi._events.items(), key=lambda item: (item[1].kind.__name__ != "TaskPublished", item[0]))
    order.sort(key=lambda item: item[1].kind.__name__ != "ParticipantRegistered")
    for number, (topic, codec) in enumerate(order):
        topics, types, values = ["0x" + topic.hex()], [], []
        for name, kind, indexed in zip(codec.kind.__struct_fields__, codec.types, codec.indexed, strict=True):
            value: Any = {"address": "0x" + "07" * 20, "bytes32": b"\x11" * 32, "bytes": b"\x01\x02", "bool": True}.get(
                kind, 1
            )
            if name == "spec":
                value = spec
            if kind == "address[]":
                value = ["0x" + "07" * 20]
            if kind.startswith(("uint", "int")):
                value = 0 if name in ("version", "from_epoch") else 1
            if indexed:
                topics.append("0x" + abi_encode([kind], [value]).hex())
            else:
                types.append(kind)
                values.append(value)
        shown.append(
            {
                "address": "0x" + DEPLOYMENT.book.hex(),
                "blockNumber": hex(1 + number // 8),
                "logIndex": hex(number % 8),
                "blockHash": "0x" + bytes([number // 8]).hex() * 32,
                "topics": topics,
                "data": "0x" + abi_encode(types, values).hex(),
            }
        )
    return shown


def _log_data(scratch: Path) -> Target:
    """A log's data under a known topic: first byte the event, then the topics' words, then the data."""
    abi = LedgerAbi()
    logs = make_logs(abi, scratch)
    heads = [[bytes.fromhex(topic[2:]) for topic in log["topics"]] for log in logs]

    def fuzz(data: bytes) -> str:
        topics = heads[data[0] % len(heads)] if data else heads[0]
        count = len(topics) - 1
        words = [data[1 + 32 * i : 33 + 32 * i].ljust(32, b"\0") for i in range(count)]
        return attempt(Fault, lambda: abi.decode_event([topics[0], *words], data[1 + 32 * count :]))

    seeds = []
    for at, (log, topics) in enumerate(zip(logs, heads, strict=True)):
        seeds.append(bytes([at]) + b"".join(topics[1:]) + bytes.fromhex(log["data"][2:]))
    return Target(fuzz, seeds)


def _views(scratch: Path) -> Target:
    """What a view returns, and what a revert says."""
    abi = LedgerAbi()
    functions = sorted(abi._functions)
    selectors = sorted(abi._errors)

    def fuzz(data: bytes) -> str:
        at = data[0] if data else 0
        contract, function = functions[at % len(functions)]
        assert isinstance(abi.describe_error(selectors[at % len(selectors)] + data[1:]), str)
        assert isinstance(abi.describe_error(data), str)
        return attempt(Fault, lambda: abi.decode_result(contract, function, data[1:]))

    words = (5).to_bytes(32, "big")
    text = (32).to_bytes(32, "big") + (3).to_bytes(32, "big") + b"abc".ljust(32, b"\0")
    return Target(fuzz, [bytes([at]) + body for at in range(0, len(functions), 3) for body in (words * 8, text)])


def _json(data: bytes) -> Any:
    try:
        return decode_answer(data)
    except Unreachable:
        return None


def _node_answers(scratch: Path) -> Target:
    """A node's answers: first byte which, then JSON."""
    shown = {"number": "0x10", "hash": "0x" + "ab" * 32, "baseFeePerGas": "0x7"}
    receipt = {"blockNumber": "0x10", "blockHash": "0x" + "ab" * 32, "status": "0x1"}
    readers: list[tuple[Callable[[Any], Any], Any]] = [
        (answers.parse_head, shown),
        (answers.parse_block_hash, shown),
        (answers.parse_quantity, "0x12"),
        (answers.parse_receipt, receipt),
        (answers.parse_bytes, "0x1234"),
    ]

    def fuzz(data: bytes) -> str:
        read, _ = readers[data[0] % len(readers)] if data else readers[0]
        return attempt(Unreachable, lambda: read(_json(data[1:])))

    return Target(fuzz, [bytes([at]) + json.dumps(valid).encode() for at, (_, valid) in enumerate(readers)])


class _Canned(HttpRpc):
    """A node whose HTTP body is given."""

    def __init__(self, body: bytes) -> None:
        super().__init__("http://127.0.0.1:1")
        self._body = body

    async def _post(self, body: bytes) -> Any:
        return decode_answer(self._body)


def _rpc_body(scratch: Path) -> Target:
    """The body of a JSON-RPC response, to one request (even first byte) or a batch of two."""

    def fuzz(data: bytes) -> str:
        rpc = _Canned(data[1:])
        requests = [("eth_chainId", []), ("eth_blockNumber", [])][: 1 + data[0] % 2 if data else 1]

        def work() -> None:
            for answer in run_now(rpc.batch(requests)):
                if isinstance(answer, RpcError):
                    assert answer.revert_data is None or isinstance(answer.revert_data, bytes)

        return attempt(Unreachable, work)

    one = {"jsonrpc": "2.0", "id": 1, "result": "0x1"}
    two = {"jsonrpc": "2.0", "id": 2, "error": {"code": 3, "message": "reverted", "data": "0x08c379a0"}}
    return Target(fuzz, [b"\0" + json.dumps(one).encode(), b"\1" + json.dumps([one, two]).encode()])


class _Node:
    """A node that shows one head and the same logs for ever."""

    def __init__(self, logs: Any) -> None:
        self._logs = logs

    async def call(self, method: str, *params: Any) -> Any:
        return (await self.batch([(method, params)]))[0]

    async def batch(self, requests: Sequence[tuple[str, Sequence[Any]]]) -> list[Any]:
        head = {"number": "0x10", "hash": "0x" + "ab" * 32, "baseFeePerGas": "0x7"}
        return [self._logs if method == "eth_getLogs" else head for method, _ in requests]


@contextmanager
def quiet(name: str) -> Iterator[None]:
    """A logger that says nothing below critical for one input: other tests of the process read it."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def _follower(scratch: Path) -> Target:
    """Logs as JSON, from the node's answer into the replica."""
    abi = LedgerAbi()

    def fuzz(data: bytes) -> str:
        follower = Follower(_Node(_json(data)), abi, DEPLOYMENT, apply, 0)

        def work() -> None:
            run_now(follower.poll())
            assert follower.state.block_number <= 16

        with quiet("contracts.follower"):
            return attempt((Unreachable, Fault), work)

    logs = make_logs(abi, scratch)
    return Target(fuzz, [json.dumps(logs[:2]).encode(), json.dumps(logs[:6]).encode(), b"[]"])


def _devnet(scratch: Path) -> Target:
    """A request to the devnet: always a response, and never an internal error."""
    faucet = Account.from_key(b"\x01" * 32)
    chain = DevChain(31_337, {bytes.fromhex(faucet.address[2:]): 10**24}, b"fuzz")
    methods = Methods(chain, b"\x01" * 32)
    methods.mine()

    def fuzz(data: bytes) -> str:
        with quiet("contracts.devnet.server"):
            shown = msgspec.json.decode(answer_bytes(methods, data))
        rows = shown if isinstance(shown, list) else [shown]
        codes = [row["error"]["code"] for row in rows if "error" in row]
        assert -32603 not in codes, "internal error"
        return "accepted" if not codes else f"error {codes[0]}"

    address = "0x" + "07" * 20
    signed = faucet.sign_transaction(
        {
            "type": 2,
            "chainId": chain.chain_id,
            "nonce": 0,
            "to": bytes(20),
            "value": 1,
            "data": b"",
            "gas": 21_000,
            "maxFeePerGas": 10**10,
            "maxPriorityFeePerGas": 1,
        }
    )
    asked: list[tuple[str, list[Any]]] = [
        ("eth_chainId", []),
        ("eth_getBlockByNumber", ["latest", True]),
        ("eth_getBlockByHash", ["0x" + chain.head.hash.hex(), False]),
        ("eth_getBalance", [address, {"blockNumber": "0x0"}]),
        ("eth_getTransactionCount", [address, "pending"]),
        ("eth_feeHistory", ["0x2", "latest", [50]]),
        ("eth_call", [{"from": address, "to": address, "data": "0x1234", "value": "0x0", "gas": "0x5208"}, "latest"]),
        ("eth_estimateGas", [{"to": address}]),
        ("eth_sendRawTransaction", ["0x" + bytes(signed.raw_transaction).hex()]),
        ("eth_getTransactionByHash", ["0x" + "ab" * 32]),
        ("eth_getTransactionReceipt", ["0x" + "ab" * 32]),
        (
            "eth_getLogs",
            [{"fromBlock": "0x0", "toBlock": "latest", "address": [address], "topics": [None, ["0x" + "ab" * 32]]}],
        ),
        ("devnet_fund", [address, 5]),
        ("devnet_mint", [address, 5]),
        ("devnet_deployment", []),
        ("devnet_reorg", [1, True]),
    ]
    bodies = [{"jsonrpc": "2.0", "id": at, "method": name, "params": params} for at, (name, params) in enumerate(asked)]
    return Target(fuzz, [json.dumps(body).encode() for body in (*bodies[:-1], bodies[:3])])


def _deployment(scratch: Path) -> Target:
    """A deployment.json, from a file or from a devnet's answer."""
    path = scratch / "deployment.json"

    def fuzz(data: bytes) -> str:
        path.write_bytes(data)

        def work() -> None:
            loaded = Deployment.load(path)
            assert Deployment.from_json(loaded.to_json(), "itself") == loaded

        return attempt(ConfigError, work)

    return Target(fuzz, [json.dumps(DEPLOYMENT.to_json()).encode()])


HARNESSES = {
    "abi_log": Harness(_log_data, "words", share=60),
    "abi_result_and_error": Harness(_views, "words", share=40, bytes_max=1000),
    "node_answer": Harness(_node_answers, "tagged-json", share=40, bytes_max=2000),
    "rpc_body": Harness(_rpc_body, "tagged-json", share=40, bytes_max=4000),
    "ledger_logs": Harness(_follower, "json", share=20, bytes_max=40_000),
    "devnet_request": Harness(_devnet, "json", share=30, bytes_max=4000, rss_mb=1024, examples=40),
    "deployment_json": Harness(_deployment, "json", share=10, bytes_max=2000),
}
