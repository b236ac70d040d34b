"""In-memory twins of the ports: `MemoryLedger`, `MemoryBlobs`, `MemoryPolicies`, over one shared `MemoryChain`.

    chain = MemoryChain()
    ledger = MemoryLedger(chain, account)         # one per participant
    await ledger.submit("join", Join(task, 4))   # durable, idempotent by intent name
    chain.advance()                              # mines it
    await ledger.poll()                          # folds the new events into ledger.state

The twins keep the ports' promises (idempotent intents, Fault for what is not there) and let tests break the world:
`MemoryBlobs.down`, `MemoryBlobs.refuse`, `MemoryPolicies.missing`.
"""

from __future__ import annotations

import asyncio
import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path

from models.adapter import BASE, is_adapter, link_base
from protocol.codec import tagged_hash
from protocol.errors import Fault
from protocol.ledger.calls import Call
from protocol.ledger.events import Logged
from protocol.ledger.state import LedgerState, apply
from protocol.ports import IntentStatus
from tests.support.memory_chain import MemoryChain

__all__ = ["MemoryBlobs", "MemoryChain", "MemoryClock", "MemoryLedger", "MemoryPolicies", "hash_policy"]


class MemoryLedger:
    """One account's connection: its own replica, its own intents. Two with one `intents` dict share an outbox, which
    is how a test restarts a process."""

    def __init__(self, chain: MemoryChain, account: bytes, intents: dict[str, IntentStatus] | None = None) -> None:
        self.chain = chain
        self.state = LedgerState()
        self.intents: dict[str, IntentStatus] = {} if intents is None else intents
        self.submitted: list[tuple[str, Call]] = []
        self._account = account
        self._read = 0

    @property
    def account(self) -> bytes:
        return self._account

    @property
    def chain_id(self) -> int:
        return self.chain.chain_id

    @property
    def address(self) -> bytes:
        return self.chain.address

    async def poll(self) -> list[Logged]:
        new = self.chain.logs[self._read :]
        self._read += len(new)
        for logged in new:
            apply(self.state, logged)
        self.state.block_number = self.chain.block_number
        return new

    async def submit(self, intent: str, call: Call) -> None:
        if intent in self.intents:
            return
        self.intents[intent] = IntentStatus("pending")
        self.submitted.append((intent, call))

        def done(status: str, block_number: int, error: str) -> None:
            self.intents[intent] = IntentStatus(status, block_number, error)  # type: ignore[arg-type]

        self.chain.mempool.append((self._account, call, done))

    def outcome(self, intent: str) -> IntentStatus:
        return self.intents.get(intent, IntentStatus("unknown"))

    async def wait(self, intent: str, timeout_s: float) -> IntentStatus:
        """Somebody else must advance the chain meanwhile."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while self.outcome(intent).status in ("unknown", "pending"):
            if asyncio.get_running_loop().time() > deadline:
                raise Fault(f"intent {intent} is {self.outcome(intent).status} after {timeout_s} s")
            await asyncio.sleep(0.001)
            await self.poll()
        return self.outcome(intent)


class MemoryBlobs:
    """A relay everybody reaches.

    Attributes:
        blobs: what it stores; tests may change it.
        down: no relay answers (`Fault` on every call).
        refuse: called with (key, data) before storing; may raise `Reject` as a relay would.
    """

    def __init__(self) -> None:
        self.blobs: dict[bytes, bytes] = {}
        self.down = False
        self.refuse: Callable[[bytes, bytes], None] | None = None

    async def put(self, key: bytes, data: bytes) -> None:
        if self.down:
            raise Fault("no relay answers")
        if self.refuse is not None:
            self.refuse(key, data)
        self.blobs[key] = bytes(data)

    async def get(self, key: bytes) -> bytes:
        if self.down or key not in self.blobs:
            raise Fault(f"no relay has blob {key.hex()[:16]}")
        return self.blobs[key]


def hash_policy(folder: Path) -> bytes:
    """Content hash of a policy folder: over sorted names, sizes and SHA-256 digests. An adapter's link is no content."""
    parts = []
    for path in sorted(path for path in folder.iterdir() if path.name != BASE):
        data = path.read_bytes()
        parts += [path.name.encode(), len(data).to_bytes(8, "big"), hashlib.sha256(data).digest()]
    return tagged_hash("memory-policy", *parts)


class MemoryPolicies:
    """Policies everybody can fetch.

    Attributes:
        folders: by (task, version); `bind_base` sets version 0 once the task id is known.
        missing: versions that cannot be had.
        fetched: every (task, version) asked for, in order.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.folders: dict[tuple[bytes, int], Path] = {}
        self.missing: set[int] = set()
        self.fetched: list[tuple[bytes, int]] = []

    def bind_base(self, task: bytes, folder: Path) -> None:
        """Serve `folder` as version 0 of a task."""
        self.folders[task, 0] = folder

    async def fetch(self, task: bytes, version: int) -> Path:
        self.fetched.append((task, version))
        if version in self.missing or (task, version) not in self.folders:
            raise Fault(f"no peer has policy {version} of task {task.hex()[:12]}")
        return self.folders[task, version]

    async def publish(self, task: bytes, version: int, parent: int, folder: Path) -> tuple[bytes, bytes]:
        target = self.directory / f"{task.hex()[:16]}-{version}"
        if not target.exists():
            shutil.copytree(folder, target, ignore=shutil.ignore_patterns(BASE))
            if is_adapter(target):
                link_base(target, self.folders[task, 0])
        self.folders[task, version] = target
        policy = hash_policy(target)
        return policy, tagged_hash("memory-manifest", policy, version.to_bytes(8, "big"), parent.to_bytes(8, "big"))


class MemoryClock:
    """A clock that never waits: sleeping moves its time on and yields once."""

    def __init__(self) -> None:
        self.now = 0.0

    def time(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds
        await asyncio.sleep(0)
