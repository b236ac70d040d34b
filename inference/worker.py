"""The rollout node: joins a task, makes what each round assigns to it, commits, then uploads.

Order of things in a round, each step durable before the next: policy fetched, loaded and its bytes verified -> groups made
chunk by chunk -> all of them checked as a verifier will check them -> sealed bundle on disk -> root on the ledger, final ->
bundle to a relay until it is receipted. `step` looks at the ledger and at the journal and does what is due, so that a
restart after kill -9 needs no other path and makes only the slots that are missing.

Guarantees: never a second root per (task, round); never a root over work that the node can see is wrong, or whose bytes are
not on disk; nothing is signed while another machine uses the same keys; after every step the status file says what is
done and, if nothing, why. Neighbours: inference.making makes the groups, inference.twin looks for other machines,
inference.delivery brings bundles away. `_policy_folder`, `_verify`, `_make_groups` and `_finish` are the seams where
adversaries differ.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from inference.background import Background
from inference.delivery import Delivery
from inference.journal import Journal, Record
from inference.making import CHUNK_ROLLOUTS_MIN, Maker, RoundWork
from inference.prefetch import Prefetch
from inference.rollouts import Made, make_bundle, make_groups, seal_bundle, validate_own
from inference.schedule import (
    describe_late,
    describe_membership,
    describe_rest,
    describe_round,
    describe_waiting,
    get_oldest_version,
    get_open_rounds,
    get_own_assignment,
)
from inference.status import Condition, StatusFile
from inference.twin import TwinGuard, find_foreign_record, name_commit
from protocol.checks import Assignment
from protocol.errors import Fault, Ignore, Reject
from protocol.evidence import describe_trial
from protocol.identity import NetworkKey
from protocol.ledger.calls import Join
from protocol.ledger.state import Task
from protocol.messages import Group
from protocol.ports import BlobStore, Engine, Environment, Ledger, PolicyStore
from protocol.rounds import get_end_round, get_times, get_trial
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
        status: where the node says what it does; `status.json` in `directory` when None.
        verify_policy: `verify_policy(folder, policy hash)` raises `Fault` when a folder's bytes are not that policy.
        hold: a reason from outside not to begin work now, empty for none.
        claim: puts a new node record on the ledger; called when this machine takes an account over from another.
        made_by: engine and numeric settings in words.
        chunk_rollouts: rollouts made in one call of the engine at first.
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
        status: StatusFile | None = None,
        verify_policy: Callable[[Path, bytes], None] | None = None,
        hold: Callable[[], str] = lambda: "",
        claim: Callable[[], Awaitable[None]] | None = None,
        made_by: str = "",
        chunk_rollouts: int = CHUNK_ROLLOUTS_MIN,
    ) -> None:
        self._ledger = ledger
        self._task_id = task
        self._environment = environment
        self._engine = engine
        self._key = key
        self._slots = slots
        self._directory = directory / f"node-{task.hex()[:16]}"
        self._events = events
        self._verify_policy, self._hold, self._claim = verify_policy, hold, claim
        self._status = status or StatusFile(directory / "status.json")
        self._background = Background()
        self._prefetch = Prefetch(policies, self._background, events)
        self._delivery = Delivery(ledger, blobs, self._background, events, self._status.add_rejection)
        self._maker = Maker(engine, self._directory, made_by, self._verify, chunk_rollouts)
        self._guard = TwinGuard(ledger)
        self._journal: Journal | None = None
        self._closed_rounds: dict[int, str] = {}
        self._attempts: dict[int, int] = {}
        self._told: set[tuple[int, str]] = set()

    async def step(self) -> None:
        """Do what is due. Called after every poll of the ledger."""
        self._background.reap()
        task = self._ledger.state.tasks.get(self._task_id)
        if task is None:
            text = f"task {self._task_id.hex()} is not on the ledger (yet)"
            self._idle(-1, text)
            self._say(Condition("waiting_task", text, "the task is published, or this ledger node catches up"))
            return
        journal = self._open_journal(task)
        if self._open_rounds(task).start < get_end_round(task):
            self._prefetch.update(task, get_oldest_version(task, self._open_rounds(task).start))
        refusal = self._check_guard(task, journal)
        if not refusal:
            await self._join(task)
        await self._delivery.step(task, journal, may_sign=not refusal)
        if not refusal:
            for round_index in self._open_rounds(task):
                if round_index not in self._closed_rounds and await self._work_round(task, journal, round_index):
                    break
        # Work polls the ledger, and a reorganisation replaces the replica: look again.
        task = self._ledger.state.tasks.get(self._task_id, task)
        refusal = self._check_guard(task, journal)
        await self._delivery.step(task, journal, may_sign=not refusal)
        self._forget(self._open_rounds(task).start)
        self._say(self._describe(task, journal))

    async def close(self) -> None:
        """Stop background work."""
        await self._background.close()

    # What is due

    def _open_rounds(self, task: Task) -> range:
        """Rounds that have started and still take commitments."""
        return get_open_rounds(task, self._ledger.state.block_number)

    def _open_journal(self, task: Task) -> Journal:
        """The journal; where another machine may be running with the same keys, a round is watched before this one signs."""
        if self._journal is None:
            journal = Journal(self._directory, task.task, self._ledger.account)
            existed = journal.existed
            waits = self._guard.start(task, journal, self._open_rounds(task).stop)
            if waits:
                self._idle(journal.first_round - 1, f"{waits}; signs from round {journal.first_round} on")
            if waits or not existed:
                journal.save()
            self._journal = journal
        return self._journal

    def _check_guard(self, task: Task, journal: Journal) -> str:
        """Why nothing may be signed; told once, and on until this process ends."""
        self._guard.check(task, journal, self._open_rounds(task).start)
        if self._guard.refusal:
            self._idle(-1, self._guard.refusal)
        return self._guard.refusal

    async def _join(self, task: Task) -> None:
        """Join once; a node that left, or was put out, does not come back by itself."""
        future = range(self._open_rounds(task).stop, get_end_round(task))
        if self._ledger.account in task.members or task.closed or not future:
            return
        condition = describe_membership(self._ledger, task)
        if condition is not None:
            self._idle(-1, condition.reason)
            return
        slots = min(self._slots or task.spec.slots_max, task.spec.slots_max)
        await self._ledger.submit(f"join/{task.task.hex()}", Join(task.task, slots))

    def _idle(self, round_index: int, reason: str) -> None:
        """Say once per round why nothing is done in it."""
        if (round_index, reason) not in self._told:
            self._told.add((round_index, reason))
            self._events("idle", {"round": round_index, "reason": reason})

    def _skip(self, round_index: int, reason: str) -> None:
        """Give a round up."""
        self._closed_rounds[round_index] = reason
        self._maker.drop(round_index)
        self._idle(round_index, reason)

    def _forget(self, oldest: int) -> None:
        """Drop notes on rounds that take no more commitments."""
        self._closed_rounds = {index: text for index, text in self._closed_rounds.items() if index >= oldest}
        self._attempts = {index: count for index, count in self._attempts.items() if index >= oldest}
        self._told = {note for note in self._told if note[0] < 0 or note[0] >= oldest}
        self._maker.forget(oldest)

    # One round

    async def _work_round(self, task: Task, journal: Journal, round_index: int) -> bool:
        """Make and commit one round if it is this node's to make; returns whether heavy work was done."""
        state, account = self._ledger.state, self._ledger.account
        signed = self._ledger.outcome(name_commit(task.task, round_index)).status != "unknown"
        if signed or round_index in journal.records or account in task.commitments.get(round_index, {}):
            self._closed_rounds[round_index] = ""
            return False
        if round_index < journal.first_round:
            self._skip(round_index, f"signs from round {journal.first_round} on: another machine may use these keys")
            return False
        deadline = get_times(task, round_index).commit_deadline
        if state.block_number + 1 > deadline:
            self._skip(round_index, describe_late(self._ledger, task, round_index, 0, self._missing_text))
            return False
        held = self._hold()
        if held:
            self._idle(round_index, held)
            return False
        try:
            assignment = get_own_assignment(self._ledger, task, round_index)
        except Ignore:
            return False  # no beacon yet; the deadline above ends the wait
        except Reject as error:
            self._skip(round_index, str(error))
            return False
        folder = self._policy_folder(task, assignment)
        if folder is None:
            self._prefetch.want(task, assignment.policy_version)
            return False
        work = self._maker.open(assignment, state.block_number)
        needed = self._maker.pace.predict_blocks(len(work.missing) * task.spec.group_size)
        if state.block_number + needed + 1 > deadline:
            self._maker.pace.relax()
            self._skip(round_index, describe_late(self._ledger, task, round_index, needed, self._missing_text))
            return False
        await self._attempt(task, journal, work, folder)
        return True

    async def _attempt(self, task: Task, journal: Journal, work: RoundWork, folder: Path) -> None:
        """Make a round; what fails is told, tried again, and given up in the end."""
        round_index = work.assignment.round_index
        try:
            await self._make(task, journal, work, folder)
        except Fault as error:
            self._attempts[round_index] = self._attempts.get(round_index, 0) + 1
            self._events("fault", {"round": round_index, "text": str(error)})
            if self._attempts[round_index] >= ATTEMPTS_MAX:
                self._skip(round_index, f"gave up after {ATTEMPTS_MAX} attempts: {error}")
        except Reject as error:
            self._skip(round_index, f"own check refused the work, nothing was committed: {error}")

    async def _make(self, task: Task, journal: Journal, work: RoundWork, folder: Path) -> None:
        """Generate what is missing, check, make durable, commit.

        Raises:
            Fault: when a part of this machine failed.
            Reject: when the work would be refused by a verifier.
        """
        assignment, size = work.assignment, task.spec.group_size
        index, deadline = assignment.round_index, get_times(task, assignment.round_index).commit_deadline
        while work.missing:
            self._say(work.describe())
            await asyncio.to_thread(self._make_next, task.spec, work, folder)
            await self._ledger.poll()
            needed = self._maker.predict_left(work, self._ledger.state.block_number, size)
            if not self._may_commit(journal, index, deadline - needed):
                return
        self._say(work.describe())
        record, fields = await asyncio.to_thread(self._make_record, task, journal, work)
        self._events("round_made", fields)
        await self._ledger.poll()
        block = self._ledger.state.block_number
        self._maker.finish(work, block)
        if not self._may_commit(journal, index, deadline):
            journal.drop(index)
            return
        if self._claim is not None and find_foreign_record(self._ledger) is not None:
            await self._claim()
        self._closed_rounds[index] = ""
        await self._delivery.commit(task, record)

    def _may_commit(self, journal: Journal, round_index: int, last_block: int) -> bool:
        """Whether a root could still be sent after `last_block`'s predecessor; gives the round up when not."""
        task, block = self._ledger.state.tasks.get(self._task_id), self._ledger.state.block_number
        if task is None:
            self._skip(round_index, "the task vanished from the ledger: a reorganisation took it back")
        elif self._check_guard(task, journal):
            self._skip(round_index, self._guard.refusal)
        elif self._ledger.account in task.commitments.get(round_index, {}):
            self._skip(round_index, "another root of this account is on the ledger: nothing was committed")
        elif block + 1 > last_block:
            deadline = get_times(task, round_index).commit_deadline
            left = f", {deadline - last_block} more blocks of work" if deadline > last_block else ""
            self._skip(
                round_index, f"no time left: observed block {block}{left}, limit block {deadline}: not committed"
            )
        else:
            return True
        return False

    def _make_next(self, spec: TaskSpec, work: RoundWork, folder: Path) -> None:
        """The thread's part of a chunk."""
        self._maker.load(work, folder)
        self._maker.make_chunk(
            work, folder, lambda slots: self._make_groups(spec, work.assignment, slots), spec.group_size
        )

    def _make_record(self, task: Task, journal: Journal, work: RoundWork) -> tuple[Record, dict[str, object]]:
        """The thread's part of the end: the durable bundle and the fields of its event."""
        clock = self._maker.read_cpu
        assignment, finishing = work.assignment, clock()
        bundle = make_bundle(assignment, self._finish(task.spec, assignment, work.collect()))
        finished = clock()
        root, data = seal_bundle(self._key, assignment, bundle)
        record = journal.add(bundle, root, data)
        samples = [sample for group in bundle.groups for sample in group.samples]
        return record, {
            "round": assignment.round_index,
            "version": assignment.policy_version,
            "groups": len(bundle.groups),
            "resumed": work.resumed,
            "rollouts": len(samples),
            "tokens": sum(len(sample.tokens) for sample in samples),
            "reward_mean": sum(sample.reward_micro for sample in samples) / 1e6 / len(samples),
            "bundle_bytes": len(data),
            "cpu_load": work.cpu["load"],
            "cpu_generation": work.cpu["generation"],
            "cpu_commitment": work.cpu["commitment"] + clock() - finished,
            "cpu_self_check": finished - finishing,
        }

    # Status

    def _say(self, condition: Condition) -> None:
        state, account = self._ledger.state, self._ledger.account
        facts: dict[str, Any] = {"account": "0x" + account.hex(), "task": self._task_id.hex()}
        if task := state.tasks.get(self._task_id):
            facts["evidence"] = describe_trial(get_trial(state, task, account, state.block_number))
        self._status.set(condition, block=self._ledger.state.block_number, **facts, **self._maker.pace.describe())

    def _describe(self, task: Task, journal: Journal) -> Condition:
        """What is true at the end of a step."""
        if self._guard.refusal:
            return Condition(
                "refused", self._guard.refusal, "one of the two machines is stopped and this one restarted"
            )
        open_rounds = self._open_rounds(task)
        rest = describe_rest(self._ledger, task, open_rounds)
        if rest is not None:
            return rest
        index = open_rounds.stop - 1
        if self._closed_rounds.get(index):
            return describe_round(task, index, "idle", self._closed_rounds[index])
        if index in journal.records or self._ledger.account in task.commitments.get(index, {}):
            return describe_round(task, index, "committed", self._delivery.describe(task, index))
        if index in self._closed_rounds:
            return describe_round(task, index, "idle", f"the root of round {index} was refused or not sent")
        attempts = f"{self._attempts.get(index, 0)} of {ATTEMPTS_MAX} attempts failed"
        return describe_waiting(self._ledger, task, index, self._hold(), attempts, self._missing_text)

    def _missing_text(self, task: Task, assignment: Assignment) -> str:
        """Why the policy of a round is not here; empty when it is."""
        if self._policy_folder(task, assignment) is not None:
            return ""
        version = assignment.policy_version
        return f"policy version {version}: {self._prefetch.missing_text(version)}"

    # Seams

    def _policy_folder(self, task: Task, assignment: Assignment) -> Path | None:
        """Folder of the policy to generate with; None while it is not here."""
        return self._prefetch.get(assignment.policy_version)

    def _verify(self, folder: Path, assignment: Assignment) -> None:
        """The loaded folder is what the ledger names; one that is not is forgotten, so that it is fetched again."""
        if self._verify_policy is None:
            return
        try:
            self._verify_policy(folder, assignment.policy)
        except Fault:
            self._prefetch.forget(assignment.policy_version)
            raise

    def _make_groups(self, spec: TaskSpec, assignment: Assignment, slots: list[int]) -> Made:
        """Fill slots under the loaded policy."""
        return make_groups(spec, self._environment, self._engine, assignment, slots)

    def _finish(self, spec: TaskSpec, assignment: Assignment, made: Made) -> tuple[Group, ...]:
        """The groups to commit to. Raises `Reject` when a verifier would refuse them."""
        validate_own(spec, self._environment, assignment, make_bundle(assignment, made.groups), made.hidden)
        return made.groups
