"""Everything a participant can ask of a ledger: one frozen struct per contract function, in the function's own order."""

from __future__ import annotations

import msgspec


class Call(msgspec.Struct, frozen=True):
    """Base of all ledger calls."""


class Register(Call, frozen=True):
    """`StakeRegistry.register(role, networkKey, record, amount)`; approves the token first where needed."""

    role: int
    network_key: bytes
    record: bytes
    amount: int


class SetRecord(Call, frozen=True):
    """`StakeRegistry.setRecord(record)`."""

    record: bytes


class AddStake(Call, frozen=True):
    """`StakeRegistry.addStake(amount)`."""

    amount: int


class StartUnbond(Call, frozen=True):
    """`StakeRegistry.startUnbond(amount)`."""

    amount: int


class WithdrawStake(Call, frozen=True):
    """`StakeRegistry.withdraw()`: everything whose unbonding time is over."""


class RecordBeacon(Call, frozen=True):
    """`Beacons.record(blockNumber)`; nothing happens when it is recorded already."""

    block_number: int


class Publish(Call, frozen=True):
    """`TaskBook.publish(terms, spec, deposit)`; the adapter derives `terms` from the canonical `spec`."""

    spec: bytes
    deposit: int


class TopUp(Call, frozen=True):
    """`TaskBook.topUp(task, amount)`."""

    task: bytes
    amount: int


class Join(Call, frozen=True):
    """`TaskBook.join(task, slots)`."""

    task: bytes
    slots: int


class Leave(Call, frozen=True):
    """`TaskBook.leave(task)`."""

    task: bytes


class CommitRoot(Call, frozen=True):
    """`TaskBook.commit(task, round, root, leaves, policy)`."""

    task: bytes
    round: int
    root: bytes
    leaves: int
    policy: bytes


class ReceiptBundles(Call, frozen=True):
    """`TaskBook.receipt(task, round, accounts)`."""

    task: bytes
    round: int
    accounts: tuple[bytes, ...]


class RecordPolicy(Call, frozen=True):
    """`TaskBook.recordPolicy(task, version, policy, manifest, batchRoot, lineage)`."""

    task: bytes
    version: int
    policy: bytes
    manifest: bytes
    batch_root: bytes
    lineage: bytes


class AttestPolicy(Call, frozen=True):
    """`TaskBook.attestPolicy(task, version)`."""

    task: bytes
    version: int


class CommitVerdict(Call, frozen=True):
    """`Court.commitVerdict(task, round, commitment)`."""

    task: bytes
    round: int
    commitment: bytes


class RevealVerdict(Call, frozen=True):
    """`Court.revealVerdict(task, round, rows, report, salt)`."""

    task: bytes
    round: int
    rows: bytes
    report: bytes
    salt: bytes


class VoteSettlement(Call, frozen=True):
    """`Court.voteSettlement(task, epoch, root, paidTotal, burnedTotal, slashed)`."""

    task: bytes
    epoch: int
    root: bytes
    paid_total: int
    burned_total: int
    slashed: tuple[bytes, ...]


class Challenge(Call, frozen=True):
    """`Court.challenge(task, epoch)` with the task's challenge bond."""

    task: bytes
    epoch: int


class VoteChallenge(Call, frozen=True):
    """`Court.voteChallenge(task, epoch, uphold)`."""

    task: bytes
    epoch: int
    uphold: bool


class WithdrawBond(Call, frozen=True):
    """`Court.withdrawBond()`: a challenge bond whose return the token refused at the time."""


class Finalize(Call, frozen=True):
    """`Court.finalize(task, epoch)`."""

    task: bytes
    epoch: int


class SealCanary(Call, frozen=True):
    """`Canaries.seal(sealHash, bond)`: by any account, for any node; see protocol.canaries."""

    seal_hash: bytes
    bond: int


class OpenCanary(Call, frozen=True):
    """`Canaries.open(task, round, salt)`: by the node, after the round's reveals."""

    task: bytes
    round: int
    salt: bytes


class ConfirmCanary(Call, frozen=True):
    """`Canaries.confirm(task, round, node, defective)`: a verifier's judgement of an opened canary."""

    task: bytes
    round: int
    node: bytes
    defective: bool


class WithdrawCanaryBond(Call, frozen=True):
    """`Canaries.withdraw()`: the bonds of our opened seals."""


class Claim(Call, frozen=True):
    """`TaskBook.claim(task, account, cumulative, proof)`: pays `account`, whoever sends it."""

    task: bytes
    account: bytes
    cumulative: int
    proof: tuple[bytes, ...]


class ClaimMany(Call, frozen=True):
    """`TaskBook.claimMany(task, accounts, cumulatives, proofs)`."""

    task: bytes
    accounts: tuple[bytes, ...]
    cumulatives: tuple[int, ...]
    proofs: tuple[tuple[bytes, ...], ...]


class Cancel(Call, frozen=True):
    """`TaskBook.cancel(task)`."""

    task: bytes


class Close(Call, frozen=True):
    """`TaskBook.close(task)`."""

    task: bytes
