"""The replica: ledger events folded into the state that every rule reads.

`apply` is the only writer. It trusts the contracts for what they enforce (order, deadlines, first root wins) and adds
nothing of its own, so two participants that saw the same events hold the same state. Bytes that strangers put on the
ledger (task specs, node records) are kept raw and parsed, bounded, where they are used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from protocol.errors import Reject
from protocol.ledger import events as ev
from protocol.task import TaskSpec, decode_spec


@dataclass
class Participant:
    """A registered account.

    Attributes:
        stakes: (block, bonded) after each change, so that rules can ask for the stake at a stated block.
        unbonds: the same for unbonding stake.
    """

    account: bytes
    role: ev.Role
    network_key: bytes
    record: bytes
    stakes: list[tuple[int, int]]
    unbonds: list[tuple[int, int]] = field(default_factory=list)
    slashed: int = 0

    @property
    def bonded(self) -> int:
        """Bonded stake now."""
        return self.stakes[-1][1]

    @property
    def unbonding(self) -> int:
        """Unbonding stake now."""
        return self.unbonds[-1][1] if self.unbonds else 0

    def bonded_at(self, block_number: int) -> int:
        """Bonded stake after all events up to and including `block_number`."""
        return _get_amount(self.stakes, block_number)

    def unbonding_at(self, block_number: int) -> int:
        """Unbonding stake after all events up to and including `block_number`."""
        return _get_amount(self.unbonds, block_number)


def _get_amount(history: list[tuple[int, int]], block_number: int) -> int:
    """The last amount of a history at or before a block, 0 before the first."""
    amount = 0
    for block, value in history:
        if block > block_number:
            break
        amount = value
    return amount


@dataclass
class Membership:
    """A node's place in a task: it declares `slots` groups per round in epochs from_epoch .. to_epoch - 1."""

    slots: int
    from_epoch: int
    to_epoch: int | None = None


@dataclass
class Commitment:
    root: bytes
    leaves: int
    policy: bytes
    block_number: int


@dataclass
class Policy:
    """A recorded policy. It is eligible from the block of its second attestation (version 0: from publication)."""

    version: int
    policy: bytes
    manifest: bytes
    batch_root: bytes
    lineage: bytes
    block_number: int
    attestations: dict[bytes, int] = field(default_factory=dict)
    eligible_block: int | None = None


@dataclass
class Reveal:
    rows: bytes
    report: bytes
    block_number: int


@dataclass
class Seal:
    """A sealed canary: nobody knows of which submission."""

    sealer: bytes
    bond: int
    block_number: int


@dataclass
class Canary:
    """An opened canary, and what verifiers said of it since; the rules count the votes of those that were not drawn."""

    bond: int
    sealed_block: int
    votes: dict[bytes, bool] = field(default_factory=dict)


@dataclass
class Settlement:
    """A settlement that is pending, challenged or final."""

    epoch: int
    root: bytes
    paid_total: int
    burned_total: int
    slashed: tuple[bytes, ...]
    challenge_end: int
    challenged: bool = False
    vote_end: int = 0
    final: bool = False


@dataclass
class Task:
    """One task as the ledger knows it. Dictionaries are keyed by round or epoch first."""

    task: bytes
    initiator: bytes
    start_block: int
    deposit: int
    spec: TaskSpec
    members: dict[bytes, list[Membership]] = field(default_factory=dict)
    policies: list[Policy] = field(default_factory=list)
    commitments: dict[int, dict[bytes, Commitment]] = field(default_factory=dict)
    receipts: dict[int, dict[bytes, bytes]] = field(default_factory=dict)
    verdict_commits: dict[int, dict[bytes, bytes]] = field(default_factory=dict)
    reveals: dict[int, dict[bytes, Reveal]] = field(default_factory=dict)
    canaries: dict[int, dict[bytes, Canary]] = field(default_factory=dict)
    votes: dict[int, dict[bytes, bytes]] = field(default_factory=dict)
    settlements: dict[int, Settlement] = field(default_factory=dict)
    #: How often the settlement of an epoch was voided.
    voids: dict[int, int] = field(default_factory=dict)
    claimed: dict[bytes, int] = field(default_factory=dict)
    cancelled_end: int | None = None
    closed: bool = False
    refunded: int = 0
    burned_at_close: int = 0
    #: What protocol.rounds derived and need not derive again: outcomes of rounds whose openings are over, without gaps from
    #: round 0, and what they did to each account's trial; quotas of rounds that have started, judged rows by account
    #: with their opening deadlines, rounds folded into those.
    outcomes: dict[int, Any] = field(default_factory=dict)
    trials: dict[bytes, list[Any]] = field(default_factory=dict)
    quotas: dict[int, dict[bytes, int]] = field(default_factory=dict)
    judged: dict[bytes, list[tuple[int, Any]]] = field(default_factory=dict)
    judged_rounds: int = 0

    @property
    def final(self) -> Settlement | None:
        """The last final settlement."""
        return max((s for s in self.settlements.values() if s.final), key=lambda s: s.epoch, default=None)


@dataclass
class LedgerState:
    """Everything the rules read. `block_number` is the last block whose events were applied."""

    block_number: int = 0
    participants: dict[bytes, Participant] = field(default_factory=dict)
    tasks: dict[bytes, Task] = field(default_factory=dict)
    beacons: dict[int, bytes] = field(default_factory=dict)
    #: Tasks on the ledger whose spec breaks a rule: nobody serves them.
    invalid_tasks: dict[bytes, str] = field(default_factory=dict)
    #: The newest seals by hash, at most `SEALS_MAX`. No rule reads them: a canary's maker does, before it spoils its work.
    seals: dict[bytes, Seal] = field(default_factory=dict)


SEALS_MAX = 16_384


def _registered(state: LedgerState, e: ev.ParticipantRegistered, block: int) -> None:
    state.participants[e.account] = Participant(
        e.account, ev.Role(e.role), e.network_key, e.record, [(block, e.bonded)]
    )


def _record_changed(state: LedgerState, e: ev.RecordChanged, block: int) -> None:
    state.participants[e.account].record = e.record


def _stake_changed(state: LedgerState, e: ev.StakeChanged, block: int) -> None:
    participant = state.participants[e.account]
    participant.stakes.append((block, e.bonded))
    participant.unbonds.append((block, e.unbonding))


def _slashed(state: LedgerState, e: ev.Slashed, block: int) -> None:
    state.participants[e.account].slashed += e.amount


def _beacon(state: LedgerState, e: ev.BeaconRecorded, block: int) -> None:
    state.beacons[e.block_number] = e.block_hash


def _sealed(state: LedgerState, e: ev.CanarySealed, block: int) -> None:
    if len(state.seals) >= SEALS_MAX:
        del state.seals[next(iter(state.seals))]
    state.seals[e.seal_hash] = Seal(e.sealer, e.bond, block)


def _published(state: LedgerState, e: ev.TaskPublished, block: int) -> None:
    try:
        spec = decode_spec(e.spec)
    except Reject as error:
        state.invalid_tasks[e.task] = str(error)
        return
    state.tasks[e.task] = Task(e.task, e.initiator, e.start_block, e.deposit, spec)


def _topped_up(task: Task, e: ev.TaskToppedUp, block: int) -> None:
    task.deposit = e.deposit


def _joined(task: Task, e: ev.NodeJoined, block: int) -> None:
    history = task.members.setdefault(e.account, [])
    if history and history[-1].to_epoch is None:
        history[-1].to_epoch = e.from_epoch
    history.append(Membership(e.slots, e.from_epoch))


def _left(task: Task, e: ev.NodeLeft, block: int) -> None:
    history = task.members.get(e.account)
    if history:
        history[-1].to_epoch = e.from_epoch


def _committed(task: Task, e: ev.RootCommitted, block: int) -> None:
    task.commitments.setdefault(e.round, {})[e.account] = Commitment(e.root, e.leaves, e.policy, block)


def _receipted(task: Task, e: ev.BundlesReceipted, block: int) -> None:
    receipts = task.receipts.setdefault(e.round, {})
    for account in e.accounts:
        receipts.setdefault(account, e.relay)


def _policy(task: Task, e: ev.PolicyRecorded, block: int) -> None:
    policy = Policy(e.version, e.policy, e.manifest, e.batch_root, e.lineage, block)
    if e.version == 0:
        policy.eligible_block = block
    task.policies.append(policy)


#: Attestations (by two different relays or verifiers) that make a policy eligible for rounds.
ATTESTATIONS_NEEDED = 2


def _attested(task: Task, e: ev.PolicyAttested, block: int) -> None:
    policy = task.policies[e.version]
    policy.attestations.setdefault(e.account, block)
    if policy.eligible_block is None and len(policy.attestations) >= ATTESTATIONS_NEEDED:
        policy.eligible_block = block


def _verdict_committed(task: Task, e: ev.VerdictCommitted, block: int) -> None:
    task.verdict_commits.setdefault(e.round, {})[e.verifier] = e.commitment


def _verdict_revealed(task: Task, e: ev.VerdictRevealed, block: int) -> None:
    task.reveals.setdefault(e.round, {})[e.verifier] = Reveal(e.rows, e.report, block)


def _canary_opened(task: Task, e: ev.CanaryOpened, block: int) -> None:
    if e.node in task.commitments.get(e.round, {}):  # else there is nothing to leave out
        task.canaries.setdefault(e.round, {}).setdefault(e.node, Canary(e.bond, e.sealed_block))


def _canary_voted(task: Task, e: ev.CanaryVoted, block: int) -> None:
    canary = task.canaries.get(e.round, {}).get(e.node)
    if canary is not None:
        canary.votes.setdefault(e.verifier, e.defective)


def _voted(task: Task, e: ev.SettlementVoted, block: int) -> None:
    task.votes.setdefault(e.epoch, {})[e.verifier] = e.settlement


def _pending(task: Task, e: ev.SettlementPending, block: int) -> None:
    task.settlements[e.epoch] = Settlement(e.epoch, e.root, e.paid_total, e.burned_total, e.slashed, e.challenge_end)


def _challenged(task: Task, e: ev.SettlementChallenged, block: int) -> None:
    settlement = task.settlements[e.epoch]
    settlement.challenged, settlement.vote_end = True, e.vote_end


def _voided(task: Task, e: ev.SettlementVoided, block: int) -> None:
    task.settlements.pop(e.epoch, None)
    task.voids[e.epoch] = task.voids.get(e.epoch, 0) + 1
    task.votes.pop(e.epoch, None)


def _final(task: Task, e: ev.SettlementFinal, block: int) -> None:
    task.settlements[e.epoch].final = True


def _claimed(task: Task, e: ev.Claimed, block: int) -> None:
    task.claimed[e.account] = e.cumulative


def _cancelled(task: Task, e: ev.TaskCancelled, block: int) -> None:
    task.cancelled_end = e.end_round


def _closed(task: Task, e: ev.TaskClosed, block: int) -> None:
    task.closed, task.refunded, task.burned_at_close = True, e.refunded, e.burned


_GLOBAL: dict[type[ev.Event], Callable[[LedgerState, Any, int], None]] = {
    ev.ParticipantRegistered: _registered,
    ev.RecordChanged: _record_changed,
    ev.StakeChanged: _stake_changed,
    ev.Slashed: _slashed,
    ev.BeaconRecorded: _beacon,
    ev.CanarySealed: _sealed,
    ev.TaskPublished: _published,
}

_PER_TASK: dict[type[ev.Event], Callable[[Task, Any, int], None]] = {
    ev.TaskToppedUp: _topped_up,
    ev.NodeJoined: _joined,
    ev.NodeLeft: _left,
    ev.RootCommitted: _committed,
    ev.BundlesReceipted: _receipted,
    ev.PolicyRecorded: _policy,
    ev.PolicyAttested: _attested,
    ev.VerdictCommitted: _verdict_committed,
    ev.VerdictRevealed: _verdict_revealed,
    ev.CanaryOpened: _canary_opened,
    ev.CanaryVoted: _canary_voted,
    ev.SettlementVoted: _voted,
    ev.SettlementPending: _pending,
    ev.SettlementChallenged: _challenged,
    ev.SettlementVoided: _voided,
    ev.SettlementFinal: _final,
    ev.Claimed: _claimed,
    ev.TaskCancelled: _cancelled,
    ev.TaskClosed: _closed,
}


def apply(state: LedgerState, logged: ev.Logged) -> None:
    """Fold one event into the replica. Events of tasks with an invalid spec are dropped."""
    event = logged.event
    kind = type(event)
    if kind in _GLOBAL:
        _GLOBAL[kind](state, event, logged.block_number)
        return
    task = state.tasks.get(event.task)  # type: ignore[attr-defined]
    if task is not None:
        _PER_TASK[kind](task, event, logged.block_number)
