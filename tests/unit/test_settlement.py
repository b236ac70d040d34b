"""What an epoch's verdicts come to: pay, fees, burns, slashes, and the bounds that hold whatever the rows say."""

from __future__ import annotations

import pytest

from protocol.errors import Fault
from protocol.ledger import events
from protocol.merkle import compute_earning_leaf, verify_proof
from protocol.rounds import get_times
from protocol.settlement import (
    SLASHED_MAX,
    compute_claim,
    compute_settlement,
    compute_submission_pay,
    get_epoch_deadline,
)
from protocol.task import compute_epoch_pay_max, compute_leaf_pay_max, compute_rollout_pay
from protocol.verdict import Status
from tests.support.ledger_kit import TASK, VERIFIERS, Books
from tests.support.scenario import make_account

GOOD, SHORT, UNPAID, CHEAT = Status.GOOD, Status.SHORT, Status.UNPAID, Status.CHEAT


def settle(books, epoch=0):
    """The settlement once the epoch's reveals are over."""
    books.state.block_number = max(books.state.block_number, get_epoch_deadline(books.task, epoch) + 1)
    return compute_settlement(books.state, books.task, epoch)


@pytest.fixture
def books():
    return Books(nodes={"a": 8, "b": 8})


def test_a_good_submission_earns_base_and_rate_and_its_judges_a_fee(books):
    books.play(0, {"a": (GOOD, 4, 90)})
    economics, result = books.spec.economics, settle(books)
    assert result.earnings == {
        make_account("a"): 4 * 4 * economics.reward_base + 90 * economics.reward_token,
        **{make_account(name): economics.verifier_fee for name in VERIFIERS},
    }
    assert result.paid_total == sum(result.earnings.values())
    assert (result.burned_total, result.slashed) == (0, ())


@pytest.mark.parametrize("status", [SHORT, UNPAID, CHEAT])
def test_anything_but_good_is_unpaid_and_not_burned(books, status):
    books.play(0, {"a": (status, 4, 90)})
    result = settle(books)
    assert make_account("a") not in result.earnings
    assert result.burned_total == 0
    assert result.slashed == ((make_account("a"),) if status is CHEAT else ())


def test_a_cheat_forfeits_its_whole_epoch_and_nothing_of_settled_ones(books):
    books.play(0, {"a": (GOOD, 4, 90)})
    for index in (4, 5):
        books.play(index, {"a": (GOOD if index == 4 else CHEAT, 4, 90)})
    before, after = settle(books, 0), settle(books, 1)
    assert before.earnings[make_account("a")] == after.earnings[make_account("a")]
    assert before.slashed == ()
    assert after.slashed == (make_account("a"),)


def test_cheats_are_slashed_once(books):
    books.play(0, {"a": (CHEAT, 4, 0)})
    books.play(1, {"a": (CHEAT, 4, 0)})
    books.play(4, {"a": (CHEAT, 4, 0)})
    assert settle(books, 0).slashed == (make_account("a"),)
    assert settle(books, 1).slashed == ()


def test_more_cheats_than_one_settlement_can_slash_come_with_the_next():
    names = [f"n{i}" for i in range(SLASHED_MAX + 9)]
    books = Books(nodes=dict.fromkeys(names, 1), groups_per_round=200, slots_max=4)
    books.play(0, dict.fromkeys(names, (CHEAT, 1, 0)))
    first, second, third = (settle(books, epoch).slashed for epoch in (0, 1, 2))
    assert (len(first), len(second), third) == (SLASHED_MAX, 9, ())
    assert sorted(first + second) == sorted(make_account(name) for name in names)
    assert list(first) == sorted(first)


def test_delivered_but_never_judged_is_burned_at_its_most(books):
    books.open(0)
    books.submit(0, "a", 4)
    books.submit(0, "b", 4, receipted=False)
    books.close(0)
    assert settle(books).burned_total == 4 * compute_leaf_pay_max(books.spec)
    assert settle(books).paid_total == 0


def test_burning_stops_at_the_quota():
    """A node may commit more leaves than it was assigned, and a relay that is its friend receipts them. If all were
    burned, a few rounds of this would take the settlement above the deposit, where the ledger refuses it for ever."""
    books = Books(nodes={f"n{i}": 8 for i in range(8)})
    for index in range(4):
        books.open(index)
        for i in range(8):
            books.submit(index, f"n{i}", 8)
        books.close(index)
    assert settle(books).burned_total == 4 * 8 * compute_leaf_pay_max(books.spec)
    assert settle(books).burned_total <= compute_epoch_pay_max(books.spec)


def test_a_node_without_a_quota_burns_nothing(books):
    books.set_stake("b", 0, get_times(books.task, 0).start)
    books.open(0)
    books.submit(0, "b", 8)
    books.close(0)
    assert settle(books).burned_total == 0


def test_void_rounds_burn_nothing(books):
    """No beacon, no quota: commitments cannot exist on the ledger, and if they did they would cost nothing."""
    books.submit(0, "a", 4)
    assert settle(books).burned_total == 0


@pytest.mark.parametrize(("groups", "tokens"), [(65_535, 0), (4, 2**32 - 1), (65_535, 2**32 - 1)])
def test_pay_stops_at_the_quota_whatever_a_committee_says(books, groups, tokens):
    books.open(0)
    books.submit(0, "a", 4)
    books.close(0)
    books.say(0, {"a": (GOOD, groups, tokens)})
    assert settle(books).earnings[make_account("a")] <= 4 * compute_leaf_pay_max(books.spec)


def test_pay_of_a_full_submission_is_the_leaves_maximum(books):
    size, most = books.spec.group_size, books.spec.sampling.max_tokens
    assert compute_submission_pay(books.task, 4, 4 * size * most) == 4 * compute_leaf_pay_max(books.spec)
    assert compute_submission_pay(books.task, 4, 4 * size) == 4 * size * compute_rollout_pay(books.spec, 1)
    assert compute_submission_pay(books.task, 0, 0) == 0


def test_verifiers_are_paid_for_agreeing_only(books):
    books.open(0)
    books.submit(0, "a", 4)
    books.close(0)
    books.say(0, {"a": (GOOD, 4, 90)}, verifiers=("v0", "v1"))
    books.say(0, {"a": (CHEAT, 4, 0)}, verifiers=("v2",))
    earnings = settle(books).earnings
    assert {name for name in VERIFIERS if make_account(name) in earnings} == {"v0", "v1"}


def test_a_fee_is_paid_once_per_round_however_many_submissions(books):
    books.play(0, {"a": (GOOD, 4, 90), "b": (GOOD, 4, 80)})
    assert settle(books).earnings[make_account("v0")] == books.spec.economics.verifier_fee


def test_settling_too_early_is_our_own_fault(books):
    books.play(0, {"a": (GOOD, 4, 90)})
    books.state.block_number = get_epoch_deadline(books.task, 0)
    with pytest.raises(Fault, match="cannot be settled yet"):
        compute_settlement(books.state, books.task, 0)


def test_a_cancelled_epoch_is_settled_by_its_last_opened_round(books):
    books.emit(events.TaskCancelled(TASK, 2))
    assert get_epoch_deadline(books.task, 0) == get_times(books.task, 1).confirm_deadline
    books.play(0, {"a": (GOOD, 4, 90)})
    assert make_account("a") in settle(books).earnings


def test_every_leaf_can_be_claimed_and_nobody_elses(books):
    books.play(0, {"a": (GOOD, 4, 90), "b": (GOOD, 4, 80)})
    result = settle(books)
    for account, amount in result.earnings.items():
        cumulative, proof = compute_claim(TASK, result.earnings, account)
        assert cumulative == amount
        verify_proof(result.root, compute_earning_leaf(TASK, account, amount), proof)
    with pytest.raises(Fault, match="no earnings"):
        compute_claim(TASK, result.earnings, make_account("nobody"))


def test_an_epoch_of_nothing_has_an_empty_root(books):
    assert settle(books)[1:] == (bytes(32), 0, 0, (), {})
