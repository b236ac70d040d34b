"""Pending transactions of the devnet: bounded, in nonce order per sender and in order of arrival between senders.

A replacement under one nonce must raise both fees by a tenth, as in go-ethereum. Error texts are go-ethereum's, because
clients recognise them. Neighbours: `contracts.devnet.chain` validates against the chain's state and takes from here.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Any, NamedTuple

from contracts.jsonrpc import RpcError

#: Most pending transactions, in all and of one sender.
POOL_MAX = 4096
SENDER_MAX = 256

#: A replacement raises both fees by at least this many percent.
REPLACEMENT_PERCENT = 10


class PendingTx(NamedTuple):
    """A decoded transaction that waits for a block; `arrival` orders senders among each other."""

    tx: Any
    hash: bytes
    sender: bytes
    nonce: int
    fee_cap: int
    tip_cap: int
    arrival: int


class Mempool:
    """Pending transactions by sender and nonce."""

    def __init__(self) -> None:
        self._by_sender: dict[bytes, dict[int, PendingTx]] = {}
        self._by_hash: dict[bytes, PendingTx] = {}
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._by_hash)

    def get(self, tx_hash: bytes) -> PendingTx | None:
        """The pending transaction of this hash."""
        return self._by_hash.get(tx_hash)

    def add(self, tx: Any, sender: bytes, fee_cap: int, tip_cap: int) -> None:
        """Add a transaction or replace one of the same nonce.

        Raises:
            RpcError: when it is known, underpriced as a replacement, or the pool is full.
        """
        tx_hash = bytes(tx.hash)
        if tx_hash in self._by_hash:
            raise RpcError(-32000, "already known")
        queue = self._by_sender.setdefault(sender, {})
        old = queue.get(tx.nonce)
        if old is not None:
            factor = 100 + REPLACEMENT_PERCENT
            if fee_cap * 100 < old.fee_cap * factor or tip_cap * 100 < old.tip_cap * factor:
                raise RpcError(-32000, "replacement transaction underpriced")
            del self._by_hash[old.hash]
        elif len(self._by_hash) >= POOL_MAX or len(queue) >= SENDER_MAX:
            raise RpcError(-32000, f"txpool is full: limits are {POOL_MAX} in all, {SENDER_MAX} of one sender")
        self._arrivals += 1
        entry = PendingTx(tx, tx_hash, sender, tx.nonce, fee_cap, tip_cap, self._arrivals)
        queue[tx.nonce] = entry
        self._by_hash[tx_hash] = entry

    def remove(self, entry: PendingTx) -> None:
        """Drop one transaction."""
        self._by_hash.pop(entry.hash, None)
        queue = self._by_sender.get(entry.sender, {})
        if queue.get(entry.nonce) is entry:
            del queue[entry.nonce]
        if not queue:
            self._by_sender.pop(entry.sender, None)

    def next_nonce(self, sender: bytes, chain_nonce: int) -> int:
        """The first nonce that neither the chain nor a gapless run of pending transactions has used."""
        queue = self._by_sender.get(sender, {})
        while chain_nonce in queue:
            chain_nonce += 1
        return chain_nonce

    def drop_below(self, sender: bytes, chain_nonce: int) -> None:
        """Forget transactions whose nonce the chain has passed."""
        for entry in [e for e in self._by_sender.get(sender, {}).values() if e.nonce < chain_nonce]:
            self.remove(entry)

    def ready(self, nonces: dict[bytes, int]) -> Iterator[PendingTx]:
        """Yield executable transactions: by arrival between senders, by nonce within one.

        `nonces` holds each sender's next nonce; the caller raises it when it includes a transaction, and a sender whose
        nonce was not raised yields nothing more.
        """
        heads = [
            (self._by_sender[sender][nonce].arrival, sender)
            for sender, nonce in nonces.items()
            if nonce in self._by_sender.get(sender, {})
        ]
        heapq.heapify(heads)
        while heads:
            _, sender = heapq.heappop(heads)
            nonce = nonces[sender]
            yield self._by_sender[sender][nonce]
            following = self._by_sender.get(sender, {}).get(nonces[sender])
            if following is not None and nonces[sender] > nonce:
                heapq.heappush(heads, (following.arrival, sender))

    def senders(self) -> list[bytes]:
        """Everyone with a pending transaction."""
        return list(self._by_sender)
