"""What surrounds a running node for its operator: status before there is a task, the ledger's clock.

`Operator` owns the status file of a node process and hands the worker what it takes from outside: a check of loaded
policies, a reason to hold work (a ledger node that lags), and the claim of an account that moved here. Neighbours:
inference.worker says what it does itself, troth.roles drives both.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from contracts.client import EvmLedger
from contracts.jsonrpc import HttpRpc, RpcError, Unreachable
from inference.status import Condition, StatusFile
from inference.twin import find_foreign_record, name_record
from protocol.errors import Fault
from protocol.ledger.calls import SetRecord
from troth.connect import make_record
from troth.fit import FittingPolicies
from troth.keystore import Keys
from troth.network import Mesh, verify_policy
from troth.settings import RoleSettings

#: Seconds between two looks at the ledger's clock, and blocks that its pace is measured over.
LOOK_SECONDS = 15.0
PACE_BLOCKS = 20
#: A newest block older than this, and older than so many block times, means that the ledger node lags.
LAG_SECONDS_MIN = 60.0
LAG_BLOCKS = 10


class BlockClock:
    """The age of the ledger's newest block against this machine's clock.

    Attributes:
        age_s: seconds since the newest block's timestamp; negative when the chain's clock is ahead.
        block_s: mean seconds between blocks.
        head: number of the newest block, -1 before the first look.
    """

    def __init__(self, rpc_url: str) -> None:
        self._url = rpc_url
        self.head, self.age_s, self.block_s = -1, 0.0, 0.0

    async def look(self) -> None:
        """Ask the ledger node. Raises `Fault` when it is away or answers nonsense."""
        try:
            async with HttpRpc(self._url) as rpc:
                newest = await rpc.call("eth_getBlockByNumber", "latest", False)
                head, stamp = int(newest["number"], 16), int(newest["timestamp"], 16)
                back = min(PACE_BLOCKS, head)
                older = await rpc.call("eth_getBlockByNumber", hex(head - back), False) if back else newest
                self.block_s = (stamp - int(older["timestamp"], 16)) / max(back, 1)
        except (RpcError, Unreachable) as error:
            raise Fault(f"no ledger node at {self._url}: {error}") from None
        except (KeyError, TypeError, ValueError) as error:
            raise Fault(f"{self._url} gives blocks that cannot be read: {error!r}") from None
        self.head, self.age_s = head, time.time() - stamp

    @property
    def limit_s(self) -> float:
        """Age from which on the ledger node counts as lagging, in seconds."""
        return max(LAG_SECONDS_MIN, LAG_BLOCKS * self.block_s)

    @property
    def lag(self) -> str:
        """Why the ledger node cannot be trusted with deadlines; empty while it can."""
        if self.head < 0 or self.age_s <= self.limit_s:
            return ""
        return (
            f"the ledger node is behind: its newest block {self.head} is {self.age_s:.0f} s old, limit {self.limit_s:.0f} s; "
            "work would be late and unpaid; check the node, or this machine's clock"
        )


class Operator:
    """One node process. Made before the first thing that can fail, closed last.

    Args:
        show: called with every new condition.
    """

    def __init__(self, settings: RoleSettings, show: Callable[[Condition], None]) -> None:
        self._settings = settings
        self.status = StatusFile(Path(settings.directory) / "status.json", changed=show)
        self.clock = BlockClock(settings.ledger.rpc)
        self._look_due = 0.0
        self._looking: asyncio.Task[None] | None = None
        self._ledger: EvmLedger | None = None
        self.policies: FittingPolicies | None = None

    def connect(self, ledger: EvmLedger, keys: Keys, mesh: Mesh, endpoint: str) -> None:
        """Say what the node has connected to."""
        settings = self._settings
        self._ledger, self._keys, self._endpoint = ledger, keys, endpoint
        directory = Path(settings.directory)
        self.policies = FittingPolicies(mesh.policies, mesh, ledger, settings.compute, directory)

    def worker_options(self) -> dict[str, Any]:
        """What `inference.worker.NodeWorker` takes from here."""
        compute = self._settings.compute.model_dump(exclude={"threads"})
        return {
            "status": self.status,
            "verify_policy": verify_or_discard,
            "hold": self.hold,
            "claim": self.claim,
            "made_by": ",".join(f"{name}={value}" for name, value in sorted(compute.items())),
        }

    def hold(self) -> str:
        """A reason not to begin work now, empty for none."""
        if self._ledger is not None and not self._ledger.reachable:
            return f"no ledger node at {self._settings.ledger.rpc}: deadlines cannot be seen; check ledger.rpc"
        return self.clock.lag

    async def claim(self) -> None:
        """Put a record of this machine on the ledger in place of another machine's."""
        assert self._ledger is not None
        foreign = find_foreign_record(self._ledger)
        if foreign is not None:
            sequence = foreign.sequence + 1
            record = make_record(self._ledger, self._keys, self._endpoint, sequence)
            await self._ledger.submit(name_record(sequence), SetRecord(record))

    def look(self) -> None:
        """Keep an eye on the ledger's clock; never waits."""
        if time.monotonic() >= self._look_due and (self._looking is None or self._looking.done()):
            self._look_due = time.monotonic() + LOOK_SECONDS
            self._looking = asyncio.create_task(self._look())

    async def _look(self) -> None:
        try:
            await self.clock.look()
        except Fault as error:
            self.fault("ledger", str(error))

    def no_worker(self, refused: int, waiting: int = 0) -> None:
        """There is no task to serve.

        Args:
            refused / waiting: open tasks that this node refuses, and whose files cannot be had at present.
        """
        wanted, held = self._settings.task, self.hold()
        if held:
            text = held
        elif wanted:
            text = f"task {wanted} is not on the ledger (yet)"
        else:
            text = "no open task on the ledger"
            if refused or waiting:
                text += (
                    f" can be served: {refused} refused, {waiting} whose files cannot be had at present (events.jsonl)"
                )
        self.status.set(Condition("waiting_task", text, "a task is published that this node can serve"))

    def fault(self, what: str, text: str) -> None:
        """Something of this machine failed, and is tried again."""
        self.status.set(Condition("idle", f"{what}: {text}", "it is tried again at the next poll of the ledger"))

    async def close(self, error: str) -> None:
        """The process ends."""
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)
        self.status.set(Condition("stopped", error or "it was told to stop", "`troth node run`"))


def verify_or_discard(folder: Path, expected: bytes) -> None:
    """`verify_policy`, and a folder that fails is removed: the next fetch makes it again from verified shards.

    Raises:
        Fault: when the folder was not what the ledger lists.
    """
    try:
        verify_policy(folder, expected)
    except Fault:
        base = folder / "base"
        if base.is_symlink():  # under an adapter: either may be the damaged one, and both are made again from shards
            shutil.rmtree(base.resolve(), ignore_errors=True)
        shutil.rmtree(folder, ignore_errors=True)
        raise
