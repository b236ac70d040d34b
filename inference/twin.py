"""One account, one machine: signs of another machine with the same keys, read off the ledger.

The durable outbox of this directory knows every root and every node record that was sent from here. A root or record of
our account that it does not know was sent by somebody else. Seen at start it may be the past of a restored or moved
directory: the node watches one whole round before it signs. Seen later, somebody is at work right now: the node signs
nothing more until it is started again. So two machines lose a round; they never make two roots, and nothing is slashed.
"""

from __future__ import annotations

from inference.journal import Journal
from protocol.errors import Reject
from protocol.ledger.state import Task
from protocol.messages import NodeRecord, open_record
from protocol.ports import Ledger


def name_commit(task: bytes, round_index: int) -> str:
    """Intent under which a round's root is sent."""
    return f"commit/{task.hex()}/{round_index}"


def name_record(sequence: int) -> str:
    """Intent under which a node record is sent."""
    return f"record/{sequence}"


def find_foreign_record(ledger: Ledger) -> NodeRecord | None:
    """Our account's node record if it was not sent from this directory; None also when there is none that can be read."""
    participant = ledger.state.participants.get(ledger.account)
    if participant is None:
        return None
    try:
        record = open_record(
            participant.record,
            account=ledger.account,
            network_key=participant.network_key,
            chain_id=ledger.chain_id,
            ledger=ledger.address,
        )
    except Reject:
        return None
    names = [name_record(record.sequence), *(["register"] if record.sequence == 1 else [])]
    return None if any(ledger.outcome(name).status != "unknown" for name in names) else record


class TwinGuard:
    """Decides whether this machine may sign in one task.

    Attributes:
        refusal: why nothing is signed any more; empty while all is well. It stays until the process ends.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._oldest: int | None = None
        self._known: set[int] = set()
        self._record_sequence = -1
        #: Rounds whose root is equal to ours although our own call was refused.
        self._doubts: set[int] = set()
        self.refusal = ""

    def start(self, task: Task, journal: Journal, next_round: int) -> str:
        """Look at the past. Returns why this node waits before it signs, empty when it need not; `journal` then holds
        the first round it may sign in.

        Args:
            next_round: the first round that has not opened yet.
        """
        roots = [index for index in task.commitments if self._is_foreign(task, journal, index)]
        record = find_foreign_record(self._ledger)
        newest, sequence = max(roots, default=-1), -1 if record is None else record.sequence
        self._known, self._record_sequence, self._oldest = set(roots), sequence, next_round - 1
        worked = not journal.existed and any(self._ledger.account in made for made in task.commitments.values())
        if not worked and newest <= journal.foreign_round and sequence <= journal.foreign_record:
            return ""
        journal.foreign_round, journal.foreign_record = newest, sequence
        journal.first_round = max(journal.first_round, max(next_round, 0) + 1)
        signs = []
        if worked:
            signs.append("new directory of an account that has worked before")
        if newest >= 0:
            signs.append(f"the root of round {newest} was not sent from this directory")
        if record is not None:
            signs.append(f"node record {record.sequence} ({record.endpoint or 'dials out'}) was not sent from here")
        return (
            f"{'; '.join(signs)}: another machine may be running with these keys, so round "
            f"{journal.first_round - 1} is only watched"
        )

    def check(self, task: Task, journal: Journal, oldest_open: int) -> None:
        """Look at what is new; sets `refusal`.

        Args:
            oldest_open: the oldest round that still takes commitments.
        """
        if self.refusal:
            return
        start = oldest_open if self._oldest is None else self._oldest - 1
        self._oldest = oldest_open
        for index in [index for index in task.commitments if index >= start and index not in self._known]:
            if self._is_foreign(task, journal, index):
                seen = task.commitments[index][self._ledger.account]
                record = journal.records.get(index)
                if record is not None and record.root == seen.root and not self._doubts:
                    self._doubts.add(index)  # a ledger node that forgot our own transaction looks the same, once
                    self._known.add(index)
                    continue
                self._refuse(
                    f"root {seen.root.hex()[:16]} of round {index} was committed at block {seen.block_number} by "
                    "another machine"
                )
                return
        found = find_foreign_record(self._ledger)
        if found is not None and found.sequence > self._record_sequence:
            self._refuse(f"node record {found.sequence} ({found.endpoint or 'dials out'}) was sent by another machine")

    def _refuse(self, seen: str) -> None:
        self.refusal = (
            f"{seen} with the keys of account 0x{self._ledger.account.hex()}: nothing more is signed here; stop one of the "
            "two, then start this one again, or give it keys of its own (`troth keys new`)"
        )

    def _is_foreign(self, task: Task, journal: Journal, round_index: int) -> bool:
        """Whether the account's root of a round was sent from elsewhere. Equal bytes prove nothing: a twin makes the
        same ones. A call of ours that is still pending can be told from a twin's only by its root."""
        seen = task.commitments.get(round_index, {}).get(self._ledger.account)
        if seen is None:
            return False
        status = self._ledger.outcome(name_commit(task.task, round_index)).status
        if status == "pending":
            record = journal.records.get(round_index)
            return record is not None and record.root != seen.root
        return status != "final"
