"""A node process that can be killed at any instant: the same small world rebuilt at every start, only its disk remains.

`play(directory, base)` builds a `Scenario`, joins, and works on round 0 until its bundle is delivered. Roots are written to
`signed` in the directory, synced, before they are sent, and sent again at the next start, as a durable outbox does. A new
chain each time holds exactly what a real one would have: the membership, and what was sent.
"""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import transformers.models.llama.modeling_llama  # noqa: F401  (slow, so once in the server that forks the nodes)

from protocol.ledger import calls, events
from protocol.messages import compute_bundle_key
from protocol.ports import IntentStatus
from protocol.rounds import get_times
from tests.support.node_kit import Node
from tests.support.scenario import Scenario, make_account, make_spec
from tests.support.twins import MemoryLedger

GROUPS, GROUP_SIZE = 12, 16


class DurableLedger(MemoryLedger):
    """Remembers the roots it was asked to send, whatever happens to the process."""

    path: Path

    async def submit(self, intent: str, call: calls.Call) -> None:
        if isinstance(call, calls.CommitRoot) and intent not in self.intents:
            with self.path.open("a") as file:
                file.write(json.dumps([intent, call.root.hex(), call.leaves, call.policy.hex()]) + "\n")
                file.flush()
                os.fsync(file.fileno())
        await super().submit(intent, call)

    async def send_again(self, task: bytes) -> None:
        """What was asked for before a kill and is not on the (new) chain."""
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        for intent, root, leaves, policy in map(json.loads, lines):
            call = calls.CommitRoot(task, 0, bytes.fromhex(root), leaves, bytes.fromhex(policy))
            self.intents[intent] = IntentStatus("pending")

            def done(status: str, block: int, error: str, intent: str = intent) -> None:
                self.intents[intent] = IntentStatus(status, block, error)  # type: ignore[arg-type]

            self.chain.mempool.append((self.account, call, done))


def play(directory: Path, base: Path) -> None:
    """Make, commit and deliver round 0; writes `delivered` (the bundle) and `events` (one kind and slots resumed a line)."""
    asyncio.run(_play(directory, base))


async def _play(directory: Path, base: Path) -> None:
    spec = make_spec(base, group_size=GROUP_SIZE, groups_per_round=GROUPS, slots_max=GROUPS)
    world = Scenario(directory / "world", spec, base)
    world.register("node", events.Role.NODE)
    assert world.call("node", calls.Join(world.task_id, GROUPS)) == ""
    node = Node(world, directory=directory / "node", chunk_rollouts=1)
    ledger = DurableLedger(world.chain, make_account("node"), {})
    ledger.path = directory / "signed"
    node.ledger = node.worker._ledger = node.worker._delivery._ledger = node.worker._guard._ledger = ledger
    world.chain.advance(get_times(world.task, 0).start + 1 - world.chain.block_number)
    await ledger.send_again(world.task_id)
    key = compute_bundle_key(world.task_id, 0, ledger.account)
    while key not in world.blobs.blobs:
        await node.step()
        world.chain.advance()
    made = node.texts("round_made")
    with (directory / "events").open("a") as file:
        file.write(f"{made[0]['resumed'] if made else -1}\n")
    (directory / "delivered").write_bytes(world.blobs.blobs[key])
