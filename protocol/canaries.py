"""Canaries: submissions with a defect made on purpose, which show who calls work good without looking at it.

A node seals `compute_seal` of a round with a bond before the round's audit beacon, spoils its work of that round, and opens
the seal after the reveals. What was opened is left out of settlement and history. A verifier that called it good is slashed
when the defect is confirmed: by the round's own committee (2/3 of its accounts), or by fresh verifiers (2/3 of their stake).

Guarantees: nobody is slashed for a canary unless 2/3 of a committee, or verifiers with a third of all verifier stake, say
that what the node committed to is a cheat; a bond below the slash leaves the node's own slash standing. Only reasons that
depend on nothing but committed leaves count (`LEAF_REASONS`): a node can sign two envelopes over one root and show verifiers
different ones, but not two sets of leaves. Neighbours: protocol.rounds leaves canaries out, protocol.settlement slashes,
docs/canaries.md has the attacks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from protocol.errors import Reason
from protocol.ledger.events import Role
from protocol.ledger.state import Canary, LedgerState, Task
from protocol.merkle import keccak
from protocol.verdict import Row, Status

#: Rejections that follow from the committed leaves and the ledger alone.
LEAF_REASONS = frozenset(
    {
        Reason.ASSIGNMENT,
        Reason.PROMPT,
        Reason.GROUP_SIZE,
        Reason.SLOT_GAP,
        Reason.LENGTH,
        Reason.TERMINATION,
        Reason.TOKEN_RANGE,
        Reason.REWARD,
        Reason.COMMITMENT_FORMAT,
        Reason.COMMITMENT_MISMATCH,
        Reason.REPLAY,
        Reason.NEAR_TIES,
        Reason.NON_FINITE,
        Reason.RESPONSE,
    }
)


def compute_seal(*, task: bytes, round_index: int, node: bytes, salt: bytes) -> bytes:
    """What is sealed for a canary: `keccak256(abi.encode(task, round, node, salt))`.

    Args:
        salt: 32 bytes that nobody else knows until the canary is opened.
    """
    return keccak(task + round_index.to_bytes(32, "big") + node.rjust(32, b"\0") + salt)


def compute_bond(state: LedgerState, task: Task, node: bytes, block_number: int) -> int:
    """What a slash would take of a node's stake as it was after `block_number`: the bond that makes a canary's slash void."""
    participant = state.participants[node]
    bps = task.spec.economics.slash_bps
    bonded, unbonding = participant.bonded_at(block_number), participant.unbonding_at(block_number)
    return bonded * bps // 10_000 + unbonding * bps // 10_000


def is_defective(row: Row) -> bool:
    """Whether a verifier's row of a canary says that its committed leaves are a cheat's."""
    return row.status == Status.CHEAT and row.reason in LEAF_REASONS


def is_left_out(state: LedgerState, task: Task, canary: Canary, node: bytes, status: int | None, block: int) -> bool:
    """Whether an opened canary has no outcome.

    Args:
        status: what the committee agreed on, None when it did not.
        block: the round's reveal deadline, at which the stake behind the bond counts.
    """
    return status != Status.CHEAT or canary.bond >= compute_bond(state, task, node, block)


def get_fresh(state: LedgerState, task: Task, committee: Collection[bytes], block: int) -> dict[bytes, int]:
    """Stake of the verifiers that were not drawn for a round, as of its reveal deadline `block`, by account.

    Empty when it is less than half of all verifiers' stake: 2/3 of it could then be less than a third of all, which
    this protocol does not assume to be honest. With a committee as large as the pool there is no fresh verifier.
    """
    minimum = task.spec.economics.verifier_stake_min
    stakes = {
        p.account: bonded
        for p in state.participants.values()
        if p.role == Role.VERIFIER and (bonded := p.bonded_at(block)) >= minimum
    }
    fresh = {account: bonded for account, bonded in stakes.items() if account not in committee}
    return fresh if 2 * sum(fresh.values()) >= sum(stakes.values()) else {}


def is_confirmed(
    state: LedgerState, task: Task, canary: Canary, rows: Iterable[Row], committee: Collection[bytes], block: int
) -> bool:
    """Whether a canary's defect is confirmed, by its round's committee or by the votes of fresh verifiers.

    Args:
        rows: the committee's revealed rows of the canary.
        block: the round's reveal deadline.
    """
    if committee and 3 * sum(is_defective(row) for row in rows) >= 2 * len(committee):
        return True
    fresh = get_fresh(state, task, committee, block)
    found = sum(stake for account, stake in fresh.items() if canary.votes.get(account))
    return bool(fresh) and 3 * found >= 2 * sum(fresh.values())
