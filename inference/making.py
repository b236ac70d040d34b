"""Making one round in chunks: what is done is on disk, what is missing is next, and one policy made all of it.

A chunk is a few slots in one call of the engine. Chunks grow while they are quick, so that batching stays efficient, and a
killed node loses the chunk in flight and nothing else. Before each chunk the policy that is loaded must be the round's:
a policy is swapped between rounds, never within one. Neighbours: inference.parts keeps the groups, inference.rollouts
makes them, inference.worker decides when and whether to go on.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from inference.pace import Pace
from inference.parts import Parts
from inference.rollouts import Made
from inference.status import Condition
from protocol.checks import Assignment
from protocol.errors import Fault
from protocol.messages import Group
from protocol.ports import Engine

#: Rollouts of the first chunk, and the most of any.
CHUNK_ROLLOUTS_MIN = 64
CHUNK_ROLLOUTS_MAX = 4096
#: A chunk that took less than this lets the next one be twice as large: at most about twice this is lost to a kill.
CHUNK_SECONDS = 2.0
#: A chunk that took more than this halves the next one, down to a single slot: batching is worth less than what a kill
#: would cost.
CHUNK_SECONDS_MAX = 120.0


@dataclass
class RoundWork:
    """A round in progress.

    Attributes:
        groups: finished groups by slot; `resumed` of them were found on disk.
        hidden: hidden size of the policy, 0 before the first group.
        started_block: block of the replica when work began in this process.
        made: rollouts made in this process.
    """

    assignment: Assignment
    groups: dict[int, Group]
    hidden: int
    started_block: int
    resumed: int = 0
    made: int = 0
    cpu: dict[str, float] = field(default_factory=lambda: {"load": 0.0, "generation": 0.0, "commitment": 0.0})

    @property
    def missing(self) -> list[int]:
        """Slots that are still to be made, ascending."""
        return [slot for slot in range(self.assignment.quota) if slot not in self.groups]

    def describe(self) -> Condition:
        """How far the round is."""
        done, quota = len(self.groups), self.assignment.quota
        text = f"{done} of {quota} groups made" if done < quota else f"checking and writing {quota} groups"
        if self.resumed:
            text += f", {self.resumed} of them before a restart"
        return Condition("working", text, "the round is made", self.assignment.round_index)

    def collect(self) -> Made:
        """All groups in slot order."""
        groups = tuple(self.groups[slot] for slot in range(self.assignment.quota))
        return Made(groups, self.hidden, self.cpu["generation"], self.cpu["commitment"])


class Maker:
    """The engine's side of a node. Its methods block and run in a thread, one at a time.

    Args:
        made_by: engine and numeric settings in words; parts of another one are not continued.
        verify: called with a folder and the assignment after every load; raises `Fault` when the bytes on disk are not
            the policy the ledger names.
        chunk_rollouts: rollouts of the first chunk.
    """

    def __init__(
        self,
        engine: Engine,
        directory: Path,
        made_by: str,
        verify: Callable[[Path, Assignment], None],
        chunk_rollouts: int = CHUNK_ROLLOUTS_MIN,
    ) -> None:
        self._engine, self._made_by, self._verify = engine, made_by, verify
        self._parts = Parts(directory)
        self._chunk_rollouts = chunk_rollouts
        self._loaded: tuple[Path, bytes] | None = None
        self.pace = Pace()

    @staticmethod
    def read_cpu() -> float:
        """CPU seconds of this thread."""
        return time.thread_time()

    def open(self, assignment: Assignment, block: int) -> RoundWork:
        """A round with what an earlier run left of it."""
        groups, hidden = self._parts.read(assignment, self._made_by)
        return RoundWork(assignment, groups, hidden, block, resumed=len(groups))

    def load(self, work: RoundWork, folder: Path) -> None:
        """Have the round's policy loaded and its bytes verified.

        Raises:
            Fault: when it is not usable; nothing is generated until a load succeeds.
        """
        wanted = (folder, work.assignment.policy)
        if self._loaded == wanted:
            return
        started = time.thread_time()
        self._loaded = None  # whatever the engine holds after a failure, it is not used
        self._engine.load(folder)
        self._verify(folder, work.assignment)
        self._loaded = wanted
        work.cpu["load"] += time.thread_time() - started

    def make_chunk(self, work: RoundWork, folder: Path, make: Callable[[list[int]], Made], group_size: int) -> None:
        """Make the next slots and put them on disk, unless they are the last and were quick.

        Raises:
            Fault: when the engine, the environment or the disk fails, or another policy is loaded.
        """
        if self._loaded != (folder, work.assignment.policy):
            raise Fault(
                f"policy {work.assignment.policy.hex()[:16]} of round {work.assignment.round_index} is not loaded"
            )
        slots = work.missing[: max(1, self._chunk_rollouts // group_size)]
        started = time.monotonic()
        made = make(slots)
        seconds = time.monotonic() - started
        if work.hidden not in (0, made.hidden):
            raise Fault(
                f"the policy's hidden size is {made.hidden}, what was made of the round before has {work.hidden}"
            )
        work.groups |= {group.slot: group for group in made.groups}
        if work.missing or seconds >= CHUNK_SECONDS:  # else the bundle follows at once: writing twice would cost more
            self._parts.add(work.assignment, self._made_by, made.groups, made.hidden)
        work.hidden = made.hidden
        work.made += len(slots) * group_size
        work.cpu["generation"] += made.cpu_generation_s
        work.cpu["commitment"] += made.cpu_commitment_s
        tokens = sum(len(sample.tokens) for group in made.groups for sample in group.samples)
        self.pace.add_generation(len(slots) * group_size, tokens, seconds)
        if seconds < CHUNK_SECONDS and len(slots) * group_size * 2 > self._chunk_rollouts:
            self._chunk_rollouts = min(2 * self._chunk_rollouts, CHUNK_ROLLOUTS_MAX)
        elif seconds > CHUNK_SECONDS_MAX:
            self._chunk_rollouts = max(self._chunk_rollouts // 2, 1)

    def predict_left(self, work: RoundWork, block: int, group_size: int) -> int:
        """Blocks that the rest of a round takes at least, by what it took so far; 0 before anything was made.

        A block is taken off what was seen: the first one may have been about to pass when work began.
        """
        elapsed = max(block - work.started_block - 1, 0)
        left = len(work.missing) * group_size
        return -(-elapsed * left // work.made) if work.made else 0

    def finish(self, work: RoundWork, block: int) -> None:
        """The round's bundle is on disk: its parts are not needed any more."""
        if work.made:
            self.pace.add_work(work.made, max(block - work.started_block, 0))
        self._parts.drop(work.assignment.round_index)

    def drop(self, round_index: int) -> None:
        """A round is given up."""
        self._parts.drop(round_index)

    def forget(self, oldest: int) -> None:
        """Rounds before `oldest` take no more commitments."""
        self._parts.forget(oldest)
