"""Policies ahead of need: every new version is fetched in the background as soon as the ledger names it.

Neighbours: inference.worker asks for the folder of its round's policy; protocol.ports.PolicyStore does the fetching and
promises that the folder's content hash is the ledger's.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from inference.background import Background
from protocol.errors import Fault, Ignore, Reject
from protocol.ledger.state import Task
from protocol.ports import PolicyStore

#: Newest versions that are fetched ahead; older ones only when a round needs them.
VERSIONS_AHEAD_MAX = 3


class Prefetch:
    """Folders by version, of one task.

    Args:
        policies: where policies come from.
        background: runs the fetches.
        events: operator events.
    """

    def __init__(
        self, policies: PolicyStore, background: Background, events: Callable[[str, dict[str, object]], None]
    ) -> None:
        self._policies = policies
        self._background = background
        self._events = events
        self._folders: dict[int, Path] = {}
        self._errors: dict[int, str] = {}

    def get(self, version: int) -> Path | None:
        """The folder of a fetched version, None while it is not here."""
        return self._folders.get(version)

    def forget(self, version: int) -> None:
        """A folder turned out to be unusable: fetch it again when it is wanted next."""
        self._folders.pop(version, None)

    def missing_text(self, version: int) -> str:
        """Why a version is not here yet, as far as it is known."""
        return self._errors.get(version, "it is being fetched")

    def want(self, task: Task, version: int) -> None:
        """Fetch a version in the background unless it is here; a failed fetch is tried again at the next call."""
        if version in self._folders or not 0 <= version < len(task.policies):
            return

        async def fetch() -> None:
            try:
                folder = await self._policies.fetch(task.task, version)
            except (Fault, Ignore, Reject) as error:
                if version not in self._errors:
                    self._events("policy_missing", {"version": version, "text": str(error)})
                self._errors[version] = str(error)
                return
            self._errors.pop(version, None)
            self._folders[version] = folder
            self._events("policy_fetched", {"version": version, "policy": task.policies[version].policy})

        self._background.start(("policy", version), fetch)

    def update(self, task: Task, needed: int) -> None:
        """Fetch what is new.

        Args:
            needed: version of the oldest round that can still be worked on; folders before the one before it are
                forgotten (the store decides what it keeps on disk).
        """
        for version in range(max(needed, len(task.policies) - VERSIONS_AHEAD_MAX), len(task.policies)):
            self.want(task, version)
        for version in [version for version in self._folders if version < needed - 1]:
            del self._folders[version]
        self._errors = {version: text for version, text in self._errors.items() if version >= needed - 1}
