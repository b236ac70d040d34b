"""Judging in the judging process: all submissions of a round at once, one by one where that fails, and quarantine.

Strangers' bytes are decoded there and nowhere else; what comes back is rows and findings, checked here against what was asked
(verifier.isolated_reply). When a job does not end well, each submission is judged by itself, the ones at fault once more in a
fresh process, and then left without a row: unknown is unpaid, never a rejection. The time until the verdict is due is shared
out so that one submission that hangs costs its own share and not the others' rows.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

from msgspec.structs import replace

from protocol.errors import Fault, Ignore
from protocol.messages import compute_bundle_bytes_max
from protocol.task import TaskSpec
from verifier.isolated_reply import validate_judgement
from verifier.isolated_wire import Failed, Inspect, Judge, Judged, Limits, Load, Setup
from verifier.isolation import Child, Keeper, require_done
from verifier.judge import FINDING_CHARS_MAX, Judgement, Submission, Unjudged
from verifier.quarantine import Quarantine

log = logging.getLogger("troth.verifier")

#: Longest time that making an environment, and loading a policy, may take.
SETUP_S_MAX, LOAD_S_MAX = 300.0, 600.0
#: Longest time of looking at one bundle.
INSPECT_S_MAX = 30.0
#: A job is never given less than this.
JOB_S_MIN = 1.0
#: Bytes of a reply: for each submission asked about a row, and a finding or a reason.
_REPLY_BYTES, _REPLY_BYTES_EACH = 4096, 256 + 4 * FINDING_CHARS_MAX

T = TypeVar("T")
Events = Callable[[str, dict[str, object]], None]


class Verdict(NamedTuple):
    """A judgement and the CPU seconds it took."""

    judgement: Judgement
    cpu_s: float


class RoundJudge(Protocol):
    """What a verifier judges with."""

    @property
    def needs_base(self) -> bool:
        """Whether the environment needs files of the base policy."""
        ...

    async def inspect(self, spec: TaskSpec, submission: Submission) -> str:
        """Whether served bytes can be held for or against the node; why they will be rejected, if that is seen already.

        Raises:
            Ignore: they say nothing about the node.
            Fault: it could not be found out.
        """
        ...

    async def judge(
        self,
        spec: TaskSpec,
        submissions: Sequence[Submission],
        *,
        folder: Path,
        base: Path | None,
        seconds: float | None,
    ) -> Verdict:
        """Judge submissions of one round.

        Args:
            folder: of the round's policy.
            base: folder of the base policy, where it is needed.
            seconds: until the verdict is due; None when that is not known.

        Raises:
            Fault: nothing could be judged, for a reason that is in no submission.
            ConfigError: judging is not possible here.
        """
        ...

    async def close(self) -> None: ...


class IsolatedJudge:
    """See the module, and `RoundJudge`.

    Args:
        setup: environment and scorer; `folders` are the participant's own.
        limits: of one job.
        events: told `fault` and `quarantined`.
    """

    def __init__(
        self,
        *,
        keeper: Keeper,
        setup: Setup,
        limits: Limits,
        quarantine: Quarantine,
        needs_base: bool,
        events: Events,
    ) -> None:
        self._keeper, self._setup, self._limits = keeper, setup, limits
        self._quarantine, self._events, self._needs_base = quarantine, events, needs_base
        self._child: Child | None = None
        self._is_set_up = False
        self._loaded: Path | None = None
        self._closed = False
        self._thread = ThreadPoolExecutor(1, "judging")

    @property
    def needs_base(self) -> bool:
        """See `RoundJudge`."""
        return self._needs_base

    @property
    def child(self) -> Child | None:
        """The worker, while there is one."""
        return self._child

    async def inspect(self, spec: TaskSpec, submission: Submission) -> str:
        """See `RoundJudge`."""
        size, size_max = len(submission.data), compute_bundle_bytes_max(spec, spec.slots_max) + 80
        if size > size_max:
            raise Ignore(f"served bytes are no bundle and prove nothing: observed {size} bytes, limit {size_max}")
        return await self._run(lambda: self._inspect(spec, submission))

    async def judge(
        self,
        spec: TaskSpec,
        submissions: Sequence[Submission],
        *,
        folder: Path,
        base: Path | None,
        seconds: float | None,
    ) -> Verdict:
        """See `RoundJudge`."""
        bounded = self._limits.wall_s * 2 if seconds is None else seconds
        return await self._run(lambda: self._judge(spec, [*submissions], folder, base, bounded))

    async def close(self) -> None:
        """End the process; a job under way ends with it."""
        self._closed = True
        self._keeper.close()
        self._thread.shutdown(wait=True, cancel_futures=True)

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    # In the thread

    def _inspect(self, spec: TaskSpec, submission: Submission) -> str:
        limits = Limits(self._limits.memory_bytes, self._limits.cpu_s, INSPECT_S_MAX)
        try:
            reply = self._get_child().ask(Inspect(spec, submission), limits)
        except Fault:
            self._end_child()
            raise
        if isinstance(reply, Failed) and reply.kind == "ignore":
            raise Ignore(reply.text)
        return require_done(reply, "looking at a bundle")

    def _judge(
        self, spec: TaskSpec, submissions: list[Submission], folder: Path, base: Path | None, seconds: float
    ) -> Verdict:
        end = time.monotonic() + seconds
        if not submissions:
            return Verdict(Judgement([], [], 0, []), 0.0)
        self._prepare(folder, base)
        try:
            return self._ask(spec, submissions, seconds / 2)
        except Fault as error:
            if self._closed:
                raise
            reason = str(error)
        log.warning("judging %d submissions together failed: %s", len(submissions), reason)
        round_index = submissions[0].assignment.round_index
        self._events("fault", {"round": round_index, "submissions": len(submissions), "text": reason})
        if len(submissions) == 1:
            total, failed = Verdict(Judgement([], [], 0, []), 0.0), {submissions[0].account: reason}
        else:
            total, failed = self._judge_singly(spec, submissions, folder, base, end, fresh=False)
        again, given_up = self._judge_singly(
            spec, [one for one in submissions if one.account in failed], folder, base, end, fresh=True
        )
        for one in submissions:
            if one.account in given_up:
                first, last = failed[one.account], given_up[one.account]
                self._give_up(again.judgement, one, f"{first}; once more in a fresh process: {last}")
        return Verdict(total.judgement.join(again.judgement), total.cpu_s + again.cpu_s)

    def _judge_singly(
        self,
        spec: TaskSpec,
        submissions: Sequence[Submission],
        folder: Path,
        base: Path | None,
        end: float,
        *,
        fresh: bool,
    ) -> tuple[Verdict, dict[bytes, str]]:
        """One job for each; each gets an equal share of what time is left then. Also those that failed, and why."""
        judgement, cpu_s = Judgement([], [], 0, []), 0.0
        failed: dict[bytes, str] = {}
        later = 1 if fresh else 2  # half is kept for the second try
        for index, one in enumerate(submissions):
            if fresh:
                self._end_child()
            try:
                self._prepare(folder, base)
                left_s = (end - time.monotonic()) / later / (len(submissions) - index)
                part = self._ask(spec, [one], left_s)
            except Fault as error:
                if self._closed:
                    raise
                failed[one.account] = str(error)
            else:
                judgement, cpu_s = judgement.join(part.judgement), cpu_s + part.cpu_s
        return Verdict(judgement, cpu_s), failed

    def _give_up(self, judgement: Judgement, one: Submission, reason: str) -> None:
        """No row; the bytes are kept for a person to look at."""
        round_index = one.assignment.round_index
        path = self._quarantine.add(round_index, one.account, one.data, reason)
        log.warning("round %d, node 0x%s: no verdict: %s; see %s", round_index, one.account.hex(), reason, path)
        self._events("quarantined", {"round": round_index, "account": one.account, "text": reason, "file": str(path)})
        judgement.unjudged.append(Unjudged(one.account, reason[:FINDING_CHARS_MAX]))

    def _ask(self, spec: TaskSpec, submissions: Sequence[Submission], seconds: float) -> Verdict:
        """One job. Raises `Fault`; the process is dead then."""
        wall_s = max(JOB_S_MIN, min(seconds, self._limits.wall_s))
        limits = Limits(self._limits.memory_bytes, self._limits.cpu_s, wall_s)
        bytes_max = _REPLY_BYTES + _REPLY_BYTES_EACH * len(submissions)
        try:
            reply = self._get_child().ask(Judge(spec, tuple(submissions), limits), limits, bytes_max=bytes_max)
            if not isinstance(reply, Judged):
                require_done(reply, "judging")
                raise Fault("judging: an answer to another question")
            validate_judgement(spec, submissions, reply)
        except Fault:
            self._end_child()
            raise
        return Verdict(reply.judgement, reply.cpu_s)

    def _prepare(self, folder: Path, base: Path | None) -> None:
        """A worker with the environment made and the policy loaded. Raises `Fault`, `ConfigError`."""
        child = self._get_child()
        try:
            if not self._is_set_up:
                folders = self._setup.folders + (() if base is None else (str(base.absolute()),))
                setup = replace(self._setup, folders=folders)
                require_done(child.ask(setup, Limits(0, 0.0, SETUP_S_MAX)), "making the environment")
                self._is_set_up = True
            if self._loaded != folder:
                self._loaded = None
                load = Load(str(folder.absolute()))
                require_done(child.ask(load, Limits(0, 0.0, LOAD_S_MAX)), "loading the policy")
                self._loaded = folder
        except Fault:
            self._end_child()
            raise

    def _get_child(self) -> Child:
        if self._child is None or not self._child.alive:
            self._end_child()
            self._child = Child(self._keeper)
        return self._child

    def _end_child(self) -> None:
        child, self._child = self._child, None
        self._is_set_up, self._loaded = False, None
        if child is not None:
            child.end()
