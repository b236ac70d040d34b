"""Following the chain: logs of the contracts, in order, folded into the replica, and rewound when blocks are orphaned.

Each poll is one batch: the newest block, the block of the cursor, and the logs after it. The cursor is a block number
with its hash; when the chain shows another hash there, the replica is rebuilt from the block of deployment, which is
simple and right. Only logs of the contracts' addresses are read. Neighbours: `contracts.jsonrpc`, `contracts.abi`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from contracts.abi import CONTRACTS, LedgerAbi
from contracts.answers import Head, RawLog, parse_block_hash, parse_head, parse_logs
from contracts.deploy import Deployment
from contracts.jsonrpc import Rpc, RpcError, Unreachable
from protocol.errors import Fault
from protocol.ledger.events import Logged
from protocol.ledger.state import LedgerState

log = logging.getLogger(__name__)

#: Blocks asked for in one eth_getLogs; halved when a node finds it too much.
RANGE_BLOCKS_MAX = 2_000


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
        self._addresses = {getattr(deployment, name) for name in CONTRACTS if name != "token"}
        self._range = RANGE_BLOCKS_MAX
        #: Hash of each block whose events were handed out, to tell new from known after a rewind.
        self._handed_out: dict[int, bytes] = {}
        #: Folded events that no poll has returned yet: a poll that fails half-way loses none.
        self._new: list[Logged] = []
        self.head: Head | None = None
        #: How often the replica was rebuilt because its last block was orphaned.
        self.rewinds = 0
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
        head = parse_head(answers[0])
        first_look, self.head = self.head is None, head
        if self._cursor_hash is not None:
            shown_hash = parse_block_hash(answers[-1])
            if shown_hash is None:
                return False  # this node is behind us; nothing can be said about our block
            if shown_hash != self._cursor_hash:
                log.warning("block %d was orphaned: rebuilding the replica from block %d", self.cursor, self._first)
                self._reset()
                self.rewinds += 1
                return True
        if first_look:
            return True
        logs = answers[1]
        target = min(head.number - self._depth, last)
        if target <= self.cursor:
            return False
        if isinstance(logs, RpcError):
            return self._shrink(logs)
        target_hash = head.hash if target == head.number else parse_block_hash(await self._block(target))
        self._fold(parse_logs(logs, self._addresses, target), target, target_hash)
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

    def _fold(self, logs: list[RawLog], target: int, target_hash: bytes | None) -> None:
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
