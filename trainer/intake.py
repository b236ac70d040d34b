"""Which submissions the trainer has, how far each is, and which groups wait to be trained on.

A submission that the ledger shows as receipted is fetched in the background, checked on 100 % (trainer.ingest), held while
its node is at p = 1 until a committee has judged it good, and then admitted. Everything here is rebuilt from the ledger
and the relays after a restart; what was consumed is known from the generation, so nothing is admitted twice.
Neighbours: trainer.worker calls `step` and takes from `waiting`.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Container
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from protocol.errors import Fault, Ignore, Reject
from protocol.ledger.state import Task
from protocol.lottery import PPM
from protocol.messages import compute_bundle_key
from protocol.ports import BlobStore, Environment, Ledger, PolicyStore
from protocol.rounds import (
    get_audit_ppm,
    get_end_round,
    get_open_round,
    get_round_policy,
    get_said,
    get_times,
    is_suspended,
)
from protocol.verdict import Status
from trainer.batch import GroupKey, TrainingGroup
from trainer.fetches import Fetches
from trainer.ingest import Scorers, check_submission

#: Submissions checked in one step, so that a step stays short.
CHECKS_MAX = 8
#: A submission that we failed on this often is given up.
FAULTS_MAX = 5

Events = Callable[[str, dict[str, Any]], None]
#: (round, account).
Key = tuple[int, bytes]


@dataclass
class _Submission:
    """Attributes:
    groups: checked groups that are held.
    num_judged: judged rounds when it was last looked at; nothing about a held submission changes in between.
    """

    groups: list[TrainingGroup] | None = None
    faults: int = 0
    retry_block: int = 0
    num_judged: int = -1


class Intake:
    """The submissions of one task.

    Attributes:
        waiting: admitted groups that no step consumed yet.
        dropped: groups not used since the last `take_counts`, by reason.
        cpu_seconds: CPU time of checking and scoring since the last `take_counts`.
    """

    def __init__(
        self,
        *,
        ledger: Ledger,
        blobs: BlobStore,
        policies: PolicyStore,
        environment: Environment,
        scorers: Scorers,
        events: Events,
    ) -> None:
        self._ledger = ledger
        self._environment = environment
        self._scorers = scorers
        self._events = events
        self._open: dict[Key, _Submission] = {}
        self._closed: dict[Key, bool] = {}
        self._bundles: Fetches[tuple[bytes, int, bytes], bytes] = Fetches(
            lambda name: blobs.get(compute_bundle_key(*name)),
            describe=lambda name: f"bundle of round {name[1]} of 0x{name[2].hex()}",
            events=events,
        )
        self._folders: Fetches[tuple[bytes, int], Path] = Fetches(
            lambda name: policies.fetch(*name), describe=lambda name: f"policy {name[1]}", events=events
        )
        self._floor = 0
        self._suspended: tuple[int, frozenset[bytes]] = (-1, frozenset())
        self.waiting: dict[GroupKey, TrainingGroup] = {}
        self.dropped: Counter[str] = Counter()
        self.cpu_seconds = 0.0

    async def step(self, task: Task, version: int, consumed: Container[bytes]) -> None:
        """Do what is due for every receipted submission that is fresh for a trainer at policy `version`.

        Args:
            consumed: leaves that this lineage has used.
        """
        rounds = self._list_rounds(task, version)
        self._forget(task, rounds)
        for round_index in rounds:
            for account in task.receipts[round_index]:
                key = (round_index, account)
                if key not in self._closed and key not in self._open:
                    self._open[key] = _Submission()
        self._drop_suspended(task)
        self._fetch(task)
        await self._check_ready(task)
        self._admit(task, consumed)

    def count_nodes(self) -> int:
        """Nodes that deliver now: with something admitted, held, or not yet looked at."""
        return len(
            {account for _, account in self._open} | {account for (_, account), good in self._closed.items() if good}
        )

    def find_complete(self, task: Task) -> bool:
        """Whether all of some round waits: no more receipts can come, every submission is settled, none of its admitted
        groups was used in an earlier step."""
        complete: Counter[int] = Counter(group.round_index for group in self.waiting)
        for round_index, num_waiting in complete.items():
            over = self._ledger.state.block_number > get_times(task, round_index).receipt_deadline
            settled = all((round_index, account) in self._closed for account in task.receipts[round_index])
            admitted = sum(
                task.commitments[index][account].leaves
                for (index, account), good in self._closed.items()
                if good and index == round_index
            )
            if over and settled and num_waiting == admitted:
                return True
        return False

    def take_counts(self) -> tuple[dict[str, int], float]:
        """Dropped groups by reason and CPU seconds since the last call."""
        counts, seconds = dict(self.dropped), self.cpu_seconds
        self.dropped.clear()
        self.cpu_seconds = 0.0
        return counts, seconds

    async def close(self) -> None:
        """Stop fetching."""
        await self._bundles.close()
        await self._folders.close()

    def _list_rounds(self, task: Task, version: int) -> list[int]:
        """Rounds with receipts whose policy is not too old. Neither a round nor the trainer ever goes back to an older
        policy, so what is too old stays so."""
        block = self._ledger.state.block_number
        newest = get_open_round(task, block)
        end = newest + 1 if newest is not None else get_end_round(task) if block >= task.start_block else 0
        while self._floor < end and version - self._version(task, self._floor) > task.spec.max_staleness:
            self._floor += 1
        return [round_index for round_index in range(self._floor, end) if round_index in task.receipts]

    def _forget(self, task: Task, rounds: list[int]) -> None:
        """Give up rounds that are too old by now."""
        fresh = set(rounds)
        for key in [key for key in self._open if key[0] not in fresh]:
            self._close(task, key, "stale")
        for key in [key for key in self._closed if key[0] not in fresh]:
            del self._closed[key]
        for group_key in [group_key for group_key in self.waiting if group_key.round_index not in fresh]:
            del self.waiting[group_key]
            self.dropped["stale"] += 1

    def _close(self, task: Task, key: Key, reason: str, text: str = "") -> None:
        """Done with a submission; `reason` is empty when it was admitted."""
        self._open.pop(key, None)
        self._bundles.discard((task.task, *key))
        self._closed[key] = not reason
        if reason:
            leaves = task.commitments[key[0]][key[1]].leaves
            self.dropped[reason] += leaves
            if reason != "stale":
                self._events(
                    "dropped",
                    {"round": key[0], "account": key[1], "groups": leaves, "reason": reason, "text": text},
                )

    def _drop_suspended(self, task: Task) -> None:
        num_judged = self._count_judged(task)
        if self._suspended[0] != num_judged:
            state = self._ledger.state
            found = (a for a in task.members if is_suspended(state, task, a, state.block_number))
            self._suspended = (num_judged, frozenset(found))
        suspended = self._suspended[1]
        for key in [key for key in self._open if key[1] in suspended]:
            self._close(task, key, "suspended")
        for group_key in [group_key for group_key in self.waiting if group_key.account in suspended]:
            del self.waiting[group_key]
            self.dropped["suspended"] += 1
            self._closed[group_key.round_index, group_key.account] = False

    def _fetch(self, task: Task) -> None:
        """Fetch bundles and the policies they were made with, oldest first."""
        block = self._ledger.state.block_number
        unchecked = [key for key, submission in sorted(self._open.items(), key=_by_key) if submission.groups is None]
        versions = dict.fromkeys(self._version(task, key[0]) for key in unchecked)
        self._folders.keep((task.task, version) for version in versions)
        missing = [version for version in versions if not self._scorers.has(version)]
        self._folders.step([(task.task, version) for version in missing], block)
        self._bundles.step([(task.task, *key) for key in unchecked], block)

    def _is_ready(self, task: Task, key: Key) -> bool:
        version = self._version(task, key[0])
        has_policy = self._scorers.has(version) or (task.task, version) in self._folders.arrived
        return has_policy and (task.task, *key) in self._bundles.arrived

    async def _check_ready(self, task: Task) -> None:
        """Check the oldest fetched submissions in a thread."""
        ready = [
            key
            for key, submission in sorted(self._open.items(), key=_by_key)
            if submission.retry_block <= self._ledger.state.block_number and self._is_ready(task, key)
        ][:CHECKS_MAX]
        if not ready:
            return
        results, seconds = await asyncio.to_thread(self._check_all, task, ready)
        self.cpu_seconds += seconds
        for key, result in results.items():
            submission = self._open[key]
            if isinstance(result, Reject):
                self._close(task, key, result.reason.name.lower(), str(result))
            elif isinstance(result, Ignore):
                self._close(task, key, "void", str(result))
            elif isinstance(result, Fault):
                submission.faults += 1
                submission.retry_block = self._ledger.state.block_number + 1
                self._events("fault", {"what": "submission", "round": key[0], "account": key[1], "text": str(result)})
                if submission.faults >= FAULTS_MAX:
                    self._close(task, key, "fault", str(result))
            else:
                submission.groups = result
                self._bundles.discard((task.task, *key))

    def _check_all(
        self, task: Task, keys: list[Key]
    ) -> tuple[dict[Key, list[TrainingGroup] | Reject | Ignore | Fault], float]:
        started = time.thread_time()
        results: dict[Key, list[TrainingGroup] | Reject | Ignore | Fault] = {}
        for key in keys:
            try:
                results[key] = self._check(task, key)
            except (Reject, Ignore, Fault) as error:
                results[key] = error
        return results, time.thread_time() - started

    def _check(self, task: Task, key: Key) -> list[TrainingGroup]:
        version = self._version(task, key[0])
        loaded = self._scorers.get(version, self._folders.arrived.get((task.task, version)))
        return check_submission(
            self._ledger.state,
            task,
            *key,
            self._bundles.arrived[task.task, *key],
            chain_id=self._ledger.chain_id,
            ledger=self._ledger.address,
            environment=self._environment,
            loaded=loaded,
        )

    def _admit(self, task: Task, consumed: Container[bytes]) -> None:
        """Admit checked submissions; those of nodes at p = 1 once a committee found them good."""
        state, num_judged = self._ledger.state, self._count_judged(task)
        for key, submission in list(self._open.items()):
            if submission.groups is None or submission.num_judged == num_judged:
                continue
            submission.num_judged = num_judged
            round_index, account = key
            if get_audit_ppm(state, task, account, round_index) >= PPM:
                outcome = get_said(state, task, round_index).get(account)
                if outcome is None or outcome.row.status != Status.GOOD:
                    if state.block_number > get_times(task, round_index).verdict_reveal_deadline:
                        judged = "no outcome" if outcome is None else outcome.row.status.name.lower()
                        self._close(task, key, "not_judged_good", f"node is at p = 1 and was judged: {judged}")
                    continue
            self.waiting |= {group.key: group for group in submission.groups if group.leaf not in consumed}
            self._close(task, key, "")

    def _count_judged(self, task: Task) -> int:
        """Rounds whose reveals are over."""
        since = self._ledger.state.block_number - get_times(task, 0).verdict_reveal_deadline
        return max(0, -(-since // task.spec.schedule.round_blocks))

    @staticmethod
    def _version(task: Task, round_index: int) -> int:
        policy = get_round_policy(task, round_index)
        if policy is None:
            raise Fault(f"round {round_index} has no policy: the ledger's version 0 is missing")
        return policy.version


def _by_key(item: tuple[Key, _Submission]) -> Key:
    return item[0]
