"""The verifier: fetches what a round delivered, judges it, commits, reveals, publishes why; attests policies, settles.

Order of a round: bundles fetched as they are receipted, and the policy with them -> audit beacon -> judged -> rows, report
and salt on disk -> commitment -> reveal after the commit deadline -> report at the relays. `step` does what is due by
looking at the ledger and the journal, so a restart needs no other path; it waits neither for a peer nor for a judgement, so
whatever a submission does to the judging process (verifier.isolated_judge), reveals go out in time. What cannot be fetched
or computed in time gets no row.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from protocol.codec import PROTOCOL_VERSION, Domain, tagged_hash
from protocol.errors import ConfigError, Fault, Ignore, Reject
from protocol.identity import NetworkKey
from protocol.ledger.calls import CommitVerdict, RevealVerdict
from protocol.ledger.state import Task
from protocol.messages import Report, compute_bundle_key, compute_report_key, make_domain, seal
from protocol.ports import BlobStore, Ledger, PolicyStore
from protocol.rounds import get_committee, get_end_round, get_round_policy, get_times
from protocol.verdict import Status, compute_verdict_commitment, pack_rows
from verifier.attester import Attester
from verifier.canary_voter import CanaryVoter
from verifier.isolated_judge import RoundJudge, Verdict
from verifier.journal import Journal, VerdictRecord
from verifier.judge import Judgement, get_submissions
from verifier.settler import Settler

log = logging.getLogger("troth.verifier")

#: Blocks before the commit deadline at which a verdict goes out even if a bundle is still missing.
PATIENCE_BLOCKS = 2
#: Blocks whose pace tells how many seconds are left until a deadline, and the least that judging is given.
PACE_BLOCKS = 32
JUDGE_S_MIN = 5.0


class VerifierWorker:
    """One verifier in one task.

    Args:
        task: id of the task on the ledger.
        judge: what bundles are looked at and judged with.
        key: the network key that the account is registered with.
        directory: this role's folder.
        events: operator events, `events(kind, fields)`.
    """

    def __init__(
        self,
        *,
        ledger: Ledger,
        task: bytes,
        judge: RoundJudge,
        policies: PolicyStore,
        blobs: BlobStore,
        key: NetworkKey,
        directory: Path,
        events: Callable[[str, dict[str, object]], None],
    ) -> None:
        self._ledger, self._task_id, self._round_judge = ledger, task, judge
        self._policies, self._blobs = policies, blobs
        self._key, self._events = key, events
        self._journal = Journal(directory / f"verdicts-{task.hex()[:16]}")
        self._attester = Attester(ledger=ledger, policies=policies, events=events)
        self._settler = Settler(ledger=ledger, events=events)
        self._voter = CanaryVoter(ledger=ledger, judge=judge, policies=policies, blobs=blobs, events=events)
        self._bundles: dict[int, dict[bytes, bytes]] = {}
        self._folders: dict[int, Path] = {}
        self._jobs: dict[tuple[object, ...], asyncio.Task[None]] = {}
        self._pace: deque[tuple[float, int]] = deque(maxlen=PACE_BLOCKS)
        self._refusal: ConfigError | None = None
        self._published: set[int] = set()

    async def step(self) -> None:
        """Do what is due. Called after every poll of the ledger. Raises `ConfigError` where judging is not possible."""
        task = self._ledger.state.tasks.get(self._task_id)
        if task is None:
            return
        if self._refusal is not None:
            raise self._refusal
        if not self._pace or self._pace[-1][1] != self._ledger.state.block_number:
            self._pace.append((time.monotonic(), self._ledger.state.block_number))
        self._jobs = {name: job for name, job in self._jobs.items() if not job.done()}
        await self._attester.step(task)
        for round_index in self._active_rounds(task):
            self._fetch_bundles(task, round_index)
            self._fetch_policy(task, round_index)
            await self._reveal(task, round_index)
        for round_index in self._active_rounds(task):
            if await self._judge(task, round_index):
                break
        self._vote_canaries(task)
        await self._settler.step(task)
        self._forget(task)

    async def close(self) -> None:
        """Stop background work."""
        await self._attester.close()
        for job in self._jobs.values():
            job.cancel()
        await self._round_judge.close()
        await asyncio.gather(*self._jobs.values(), return_exceptions=True)

    def _active_rounds(self, task: Task) -> range:
        """Rounds that have started and whose reveals are not over."""
        block, schedule = self._ledger.state.block_number, task.spec.schedule
        newest = min((block - task.start_block) // schedule.round_blocks, get_end_round(task) - 1)
        reach = get_times(task, 0).verdict_reveal_deadline - task.start_block
        oldest = -((task.start_block + reach - block) // schedule.round_blocks)
        return range(max(oldest, 0), newest + 1)

    # Fetching

    def _fetch_bundles(self, task: Task, round_index: int) -> None:
        """Start fetching receipted bundles; those that are here are not fetched again."""
        here = self._bundles.setdefault(round_index, {})
        for account in task.receipts.get(round_index, {}):
            name = ("bundle", round_index, account)
            if account not in here and name not in self._jobs and round_index not in self._journal.records:
                self._jobs[name] = asyncio.create_task(self._fetch_bundle(task.task, round_index, account))

    async def _fetch_bundle(self, task: bytes, round_index: int, account: bytes) -> None:
        try:
            data = await self._blobs.get(compute_bundle_key(task, round_index, account))
            await self._require_evidence(task, round_index, account, data)
        except Fault as error:
            log.info("bundle of round %d, node 0x%s: %s", round_index, account.hex(), error)
        except Ignore as error:  # a relay's doing: asked for again, and no row if it stays so
            log.warning("bundle of round %d, node 0x%s: %s", round_index, account.hex(), error)
            self._events("bundle_refused", {"round": round_index, "account": account, "text": str(error)})
        else:
            self._bundles.setdefault(round_index, {})[account] = data

    async def _require_evidence(self, task_id: bytes, round_index: int, account: bytes, data: bytes) -> None:
        """Keep only bytes that can be held for or against the node; what they are worth is for the judge. Raises `Ignore`."""
        ledger, task = self._ledger, self._ledger.state.tasks[task_id]
        found, _ = get_submissions(
            ledger.state, task, round_index, {account: data}, chain_id=ledger.chain_id, ledger=ledger.address
        )
        for one in found:
            try:
                text = await self._round_judge.inspect(task.spec, one)
            except Fault as error:  # kept: what a bundle does to whoever looks at it is for the judge to find out
                log.warning("bundle of round %d, node 0x%s: %s", round_index, account.hex(), error)
                self._events("fault", {"round": round_index, "account": account, "text": str(error)})
            else:
                if text:
                    log.info("bundle of round %d, node 0x%s will be rejected: %s", round_index, account.hex(), text)

    def _fetch_policy(self, task: Task, round_index: int) -> None:
        """Start fetching the policy of a round that will have to be judged, so that no step ever waits for a peer."""
        policy = get_round_policy(task, round_index)
        if policy is None or round_index in self._journal.records or round_index not in task.receipts:
            return
        for version in {policy.version, 0} if self._round_judge.needs_base else {policy.version}:
            folder, name = self._folders.get(version), ("policy", version)
            if (folder is None or not folder.is_dir()) and name not in self._jobs:
                self._jobs[name] = asyncio.create_task(self._fetch_folder(task.task, version))

    async def _fetch_folder(self, task: bytes, version: int) -> None:
        self._folders.pop(version, None)
        try:
            self._folders[version] = await self._policies.fetch(task, version)
        except Fault as error:
            log.warning("policy %d: %s", version, error)
            self._events("fault", {"version": version, "text": str(error)})

    # Judging

    async def _judge(self, task: Task, round_index: int) -> bool:
        """Start judging a round when it is due, or commit what is judged; returns whether a round is being judged."""
        state, times = self._ledger.state, get_times(task, round_index)
        if ("judge",) in self._jobs:
            return True
        over = state.block_number >= times.verdict_commit_deadline
        said = self._ledger.account in task.verdict_commits.get(round_index, {})
        if over or said:
            return False
        if round_index in self._journal.records:  # judged by a process that died before the ledger heard of it
            await self._commit(task, round_index)
            return False
        if self._ledger.account not in get_committee(state, task, round_index):
            return False
        bundles = self._bundles.get(round_index, {})
        missing = set(task.receipts.get(round_index, {})) - set(bundles)
        if missing and state.block_number < times.verdict_commit_deadline - PATIENCE_BLOCKS:
            return False
        policy = get_round_policy(task, round_index)
        folder = None if policy is None else self._folders.get(policy.version)
        base = self._folders.get(0) if self._round_judge.needs_base else None
        if not bundles or folder is None or (self._round_judge.needs_base and base is None):
            return False
        work = self._judge_round(task, round_index, dict(bundles), folder, base, len(missing))
        self._jobs["judge",] = asyncio.create_task(work)
        await asyncio.sleep(0)
        return True

    async def _judge_round(
        self, task: Task, round_index: int, bundles: dict[bytes, bytes], folder: Path, base: Path | None, missing: int
    ) -> None:
        """Judge a round, put the verdict on disk, and commit to it if it is not too late."""
        ledger, deadline = self._ledger, get_times(task, round_index).verdict_commit_deadline
        try:
            submissions, known = get_submissions(
                ledger.state, task, round_index, bundles, chain_id=ledger.chain_id, ledger=ledger.address
            )
            seconds = self._estimate_seconds(deadline - PATIENCE_BLOCKS)
            said, cpu_s = await self._round_judge.judge(
                task.spec, submissions, folder=folder, base=base, seconds=seconds
            )
            judgement = known.join(said)
            if ledger.state.block_number >= deadline:
                raise Fault(f"judged too late: at block {ledger.state.block_number}, limit {deadline - 1}")
            self._record(task, round_index, judgement)
            await self._commit(task, round_index)
            self._tell(round_index, Verdict(judgement, cpu_s), missing)
        except ConfigError as error:
            self._refusal = error
        except Exception as error:  # ours, and of this round: other rounds and the settlement go on
            text = str(error) if isinstance(error, Fault) else f"{type(error).__name__}: {error}"
            log.warning("round %d: no verdict (yet): %s", round_index, text, exc_info=not isinstance(error, Fault))
            self._events("fault", {"round": round_index, "text": text})

    def _estimate_seconds(self, block: int) -> float | None:
        """Seconds until a block at the chain's recent pace; None while that is not known."""
        (first_s, first), (last_s, last) = self._pace[0], self._pace[-1]
        if last == first:
            return None
        left_s = (block - last) * (last_s - first_s) / (last - first)
        return max(JUDGE_S_MIN, left_s - (time.monotonic() - last_s))

    async def _commit(self, task: Task, round_index: int) -> None:
        """Put the commitment of a verdict that is on disk on the ledger; once is enough."""
        intent, record = f"verdict/{task.task.hex()}/{round_index}", self._journal.records[round_index]
        if self._ledger.outcome(intent).status == "unknown":
            await self._ledger.submit(intent, CommitVerdict(task.task, round_index, record.commitment))

    def _salt(self, task: bytes, round_index: int) -> bytes:
        """The round's salt: a hash of a signature that is never published, so a restart finds the same one."""
        domain = Domain(self._ledger.chain_id, self._ledger.address, task, "VerdictSalt")
        return tagged_hash("salt", self._key.sign(domain, round_index.to_bytes(8, "big")))

    def _record(self, task: Task, round_index: int, judgement: Judgement) -> None:
        """Put the verdict on disk."""
        account = self._ledger.account
        report = Report(PROTOCOL_VERSION, task.task, round_index, account, tuple(judgement.findings))
        domain = make_domain(self._ledger.chain_id, self._ledger.address, task.task, Report)
        sealed, rows = seal(self._key, domain, report), pack_rows(judgement.rows)
        salt = self._salt(task.task, round_index)
        commitment = compute_verdict_commitment(
            task=task.task,
            round_index=round_index,
            verifier=account,
            rows=rows,
            report=hashlib.sha256(sealed).digest(),
            salt=salt,
        )
        self._journal.add(VerdictRecord(round_index, rows, sealed, salt, commitment))

    def _tell(self, round_index: int, verdict: Verdict, missing: int) -> None:
        judgement, cpu_s = verdict
        good = sum(row.status == Status.GOOD for row in judgement.rows)
        self._events(
            "verdict",
            {
                "round": round_index,
                "good": good,
                "rejected": len(judgement.rows) - good,
                "missing": missing,
                "unjudged": len(judgement.unjudged),
                "groups": sum(row.groups for row in judgement.rows),
                "leaves_audited": sum(row.audited for row in judgement.rows),
                "tokens_audited": judgement.tokens_audited,
                "cpu_verification": cpu_s,
            },
        )
        for one in judgement.unjudged:
            self._events("unjudged", {"round": round_index, "account": one.account, "text": one.text})
        for finding in judgement.findings:
            self._events("rejected", {"round": round_index, "account": finding.account, "text": finding.text})

    def _vote_canaries(self, task: Task) -> None:
        """Fetch and judge opened canaries that we were not drawn for, one at a time and after everything else."""
        for opened in self._voter.find_due(task):
            name = ("canary", *opened)
            if not self._voter.is_fetched(opened):
                if name not in self._jobs:
                    self._jobs[name] = asyncio.create_task(self._voter.fetch(task, opened))
            elif ("judge",) not in self._jobs:
                deadline = get_times(task, opened[0]).confirm_deadline
                seconds = self._estimate_seconds(deadline - PATIENCE_BLOCKS)
                self._jobs["judge",] = asyncio.create_task(self._voter.vote(task, opened, seconds))

    # Revealing

    async def _reveal(self, task: Task, round_index: int) -> None:
        """Reveal a committed verdict once commitments are closed, and publish its report once it is revealed."""
        record, times = self._journal.records.get(round_index), get_times(task, round_index)
        if record is None:
            return
        account, block = self._ledger.account, self._ledger.state.block_number
        if account in task.reveals.get(round_index, {}):
            name = ("report", round_index)
            if round_index not in self._published and name not in self._jobs:
                self._jobs[name] = asyncio.create_task(self._publish(task.task, record))
            return
        committed = task.verdict_commits.get(round_index, {}).get(account) == record.commitment
        if committed and times.verdict_commit_deadline < block < times.verdict_reveal_deadline:
            digest = hashlib.sha256(record.sealed_report).digest()
            await self._ledger.submit(
                f"reveal/{task.task.hex()}/{round_index}",
                RevealVerdict(task.task, round_index, record.rows, digest, record.salt),
            )

    async def _publish(self, task: bytes, record: VerdictRecord) -> None:
        try:
            await self._blobs.put(compute_report_key(task, record.round, self._ledger.account), record.sealed_report)
            self._published.add(record.round)
        except (Fault, Ignore, Reject) as error:
            log.info("report of round %d: %s", record.round, error)

    def _forget(self, task: Task) -> None:
        """Drop rounds that are over, a little later than necessary so that reports can still go out."""
        active = self._active_rounds(task)
        oldest = active.start - 4
        for round_index in [r for r in self._journal.records if r < oldest]:
            self._journal.drop(round_index)
        for round_index in [r for r in self._bundles if r < active.start]:
            del self._bundles[round_index]
        self._published = {r for r in self._published if r >= oldest}
        policies = [get_round_policy(task, r) for r in active]
        used = {policy.version for policy in policies if policy is not None} | {0}
        self._folders = {version: folder for version, folder in self._folders.items() if version in used}
