"""From a bundle on disk to a verdict: commit its root, upload it until it is receipted, tell what became of it.

Everything is read off the ledger and the journal, so calling `step` again, or after a restart, goes on where it stood.
Neighbours: inference.worker makes the bundles, inference.reports reads why one was refused.
"""

from __future__ import annotations

from collections.abc import Callable

from inference.background import Background
from inference.journal import Journal, Record
from inference.reports import explain_round
from inference.twin import name_commit
from protocol.errors import Fault, Ignore, Reject
from protocol.ledger.calls import CommitRoot
from protocol.ledger.state import Task
from protocol.messages import compute_bundle_key
from protocol.ports import BlobStore, Ledger
from protocol.rounds import Outcome, get_epoch, get_outcomes, get_times
from protocol.settlement import compute_submission_pay
from protocol.verdict import Status

#: Blocks without a receipt after which an upload is repeated (another relay may answer).
RETRY_BLOCKS = 3
#: Uploads of one bundle that a relay may refuse before the node stops asking.
REFUSALS_MAX = 3


class Delivery:
    """The second half of a round."""

    def __init__(
        self,
        ledger: Ledger,
        blobs: BlobStore,
        background: Background,
        events: Callable[[str, dict[str, object]], None],
        rejected: Callable[[dict[str, object]], None] = lambda fields: None,
    ) -> None:
        self._ledger = ledger
        self._blobs = blobs
        self._background = background
        self._events = events
        self._rejected = rejected
        self._uploaded: dict[int, int] = {}
        self._refused: dict[int, int] = {}
        self._told: set[tuple[int, str]] = set()

    def _tell(self, kind: str, round_index: int, **fields: object) -> None:
        """Emit an event once per round, kind and text."""
        name = (round_index, f"{kind}/{fields.get('text', '')}")
        if name not in self._told:
            self._told.add(name)
            self._events(kind, {"round": round_index, **fields})

    async def commit(self, task: Task, record: Record) -> None:
        """Put a durable bundle's root on the ledger (idempotent by its intent)."""
        call = CommitRoot(task.task, record.round_index, record.root, record.leaves, record.policy)
        await self._ledger.submit(name_commit(task.task, record.round_index), call)

    def describe(self, task: Task, round_index: int) -> str:
        """How far a round's bundle has come, in words."""
        account = self._ledger.account
        if account in task.receipts.get(round_index, {}):
            return f"round {round_index} is committed, delivered and receipted"
        if account not in task.commitments.get(round_index, {}):
            return f"the root of round {round_index} is on its way to the ledger"
        where = "at a relay, no receipt yet" if round_index in self._uploaded else "not delivered yet"
        return f"round {round_index} is committed, its bundle is {where}"

    async def step(self, task: Task, journal: Journal, *, may_sign: bool = True) -> None:
        """Move every bundle on. Unless `may_sign`, and before the journal's first round, no root is sent; what is on the
        ledger is still delivered."""
        for record in sorted(journal.records.values()):
            await self._step_record(task, journal, record, may_sign and record.round_index >= journal.first_round)
        self._judge(task, journal)
        kept = journal.records
        self._told = {note for note in self._told if note[0] in kept}
        self._uploaded = {index: block for index, block in self._uploaded.items() if index in kept}
        self._refused = {index: count for index, count in self._refused.items() if index in kept}

    async def _step_record(self, task: Task, journal: Journal, record: Record, may_sign: bool) -> None:
        index, times = record.round_index, get_times(task, record.round_index)
        block = self._ledger.state.block_number
        seen = task.commitments.get(index, {}).get(self._ledger.account)
        if seen is not None and seen.root != record.root:
            text = f"observed root {seen.root.hex()[:16]}, made {record.root.hex()[:16]}: another machine uses this account"
            self._tell("other_root", index, text=text)
            journal.drop(index)
        elif seen is None:
            await self._step_commitment(task, journal, record, may_sign)
        elif self._ledger.account in task.receipts.get(index, {}):
            self._tell("receipted", index)
            final = task.final
            if final is not None and final.epoch >= get_epoch(task, index) and index <= journal.judged_round:
                journal.drop(index)
        elif block > times.receipt_deadline:
            self._tell("unreceipted", index, text=f"no relay receipted it by block {times.receipt_deadline}: unpaid")
            journal.drop(index)
        elif self._upload_due(index, block):
            self._background.start(("upload", index), lambda: self._upload(task, record))

    async def _step_commitment(self, task: Task, journal: Journal, record: Record, may_sign: bool) -> None:
        """A bundle whose root is not on the ledger: submit it while there is time, drop it when it was refused."""
        index, deadline = record.round_index, get_times(task, record.round_index).commit_deadline
        outcome = self._ledger.outcome(name_commit(task.task, index))
        late = outcome.status == "unknown" and self._ledger.state.block_number + 1 > deadline
        if outcome.status == "reverted" or late:
            text = outcome.error or f"not committed by block {deadline}"
            self._tell("commit_refused", index, text=text)
            journal.drop(index)
        elif outcome.status == "unknown" and may_sign:
            await self.commit(task, record)

    def _upload_due(self, index: int, block: int) -> bool:
        uploaded = self._uploaded.get(index)
        fresh = uploaded is not None and block < uploaded + RETRY_BLOCKS
        return not fresh and self._refused.get(index, 0) < REFUSALS_MAX

    async def _upload(self, task: Task, record: Record) -> None:
        index = record.round_index
        key = compute_bundle_key(task.task, index, self._ledger.account)
        self._tell("committed", index, root=record.root, groups=record.leaves)
        try:
            data = record.path.read_bytes()
            await self._blobs.put(key, data)
        except Reject as error:
            self._refused[index] = self._refused.get(index, 0) + 1
            self._uploaded[index] = self._ledger.state.block_number - RETRY_BLOCKS + 1  # again in the next block
            self._tell("upload_refused", index, text=str(error))
        except (Fault, Ignore, OSError) as error:
            self._tell("upload_failed", index, text=str(error))
        else:
            self._uploaded[index] = self._ledger.state.block_number
            self._tell("uploaded", index, sent_bytes=len(data))

    def _judge(self, task: Task, journal: Journal) -> None:
        """Tell, in round order, how rounds ended whose openings are over."""
        account, judged = self._ledger.account, journal.judged_round
        for index in sorted(journal.records):
            if index <= journal.judged_round or account not in task.receipts.get(index, {}):
                continue
            if self._ledger.state.block_number <= get_times(task, index).opening_deadline:
                break
            outcome = get_outcomes(self._ledger.state, task, index).get(account)
            refused = outcome is None or outcome.row.status != Status.GOOD
            if refused and not self._explain(task, index):
                break  # too much runs already: next step
            self._tell_verdict(task, index, outcome)
            journal.judged_round = index
        if journal.judged_round != judged:
            journal.save()

    def _tell_verdict(self, task: Task, index: int, outcome: Outcome | None) -> None:
        if outcome is None:
            self._tell("verdict", index, status="none", text="verifiers did not agree in time: unpaid, not slashed")
            return
        row = outcome.row
        pay = compute_submission_pay(task, row.groups, row.tokens) if row.status == Status.GOOD else 0
        fields = {"status": row.status.name.lower(), "groups": row.groups, "tokens": row.tokens, "pay": pay}
        self._tell("verdict", index, reason=row.reason, **fields)

    def _explain(self, task: Task, index: int) -> bool:
        """Fetch the reports on a refused round and tell their reasons."""
        return self._background.start(
            ("explain", index),
            lambda: explain_round(self._ledger, self._blobs, task, index, self._events, self._rejected),
        )
