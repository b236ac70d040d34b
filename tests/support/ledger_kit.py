"""A ledger written by hand: participants, rounds, verdicts as events, without chain, model or worker.

books = Books(nodes={"a": 8, "b": 8})
books.open(0); books.submit(0, "a", leaves=4); books.close(0)
books.say(0, {"a": (Status.GOOD, 4, 80)})       # the whole committee reveals this
books.state, books.task                          # what the rules read
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from protocol import presets
from protocol.codec import encode, tagged_hash
from protocol.errors import Reason
from protocol.ledger import events
from protocol.ledger.state import LedgerState, Task, apply
from protocol.rounds import get_committee, get_times
from protocol.task import TaskSpec
from protocol.verdict import Row, Status, pack_rows
from tests.support.scenario import STAKE, make_account, make_spec

TASK = b"\5" * 32
START_BLOCK = 100
VERIFIERS = ("v0", "v1", "v2")
_EMPTY = Path(tempfile.mkdtemp(prefix="no-policy-"))


def make_plain_spec(**changes: Any) -> TaskSpec:
    """Three epochs of four rounds; fields of the schedule and the economics may be given by their own names."""
    schedule = replace(presets.MINIMAL.schedule, epoch_rounds=4, num_epochs=3)
    parts: dict[str, Any] = {"schedule": schedule, "economics": presets.MINIMAL.economics}
    for part, value in parts.items():
        known = {name: changes.pop(name) for name in list(changes) if name in value.__struct_fields__}
        parts[part] = replace(value, **known)
    return make_spec(_EMPTY, **{**parts, **changes})


class Books:
    """See the module.

    Args:
        nodes: slots by name; all join before epoch 0.
        deposit: enough for every epoch when None.
        seed: changes every block hash.
        changes: fields of the spec (see `make_plain_spec`).
    """

    def __init__(
        self,
        *,
        nodes: Mapping[str, int],
        verifiers: tuple[str, ...] = VERIFIERS,
        deposit: int = 10**15,
        seed: bytes = b"",
        **changes: Any,
    ) -> None:
        self.spec = make_plain_spec(**changes)
        self.state = LedgerState()
        self._seed = seed
        self.emit(events.TaskPublished(TASK, make_account("initiator"), START_BLOCK, deposit, encode(self.spec)))
        names = (self.spec.base_policy, self.spec.base_manifest, bytes(32), bytes(32))
        self.emit(events.PolicyRecorded(TASK, 0, *names))
        for name in verifiers:
            self.register(name, events.Role.VERIFIER)
        for name, slots in nodes.items():
            self.register(name, events.Role.NODE)
            self.emit(events.NodeJoined(TASK, make_account(name), slots, 0))

    @property
    def task(self) -> Task:
        """The task as the replica knows it."""
        return self.state.tasks[TASK]

    def emit(self, event: events.Event, block: int = 0) -> None:
        """Fold one event; the replica never goes back."""
        self.state.block_number = max(self.state.block_number, block)
        apply(self.state, events.Logged(block or self.state.block_number, 0, event))

    def register(self, name: str, role: events.Role, *, stake: int = STAKE, block: int = 1) -> None:
        """Bond a participant."""
        key = tagged_hash("books-key", name.encode())
        self.emit(events.ParticipantRegistered(make_account(name), role, key, b"", stake), block)

    def set_stake(self, name: str, bonded: int, block: int) -> None:
        """Change a bonded stake."""
        self.emit(events.StakeChanged(make_account(name), bonded, 0), block)

    def hash(self, block: int) -> bytes:
        """A block's hash."""
        return tagged_hash("books-block", self._seed, block.to_bytes(8, "big"))

    def open(self, index: int) -> None:
        """Record the round's beacon."""
        start = get_times(self.task, index).start
        self.emit(events.BeaconRecorded(start, self.hash(start)), start + 1)

    def submit(self, index: int, name: str, leaves: int, *, receipted: bool = True) -> None:
        """Commit a root, and receipt its bundle."""
        times, account = get_times(self.task, index), make_account(name)
        root = tagged_hash("books-root", name.encode(), index.to_bytes(8, "big"))
        self.emit(
            events.RootCommitted(TASK, index, account, root, leaves, self.spec.base_policy), times.commit_deadline
        )
        if receipted:
            self.emit(events.BundlesReceipted(TASK, index, make_account("relay"), (account,)), times.receipt_deadline)

    def close(self, index: int) -> None:
        """Record the round's audit beacon."""
        audit = get_times(self.task, index).audit_block
        self.emit(events.BeaconRecorded(audit, self.hash(audit)), audit + 1)

    def say(
        self,
        index: int,
        verdicts: Mapping[str, tuple[Status, int, int]],
        *,
        verifiers: tuple[str, ...] | None = None,
        evidence: Mapping[str, int] | None = None,
    ) -> None:
        """Have the committee (or these verifiers) reveal status, groups and tokens of nodes, with this evidence (0 where
        none is given), and let the openings be over."""
        times = get_times(self.task, index)
        rows = []
        for name, (status, groups, tokens) in verdicts.items():
            reason, weight = 0 if status is Status.GOOD else int(Reason.REPLAY), (evidence or {}).get(name, 0)
            rows.append(Row(make_account(name), status, reason, groups, tokens, 1, weight))
        committee = get_committee(self.state, self.task, index)
        for verifier in committee if verifiers is None else [make_account(name) for name in verifiers]:
            revealed = events.VerdictRevealed(TASK, index, verifier, pack_rows(rows), bytes(32))
            self.emit(revealed, times.verdict_reveal_deadline)
        self.state.block_number = max(self.state.block_number, times.opening_deadline + 1)

    def play(
        self, index: int, verdicts: Mapping[str, tuple[Status, int, int]], evidence: Mapping[str, int] | None = None
    ) -> None:
        """A whole round in which each of these nodes commits its groups, is receipted and judged as said."""
        self.open(index)
        for name, (_, groups, _) in verdicts.items():
            self.submit(index, name, groups)
        self.close(index)
        self.say(index, verdicts, evidence=evidence)
