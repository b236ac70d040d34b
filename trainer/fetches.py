"""Background downloads of the trainer: bundles and policies, bounded in number, tried again after a `Fault`.

No step waits for the network: `step` starts what is wanted and takes what has come. Neighbour: trainer.intake.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Generic, TypeVar

from protocol.errors import Fault, Ignore, Reject

#: Downloads of one kind at the same time.
FETCHES_MAX = 8

K = TypeVar("K")
V = TypeVar("V")


class Fetches(Generic[K, V]):
    """Downloads by key.

    Args:
        fetch: the download of a key.
        describe: a key in words.
        events: operator events.

    Attributes:
        arrived: what came and was not discarded.
    """

    def __init__(
        self,
        fetch: Callable[[K], Awaitable[V]],
        *,
        describe: Callable[[K], str],
        events: Callable[[str, dict[str, Any]], None],
    ) -> None:
        self._fetch = fetch
        self._describe = describe
        self._events = events
        self._running: dict[K, asyncio.Future[V]] = {}
        self._retry_block: dict[K, int] = {}
        self.arrived: dict[K, V] = {}

    def step(self, wanted: Iterable[K], block_number: int) -> None:
        """Take what has come, start what is `wanted` and neither here nor running; a failed one again in the next block."""
        for key in [key for key, running in self._running.items() if running.done()]:
            try:
                self.arrived[key] = self._running.pop(key).result()
            except (Fault, Reject, Ignore) as error:
                self._retry_block[key] = block_number + 1
                self._events("fetch_failed", {"what": self._describe(key), "text": str(error)})
        for key in wanted:
            if len(self._running) >= FETCHES_MAX:
                return
            if key not in self.arrived and key not in self._running and self._retry_block.get(key, 0) <= block_number:
                self._running[key] = asyncio.ensure_future(self._fetch(key))

    def discard(self, key: K) -> None:
        """Forget a key and stop its download."""
        self.arrived.pop(key, None)
        self._retry_block.pop(key, None)
        running = self._running.pop(key, None)
        if running is not None:
            running.cancel()

    def keep(self, keys: Iterable[K]) -> None:
        """Discard everything but `keys`."""
        kept = set(keys)
        for key in (set(self.arrived) | set(self._running) | set(self._retry_block)) - kept:
            self.discard(key)

    async def close(self) -> None:
        """Stop all downloads."""
        running = list(self._running.values())
        self.keep(())
        await asyncio.gather(*running, return_exceptions=True)
