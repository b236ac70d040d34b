"""The rollout node: joins a task, makes what each round assigns to it, commits, then uploads.

Order of things in a round, each step durable before the next: policy fetched and loaded -> groups made and checked as a
verifier will check them -> sealed bundle on disk -> root on the ledger, final -> bundle to a relay until it is receipted.
`step` looks at the ledger and at the journal and does what is due, so that a restart after kill -9 needs no other path.

Guarantees: never a second root per (task, round); never a root over work that the node can see is wrong, or whose bytes are
not on disk. Neighbours: inference.rollouts makes the groups, inference.journal keeps the bytes, protocol.checks and
protocol.rounds are the rules. `_policy_folder`, `_make_groups` and `_finish` are the seams where adversaries differ.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

from inference.background import Background
from inference.delivery import Delivery
from inference.journal import Journal, Record
from inference.prefetch import Prefetch
from inference.rollouts import Made, make_bundle, make_groups, seal_bundle, validate_own
from protocol.checks import Assignment, get_assignment
from protocol.errors import Fault, Ignore, Reject
from protocol.identity import NetworkKey
from protocol.ledger.calls import Join
from protocol.ledger.events import Role
from protocol.ledger.state import Task
from protocol.messages import Group
from protocol.ports import BlobStore, Engine, Environment, Ledger, PolicyStore
from protocol.rounds import get_end_round, get_times
from protocol.task import TaskSpec

#: Times a round is tried again after the engine, the environment or the disk failed.
ATTEMPTS_MAX = 2


class NodeWorker:
    """One node in one task.

    Args:
        task: id of the task on the ledger.
        environment: the task's environment, loaded and checked by the caller.
        key: the network key that the account is registered with.
        slots: groups per round to declare when joining; 0 declares the most the task allows.
        directory: this role's folder; the journal of a task is a subfolder.
        events: operator events, `events(kind, fields)`.
    """

    def __init__(
        self,
        *,
        ledger: Ledger,
        task: bytes,
        environment: Environment,
        engine: Engine,
        policies: PolicyStore,
        blobs: BlobStore,
        key: NetworkKey,
        directory: Path,
        events: Callable[[str, dict[str, object]], None],
        slots: int = 0,
    ) -> None:
        self._ledger = ledger
        self._task_id = task
        self._environment = environment
        self._engine = engine
        self._key = key
        self._slots = slots
        self._directory = directory / f"node-{task.hex()[:16]}"
        self._events = events
        self._background = Background()
        self._prefetch = Prefetch(policies, self._background, events)
        self._delivery = Delivery(ledger, blobs, self._background, events)
        self._journal: Journal | None = None
        self._loaded: Path | None = None
        self._closed_rounds: set[int] = set()
        self._attempts: dict[int, int] = {}
        self._told: set[tuple[int, str]] = set()
        self._work_blocks = 0
        self._work_started: int | None = None

    async def step(self) -> None:
        """Do what is due. Called after every poll of the ledger."""
        self._background.reap()
        task = self._ledger.state.tasks.get(self._task_id)
        if task is None:
            self._idle(-1, f"task {self._task_id.hex()} is not on the ledger (yet)")
            return
        self._measure()
        journal = self._open_journal(task)
        if self._open_rounds(task).start < get_end_round(task):
            self._prefetch.update(task, self._oldest_version(task))
        await self._join(task)
        await self._delivery.step(task, journal)
        for round_index in self._open_rounds(task):
            if round_index not in self._closed_rounds and await self._work_round(task, journal, round_index):
                break
        await self._delivery.step(task, journal)
        self._forget(self._open_rounds(task).start)

    async def close(self) -> None:
        """Stop background work."""
        await self._background.close()

    # What is due

    def _open_rounds(self, task: Task) -> range:
        """Rounds that have started and still take commitments."""
        block, schedule = self._ledger.state.block_number, task.spec.schedule
        newest = min((block - task.start_block) // schedule.round_blocks, get_end_round(task) - 1)
        oldest = -((task.start_block + schedule.commit_blocks - block) // schedule.round_blocks)
        return range(max(oldest, 0), newest + 1)

    def _oldest_version(self, task: Task) -> int:
        """Version of the oldest round a node can still work on; the newest eligible before the first round."""
        limit = task.start_block + max(self._open_rounds(task).start, 0) * task.spec.schedule.round_blocks
        usable = [p.version for p in task.policies if p.eligible_block is not None and p.eligible_block <= limit]
        return max(usable, default=0)

    def _open_journal(self, task: Task) -> Journal:
        """The journal; a directory that is new to an account which already worked here waits a round before it signs,
        because another machine may be running with the same keys."""
        if self._journal is None:
            journal = Journal(self._directory, task.task, self._ledger.account)
            if not journal.existed:
                if any(self._ledger.account in roots for roots in task.commitments.values()):
                    journal.first_round = self._open_rounds(task).stop
                    self._idle(
                        journal.first_round - 1,
                        f"new directory of an account that has worked before: signs from round {journal.first_round} on",
                    )
                journal.save()
            self._journal = journal
        return self._journal

    async def _join(self, task: Task) -> None:
        """Join once; a node that left, or was put out, does not come back by itself."""
        account = self._ledger.account
        if account in task.members or task.closed or not len(range(*self._future(task))):
            return
        participant = self._ledger.state.participants.get(account)
        stake_min = task.spec.economics.node_stake_min
        if participant is None or participant.role != Role.NODE or participant.bonded < stake_min:
            bonded = "no registration as a node" if participant is None else f"stake {participant.bonded}"
            self._idle(-1, f"cannot join: observed {bonded}, limit {stake_min}; register with enough stake")
            return
        slots = min(self._slots or task.spec.slots_max, task.spec.slots_max)
        await self._ledger.submit(f"join/{task.task.hex()}", Join(task.task, slots))

    def _future(self, task: Task) -> tuple[int, int]:
        return self._open_rounds(task).stop, get_end_round(task)

    def _idle(self, round_index: int, reason: str) -> None:
        """Say once per round why nothing is done in it."""
        if (round_index, reason) not in self._told:
            self._told.add((round_index, reason))
            self._events("idle", {"round": round_index, "reason": reason})

    def _skip(self, round_index: int, reason: str) -> None:
        """Give a round up."""
        self._closed_rounds.add(round_index)
        self._idle(round_index, reason)

    def _forget(self, oldest: int) -> None:
        """Drop notes on rounds that take no more commitments."""
        self._closed_rounds = {index for index in self._closed_rounds if index >= oldest}
        self._attempts = {index: count for index, count in self._attempts.items() if index >= oldest}
        self._told = {note for note in self._told if note[0] < 0 or note[0] >= oldest}

    def _measure(self) -> None:
        """Blocks that the last piece of work took, seen from the replica."""
        if self._work_started is not None:
            self._work_blocks = self._ledger.state.block_number - self._work_started
            self._work_started = None

    # One round

    async def _work_round(self, task: Task, journal: Journal, round_index: int) -> bool:
        """Make and commit one round if it is this node's to make; returns whether heavy work was done."""
        state, account = self._ledger.state, self._ledger.account
        deadline = get_times(task, round_index).commit_deadline
        if round_index in journal.records or account in task.commitments.get(round_index, {}):
            self._closed_rounds.add(round_index)
            return False
        if round_index < journal.first_round:
            self._skip(round_index, f"signs from round {journal.first_round} on")
            return False
        if state.block_number + self._work_blocks + 1 > deadline:
            waited = self._work_blocks
            self._work_blocks = max(waited - 1, 0)  # one fast round must be able to follow a slow one
            self._skip(round_index, self._late_text(task, round_index, waited))
            return False
        try:
            assignment = get_assignment(
                state, task, round_index, account, chain_id=self._ledger.chain_id, ledger=self._ledger.address
            )
        except Ignore:
            return False  # no beacon yet; the deadline above ends the wait
        except Reject as error:
            self._skip(round_index, str(error))
            return False
        folder = self._policy_folder(task, assignment)
        if folder is None:
            self._prefetch.want(task, assignment.policy_version)
            return False
        try:
            await self._make(task, journal, assignment, folder)
        except Fault as error:
            self._attempts[round_index] = self._attempts.get(round_index, 0) + 1
            self._events("fault", {"round": round_index, "text": str(error)})
            if self._attempts[round_index] >= ATTEMPTS_MAX:
                self._skip(round_index, f"gave up after {ATTEMPTS_MAX} attempts: {error}")
        except Reject as error:
            self._skip(round_index, f"own check refused the work, nothing was committed: {error}")
        return True

    def _late_text(self, task: Task, round_index: int, work_blocks: int) -> str:
        deadline, block = get_times(task, round_index).commit_deadline, self._ledger.state.block_number
        try:
            assignment = get_assignment(
                self._ledger.state,
                task,
                round_index,
                self._ledger.account,
                chain_id=self._ledger.chain_id,
                ledger=self._ledger.address,
            )
        except (Ignore, Reject) as error:
            return str(error)
        if self._policy_folder(task, assignment) is None:
            version = assignment.policy_version
            return f"policy version {version} was not here by block {block}: commitments close at block {deadline}"
        return (
            f"no time left: observed block {block} and {work_blocks} blocks of work, limit block {deadline}; "
            "declare fewer slots or use a faster machine if this goes on"
        )

    async def _make(self, task: Task, journal: Journal, assignment: Assignment, folder: Path) -> None:
        """Generate, check, make durable, commit.

        Raises:
            Fault: when a part of this machine failed.
            Reject: when the work would be refused by a verifier.
        """
        self._work_started = self._ledger.state.block_number
        record, fields = await asyncio.to_thread(self._make_record, task, journal, assignment, folder)
        self._events("round_made", fields)
        block, deadline = self._ledger.state.block_number, get_times(task, assignment.round_index).commit_deadline
        other = task.commitments.get(assignment.round_index, {}).get(assignment.account)
        if other is not None or block + 1 > deadline:
            journal.drop(assignment.round_index)
            what = "another root of this account is on the ledger" if other else f"work ended at block {block}"
            self._skip(assignment.round_index, f"{what}, limit block {deadline}: nothing was committed")
            return
        self._closed_rounds.add(assignment.round_index)
        await self._delivery.commit(task, record)

    def _make_record(
        self, task: Task, journal: Journal, assignment: Assignment, folder: Path
    ) -> tuple[Record, dict[str, object]]:
        """The thread's part of `_make`: the durable bundle and the fields of its event."""
        started = time.thread_time()
        if self._loaded != folder:
            self._loaded = None
            self._engine.load(folder)
            self._loaded = folder
        loaded = time.thread_time()
        made = self._make_groups(task.spec, assignment)
        finishing = time.thread_time()
        bundle = make_bundle(assignment, self._finish(task.spec, assignment, made))
        finished = time.thread_time()
        root, data = seal_bundle(self._key, assignment, bundle)
        record = journal.add(bundle, root, data)
        samples = [sample for group in bundle.groups for sample in group.samples]
        return record, {
            "round": assignment.round_index,
            "version": assignment.policy_version,
            "groups": len(bundle.groups),
            "rollouts": len(samples),
            "tokens": sum(len(sample.tokens) for sample in samples),
            "reward_mean": sum(sample.reward_micro for sample in samples) / 1e6 / len(samples),
            "bundle_bytes": len(data),
            "cpu_load": loaded - started,
            "cpu_generation": made.cpu_generation_s,
            "cpu_commitment": made.cpu_commitment_s + time.thread_time() - finished,
            "cpu_self_check": finished - finishing,
        }

    # Seams

    def _policy_folder(self, task: Task, assignment: Assignment) -> Path | None:
        """Folder of the policy to generate with; None while it is not here."""
        return self._prefetch.get(assignment.policy_version)

    def _make_groups(self, spec: TaskSpec, assignment: Assignment) -> Made:
        """Fill every slot under the loaded policy."""
        return make_groups(spec, self._environment, self._engine, assignment)

    def _finish(self, spec: TaskSpec, assignment: Assignment, made: Made) -> tuple[Group, ...]:
        """The groups to commit to. Raises `Reject` when a verifier would refuse them."""
        validate_own(spec, self._environment, assignment, make_bundle(assignment, made.groups), made.hidden)
        return made.groups
