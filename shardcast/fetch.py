"""Downloading a manifest's shards from many peers at once.

Each shard comes whole from one peer, so blame is exact: wrong bytes ban their sender, silence and broken promises strike
it (it is asked again after a growing pause). Peers pull work as fast as they deliver, the rarest shard first; when only
slow peers are left holding shards, an idle peer is asked for the same shard and the first verified copy wins.
A shard counts, and is served to others, only after its hash was checked and it is durable.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from protocol.errors import Fault, Ignore, Reject, TrothError
from shardcast import wire
from shardcast.client import Address
from shardcast.content import NotFound
from shardcast.manifest import Manifest
from shardcast.store import ShardStore

#: Shards asked of one peer at once, so that its link stays full between two shards.
LANES = 2
BITMAP_INTERVAL_S = 1.0
#: A download that takes longer than this says how far it is, this often.
PROGRESS_INTERVAL_S = 5.0
PAUSE_S_MIN = 0.25
PAUSE_S_MAX = 15.0
#: A peer that delivers a shard more slowly than this is struck.
RATE_BYTES_PER_S_MIN = 64 << 10
_IDLE_S = 0.1
#: How many shards are compared to find a rare one.
_SAMPLE = 64
_DUPLICATE_AFTER_S_MIN = 0.5
_MISSING_LISTED_MAX = 8


class Link(Protocol):
    """What a fetch needs of a connection; `shardcast.client.Connection` is one."""

    async def bitmap(self, manifest_hash: bytes, num_shards: int) -> bytes: ...
    async def download(self, space: int, key: bytes, *, size: int | None = None, size_max: int) -> bytearray: ...


@dataclass
class _Source:
    """One peer as this fetch sees it."""

    address: Address
    bits: bytes = b""
    lacks: set[int] = field(default_factory=set)
    banned: bool = False
    strikes: int = 0
    retry_at: float = 0.0
    shard_s: float = 0.0
    last_error: str = "no answer yet"
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def has(self, index: int) -> bool:
        byte = index >> 3
        return not self.banned and byte < len(self.bits) and bool(self.bits[byte] >> (index & 7) & 1)

    def offers(self, index: int) -> bool:
        return self.has(index) and index not in self.lacks


class _Pool:
    """A set of shard numbers with O(1) removal and sampling."""

    def __init__(self, items: Iterable[int]) -> None:
        self._items = list(items)
        self._places = {item: place for place, item in enumerate(self._items)}

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, item: object) -> bool:
        return item in self._places

    def add(self, item: int) -> None:
        if item not in self._places:
            self._places[item] = len(self._items)
            self._items.append(item)

    def discard(self, item: int) -> None:
        place = self._places.pop(item, None)
        if place is not None:
            last = self._items.pop()
            if last != item:
                self._items[place] = last
                self._places[last] = place

    def sample(self, rng: random.Random, count: int) -> list[int]:
        return rng.sample(self._items, min(count, len(self._items)))

    def items(self) -> Sequence[int]:
        return self._items


class Fetch:
    """One download; use it once.

    Args:
        manifest: verified; its hash names it to peers.
        store: where shards go.
        addresses: peers to ask.
        link: returns the connection to an address.
        timeout_s: gives up when no shard was verified for so long.
        request_timeout_s: a chunk has to arrive within this.
        metrics: counters to add to.
        on_event: event sink.
        on_ban: called with the address of a peer that sent wrong bytes.
    """

    def __init__(
        self,
        manifest: Manifest,
        store: ShardStore,
        addresses: Sequence[Address],
        link: Callable[[Address], Link],
        *,
        timeout_s: float,
        request_timeout_s: float,
        metrics: Counter[str],
        on_event: Callable[[str, dict[str, Any]], None],
        on_ban: Callable[[Address], None],
    ) -> None:
        self.manifest = manifest
        self._store, self._link = store, link
        self._timeout_s, self._request_timeout_s = timeout_s, request_timeout_s
        self._metrics, self._on_event, self._on_ban = metrics, on_event, on_ban
        self._sources = [_Source(address) for address in dict.fromkeys(addresses)]
        self._digests = list(manifest.shards)
        self._todo = _Pool(i for i, digest in enumerate(self._digests) if not store.has(digest))
        #: Shards under way: who is asked, since when, and the task that waits for it.
        self._under_way: dict[int, dict[int, tuple[float, asyncio.Task[bytearray]]]] = {}
        self._wake = asyncio.Event()
        self._superseded_by: int | None = None
        self._bytes_kept = 0
        self._progress_at = self._reported_at = time.monotonic()
        # Which shards are asked first must differ between nodes, or all of them drain the origin in one order.
        self._rng = random.Random()

    def supersede(self, version: int) -> None:
        """Stop: a newer version is being fetched."""
        self._superseded_by = version
        self._wake.set()

    async def run(self) -> None:
        """Fetch until every shard is in the store.

        Raises:
            Ignore: superseded by a newer version; what was fetched stays.
            Fault: nobody delivered anything for `timeout_s`, every peer is banned, or our disk failed.
        """
        with self._store.pin(self._digests):
            try:
                async with asyncio.TaskGroup() as group:
                    jobs: list[Coroutine[Any, Any, None]] = []
                    for source in self._sources:
                        jobs += [self._poll(source), *(self._lane(source) for _ in range(LANES))]
                    tasks = [group.create_task(job) for job in jobs]
                    await self._watch()
                    for task in tasks:
                        task.cancel()
            except BaseExceptionGroup as errors:
                raise errors.exceptions[0] from None
        fields = {"version": self.manifest.version, "shards": len(self._digests), "bytes": self._bytes_kept}
        self._on_event("fetched", fields)

    @property
    def _complete(self) -> bool:
        return not self._todo and not self._under_way

    async def _watch(self) -> None:
        while not self._complete:
            if self._superseded_by is not None:
                raise Ignore(f"fetch of version {self.manifest.version} stopped for version {self._superseded_by}")
            left_s = self._progress_at + self._timeout_s - time.monotonic()
            if left_s <= 0 or all(source.banned for source in self._sources):
                raise self._failure()
            self._wake.clear()
            try:
                async with asyncio.timeout(left_s):
                    await self._wake.wait()
            except TimeoutError:
                continue

    def _failure(self) -> Fault:
        missing = self._store.missing(self.manifest)
        listed = ", ".join(digest.hex()[:16] for digest in missing[:_MISSING_LISTED_MAX])
        peers = "; ".join(
            f"{source.address.endpoint}: {'banned, ' if source.banned else ''}{source.last_error}"
            for source in self._sources
        )
        more = ", ..." if len(missing) > _MISSING_LISTED_MAX else ""
        return Fault(
            f"version {self.manifest.version} misses {len(missing)} of {len(self._digests)} shards ({listed}{more}) after "
            f"{self._timeout_s} s without progress; peers: {peers or 'none given'}; retry, or give other peers"
        )

    # One peer

    async def _poll(self, source: _Source) -> None:
        """Keep the peer's bitmap fresh."""
        while not source.banned:
            await self._pause(source)
            try:
                bits = await self._link(source.address).bitmap(self.manifest.hash, len(self._digests))
                if bits != source.bits:
                    source.bits = bits
                    source.lacks = {index for index in source.lacks if source.has(index)}
                    source.news.set()
            except TrothError as error:
                self._blame(source, error)
            await asyncio.sleep(BITMAP_INTERVAL_S)

    async def _pause(self, source: _Source) -> None:
        while (wait_s := source.retry_at - time.monotonic()) > 0:
            await asyncio.sleep(wait_s)

    async def _lane(self, source: _Source) -> None:
        while not source.banned:
            await self._pause(source)
            index = self._pick(source)
            if index is None:
                source.news.clear()
                try:
                    async with asyncio.timeout(_IDLE_S):
                        await source.news.wait()
                except TimeoutError:
                    pass
                continue
            await self._fetch_shard(source, index)

    def _pick(self, source: _Source) -> int | None:
        offered = [index for index in self._todo.sample(self._rng, _SAMPLE) if source.offers(index)]
        if not offered and len(self._todo) > _SAMPLE:
            offered = [index for index in self._todo.items() if source.offers(index)][:_SAMPLE]
        if offered:
            return min(offered, key=lambda index: sum(other.has(index) for other in self._sources))
        return self._pick_duplicate(source)

    def _pick_duplicate(self, source: _Source) -> int | None:
        """The oldest shard that one other peer has had for longer than this peer would need."""
        oldest, picked = time.monotonic() - max(_DUPLICATE_AFTER_S_MIN, 2 * source.shard_s), None
        for index, copies in self._under_way.items():
            if len(copies) == 1 and id(source) not in copies and source.offers(index):
                [(started, _)] = copies.values()
                if started < oldest:
                    oldest, picked = started, index
        return picked

    async def _fetch_shard(self, source: _Source, index: int) -> None:
        digest = self._digests[index]
        started = time.monotonic()
        task = asyncio.create_task(self._download(source, digest))
        self._todo.discard(index)
        self._under_way.setdefault(index, {})[id(source)] = (started, task)
        try:
            await asyncio.wait({task})
            if task.cancelled():
                return  # another peer was faster
            data = task.result()
            await self._keep(source, index, data)
            source.strikes = 0
            source.shard_s = time.monotonic() - started
        except NotFound as error:
            source.lacks.add(index)
            self._blame(source, Fault(f"has shard {digest.hex()[:16]} on its bitmap but does not serve it: {error}"))
        except TrothError as error:
            if isinstance(error, _OwnFault):
                raise error.fault from None
            self._blame(source, error)
        finally:
            task.cancel()
            self._settle(source, index)

    async def _download(self, source: _Source, digest: bytes) -> bytearray:
        size = self.manifest.shards[digest]
        try:
            async with asyncio.timeout(self._request_timeout_s + size / RATE_BYTES_PER_S_MIN):
                return await self._link(source.address).download(wire.SPACE_CONTENT, digest, size=size, size_max=size)
        except TimeoutError:
            raise wire.PeerTimeout(f"delivers less than {RATE_BYTES_PER_S_MIN} bytes/s") from None

    async def _keep(self, source: _Source, index: int, data: bytearray) -> None:
        try:
            await asyncio.to_thread(self._store.put, data, self._digests[index])
        except Reject:
            self._metrics["verify_failures"] += 1
            self._metrics["bytes_wasted"] += len(data)
            raise
        except Fault as fault:
            raise _OwnFault(fault) from fault
        self._metrics["shards_fetched"] += 1
        self._bytes_kept += len(data)
        self._progress_at = time.monotonic()
        self._report()
        for _, loser in self._under_way.get(index, {}).values():
            loser.cancel()

    def _report(self) -> None:
        """Say how far it is, now and then."""
        if self._progress_at - self._reported_at < PROGRESS_INTERVAL_S:
            return
        self._reported_at = self._progress_at
        left = sum(self.manifest.shards[digest] for digest in self._store.missing(self.manifest))
        total = sum(self.manifest.shards.values())
        fields = {"version": self.manifest.version, "bytes_done": total - left, "bytes_total": total}
        self._on_event("fetching", fields)

    def _settle(self, source: _Source, index: int) -> None:
        copies = self._under_way[index]
        del copies[id(source)]
        if not copies:
            del self._under_way[index]
            if not self._store.has(self._digests[index]):
                self._todo.add(index)
        self._wake.set()

    def _blame(self, source: _Source, error: TrothError) -> None:
        source.last_error = str(error)
        fields = {"peer": source.address.curve_key.hex(), "endpoint": source.address.endpoint, "why": str(error)}
        if isinstance(error, Reject):
            source.banned = True
            self._metrics["peers_banned"] += 1
            self._on_ban(source.address)
            self._on_event("banned", fields)
            self._wake.set()
            return
        if isinstance(error, NotFound):  # it does not know the manifest yet: no promise was broken
            return
        source.strikes += 1
        pause_s = min(PAUSE_S_MAX, PAUSE_S_MIN * 2 ** min(source.strikes, 10))
        source.retry_at = time.monotonic() + pause_s * self._rng.uniform(0.5, 1.0)
        self._metrics["strikes"] += 1
        self._on_event("strike", fields)


class _OwnFault(TrothError):
    """Our disk failed while a shard was stored: nobody else is to blame."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        super().__init__(str(fault))
