"""`Court`: settlement votes, challenges and finalization, with every deadline at +-1 block."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from eth_abi.abi import encode

from protocol.ledger.events import (
    Role,
    SettlementChallenged,
    SettlementFinal,
    SettlementPending,
    SettlementVoided,
    SettlementVoted,
    Slashed,
    StakeChanged,
)
from protocol.merkle import keccak
from tests.support.evm_ledger import (
    BURN_ADDRESS,
    STAKE,
    TERMS,
    VERIFIERS,
    EvmLedger,
    fresh_ledger,
    settlement,
)

UNKNOWN = b"\x99" * 32


@pytest.fixture
def ledger() -> Iterator[EvmLedger]:
    yield from fresh_ledger()


@pytest.fixture
def task(ledger: EvmLedger) -> bytes:
    return ledger.publish()


def _hash(*arguments: object) -> bytes:
    return keccak(encode(["bytes32", "uint64", "bytes32", "uint256", "uint256", "address[]"], arguments))


def _pending(ledger: EvmLedger, task: bytes, **rest: object) -> int:
    """Make a settlement of epoch 0 pending; return the last block of its challenge window."""
    ledger.vote(task, 0, {ledger.address("node"): 100}, **rest)
    end: int = ledger.view("court", "pendingOf", task)[1]
    return end


def test_settlement_is_pending_with_two_thirds_of_the_stake(ledger: EvmLedger, task: bytes) -> None:
    """40 % is not enough, 70 % is."""
    node, node2 = sorted((ledger.address("node"), ledger.address("node2")))
    last = ledger.view("book", "lastConfirmOf", task, 0)
    arguments = settlement(task, 0, {node: 100}, burned=3, slashed=(node, node2))
    ledger.mine_until(last)
    assert ledger.error("verifier", "court", "voteSettlement", *arguments) == ("TooEarly", last, last + 1)
    ledger.mine_until(last + 1)
    voted = SettlementVoted(task, 0, ledger.address("verifier"), _hash(*arguments), 4 * STAKE)
    assert ledger.send("verifier", "court", "voteSettlement", *arguments) == [voted]
    assert not ledger.view("court", "isPending", task)
    end = ledger.block + TERMS.challenge_blocks
    assert ledger.send("verifier2", "court", "voteSettlement", *arguments) == [
        SettlementVoted(task, 0, ledger.address("verifier2"), _hash(*arguments), 3 * STAKE),
        SettlementPending(task, 0, arguments[2], 100, 3, (node, node2), end),
    ]
    assert ledger.view("court", "tallyOf", task, 0, _hash(*arguments)) == 7 * STAKE
    assert ledger.view("court", "pendingOf", task) == (0, end, 0, bytes(20), 0)
    assert ledger.error("verifier3", "court", "voteSettlement", *arguments) == ("PendingAlready", task, 0)


def test_votes_for_different_settlements_do_not_add_up(ledger: EvmLedger, task: bytes) -> None:
    ledger.vote(task, 0, {ledger.address("node"): 100}, voters=["verifier"])
    for voter, burned in (("verifier2", 1), ("verifier3", 2)):
        ledger.vote(task, 0, {ledger.address("node"): 100}, burned=burned, voters=[voter])
    assert not ledger.view("court", "isPending", task)


def test_exactly_two_thirds_are_enough(ledger: EvmLedger, task: bytes) -> None:
    """With 3 : 3 : 3, two verifiers have exactly two thirds; when the third bonds one unit more, they have not."""
    ledger.send("verifier", "registry", "startUnbond", STAKE)
    ledger.mine_until(ledger.view("book", "lastRevealOf", task, 0) + 1)
    ledger.send("verifier", "registry", "addStake", 1)  # counts for epoch 1 only
    ledger.vote(task, 0, {}, voters=["verifier2", "verifier3"])
    assert ledger.view("court", "isPending", task)
    ledger.finalize(task, 0)
    ledger.vote(task, 1, {}, voters=["verifier2", "verifier3"])
    assert not ledger.view("court", "isPending", task)


def test_vote_settlement_refuses(ledger: EvmLedger, task: bytes) -> None:
    node, node2 = sorted((ledger.address("node"), ledger.address("node2")))
    ledger.mine_until(ledger.view("book", "lastConfirmOf", task, 0) + 1)

    def error(who: str = "verifier", **changes: object) -> tuple[object, ...]:
        named = {"task": task, "epoch": 0, "root": UNKNOWN, "paid": 0, "burned": 0, "slashed": ()} | changes
        return ledger.error(who, "court", "voteSettlement", *named.values())

    assert error(task=UNKNOWN) == ("UnknownTask", UNKNOWN)
    assert error(epoch=1) == ("WrongEpoch", 1, 0)
    assert error(paid=3_501) == ("SettlementAboveDeposit", 3_501, 0, 3_500)
    assert error(paid=3_000, burned=501) == ("SettlementAboveDeposit", 3_000, 501, 3_500)
    assert error(burned=2**256 - 1)[0] == "SettlementAboveDeposit"
    assert error(paid=2**256 - 1, burned=2**256 - 1)[0] == "SettlementAboveDeposit"
    assert error(slashed=(node2, node)) == ("SlashedListInvalid", 1, node)
    assert error(slashed=(node, node)) == ("SlashedListInvalid", 1, node)
    stranger = ledger.address("stranger")
    assert error(slashed=(stranger,)) == ("SlashedListInvalid", 0, stranger)
    assert error(slashed=(node,) * 65) == ("TooLong", 65, 64)
    assert error("node") == ("WrongRole", ledger.address("node"), Role.NODE)
    ledger.send("verifier3", "registry", "startUnbond", 2 * STAKE + 1)
    assert error("verifier3") == ("StakeTooLow", ledger.address("verifier3"), STAKE - 1, STAKE)
    ledger.vote(task, 0, {}, voters=["verifier"])
    assert error() == ("AlreadyVoted", ledger.address("verifier"))


def test_settled_totals_only_grow(ledger: EvmLedger, task: bytes) -> None:
    ledger.settle(task, 0, {ledger.address("node"): 100}, burned=10)
    ledger.mine_until(ledger.view("book", "lastConfirmOf", task, 1) + 1)
    for paid, burned in ((99, 10), (100, 9)):
        error = ledger.error("verifier", "court", "voteSettlement", task, 1, UNKNOWN, paid, burned, ())
        assert error == ("TotalsShrink", paid, burned, 100, 10)
    assert ledger.error("verifier", "court", "voteSettlement", task, 0, UNKNOWN, 100, 10, ()) == ("WrongEpoch", 0, 1)


def test_epochs_that_do_not_exist_are_not_settled(ledger: EvmLedger) -> None:
    task = ledger.publish(1_000)
    ledger.settle(task, 0, {})
    ledger.mine_until(ledger.view("book", "lastConfirmOf", task, 1) + 1)
    error = ledger.error("verifier", "court", "voteSettlement", task, 1, bytes(32), 0, 0, ())
    assert error == ("PastTheEnd", 1, 1)


def test_finalize_slashes_bonded_and_unbonding_stake(ledger: EvmLedger, task: bytes) -> None:
    node = ledger.address("node")
    _pending(ledger, task, burned=5, slashed=(node,))
    ledger.send("node", "registry", "startUnbond", 301)
    root = settlement(task, 0, {node: 100})[2]
    assert ledger.finalize(task, 0) == [
        SettlementFinal(task, 0, root, 100, 5),
        Slashed(node, task, 349 + 150),
        StakeChanged(node, 699 - 349, 301 - 150),
    ]
    assert ledger.balance(BURN_ADDRESS) == 5 + 499
    assert ledger.view("registry", "bondedOf", node) == 350
    assert ledger.view("registry", "totalBonded", int(Role.NODE)) == 350 + STAKE
    assert not ledger.view("court", "isPending", task)
    assert ledger.error("stranger", "court", "finalize", task, 0) == ("NothingPending", task, 0)


def test_slashing_an_account_without_stake_does_not_stop_a_settlement(ledger: EvmLedger, task: bytes) -> None:
    trainer = ledger.address("trainer")
    _pending(ledger, task, slashed=(trainer,))
    assert Slashed(trainer, task, 0) in ledger.finalize(task, 0)


def test_finalize_refuses(ledger: EvmLedger, task: bytes) -> None:
    assert ledger.error("stranger", "court", "finalize", task, 0) == ("NothingPending", task, 0)
    _pending(ledger, task)
    assert ledger.error("stranger", "court", "finalize", task, 1) == ("NothingPending", task, 1)
    assert ledger.error("stranger", "court", "finalize", UNKNOWN, 0) == ("NothingPending", UNKNOWN, 0)


def test_challenge_that_is_not_upheld_voids(ledger: EvmLedger, task: bytes) -> None:
    """40 % uphold it, 60 % against or silent: the bond comes back, and the epoch can be voted on again."""
    end, before = _pending(ledger, task, slashed=(ledger.address("node2"),)), ledger.balance("node")
    ledger.mine_until(end)
    vote_end = end + TERMS.challenge_blocks
    assert ledger.send("node", "court", "challenge", task, 0) == [
        SettlementChallenged(task, 0, ledger.address("node"), TERMS.challenge_bond, vote_end)
    ]
    assert (ledger.balance("node"), ledger.balance("court")) == (before - TERMS.challenge_bond, TERMS.challenge_bond)
    ledger.send("verifier", "court", "voteChallenge", task, 0, True)
    ledger.send("verifier2", "court", "voteChallenge", task, 0, False)
    assert ledger.view("court", "pendingOf", task) == (0, end, vote_end, ledger.address("node"), 4 * STAKE)
    ledger.mine_until(vote_end)
    assert ledger.error("stranger", "court", "finalize", task, 0) == ("TooEarly", vote_end, vote_end + 1)
    ledger.mine_until(vote_end + 1)
    assert ledger.send("stranger", "court", "finalize", task, 0) == [SettlementVoided(task, 0)]
    assert (ledger.balance("node"), ledger.balance("court")) == (before, 0)
    assert ledger.view("court", "attemptOf", task, 0) == 1
    assert ledger.view("book", "settlementOf", task)[0] == 0
    assert ledger.view("registry", "bondedOf", ledger.address("node2")) == STAKE
    ledger.settle(task, 0, {ledger.address("node"): 50}, voters=VERIFIERS[::2])
    assert ledger.view("book", "settlementOf", task)[2] == 50


def test_challenge_that_is_upheld_burns_the_bond(ledger: EvmLedger, task: bytes) -> None:
    _pending(ledger, task)
    ledger.send("node", "court", "challenge", task, 0)
    for voter in ("verifier", "verifier2"):
        ledger.send(voter, "court", "voteChallenge", task, 0, True)
    assert isinstance(ledger.finalize(task, 0)[0], SettlementFinal)
    assert ledger.balance(BURN_ADDRESS) == TERMS.challenge_bond
    assert ledger.balance("court") == 0


def test_challenge_refuses(ledger: EvmLedger, task: bytes) -> None:
    assert ledger.error("node", "court", "challenge", task, 0) == ("NothingPending", task, 0)
    end = _pending(ledger, task)
    assert ledger.error("stranger", "court", "challenge", task, 0) == ("WrongRole", ledger.address("stranger"), 0)
    assert ledger.error("node", "court", "challenge", task, 1) == ("NothingPending", task, 1)
    ledger.mine_until(end + 1)
    assert ledger.error("node", "court", "challenge", task, 0) == ("TooLate", end + 1, end)


def test_one_challenge_for_each_settlement(ledger: EvmLedger, task: bytes) -> None:
    _pending(ledger, task)
    ledger.send("node", "court", "challenge", task, 0)
    assert ledger.error("node2", "court", "challenge", task, 0) == ("AlreadyChallenged", ledger.address("node"))


def test_vote_challenge_refuses(ledger: EvmLedger, task: bytes) -> None:
    def error(who: str = "verifier", epoch: int = 0) -> tuple[object, ...]:
        return ledger.error(who, "court", "voteChallenge", task, epoch, True)

    assert error() == ("NothingPending", task, 0)
    _pending(ledger, task)
    assert error() == ("NotChallenged", task, 0)
    ledger.send("node", "court", "challenge", task, 0)
    vote_end = ledger.view("court", "pendingOf", task)[2]
    assert error(epoch=1) == ("NothingPending", task, 1)
    assert error("node") == ("WrongRole", ledger.address("node"), Role.NODE)
    ledger.send("verifier", "court", "voteChallenge", task, 0, False)
    assert error() == ("AlreadyVoted", ledger.address("verifier"))
    ledger.mine_until(vote_end)
    ledger.call("verifier2", "court", "voteChallenge", task, 0, True)
    ledger.mine_until(vote_end + 1)
    assert error("verifier2") == ("TooLate", vote_end + 1, vote_end)


def test_a_task_may_ask_for_no_bond(ledger: EvmLedger) -> None:
    task = ledger.publish(challenge_bond=0)
    _pending(ledger, task)
    ledger.send("relay", "court", "challenge", task, 0)
    assert ledger.finalize(task, 0) == [SettlementVoided(task, 0)]


def test_nobody_has_a_bond_to_withdraw(ledger: EvmLedger) -> None:
    assert ledger.error("node", "court", "withdrawBond") == ("NoBond", ledger.address("node"))
