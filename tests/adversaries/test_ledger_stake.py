"""S2, S4, V3 on the ledger: stake stays where cheats can be slashed, backs one promise, and votes once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from protocol.ledger.events import NodeJoined, Role
from tests.support.evm_ledger import STAKE, TERMS, UNBOND_BLOCKS, EvmLedger, fresh_ledger

RESERVED_BY_SLOT = TERMS.leaf_pay_max * TERMS.epoch_rounds * 2


@pytest.fixture
def ledger() -> Iterator[EvmLedger]:
    yield from fresh_ledger()


def test_s2_unbonding_in_the_first_cheated_block_does_not_escape(ledger: EvmLedger) -> None:
    """The longest way to a slash: a cheat in the first round unbonds at once, the settlement is challenged in the last
    block of its window and upheld. The stake is still there when it is finalized in the first block it can be."""
    task, node = ledger.publish(), ledger.address("node")
    ledger.send("node", "book", "join", task, 1)
    ledger.commit(task, 0)
    release = ledger.block + UNBOND_BLOCKS
    ledger.send("node", "registry", "startUnbond", STAKE)
    ledger.vote(task, 0, {}, slashed=(node,))
    ledger.mine_until(ledger.view("court", "pendingOf", task)[1])
    ledger.send("relay", "court", "challenge", task, 0)
    for voter in ("verifier", "verifier2"):
        ledger.send(voter, "court", "voteChallenge", task, 0, True)
    end = ledger.view("court", "pendingOf", task)[2]
    assert end + 1 < release
    ledger.finalize(task, 0)
    assert ledger.view("registry", "unbondingOf", node) == (STAKE // 2, release)


@pytest.mark.parametrize("ahead", [-1, 0, 1])
def test_s2_slash_at_the_release_block(ledger: EvmLedger, ahead: int) -> None:
    """Before the release block, in it and after it: what is not withdrawn yet can be slashed."""
    task, node, before = ledger.publish(), ledger.address("node"), ledger.balance("node")
    ledger.vote(task, 0, {}, slashed=(node,))
    release = ledger.block + UNBOND_BLOCKS
    ledger.send("node", "registry", "startUnbond", STAKE)
    ledger.mine_until(release + ahead)
    calls = [("stranger", "court", "finalize", (task, 0)), ("node", "registry", "withdraw", ())]
    assert ledger.send_in_one_block(*calls) == [1, int(ahead >= 0)]
    ledger.mine_until(max(ledger.block, release))
    if ahead < 0:
        ledger.send("node", "registry", "withdraw")
    assert ledger.balance("node") == before + STAKE // 2


def test_s2_withdrawal_at_the_release_block(ledger: EvmLedger) -> None:
    release = ledger.block + UNBOND_BLOCKS
    ledger.send("node", "registry", "startUnbond", STAKE)
    ledger.mine_until(release - 1)
    assert ledger.error("node", "registry", "withdraw") == ("TooEarly", release - 1, release)
    ledger.mine_until(release)
    ledger.call("node", "registry", "withdraw")


def test_s2_new_unbonding_does_not_free_the_old_early(ledger: EvmLedger) -> None:
    ledger.send("node", "registry", "startUnbond", STAKE - 1)
    ledger.mine_until(ledger.block + UNBOND_BLOCKS - 2)
    release = ledger.block + UNBOND_BLOCKS
    ledger.send("node", "registry", "startUnbond", 1)
    assert ledger.error("node", "registry", "withdraw") == ("TooEarly", ledger.block, release)


def test_s4_one_stake_backs_four_times_itself(ledger: EvmLedger) -> None:
    """4 slots reserve 1,600; a stake of 1,000 backs 4,000 over all tasks: two tasks of 4 slots and one of 2."""
    node, tasks = ledger.address("node"), [ledger.publish() for _ in range(4)]
    for task, slots in zip(tasks, (4, 4, 2), strict=False):
        ledger.send("node", "book", "join", task, slots)
    assert ledger.view("book", "reservedOf", node) == 4 * STAKE
    refused = ("ReservedAboveStake", 4 * STAKE + RESERVED_BY_SLOT, 4 * STAKE)
    assert ledger.error("node", "book", "join", tasks[3], 1) == refused
    ledger.send("node", "registry", "addStake", 100)
    ledger.send("node", "book", "join", tasks[3], 1)


def test_s4_stake_cannot_leave_after_joining(ledger: EvmLedger) -> None:
    """Join with much, unbond to the minimum: no commitment is taken while the reservation exceeds what is left."""
    ledger.send("node", "registry", "addStake", STAKE)
    tasks = [ledger.publish() for _ in range(3)]
    for task in tasks:
        ledger.send("node", "book", "join", task, 4)
    ledger.send("node", "registry", "startUnbond", STAKE)
    start = ledger.times(tasks[0], 0)[0]
    ledger.record_beacon(start)
    error = ledger.error("node", "book", "commit", tasks[0], 0, b"\x01" * 32, 1, bytes(32))
    assert error == ("ReservedAboveStake", 12 * RESERVED_BY_SLOT, 4 * STAKE)


def test_s4_leaving_does_not_free_a_stake_that_can_still_be_slashed(ledger: EvmLedger) -> None:
    """Cheat in one task, leave, join the next with the same stake: refused until the first can no longer slash."""
    node, first = ledger.address("node"), ledger.publish()
    ledger.send("node", "book", "join", first, 4)
    ledger.send("node", "book", "join", ledger.publish(), 4)
    third = ledger.publish(100_000, num_epochs=50)
    ledger.commit(first, 0)
    ledger.send("node", "book", "leave", first)
    until = ledger.view("book", "lastConfirmOf", first, 0) + 2 * TERMS.challenge_blocks
    ledger.mine_until(until)
    assert ledger.view("book", "reservedOf", node) == 3_200
    assert ledger.error("node", "book", "join", third, 4) == ("ReservedAboveStake", 4_800, 4 * STAKE)
    ledger.mine_until(until + 1)
    assert ledger.view("book", "reservedOf", node) == 1_600
    emitted = ledger.send("node", "book", "join", third, 4)
    assert isinstance(emitted[0], NodeJoined)
    assert ledger.view("book", "reservedOf", node) == 3_200


def test_v3_stake_that_moves_does_not_vote_twice(ledger: EvmLedger) -> None:
    """40 % vote, unbond, and come back as another account before the epoch's votes are counted: they have no weight."""
    task = ledger.publish()
    ledger.vote(task, 0, {}, voters=["verifier"])
    release = ledger.block + UNBOND_BLOCKS
    ledger.send("verifier", "registry", "startUnbond", 4 * STAKE)
    ledger.mine_until(release)
    ledger.send("verifier", "registry", "withdraw")
    ledger.send("verifier", "token", "transfer", ledger.address("stranger"), 4 * STAKE)
    ledger.send("stranger", "registry", "register", int(Role.VERIFIER), b"k" * 32, b"", 4 * STAKE)
    snapshot = ledger.view("book", "lastRevealOf", task, 0)
    error = ledger.error("stranger", "court", "voteSettlement", task, 0, bytes(32), 0, 0, ())
    assert error == ("NoStakeAt", ledger.address("stranger"), snapshot)


def test_v3_unbonding_after_a_vote_does_not_shrink_the_total(ledger: EvmLedger) -> None:
    """4 of 10 vote and unbond. Of the 6 left, 3 are a half, and 4 + 3 of 6 would be more than all: 3 + 3 decide."""
    task = ledger.publish()
    ledger.vote(task, 0, {}, burned=1, voters=["verifier"])
    ledger.send("verifier", "registry", "startUnbond", 4 * STAKE)
    ledger.vote(task, 0, {}, burned=2, voters=["verifier2", "verifier3"])
    assert not ledger.view("court", "isPending", task)  # 6 of 10, not 6 of 6


def test_v3_stake_bonded_for_a_vote_comes_too_late(ledger: EvmLedger) -> None:
    task = ledger.publish()
    ledger.mine_until(ledger.view("book", "lastRevealOf", task, 0) + 1)
    ledger.send("verifier", "registry", "addStake", 10**9)
    ledger.vote(task, 0, {}, voters=["verifier"])
    assert not ledger.view("court", "isPending", task)


def test_v3_same_verifier_twice(ledger: EvmLedger) -> None:
    task = ledger.publish()
    ledger.vote(task, 0, {}, voters=["verifier"])
    for burned in (0, 1):
        error = ledger.error("verifier", "court", "voteSettlement", task, 0, bytes(32), 0, burned, ())
        assert error == ("AlreadyVoted", ledger.address("verifier"))


def test_nobody_is_slashed_without_two_thirds(ledger: EvmLedger) -> None:
    """60 % want a node slashed: nothing happens, however long they wait."""
    task, node = ledger.publish(), ledger.address("node")
    ledger.vote(task, 0, {}, slashed=(node,), voters=["verifier2", "verifier3"])
    assert ledger.error("verifier2", "court", "finalize", task, 0) == ("NothingPending", task, 0)
    ledger.mine_until(ledger.block + 100)
    assert ledger.error("verifier2", "court", "finalize", task, 0) == ("NothingPending", task, 0)
    assert ledger.view("registry", "bondedOf", node) == STAKE
