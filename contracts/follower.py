"""Following the chain: logs of the contracts, in order, folded into the replica, and rewound when blocks are orphaned.

Each poll is one batch: the newest block, the block of the cursor, and the logs after it. The cursor is a block number
with its hash; when the chain shows another hash there, the replica is rebuilt from the block of deployment, which is
simple and right. Only logs of the contracts' addresses are read. Neighbours: `contracts.jsonrpc`, `contracts.abi`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

from contracts.abi import LOG_DATA_BYTES_MAX, LedgerAbi
from contracts.deploy import Deployment
from contracts.jsonrpc import Rpc, RpcError, Unreachable
from protocol.errors import Fault
from protocol.ledger.events import Logged
from protocol.ledger.state import LedgerState

log = logging.getLogger(__name__)

#: Blocks asked for in one eth_getLogs; halved when a node finds it too much.
RANGE_BLOCKS_MAX = 2_000

LOG_TOPICS_MAX = 4


class Head(NamedTuple):
    """The node's newest block."""

    number: int
    hash: bytes
    base_fee: int


class Follower:
    """The replica of one ledger.

    Args:
        rpc: the node.
        abi: decoder of logs.
        deployment: addresses that are listened to, and the first block.
        apply: reducer of the replica (`protocol.ledger.state.apply`).
        finality_depth: blocks on top of a block before its events count.
    """

    def __init__(
        self,
        rpc: Rpc,
        abi: LedgerAbi,
        deployment: Deployment,
        apply: Callable[[LedgerState, Logged], None],
        finality_depth: int,
    ) -> None:
        self._rpc = rpc
        self._abi = abi
        self._apply = apply
        self._depth = finality_depth
        self._first = deployment.block
        self._addresses = {deployment.beacons, deployment.registry, deployment.court, deployment.book}
        self._range = RANGE_BLOCKS_MAX
        #: Hash of each block whose events were handed out, to tell new from known after a rewind.
        self._handed_out: dict[int, bytes] = {}
        #: Folded events that no poll has returned yet: a poll that fails half-way loses none.
        self._new: list[Logged] = []
        self.head: Head | None = None
        self._reset()

    def _reset(self) -> None:
        self.state = LedgerState()
        self.cursor = self._first - 1
        self._cursor_hash: bytes | None = None

    async def poll(self) -> list[Logged]:
        """Advance to the head minus the finality depth; returns the events that were not handed out before.

        Raises:
            Unreachable: no usable answer; nothing has changed.
            Fault: the node showed something that no honest node can show; the replica is rebuilt by the next poll.
        """
        while await self._step():
            pass
        new, self._new = self._new, []
        return new

    async def _step(self) -> bool:
        """One batch. Returns whether there is more to fetch at once."""
        first = self.cursor + 1
        known_head = self.head.number if self.head else first
        last = first + self._range - 1
        query = {
            "address": ["0x" + address.hex() for address in sorted(self._addresses)],
            "fromBlock": hex(first),
            "toBlock": hex(last) if last < known_head else "latest",
        }
        requests: list[tuple[str, list[Any]]] = [("eth_getBlockByNumber", ["latest", False])]
        if self.head is not None:
            requests.append(("eth_getLogs", [query]))
        if self._cursor_hash is not None:
            requests.append(("eth_getBlockByNumber", [hex(self.cursor), False]))
        answers = await self._rpc.batch(requests)
        head = _parse_head(answers[0])
        first_look, self.head = self.head is None, head
        if self._cursor_hash is not None:
            shown_hash = _block_hash(answers[-1])
            if shown_hash is None:
                return False  # this node is behind us; nothing can be said about our block
            if shown_hash != self._cursor_hash:
                log.warning("block %d was orphaned: rebuilding the replica from block %d", self.cursor, self._first)
                self._reset()
                return True
        if first_look:
            return True
        logs = answers[1]
        target = min(head.number - self._depth, last)
        if target <= self.cursor:
            return False
        if isinstance(logs, RpcError):
            return self._shrink(logs)
        target_hash = head.hash if target == head.number else _block_hash(await self._block(target))
        self._fold(_parse_logs(logs, self._addresses, target), target, target_hash)
        self._range = min(RANGE_BLOCKS_MAX, self._range * 2)
        return target < head.number - self._depth

    async def _block(self, number: int) -> Any:
        return (await self._rpc.batch([("eth_getBlockByNumber", [hex(number), False])]))[0]

    def _shrink(self, error: RpcError) -> bool:
        """A node refused the range: ask for less next time."""
        if self._range == 1:
            raise Unreachable(f"the node does not give logs of block {self.cursor + 1}: {error.message}")
        self._range = max(1, self._range // 2)
        return True

    def _fold(self, logs: list[_RawLog], target: int, target_hash: bytes | None) -> None:
        if target_hash is None or any(item.block == target and item.block_hash != target_hash for item in logs):
            raise Unreachable(f"block {target} changed while it was read")
        new: list[Logged] = []
        try:
            for item in logs:
                event = self._abi.decode_event(item.topics, item.data)
                if event is None:
                    continue
                logged = Logged(item.block, item.log_index, event)
                self._apply(self.state, logged)
                if self._handed_out.get(item.block) != item.block_hash:
                    new.append(logged)
        except Exception as error:
            self._reset()
            if isinstance(error, Fault):
                raise
            raise Fault(f"the node's events do not form a ledger: {type(error).__name__}: {error}") from error
        self._new += new
        self._handed_out.update((item.block, item.block_hash) for item in logs)
        self.state.block_number = self.cursor = target
        self._cursor_hash = target_hash


class _RawLog(NamedTuple):
    block: int
    log_index: int
    block_hash: bytes
    topics: list[bytes]
    data: bytes


def _parse_logs(logs: Any, addresses: set[bytes], last: int) -> list[_RawLog]:
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
                _RawLog(
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


def _parse_head(block: Any) -> Head:
    try:
        return Head(
            int(block["number"], 16), bytes.fromhex(block["hash"][2:]), int(block.get("baseFeePerGas", "0x0"), 16)
        )
    except (KeyError, TypeError, ValueError, AttributeError):
        raise Unreachable(f"the node's newest block is malformed: {str(block)[:100]}") from None


def _block_hash(block: Any) -> bytes | None:
    """Hash of a block; None when the node has none of this number (its chain is shorter now)."""
    if block is None:
        return None
    try:
        return bytes.fromhex(block["hash"][2:])
    except (KeyError, TypeError, ValueError):
        raise Unreachable(f"the node's block is malformed: {str(block)[:100]}") from None
