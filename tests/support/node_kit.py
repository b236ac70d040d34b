"""One node worker in a `Scenario`, with its events, its status file and a loop that mines a block per step.

    node = Node(world)                        # the account "node", registered, with a directory of its own
    await node.run_until(block)
    assert node.texts("round_made")
    assert node.status["state"] == "committed"

A second `Node(world)` over the same directory and outbox is a restart; one with `outbox={}` is another machine.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from inference.engine import TorchEngine
from inference.status import Condition, StatusFile
from inference.worker import NodeWorker
from protocol.ledger import events
from tests.support.scenario import Scenario, make_account, make_key
from tests.support.twins import MemoryLedger


class Node:
    """See the module. `after` is called after every step; `conditions` are all that were ever said."""

    def __init__(
        self,
        world: Scenario,
        name: str = "node",
        *,
        directory: Path | None = None,
        outbox: dict[str, Any] | None = None,
        kind: type[NodeWorker] = NodeWorker,
        after: Callable[[Node], None] = lambda node: None,
        **options: Any,
    ) -> None:
        self.world, self.after = world, after
        self.seen: list[tuple[str, dict[str, Any]]] = []
        self.conditions: list[Condition] = []
        self.directory = directory or world.directory / name
        self.ledger = world.register(name, events.Role.NODE)
        if outbox is not None:
            self.ledger = MemoryLedger(world.chain, make_account(name), outbox)
        fields: dict[str, Any] = {
            "environment": world.environment,
            "policies": world.policies,
            "status": StatusFile(self.directory / "status.json", changed=self.conditions.append),
        }
        fields |= options
        fields.setdefault("engine", None)
        fields["engine"] = fields["engine"] or TorchEngine()
        self.worker = kind(
            ledger=self.ledger,
            task=world.task_id,
            blobs=world.blobs,
            key=make_key(name),
            directory=self.directory,
            events=lambda event, fields: self.seen.append((event, fields)),
            **fields,
        )

    async def step(self) -> None:
        """Poll and step once."""
        await self.ledger.poll()
        await self.worker.step()
        await asyncio.sleep(0)
        self.after(self)

    async def run_until(self, block: int) -> None:
        """Step and mine until a block is there, then look twice."""
        while self.world.chain.block_number < block:
            await self.step()
            self.world.chain.advance()
        await self.step()
        await self.step()

    def texts(self, kind: str) -> list[dict[str, Any]]:
        """Fields of all events of a kind."""
        return [fields for event, fields in self.seen if event == kind]

    @property
    def status(self) -> dict[str, Any]:
        """What the status file says."""
        table: dict[str, Any] = json.loads((self.directory / "status.json").read_text())
        return table


def run(coroutine: Any, timeout_s: float = 60.0) -> Any:
    """Run a scenario to its end."""
    return asyncio.run(asyncio.wait_for(coroutine, timeout_s))
