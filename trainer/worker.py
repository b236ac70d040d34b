"""The trainer role: admitted rollouts to policies, one generation at a time, recorded in order.

`step` does whatever is due and not yet done: take up the newest generation (or the ledger's newest policy, when the ledger
is ahead or disagrees), publish and record what is not on the ledger, take in submissions, and train when enough groups
wait. Training never waits for a record to become final, but is never more than `AHEAD_MAX` policies ahead of the ledger.
Everything it needs is on disk before a ledger call: killed anywhere, it goes on by the same code, and no rollout is used
twice in a lineage. Neighbours: trainer.intake (what waits), trainer.step (the arithmetic), trainer.release (the ledger).
"""

from __future__ import annotations

import asyncio
import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from models.adapter import link_base
from protocol.errors import ConfigError, Fault
from protocol.identity import NetworkKey
from protocol.ledger.state import Task
from protocol.ports import BlobStore, Environment, Ledger, PolicyStore, Scorer
from protocol.rounds import get_end_round, get_times
from trainer.batch import TrainingGroup, choose_batch
from trainer.checkpoint import Generation, Generations
from trainer.config import TrainerConfig
from trainer.grpo import has_variance
from trainer.ingest import Scorers
from trainer.intake import Intake
from trainer.lineage import fetch_consumed, make_adopted_state, make_next_state
from trainer.release import Diverged, Releaser
from trainer.step import Learner, StepReport

#: Policies made before the ledger shows them; relays take lineage records this far ahead.
AHEAD_MAX = 2
#: A generation carries 64 hexadecimal digits per leaf, a lineage record 32 bytes: this keeps both within their bounds.
GROUPS_MAX = 16_384


class TrainerWorker:
    """The trainer of one task.

    Args:
        key: network key, which signs lineage records.
        make_scorer: loads a scorer from a policy folder.
        directory: its own; generations live in a folder of it named after the task.
        events: operator events.
        threads: of torch; part of what makes a step reproducible.

    Raises:
        ConfigError: when this account is not the task's trainer.
    """

    def __init__(
        self,
        *,
        ledger: Ledger,
        blobs: BlobStore,
        policies: PolicyStore,
        environment: Environment,
        make_scorer: Callable[[Path], Scorer],
        key: NetworkKey,
        task: bytes,
        directory: Path,
        events: Callable[[str, dict[str, Any]], None],
        config: TrainerConfig | None = None,
        device: str = "cpu",
        threads: int = 1,
    ) -> None:
        spec = ledger.state.tasks[task].spec
        if ledger.account != spec.trainer:
            raise ConfigError(
                f"task {task.hex()[:12]} names trainer 0x{spec.trainer.hex()}, this account is 0x{ledger.account.hex()}"
            )
        self._ledger = ledger
        self._blobs = blobs
        self._policies = policies
        self._task = task
        self._events = events
        self._config = config or TrainerConfig()
        self._groups_min = self._config.groups_min or max(1, spec.groups_per_round // 2)
        self._groups_max = min(self._config.groups_max or 2 * spec.groups_per_round, GROUPS_MAX)
        self._config_hash = self._config.compute_hash(spec.sampling.temperature_milli)
        self._device = device
        self._threads = threads
        self._vocab_size = environment.vocab_size
        self._generations = Generations(directory / "generations" / task.hex()[:16])
        self._adapter, self._base_policy = spec.adapter, spec.base_policy
        self._generation: Generation | None = None
        self._learner: Learner | None = None
        self._consumed: frozenset[bytes] = frozenset()
        self._releaser = Releaser(ledger=ledger, blobs=blobs, policies=policies, key=key, events=events)
        self._intake = Intake(
            ledger=ledger,
            blobs=blobs,
            policies=policies,
            environment=environment,
            scorers=Scorers(make_scorer),
            events=events,
        )

    async def step(self) -> None:
        """Do what is due.

        Raises:
            Fault: something of ours failed; the next step tries again.
        """
        task = self._ledger.state.tasks[self._task]
        if task.closed:
            return
        try:
            generation = await self._take_up(task)
            await self._record(task)
        except Diverged as error:
            self._events("diverged", {"text": str(error)})
            self._generation = None
            generation = await self._adopt(task)
        await self._intake.step(task, generation.version, self._consumed)
        batch = self._choose(task, generation)
        if batch:
            await self._train(task, generation, batch)
            await self._record(task)

    async def close(self) -> None:
        """Stop background work."""
        await self._intake.close()

    # Taking up a lineage

    async def _take_up(self, task: Task) -> Generation:
        """The generation to go on from."""
        if self._generation is None:
            found = await asyncio.to_thread(self._generations.load_newest)
            if found is None or found.state.task != self._task.hex():
                return await self._adopt(task)
            if base := await self._fetch_base():
                link_base(found.policy, base)
            self._set_generation(found)
            self._events("resumed", {"version": found.version})
        assert self._generation is not None
        if self._generation.version < len(task.policies) - 1:
            return await self._adopt(task)
        await self._releaser.publish(task, self._generation)
        return self._generation

    async def _adopt(self, task: Task) -> Generation:
        """Make a generation of the ledger's newest policy, with a fresh optimiser state, and learn from its lineage which
        leaves are used up: at the start of a task, and when our own generations were lost, old or refused."""
        newest = task.policies[-1]
        folder = await self._policies.fetch(self._task, newest.version)
        consumed = await fetch_consumed(self._ledger, self._blobs, task)
        learner = await asyncio.to_thread(self._make_learner, folder, None, await self._fetch_reference())
        optimizer = learner.encode_optimizer()
        state = make_adopted_state(
            newest,
            self._task,
            optimizer=optimizer,
            config_hash=self._config_hash,
            consumed=consumed,
            seed=self._config.seed,
        )
        self._releaser.forget()
        generation = await asyncio.to_thread(
            self._generations.write,
            state,
            policy=learner.encode_policy(),
            optimizer=optimizer,
            base=await self._fetch_base(),
        )
        self._learner = learner
        self._set_generation(generation)
        self._events("adopted", {"version": newest.version, "policy": newest.policy})
        return generation

    async def _fetch_reference(self) -> Path | None:
        """The policy that a KL penalty refers to; under an adapter it is in memory anyway."""
        wanted = self._config.kl and not self._adapter.rank
        return await self._policies.fetch(self._task, 0) if wanted else None

    async def _fetch_base(self) -> Path | None:
        """The policy that adapters belong to."""
        return await self._policies.fetch(self._task, 0) if self._adapter.rank else None

    def _make_learner(self, folder: Path, optimizer: bytes | None, reference: Path | None) -> Learner:
        milli = self._ledger.state.tasks[self._task].spec.sampling.temperature_milli
        return Learner(
            self._config,
            folder,
            temperature=milli / 1000,
            optimizer=optimizer,
            adapter=self._adapter,
            base_policy=self._base_policy,
            reference=reference,
            vocab_size=self._vocab_size,
            device=self._device,
            threads=self._threads,
        )

    def _set_generation(self, generation: Generation) -> None:
        self._generation = generation
        state = generation.state
        used = [leaf for leaves in (*state.consumed.values(), state.leaves) for leaf in leaves]
        self._consumed = frozenset(bytes.fromhex(leaf) for leaf in used)

    async def _record(self, task: Task) -> None:
        """Record every generation that the ledger lacks, oldest first. What cannot be done now is tried again later."""
        assert self._generation is not None
        for version in range(max(1, len(task.policies)), self._generation.version + 1):
            newest = version == self._generation.version
            generation = self._generation if newest else await asyncio.to_thread(self._generations.load, version)
            try:
                await self._releaser.record(task, generation)
            except Diverged:
                raise
            except Fault as error:
                self._events("fault", {"what": f"recording policy {version}", "text": str(error)})
                return

    # Training

    def _choose(self, task: Task, generation: Generation) -> Sequence[TrainingGroup]:
        """The batch of a step that is due now, or nothing."""
        if generation.version - (len(task.policies) - 1) >= AHEAD_MAX or self._is_over(task):
            return ()
        waiting = self._intake.waiting
        batch = choose_batch(
            self._config,
            waiting.values(),
            version=generation.version,
            max_staleness=task.spec.max_staleness,
            groups_max=self._groups_max,
            num_nodes=self._intake.count_nodes(),
        )
        if not batch or (len(batch) < self._groups_min and not self._intake.find_complete(task)):
            return ()
        if not any(has_variance(group.rewards_micro[None])[0] for group in batch):
            for group in batch:
                del waiting[group.key]
            self._intake.dropped["no_variance"] += len(batch)
            return ()
        return batch

    def _is_over(self, task: Task) -> bool:
        """Whether the last round is past and had time to be used."""
        last = get_times(task, get_end_round(task) - 1).opening_deadline
        return self._ledger.state.block_number > last + task.spec.schedule.round_blocks

    async def _train(self, task: Task, generation: Generation, batch: Sequence[TrainingGroup]) -> None:
        """One step, made durable as a generation before anybody hears of it."""
        released = await self._releaser.publish(task, generation)
        started = time.monotonic()
        reference = None if self._learner is not None else await self._fetch_reference()
        base = await self._fetch_base()
        learner, self._learner = self._learner, None
        # Until the generation is on disk there is no learner: after a failure it is loaded again from the last one.
        learner, made, report, cpu_seconds = await asyncio.to_thread(
            self._make_generation, task, learner, generation, batch, released.policy, released.lineage, reference, base
        )
        self._learner = learner
        self._set_generation(made)
        for group in batch:
            del self._intake.waiting[group.key]
        self._report(made, batch, report, cpu_seconds, time.monotonic() - started)

    def _make_generation(
        self,
        task: Task,
        learner: Learner | None,
        generation: Generation,
        batch: Sequence[TrainingGroup],
        parent: bytes,
        parent_lineage: bytes,
        reference: Path | None,
        base: Path | None,
    ) -> tuple[Learner, Generation, StepReport, float]:
        started = time.thread_time()
        before = generation.read_optimizer()
        if learner is None:
            learner = self._make_learner(generation.policy, before, reference)
        report = learner.step(batch, generation.version)
        state = make_next_state(
            generation.state,
            batch,
            parent=parent,
            parent_lineage=parent_lineage,
            optimizer_before=before,
            config_hash=self._config_hash,
            reward_mean=report.reward_mean,
            max_staleness=task.spec.max_staleness,
            seed=self._config.seed,
        )
        made = self._generations.write(
            state, policy=learner.encode_policy(), optimizer=learner.encode_optimizer(), base=base
        )
        return learner, made, report, time.thread_time() - started

    def _report(
        self, made: Generation, batch: Sequence[TrainingGroup], report: StepReport, cpu_seconds: float, seconds: float
    ) -> None:
        dropped, cpu_verification = self._intake.take_counts()
        staleness = [made.version - 1 - group.policy_version for group in batch]
        self._events(
            "step",
            {
                "version": made.version,
                **dataclasses.asdict(report),
                "nodes": len({group.key.account for group in batch}),
                "rounds": [batch[0].key.round_index, batch[-1].key.round_index],
                "staleness_mean": statistics.fmean(staleness),
                "staleness_max": max(staleness),
                "dropped": dropped,
                "waiting": len(self._intake.waiting),
                "seconds": seconds,
                "cpu_training": cpu_seconds,
                "cpu_verification": cpu_verification,
            },
        )
