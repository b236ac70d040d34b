"""A whole task around a trainer, in one process and without sockets: real nodes, real scorer, blocks mined by hand.

    network = TrainerNetwork(tmp_path, base, nodes=("a", "b"))
    await network.run(60)                 # 60 blocks; every participant acts once per block
    network.steps                         # the trainer's "step" events

A relay receipts every bundle that is stored; two relays attest every policy; a committee finds every receipted submission
good, except as `statuses` says. Neighbours: tests.support.scenario, tests.support.twins.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import environments
from inference.engine import TorchEngine
from inference.worker import NodeWorker
from protocol import presets
from protocol.errors import Reason
from protocol.ledger import calls, events
from protocol.messages import compute_bundle_key
from protocol.rounds import get_committee, get_end_round, get_times
from protocol.task import Environment as EnvironmentSpec
from protocol.verdict import Row, Status, pack_rows
from tests.support.scenario import Scenario, make_account, make_key, make_spec
from tests.support.twins import MemoryBlobs
from trainer.config import TrainerConfig
from trainer.worker import TrainerWorker
from verifier.scorer import TorchScorer

ARGS = '{"digits":2}'
VERIFIERS = ("v0", "v1", "v2")
RELAYS = ("relay-a", "relay-b")


def make_scorer(folder: Path) -> TorchScorer:
    """The verifier's scorer of a policy folder."""
    scorer = TorchScorer()
    scorer.load(folder)
    return scorer


def make_sort_spec(base: Path, *, probation_groups: int = 0, **changes: Any) -> Any:
    """A sort-2 task that a node may be trusted in from the start."""
    from msgspec.structs import replace

    schedule = replace(presets.MINIMAL.schedule, start_delay_blocks=20)
    economics = replace(presets.MINIMAL.economics, probation_groups=probation_groups)
    environment = EnvironmentSpec("sort", ARGS, environments.content_hash("sort", ARGS))
    fields = {"schedule": schedule, "economics": economics, "environment": environment, "group_size": 8}
    return make_spec(base, **{**fields, **changes})


class TrainerNetwork:
    """See the module.

    Attributes:
        nodes: workers by name; tests may stop one by removing it.
        statuses: (round, node name) -> status in the verdicts, GOOD when absent.
        trainer: the trainer's worker; `restart` makes a new one over the same directory and outbox.
        attests: whether relays attest policies, without which no round uses them.
        trainer_blobs: the relays as the trainer sees them: same content, outages of their own.
        seen: the trainer's events, over restarts.
    """

    def __init__(
        self,
        directory: Path,
        base: Path,
        *,
        nodes: tuple[str, ...] = ("a", "b", "c"),
        config: Any = None,
        **changes: Any,
    ) -> None:
        self.world = Scenario(directory, make_sort_spec(base, **changes), base)
        for name in RELAYS:
            self.world.register(name, events.Role.RELAY)
        for name in VERIFIERS:
            self.world.register(name, events.Role.VERIFIER)
        self.config = config or TrainerConfig(total_steps=20, warmup_steps=2)
        self.statuses: dict[tuple[int, str], Status] = {}
        self.seen: list[tuple[str, dict[str, Any]]] = []
        self.ledgers = {name: self.world.register(name, events.Role.NODE) for name in nodes}
        self.nodes: dict[str, Any] = {}
        self.trainer_ledger = self.world.register("trainer", events.Role.TRAINER)
        self.trainer: TrainerWorker | None = None
        self.attests = True
        self.trainer_blobs = MemoryBlobs()
        self.trainer_blobs.blobs = self.world.blobs.blobs
        self._judged = 0

    @property
    def steps(self) -> list[dict[str, Any]]:
        """What the trainer reported about its steps."""
        return [fields for kind, fields in self.seen if kind == "step"]

    def count(self, kind: str) -> int:
        """Events of one kind."""
        return sum(seen == kind for seen, _ in self.seen)

    async def restart(self, directory: Path | None = None) -> TrainerWorker:
        """A new trainer process: nothing in memory survives."""
        if self.trainer is not None:
            await self.trainer.close()
        self.trainer_ledger = self.world.register("trainer", events.Role.TRAINER)
        await self.trainer_ledger.poll()
        self.trainer = TrainerWorker(
            ledger=self.trainer_ledger,
            blobs=self.trainer_blobs,
            policies=self.world.policies,
            environment=self.world.environment,
            make_scorer=make_scorer,
            key=make_key("trainer"),
            task=self.world.task_id,
            directory=directory or self.world.directory / "trainer",
            events=lambda kind, fields: self.seen.append((kind, fields)),
            config=self.config,
        )
        return self.trainer

    async def start(self) -> None:
        """Make all workers."""
        for name, ledger in self.ledgers.items():
            await ledger.poll()
            self.nodes[name] = self._make_node(name)
        await self.restart()

    async def run(self, blocks: int, *, until: Callable[[], bool] = lambda: False) -> None:
        """Mine so many blocks, or fewer when something has happened."""
        if self.trainer is None:
            await self.start()
        for _ in range(blocks):
            if until():
                return
            await self.act()
            await self.step_trainer()
            self.world.chain.advance()

    def has_version(self, version: int) -> Callable[[], bool]:
        """Whether the ledger has a policy version."""
        return lambda: len(self.world.task.policies) > version

    async def act(self) -> None:
        """Everybody but the trainer does what is due in this block."""
        for name, node in self.nodes.items():
            await self.ledgers[name].poll()
            await node.step()
            # Its uploads run in the background.
            await asyncio.sleep(0)
        self._relay()
        if self.attests:
            self._attest()
        self._judge()

    async def step_trainer(self) -> None:
        """The trainer alone: its downloads come, then it steps."""
        assert self.trainer is not None
        for _ in range(2):
            await self.trainer_ledger.poll()
            await self.trainer.step()
            await asyncio.sleep(0)

    def _make_node(self, name: str) -> NodeWorker:
        return NodeWorker(
            ledger=self.ledgers[name],
            task=self.world.task_id,
            environment=self.world.environment,
            engine=TorchEngine(),
            policies=self.world.policies,
            blobs=self.world.blobs,
            key=make_key(name),
            directory=self.world.directory / name,
            events=lambda kind, fields: None,
        )

    def _relay(self) -> None:
        task = self.world.task
        for index, commitments in task.commitments.items():
            stored = [
                account
                for account in commitments
                if account not in task.receipts.get(index, {})
                and compute_bundle_key(task.task, index, account) in self.world.blobs.blobs
                and self.world.chain.block_number < get_times(task, index).receipt_deadline
            ]
            if stored:
                call = calls.ReceiptBundles(task.task, index, tuple(stored))
                self.world.chain.mempool.append((make_account(RELAYS[0]), call, lambda *_: None))

    def _attest(self) -> None:
        task = self.world.task
        for policy in task.policies[1:]:
            for name in RELAYS:
                if policy.eligible_block is None and make_account(name) not in policy.attestations:
                    self.world.chain.emit(events.PolicyAttested(task.task, policy.version, make_account(name)))

    def _judge(self) -> None:
        task = self.world.task
        names = {make_account(name): name for name in self.ledgers}
        while self._judged < get_end_round(task):
            times = get_times(task, self._judged)
            if self.world.chain.block_number < times.verdict_reveal_deadline:
                return
            rows = []
            for account in task.receipts.get(self._judged, {}):
                status = self.statuses.get((self._judged, names[account]), Status.GOOD)
                reason = 0 if status == Status.GOOD else int(Reason.REPLAY)
                leaves = task.commitments[self._judged][account].leaves
                rows.append(Row(account, status, reason, leaves, leaves * 8, leaves))
            for verifier in get_committee(self.world.chain.state, task, self._judged):
                revealed = events.VerdictRevealed(task.task, self._judged, verifier, pack_rows(rows), bytes(32))
                self.world.chain.emit(revealed)
            self._judged += 1
