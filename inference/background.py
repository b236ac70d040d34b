"""Network work that must not hold up a step: one asyncio task per key, owned, bounded, never forgotten.

A job handles the errors it expects. An error it does not expect is a bug and is raised in the owner's next step.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable

#: Most jobs at once; a job beyond it is simply not started and asked for again in a later step.
JOBS_MAX = 8


class Background:
    """A worker's running jobs."""

    def __init__(self) -> None:
        self._jobs: dict[Hashable, asyncio.Task[None]] = {}

    def start(self, key: Hashable, make: Callable[[], Coroutine[object, object, None]]) -> bool:
        """Start the job named `key` unless it is running or too many are; returns whether it was started."""
        if key in self._jobs or len(self._jobs) >= JOBS_MAX:
            return False
        self._jobs[key] = asyncio.create_task(make())
        return True

    def reap(self) -> None:
        """Forget finished jobs; raises what one of them raised."""
        for key in [key for key, job in self._jobs.items() if job.done()]:
            self._jobs.pop(key).result()

    async def close(self) -> None:
        """Cancel what runs and wait for it."""
        jobs, self._jobs = list(self._jobs.values()), {}
        for job in jobs:
            job.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)
