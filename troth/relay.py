"""The relay role: the storage committee (of one, in this version) and the public shelf of the network.

It takes bundles whose content is what the ledger says was committed, reports and lineage records whose hash is on the
ledger, serves them to everybody, and says so on the ledger with receipts. It judges nothing: a false reward or an edited
token is for the verifiers. Torch is never imported here.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable

from protocol.checks import get_assignment, open_bundle
from protocol.codec import tagged_hash
from protocol.errors import Ignore, Reason, Reject
from protocol.ledger.calls import ReceiptBundles
from protocol.ledger.events import Role
from protocol.ledger.state import Task
from protocol.messages import (
    LINEAGE_BYTES_MAX,
    REPORT_BYTES_MAX,
    compute_bundle_key,
    compute_lineage_key,
    compute_report_key,
)
from protocol.ports import Ledger, PolicyStore
from protocol.rounds import get_end_round, get_open_round, get_times
from troth.directory import Contact, Directory
from verifier.attester import Attester

log = logging.getLogger("troth.relay")

#: Rounds whose blobs a relay still takes: enough for the slowest deadline of the presets.
ROUNDS_OPEN_MAX = 64
#: Lineage records a trainer may store ahead of their ledger record.
LINEAGE_AHEAD_MAX = 2


class RelayWorker:
    """Accepts blobs, writes receipts.

    Args:
        has_blob: tells whether a blob key is on the shelf.
        policies: where new policies are fetched, to be served and attested.
        events: operator events.
    """

    def __init__(
        self,
        *,
        ledger: Ledger,
        directory: Directory,
        has_blob: Callable[[bytes], bool],
        policies: PolicyStore,
        events: Callable[[str, dict[str, object]], None],
    ) -> None:
        self._ledger = ledger
        self._directory = directory
        self._has_blob = has_blob
        self._events = events
        self._attester = Attester(ledger=ledger, policies=policies, events=events)
        self._waiting_since: dict[tuple[bytes, int], int] = {}

    def _open_rounds(self, task: Task) -> range:
        block = self._ledger.state.block_number
        newest = get_open_round(task, block)
        if newest is None:
            newest = get_end_round(task) - 1 if block >= task.start_block else -1
        return range(max(0, newest - ROUNDS_OPEN_MAX), newest + 1)

    def accept(self, sender_curve: bytes, key: bytes, data: bytes) -> None:
        """Decide whether a blob belongs on the shelf.

        Raises:
            Reject: with the reason, which goes back to the sender.
            Ignore: when nothing on the ledger speaks of such a blob (yet).
        """
        senders = self._directory.find_curve(sender_curve)
        if not senders:
            raise Reject(
                Reason.UNREGISTERED,
                "only registered participants store blobs",
                observed=sender_curve.hex()[:16],
                todo="register on the ledger with a record that names this CURVE key",
            )
        if any(self._accept_from(sender, key, data) for sender in senders):
            return
        raise Ignore("no commitment, reveal or policy on the ledger speaks of this blob; commit first, then upload")

    def _accept_from(self, sender: Contact, key: bytes, data: bytes) -> bool:
        """Whether the ledger speaks of such a blob of this participant. Raises `Reject` when it is not the one named."""
        for task in self._ledger.state.tasks.values():
            if sender.role == Role.NODE and self._accept_bundle(task, sender.account, key, data):
                return True
            if sender.role == Role.VERIFIER and self._accept_report(task, sender.account, key, data):
                return True
            if sender.account == task.spec.trainer and self._accept_lineage(task, key, data):
                return True
        return False

    def _accept_bundle(self, task: Task, account: bytes, key: bytes, data: bytes) -> bool:
        state = self._ledger.state
        for round_index in reversed(self._open_rounds(task)):
            commitment = task.commitments.get(round_index, {}).get(account)
            if commitment is None or key != compute_bundle_key(task.task, round_index, account):
                continue
            deadline = get_times(task, round_index).receipt_deadline
            if state.block_number > deadline:
                raise Reject(
                    Reason.LATE,
                    f"bundle of round {round_index} came after its receipt deadline",
                    observed=f"block {state.block_number}",
                    limit=f"block {deadline}",
                    todo="it is unpaid and costs no stake; commit and upload earlier",
                )
            assignment = get_assignment(
                state, task, round_index, account, chain_id=self._ledger.chain_id, ledger=self._ledger.address
            )
            public = state.participants[account].network_key
            open_bundle(task.spec, assignment, commitment, data, public)
            self._events("bundle", {"round": round_index, "account": account, "stored_bytes": len(data)})
            return True
        return False

    def _accept_report(self, task: Task, account: bytes, key: bytes, data: bytes) -> bool:
        for round_index in reversed(self._open_rounds(task)):
            reveal = task.reveals.get(round_index, {}).get(account)
            if reveal is None or key != compute_report_key(task.task, round_index, account):
                continue
            digest = hashlib.sha256(data).digest()
            if len(data) > REPORT_BYTES_MAX or digest != reveal.report:
                raise Reject(
                    Reason.ROOT_MISMATCH,
                    f"report of round {round_index} is not the one revealed",
                    observed=digest.hex()[:16],
                    limit=reveal.report.hex()[:16],
                )
            return True
        return False

    def _accept_lineage(self, task: Task, key: bytes, data: bytes) -> bool:
        for version in range(len(task.policies), len(task.policies) + LINEAGE_AHEAD_MAX):
            if key == compute_lineage_key(task.task, version):
                if len(data) > LINEAGE_BYTES_MAX:
                    raise Reject(Reason.MALFORMED, "lineage record", observed=len(data), limit=LINEAGE_BYTES_MAX)
                return True
        for policy in task.policies:
            if key == compute_lineage_key(task.task, policy.version):
                if hashlib.sha256(data).digest() != policy.lineage:
                    raise Reject(Reason.ROOT_MISMATCH, f"lineage of policy {policy.version} is not the one recorded")
                return True
        return False

    async def step(self) -> None:
        """Write receipts for bundles that are on the shelf; fetch and attest new policies."""
        state = self._ledger.state
        for task in state.tasks.values():
            if task.closed:
                continue
            await self._attester.step(task)
            for round_index in self._open_rounds(task):
                if state.block_number < get_times(task, round_index).receipt_deadline:
                    await self._receipt_round(task, round_index)

    async def close(self) -> None:
        """Stop background work."""
        await self._attester.close()

    async def _receipt_round(self, task: Task, round_index: int) -> None:
        """One receipt for all bundles that wait, at once when everybody's is here, else after a block of patience."""
        committed = task.commitments.get(round_index, {})
        missing = set(committed) - set(task.receipts.get(round_index, {}))
        stored = sorted(a for a in missing if self._has_blob(compute_bundle_key(task.task, round_index, a)))
        if not stored:
            return
        block = self._ledger.state.block_number
        since = self._waiting_since.setdefault((task.task, round_index), block)
        times = get_times(task, round_index)
        everybody = len(stored) == len(missing) and block >= times.commit_deadline
        if not everybody and block <= since and block + 2 < times.receipt_deadline:
            return
        name = tagged_hash("receipt", *stored).hex()[:16]
        await self._ledger.submit(
            f"receipt/{task.task.hex()}/{round_index}/{name}",
            ReceiptBundles(task.task, round_index, tuple(stored)),
        )
        self._waiting_since.pop((task.task, round_index), None)
