"""Everything a ledger tells the world: one frozen struct per contract event, in the contract's own field order.

A ledger adapter decodes its chain's logs into these; `protocol.ledger.state` folds them into a replica. Accounts are
20 bytes, hashes and task ids 32 bytes, money is an integer of the token's smallest unit.
"""

from __future__ import annotations

from enum import IntEnum

import msgspec


class Role(IntEnum):
    """What a registered account does. One account has one role."""

    NODE = 1
    VERIFIER = 2
    RELAY = 3
    TRAINER = 4


class Event(msgspec.Struct, frozen=True):
    """Base of all ledger events."""


class ParticipantRegistered(Event, frozen=True):
    """`StakeRegistry.register`: an account bound a network key and a role and bonded its first stake."""

    account: bytes
    role: int
    network_key: bytes
    record: bytes
    bonded: int


class RecordChanged(Event, frozen=True):
    """`StakeRegistry.setRecord`: a new signed node record."""

    account: bytes
    record: bytes


class StakeChanged(Event, frozen=True):
    """`StakeRegistry`: totals after a top-up, an unbonding, a withdrawal or a slash."""

    account: bytes
    bonded: int
    unbonding: int


class Slashed(Event, frozen=True):
    """`StakeRegistry.slash`: `amount` was taken from bonded and unbonding stake and burned, on behalf of `task`."""

    account: bytes
    task: bytes
    amount: int


class BeaconRecorded(Event, frozen=True):
    """`Beacons.record`: the hash of block `block_number`, recorded while the chain still knew it."""

    block_number: int
    block_hash: bytes


class TaskPublished(Event, frozen=True):
    """`TaskBook.publish`: `spec` is the canonical encoding of the task, `start_block` the first block of round 0."""

    task: bytes
    initiator: bytes
    start_block: int
    deposit: int
    spec: bytes


class TaskToppedUp(Event, frozen=True):
    """`TaskBook.topUp`: `deposit` is the new total."""

    task: bytes
    deposit: int


class NodeJoined(Event, frozen=True):
    """`TaskBook.join`: from epoch `from_epoch` on, the node declares `slots` groups in every round."""

    task: bytes
    account: bytes
    slots: int
    from_epoch: int


class NodeLeft(Event, frozen=True):
    """`TaskBook.leave`: the node's last epoch is the one before `from_epoch`."""

    task: bytes
    account: bytes
    from_epoch: int


class RootCommitted(Event, frozen=True):
    """`TaskBook.commit`: the Merkle root over a node's groups of one round. The ledger keeps the first."""

    task: bytes
    round: int
    account: bytes
    root: bytes
    leaves: int
    policy: bytes


class BundlesReceipted(Event, frozen=True):
    """`TaskBook.receipt`: a relay holds and serves the bundles of `accounts` in this round."""

    task: bytes
    round: int
    relay: bytes
    accounts: tuple[bytes, ...]


class PolicyRecorded(Event, frozen=True):
    """`TaskBook.recordPolicy`: a policy, the manifest that describes its bytes, and the lineage that made it."""

    task: bytes
    version: int
    policy: bytes
    manifest: bytes
    batch_root: bytes
    lineage: bytes


class PolicyAttested(Event, frozen=True):
    """`TaskBook.attestPolicy`: a relay or verifier fetched every byte of this policy and serves it."""

    task: bytes
    version: int
    account: bytes


class VerdictCommitted(Event, frozen=True):
    """`Court.commitVerdict`."""

    task: bytes
    round: int
    verifier: bytes
    commitment: bytes


class VerdictRevealed(Event, frozen=True):
    """`Court.revealVerdict`: packed verdict rows (see protocol.verdict) and the hash of the public report."""

    task: bytes
    round: int
    verifier: bytes
    rows: bytes
    report: bytes


class CanarySealed(Event, frozen=True):
    """`Canaries.seal`: somebody's hash of (task, round, node, salt), and the bond behind it."""

    seal_hash: bytes
    sealer: bytes
    bond: int


class CanaryOpened(Event, frozen=True):
    """`Canaries.open`: the submission of `node` in this round was a canary, sealed in block `sealed_block`."""

    task: bytes
    round: int
    node: bytes
    sealed_block: int
    bond: int


class CanaryVoted(Event, frozen=True):
    """`Canaries.confirm`: what `verifier` says of an opened canary."""

    task: bytes
    round: int
    node: bytes
    verifier: bytes
    defective: bool


class SettlementVoted(Event, frozen=True):
    """`Court.voteSettlement`: `settlement` is the keccak hash of what was voted for."""

    task: bytes
    epoch: int
    verifier: bytes
    settlement: bytes
    stake: int


class SettlementPending(Event, frozen=True):
    """`Court.voteSettlement`: at least 2/3 of verifier stake voted for it; it becomes final after `challenge_end`."""

    task: bytes
    epoch: int
    root: bytes
    paid_total: int
    burned_total: int
    slashed: tuple[bytes, ...]
    challenge_end: int


class SettlementChallenged(Event, frozen=True):
    """`Court.challenge`: `challenger` posted a bond; verifiers vote until `vote_end`."""

    task: bytes
    epoch: int
    challenger: bytes
    bond: int
    vote_end: int


class SettlementVoided(Event, frozen=True):
    """`Court`: the pending settlement of `epoch` is gone; the next one builds on the last final root."""

    task: bytes
    epoch: int


class SettlementFinal(Event, frozen=True):
    """`Court.finalize`: earnings under this root can be claimed, its slashes were executed."""

    task: bytes
    epoch: int
    root: bytes
    paid_total: int
    burned_total: int


class Claimed(Event, frozen=True):
    """`TaskBook.claim`: `amount` went to `account`, whose claims now total `cumulative`."""

    task: bytes
    account: bytes
    amount: int
    cumulative: int


class TaskCancelled(Event, frozen=True):
    """`TaskBook.cancel`: no round opens at or after `end_round`."""

    task: bytes
    end_round: int


class TaskClosed(Event, frozen=True):
    """`TaskBook.close`: what nobody earned went back to the initiator, what was never judged was burned."""

    task: bytes
    refunded: int
    burned: int


class Logged(msgspec.Struct, frozen=True):
    """An event and where it stands in the chain."""

    block_number: int
    log_index: int
    event: Event
