"""A small network around real verifiers: real nodes, a relay that receipts what it holds, three `VerifierWorker`s.

    network = VerifierNetwork(directory, base)
    await network.run(until_block)          # everybody steps once per block
    network.restart("v0")                   # a new process over the same directory and outbox

Neighbours: tests.support.scenario (the world), tests.support.twins (ports), verifier.worker (under test).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from inference.engine import TorchEngine
from inference.worker import NodeWorker
from models.policy import read_hidden_size
from protocol import presets
from protocol.ledger import calls, events
from protocol.messages import compute_bundle_key
from protocol.ports import Environment, Scorer
from protocol.rounds import get_times
from protocol.task import TaskSpec
from tests.support.scenario import Scenario, make_account, make_key, make_spec
from tests.support.twins import MemoryLedger
from verifier.isolated_judge import RoundJudge, Verdict
from verifier.judge import Submission, inspect_submission, judge_submissions
from verifier.scorer import TorchScorer
from verifier.worker import VerifierWorker

VERIFIERS = ("v0", "v1", "v2")
RELAYS = ("relay-a", "relay-b")


def make_quick_spec(base: Path, **changes: Any) -> Any:
    """Two epochs of two rounds, four groups of four per round."""
    schedule = replace(presets.MINIMAL.schedule, start_delay_blocks=16, epoch_rounds=2, num_epochs=2)
    return make_spec(base, **{"schedule": schedule, "groups_per_round": 4, "slots_max": 4, **changes})


class LocalJudge:
    """A `RoundJudge` in this process, done before anybody else has a turn: a step of a verifier is a whole step."""

    needs_base = False

    def __init__(self, environment: Environment, scorer: Scorer) -> None:
        self._environment, self._scorer = environment, scorer
        self._loaded: Path | None = None

    async def inspect(self, spec: TaskSpec, submission: Submission) -> str:
        return inspect_submission(spec, submission)

    async def judge(
        self,
        spec: TaskSpec,
        submissions: Sequence[Submission],
        *,
        folder: Path,
        base: Path | None,
        seconds: float | None,
    ) -> Verdict:
        started = time.process_time()
        if self._loaded != folder:
            self._scorer.load(folder)
            self._loaded = folder
        judgement = judge_submissions(
            spec, submissions, environment=self._environment, scorer=self._scorer, hidden=read_hidden_size(folder)
        )
        return Verdict(judgement, time.process_time() - started)

    async def close(self) -> None:
        pass


class VerifierNetwork:
    """See the module.

    Attributes:
        seen: events of every verifier by name, over restarts.
        verifiers / ledgers: workers and connections by name; tests may stop one by removing its worker.
        scorers / environments: what a verifier's judge is given in place of the real one.
        judges: what a verifier is given in place of a `LocalJudge`.
        withheld: (round, node) of bundles that no relay serves although they are receipted.
    """

    def __init__(
        self, directory: Path, base: Path, *, nodes: tuple[str, ...] = ("node-a", "node-b"), **changes: Any
    ) -> None:
        self.world = Scenario(directory, make_quick_spec(base, **changes), base)
        self.seen: dict[str, list[tuple[str, dict[str, Any]]]] = {name: [] for name in VERIFIERS}
        self.ledgers: dict[str, MemoryLedger] = {}
        self.verifiers: dict[str, VerifierWorker] = {}
        self.nodes: dict[str, NodeWorker] = {}
        self.scorers: dict[str, Scorer] = {}
        self.environments: dict[str, Any] = {}
        self.judges: dict[str, RoundJudge] = {}
        self.withheld: set[tuple[int, str]] = set()
        for name in RELAYS:
            self.world.register(name, events.Role.RELAY)
        for name in VERIFIERS:
            self.world.register(name, events.Role.VERIFIER)
        for name in nodes:
            self.ledgers[name] = self.world.register(name, events.Role.NODE)
            self.nodes[name] = self._make_node(name)
        for name in VERIFIERS:
            self.restart(name)

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

    def restart(self, name: str) -> VerifierWorker:
        """A new process: memory is lost, directory and outbox are not."""
        self.ledgers[name] = self.world.register(name, events.Role.VERIFIER)
        environment = self.environments.get(name, self.world.environment)
        self.verifiers[name] = VerifierWorker(
            ledger=self.ledgers[name],
            task=self.world.task_id,
            judge=self.judges.get(name) or LocalJudge(environment, self.scorers.get(name) or TorchScorer()),
            policies=self.world.policies,
            blobs=self.world.blobs,
            key=make_key(name),
            directory=self.world.directory / name,
            events=lambda kind, fields: self.seen[name].append((kind, fields)),
        )
        return self.verifiers[name]

    def account(self, name: str) -> bytes:
        """The account of a name."""
        return make_account(name)

    def texts(self, name: str, kind: str) -> list[dict[str, Any]]:
        """A verifier's events of one kind."""
        return [fields for seen, fields in self.seen[name] if seen == kind]

    async def step_verifier(self, name: str) -> None:
        """One verifier polls and steps; its background work gets a turn."""
        await self.ledgers[name].poll()
        await self.verifiers[name].step()
        for _ in range(3):
            await asyncio.sleep(0)

    async def run(self, block: int, *, each: Callable[[], None] | None = None) -> None:
        """Mine up to `block`: in each block nodes, relay and verifiers step, then `each` is called."""
        while self.world.chain.block_number < block:
            await self.step()
            if each is not None:
                each()
            self.world.chain.advance()
        for name in self.verifiers:
            await self.step_verifier(name)

    async def step(self) -> None:
        """Everybody once."""
        for name, node in self.nodes.items():
            await self.ledgers[name].poll()
            await node.step()
            await asyncio.sleep(0)
        self._relay()
        for name in list(self.verifiers):
            await self.step_verifier(name)

    def _relay(self) -> None:
        """Receipt what is stored and make it unavailable where the test says so."""
        task, chain = self.world.task, self.world.chain
        names = {make_account(name): name for name in self.nodes}
        for index, commitments in task.commitments.items():
            stored = [
                account
                for account in commitments
                if compute_bundle_key(task.task, index, account) in self.world.blobs.blobs
            ]
            new = [account for account in stored if account not in task.receipts.get(index, {})]
            if new and chain.block_number < get_times(task, index).receipt_deadline:
                call = calls.ReceiptBundles(task.task, index, tuple(new))
                chain.mempool.append((make_account(RELAYS[0]), call, lambda *_: None))
            for account in stored:
                if account not in new and (index, names.get(account, "")) in self.withheld:
                    del self.world.blobs.blobs[compute_bundle_key(task.task, index, account)]

    async def close(self) -> None:
        """Stop all background work."""
        for worker in (*self.nodes.values(), *self.verifiers.values()):
            await worker.close()


def run(coroutine: Any) -> Any:
    """Run a scenario with a limit on its time."""
    return asyncio.run(asyncio.wait_for(coroutine, 120))
