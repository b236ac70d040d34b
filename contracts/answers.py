"""A node's answers in typed form. A malformed one is `Unreachable`: it says nothing about the chain, so nothing follows.

Neighbours: `contracts.follower` reads blocks and logs, `contracts.sender` receipts and numbers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from contracts.abi import LOG_DATA_BYTES_MAX
from contracts.jsonrpc import RpcError, Unreachable

LOG_TOPICS_MAX = 4


class Head(NamedTuple):
    """The node's newest block."""

    number: int
    hash: bytes
    base_fee: int


class Receipt(NamedTuple):
    """Where a transaction was included, and whether it succeeded."""

    block_number: int
    block_hash: bytes
    succeeded: bool


class RawLog(NamedTuple):
    """A log of one of our contracts, not yet decoded."""

    block: int
    log_index: int
    block_hash: bytes
    topics: list[bytes]
    data: bytes


def parse_logs(logs: Any, addresses: set[bytes], last: int) -> list[RawLog]:
    """Logs of our addresses up to block `last`, in chain order. Everything else is dropped."""
    try:
        parsed = []
        for item in logs:
            if bytes.fromhex(item["address"][2:]) not in addresses or item.get("removed"):
                continue
            block = int(item["blockNumber"], 16)
            if block > last:
                continue
            if len(item["data"]) > 2 + 2 * LOG_DATA_BYTES_MAX or len(item["topics"]) > LOG_TOPICS_MAX:
                raise ValueError("a log of our contracts is longer than any they emit")
            topics = [bytes.fromhex(topic[2:]) for topic in item["topics"]]
            if any(len(topic) != 32 for topic in topics):
                raise ValueError("a topic is not 32 bytes")
            parsed.append(
                RawLog(
                    block,
                    int(item["logIndex"], 16),
                    bytes.fromhex(item["blockHash"][2:]),
                    topics,
                    bytes.fromhex(item["data"][2:]),
                )
            )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise Unreachable(f"the node's logs are malformed: {error}") from None
    return sorted(parsed, key=lambda item: (item.block, item.log_index))


def parse_head(block: Any) -> Head:
    try:
        return Head(
            int(block["number"], 16), bytes.fromhex(block["hash"][2:]), int(block.get("baseFeePerGas", "0x0"), 16)
        )
    except (KeyError, TypeError, ValueError, AttributeError):
        raise Unreachable(f"the node's newest block is malformed: {str(block)[:100]}") from None


def parse_block_hash(block: Any) -> bytes | None:
    """Hash of a block; None when the node has none of this number (its chain is shorter now)."""
    if block is None:
        return None
    try:
        return bytes.fromhex(block["hash"][2:])
    except (KeyError, TypeError, ValueError):
        raise Unreachable(f"the node's block is malformed: {str(block)[:100]}") from None


def parse_quantity(answer: Any) -> int:
    """A number in a node's answer. Raises `Unreachable` when there is none."""
    if isinstance(answer, RpcError):
        raise Unreachable(answer.message)
    try:
        return int(answer, 16)
    except (TypeError, ValueError):
        raise Unreachable(f"expected a number, the node answered {str(answer)[:64]!r}") from None


def parse_receipt(answer: Any) -> Receipt | None:
    """A receipt, None when the transaction is in no block. Raises `Unreachable` when the node does not say."""
    if isinstance(answer, RpcError):
        raise Unreachable(f"the node does not give receipts: {answer.message}")
    if answer is None or (isinstance(answer, dict) and answer.get("blockNumber") is None):
        return None
    try:
        return Receipt(
            int(answer["blockNumber"], 16), bytes.fromhex(answer["blockHash"][2:]), int(answer["status"], 16) == 1
        )
    except (KeyError, TypeError, ValueError):
        raise Unreachable(f"the node's receipt is malformed: {str(answer)[:100]}") from None


def parse_bytes(answer: Any) -> bytes:
    """Bytes in a node's answer, 0x hex. Raises `Unreachable` when there are none."""
    try:
        return bytes.fromhex(answer[2:])
    except (TypeError, ValueError):
        raise Unreachable(f"expected 0x hex, the node answered {str(answer)[:64]!r}") from None
