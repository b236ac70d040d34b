"""S1, S3 and V4 in money: who cheats, deals with itself or accuses falsely ends with less than who does not.

Draws are the protocol's lottery, outcomes and payments its own rules over a ledger of events; figures are in token units.
"""

from __future__ import annotations

import random

import pytest

from protocol.codec import tagged_hash
from protocol.lottery import PPM, compute_audited_leaves
from protocol.presets import MAINNET, MINIMAL
from protocol.rounds import get_audit_ppm, get_audited
from protocol.settlement import compute_settlement, get_epoch_deadline
from protocol.task import compute_leaf_pay_max
from protocol.verdict import Status
from tests.support.ledger_kit import VERIFIERS, Books, make_plain_spec
from tests.support.scenario import make_account

#: Chance that a prefill finds a cheated leaf: what the rollout adversaries' tests show, with room.
POWER = 0.99


def live(spec, slots, cheated, seed):
    """One identity: honest through probation, then `cheated` leaves of every submission until it is found.

    Returns:
        What cheating saved at most, and what being found cost: half (or all) of the stake, and the epoch's pay of honest
        leaves, which were worked for.
    """
    economics, rng, leaf_pay = spec.economics, random.Random(seed), compute_leaf_pay_max(spec)
    saved = unsettled = 0
    for number in range(100_000):
        if number % spec.schedule.epoch_rounds == 0:
            unsettled = 0
        drawn = compute_audited_leaves(
            chain_id=1,
            ledger=bytes(20),
            task=bytes(32),
            round_index=number,
            account=make_account(f"sybil-{seed}"),
            root=tagged_hash("root", seed.to_bytes(8, "big"), number.to_bytes(8, "big")),
            num_leaves=slots,
            beacon=tagged_hash("beacon", seed.to_bytes(8, "big"), number.to_bytes(8, "big")),
            audit_ppm=economics.audit_ppm,
        )
        saved += cheated * leaf_pay  # the work that was not done is worth at most its pay
        unsettled += slots * leaf_pay
        if any(leaf < cheated and rng.random() < POWER for leaf in drawn):
            return saved, unsettled + economics.node_stake_min * economics.slash_bps // 10_000
    raise AssertionError("never found")


@pytest.mark.parametrize("preset", [MINIMAL, MAINNET], ids=["minimal", "mainnet"])
@pytest.mark.parametrize("cheated", [1, 4])
def test_s1_burning_identities_and_joining_again_loses(preset, cheated):
    """400 identities one after the other, each with a stake of its own and an honest probation: every one of them loses more
    when it is found than it saved until then, on average by far."""
    spec = make_plain_spec()
    fields = {name: getattr(preset.economics, name) for name in preset.economics.__struct_fields__}
    spec = make_plain_spec(**fields) if preset is MAINNET else spec
    lives = [live(spec, 4, cheated, seed) for seed in range(400)]
    saved, lost = (sum(column) for column in zip(*lives, strict=True))
    assert saved < lost / 10, f"saved {saved}, lost {lost}"
    # The worst case of every identity: what it saved, of what it would have earned honestly, less what it lost.
    assert sum(one > two for one, two in lives) <= len(lives) // 100


def test_s1_a_new_identity_is_audited_on_everything():
    """Cheating at once instead: all leaves of a new account are drawn, so the first submission is the last."""
    books = Books(nodes={"a": 4, "b": 4})
    books.open(0)
    books.submit(0, "a", 4)
    books.close(0)
    assert get_audit_ppm(books.state, books.task, make_account("a"), 0) == PPM
    drawn = get_audited(books.state, books.task, 0, make_account("a"), chain_id=1, ledger=bytes(20))
    assert drawn == (0, 1, 2, 3)


# One owner in all roles


def deal(*, own_nodes, own_verifiers, verdict=(Status.GOOD, 4, 90), judged=True):
    """Two epochs of a task whose initiator also owns nodes and verifiers; its net in token units, gas aside.

    What it paid in comes back as earnings of its own accounts and as the refund of what nobody earned; half of the stake of
    a node of its own that is called a cheat is burned.
    """
    books = Books(nodes={"own-a": 4, "own-b": 4} if own_nodes else {"a": 4, "b": 4}, deposit=10**9)
    names = ["own-a", "own-b"] if own_nodes else ["a", "b"]
    for index in range(8):
        if judged:
            books.play(index, dict.fromkeys(names, verdict))
        else:
            books.open(index)
            for name in names:
                books.submit(index, name, 4)
            books.close(index)
    books.state.block_number = max(books.state.block_number, get_epoch_deadline(books.task, 1) + 1)
    results = [compute_settlement(books.state, books.task, epoch) for epoch in (0, 1)]
    last = results[-1]
    own = {make_account(name) for name in names} if own_nodes else set()
    own |= {make_account(name) for name in own_verifiers}
    refund = books.task.deposit - last.paid_total - last.burned_total
    stake = books.spec.economics.node_stake_min
    slashes = sum(len(own.intersection(result.slashed)) for result in results)
    burned = slashes * stake * books.spec.economics.slash_bps // 10_000
    earned = sum(amount for account, amount in last.earnings.items() if account in own)
    return earned + refund - books.task.deposit - burned


def test_s3_a_self_dealer_never_gains():
    """Nothing is minted here, so an owner of everything moves its own money in a circle: it nets 0 and pays the gas. As soon
    as anybody else takes part, or anything goes wrong, it nets less."""
    assert deal(own_nodes=True, own_verifiers=VERIFIERS) == 0
    assert deal(own_nodes=True, own_verifiers=()) < 0, "honest verifiers are paid"
    assert deal(own_nodes=True, own_verifiers=VERIFIERS[:2]) < 0
    assert deal(own_nodes=True, own_verifiers=VERIFIERS, judged=False) < 0, "what nobody judged is burned"
    assert deal(own_nodes=True, own_verifiers=VERIFIERS, verdict=(Status.CHEAT, 4, 0)) < 0
    assert deal(own_nodes=False, own_verifiers=VERIFIERS) < 0, "honest nodes are paid"


def test_s3_taking_work_without_paying_takes_two_thirds_of_the_committee():
    """An initiator whose own verifiers are the whole committee can call honest work unpaid and keep the reward; that 2/3 of
    verifiers are honest is the stated assumption. With one of three it pays; what nobody judged is never refunded."""
    withheld = deal(own_nodes=False, own_verifiers=VERIFIERS, verdict=(Status.UNPAID, 4, 90))
    assert withheld == 0, (
        "an initiator that owns the whole committee starves its nodes: 2/3 of verifiers must be honest"
    )
    assert deal(own_nodes=False, own_verifiers=VERIFIERS, judged=False) < 0
    assert deal(own_nodes=False, own_verifiers=VERIFIERS[:1], verdict=(Status.UNPAID, 4, 90)) < 0


def test_v9_an_initiator_that_starves_its_verifiers_is_not_refunded():
    """Nodes delivered, relays receipted, no verifier revealed: the pay is burned, to the last unit of what it
    could have been, and neither the initiator nor anybody else has it."""
    books = Books(nodes={"a": 4, "b": 4}, deposit=10**9)
    for index in range(4):
        books.open(index)
        for name in ("a", "b"):
            books.submit(index, name, 4)
        books.close(index)
    books.state.block_number = get_epoch_deadline(books.task, 0) + 1
    result = compute_settlement(books.state, books.task, 0)
    assert result.burned_total == 4 * 8 * compute_leaf_pay_max(books.spec)
    assert result.earnings == {}
    assert deal(own_nodes=False, own_verifiers=VERIFIERS, judged=False) == -2 * result.burned_total


# False accusation


def accuse(liars, status=Status.CHEAT):
    """A round of two honest nodes in which some verifiers of three call one of them a cheat; the settlement."""
    books = Books(nodes={"victim": 4, "other": 4})
    books.open(0)
    for name in ("victim", "other"):
        books.submit(0, name, 4)
    books.close(0)
    honest = {"victim": (Status.GOOD, 4, 90), "other": (Status.GOOD, 4, 80)}
    truthful = tuple(name for name in VERIFIERS if name not in liars)
    books.say(0, honest, verifiers=truthful)
    books.say(0, {"victim": (status, 4, 0), "other": (status, 4, 0)}, verifiers=tuple(liars))
    books.state.block_number = max(books.state.block_number, get_epoch_deadline(books.task, 0) + 1)
    return compute_settlement(books.state, books.task, 0)


@pytest.mark.parametrize("status", [Status.CHEAT, Status.UNPAID, Status.SHORT])
def test_v4_an_accuser_alone_is_not_paid_and_its_victim_is(status):
    result, control = accuse(VERIFIERS[:1], status), accuse(())
    assert result.slashed == ()
    for name in ("victim", "other"):
        assert result.earnings[make_account(name)] == control.earnings[make_account(name)] > 0
    assert make_account(VERIFIERS[0]) not in result.earnings, "the fee is for those who agreed"
    assert control.earnings[make_account(VERIFIERS[0])] > 0


def test_v4_two_of_three_accusers_are_believed():
    """A majority of one committee can say so; what executes a slash is the settlement, for which 2/3 of all verifier stake
    must vote (tests/adversaries/test_ledger_stake.py), and which honest verifiers outside the committee compute alike: the
    rule is the ledger's. Collusion of 2/3 is the stated assumption."""
    assert set(accuse(VERIFIERS[:2]).slashed) == {make_account("victim"), make_account("other")}
