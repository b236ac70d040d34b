"""What the ledger says about a round: policy, members, quotas, committee, outcomes, audit probability."""

from __future__ import annotations

import pytest

from protocol.ledger import events
from protocol.lottery import PPM
from protocol.rounds import (
    get_audit_ppm,
    get_audited,
    get_committee,
    get_end_round,
    get_epoch,
    get_members,
    get_num_epochs,
    get_open_round,
    get_outcomes,
    get_quotas,
    get_round_beacon,
    get_round_policy,
    get_times,
    is_suspended,
)
from protocol.task import compute_epoch_pay_max
from protocol.verdict import Status
from tests.support.ledger_kit import START_BLOCK, TASK, VERIFIERS, Books, make_plain_spec
from tests.support.scenario import STAKE, make_account

CHAIN = {"chain_id": 1, "ledger": bytes(20)}
GOOD, SHORT, UNPAID, CHEAT = Status.GOOD, Status.SHORT, Status.UNPAID, Status.CHEAT


@pytest.fixture
def books():
    return Books(nodes={"a": 8, "b": 8, "c": 8})


def by_name(found, *names):
    return {name: found[make_account(name)] for name in names if make_account(name) in found}


# Schedule and policy


def test_deadlines_follow_each_other_and_rounds_overlap(books):
    s, times = books.spec.schedule, get_times(books.task, 3)
    assert times.start == START_BLOCK + 3 * s.round_blocks
    assert times.start < times.commit_deadline < times.receipt_deadline <= times.audit_block
    assert times.audit_block < times.verdict_commit_deadline < times.verdict_reveal_deadline
    assert [get_epoch(books.task, index) for index in (0, 3, 4, 11)] == [0, 0, 1, 2]


def test_open_round_by_block(books):
    s = books.spec.schedule
    assert get_open_round(books.task, START_BLOCK - 1) is None
    assert get_open_round(books.task, START_BLOCK) == 0
    assert get_open_round(books.task, START_BLOCK + s.round_blocks - 1) == 0
    assert get_open_round(books.task, START_BLOCK + s.round_blocks) == 1
    assert get_open_round(books.task, START_BLOCK + 12 * s.round_blocks) is None


@pytest.mark.parametrize(("epochs", "rounds"), [(1, 4), (2, 8), (3, 12), (7, 12)])
def test_only_funded_epochs_open(epochs, rounds):
    deposit = compute_epoch_pay_max(make_plain_spec()) * epochs
    assert get_end_round(Books(nodes={"a": 8}, deposit=deposit).task) == rounds
    assert get_end_round(Books(nodes={"a": 8}, deposit=deposit + 1).task) == rounds
    assert get_end_round(Books(nodes={"a": 8}, deposit=deposit - 1).task) == min(4 * (epochs - 1), 12) or epochs == 7


def test_cancellation_ends_a_task_and_its_last_epoch_can_still_be_settled(books):
    books.emit(events.TaskCancelled(TASK, 6))
    assert get_end_round(books.task) == 6
    assert get_num_epochs(books.task) == 2
    books.emit(events.TaskCancelled(TASK, 10**6))
    assert get_end_round(books.task) == 12


def test_a_round_uses_the_newest_policy_that_was_eligible_a_grace_period_before(books):
    grace = books.spec.schedule.grace_blocks
    start = get_times(books.task, 2).start
    for version, block in ((1, start - grace), (2, start - grace + 1)):
        names = (bytes([version]) * 32, bytes(32), bytes(32), bytes(32))
        books.emit(events.PolicyRecorded(TASK, version, *names), block - 5)
        books.emit(events.PolicyAttested(TASK, version, make_account("v0")), block - 1)
        books.emit(events.PolicyAttested(TASK, version, make_account("v1")), block)
    names = (b"\3" * 32, bytes(32), bytes(32), bytes(32))
    books.emit(events.PolicyRecorded(TASK, 3, *names))
    books.emit(events.PolicyAttested(TASK, 3, make_account("v0")))
    assert [get_round_policy(books.task, index).version for index in (0, 1, 2, 3, 11)] == [0, 0, 1, 2, 2]


def test_one_attester_is_not_two(books):
    books.emit(events.PolicyRecorded(TASK, 1, b"\1" * 32, bytes(32), bytes(32), bytes(32)))
    for _ in range(3):
        books.emit(events.PolicyAttested(TASK, 1, make_account("v0")))
    assert books.task.policies[1].eligible_block is None


# Members and quotas


def test_members_need_a_place_and_a_stake_at_the_rounds_start(books):
    start = get_times(books.task, 1).start
    assert set(by_name(get_members(books.state, books.task, 1), "a", "b", "c")) == {"a", "b", "c"}
    books.set_stake("a", books.spec.economics.node_stake_min - 1, start)
    books.set_stake("b", books.spec.economics.node_stake_min, start)
    books.set_stake("c", 0, start + 1)
    assert set(by_name(get_members(books.state, books.task, 1), "a", "b", "c")) == {"b", "c"}
    assert set(by_name(get_members(books.state, books.task, 0), "a", "b", "c")) == {"a", "b", "c"}


def test_joining_and_leaving_take_effect_at_epochs(books):
    books.register("d", events.Role.NODE)
    books.emit(events.NodeJoined(TASK, make_account("d"), 3, 1))
    books.emit(events.NodeLeft(TASK, make_account("a"), 2))
    books.emit(events.NodeJoined(TASK, make_account("b"), 5, 2))
    members = [by_name(get_members(books.state, books.task, index), "a", "b", "d") for index in (0, 3, 4, 7, 8, 11)]
    assert members[0] == members[1] == {"a": 8, "b": 8}
    assert members[2] == members[3] == {"a": 8, "b": 8, "d": 3}
    assert members[4] == members[5] == {"b": 5, "d": 3}


def test_quotas_share_a_round_and_the_remainder_goes_by_beacon(books):
    assert get_quotas(books.state, books.task, 0) == {}
    seen = set()
    for index in range(8):
        books.open(index)
        quotas = by_name(get_quotas(books.state, books.task, index), "a", "b", "c")
        assert sorted(quotas.values()) == [2, 3, 3]
        seen.add(min(quotas, key=quotas.get))
    assert len(seen) > 1


def test_quotas_stop_at_the_declared_slots():
    books = Books(nodes={"a": 1, "b": 8})
    books.open(0)
    assert by_name(get_quotas(books.state, books.task, 0), "a", "b") == {"a": 1, "b": 4}


def test_more_nodes_than_groups_leaves_some_without():
    books = Books(nodes={f"n{i}": 1 for i in range(20)})
    books.open(0)
    quotas = get_quotas(books.state, books.task, 0)
    assert len(quotas) == 8
    assert set(quotas.values()) == {1}


def test_a_short_submission_lowers_the_next_quota_until_it_is_filled(books):
    books.play(0, {"a": (SHORT, 1, 0), "b": (GOOD, 3, 60)})
    later = next(i for i in range(1, 12) if get_times(books.task, i).start > books.state.block_number)
    books.open(later)
    assert by_name(get_quotas(books.state, books.task, later), "a")["a"] == 1
    books.submit(later, "a", 1)
    books.close(later)
    books.say(later, {"a": (GOOD, 1, 20)})
    again = next(i for i in range(later, 12) if get_times(books.task, i).start > books.state.block_number)
    books.open(again)
    assert by_name(get_quotas(books.state, books.task, again), "a")["a"] >= 2


def test_nothing_delivered_still_leaves_a_quota_of_one(books):
    books.play(0, {"a": (SHORT, 0, 0)})
    later = next(i for i in range(1, 12) if get_times(books.task, i).start > books.state.block_number)
    books.open(later)
    assert by_name(get_quotas(books.state, books.task, later), "a")["a"] == 1


def test_a_confirmed_cheat_is_suspended_from_the_block_in_which_it_is_known(books):
    books.play(0, {"a": (CHEAT, 3, 0), "b": (UNPAID, 3, 0)})
    deadline = get_times(books.task, 0).opening_deadline
    assert not is_suspended(books.state, books.task, make_account("a"), deadline)
    assert is_suspended(books.state, books.task, make_account("a"), deadline + 1)
    assert not is_suspended(books.state, books.task, make_account("b"), deadline + 1)
    for index in range(12):
        known = get_times(books.task, index).start > deadline
        assert (make_account("a") in get_members(books.state, books.task, index)) != known


def test_without_a_beacon_a_round_is_void(books):
    assert get_round_beacon(books.state, books.task, 0) is None
    books.open(0)
    assert get_round_beacon(books.state, books.task, 0) == books.hash(START_BLOCK)


# Committee and outcomes


def test_the_committee_is_drawn_by_the_audit_beacon_from_stakes_at_its_block():
    names = tuple(f"v{i}" for i in range(9))
    books = Books(nodes={"a": 8}, verifiers=names)
    assert get_committee(books.state, books.task, 0) == ()
    audit = get_times(books.task, 0).audit_block
    books.set_stake("v0", books.spec.economics.verifier_stake_min - 1, audit)
    books.set_stake("v1", 0, audit + 1)
    drawn = {}
    for index in range(12):
        books.close(index)
        drawn[index] = get_committee(books.state, books.task, index)
        assert len(set(drawn[index])) == 3
        assert make_account("v0") not in drawn[index]
    assert make_account("v1") not in {account for index in range(1, 12) for account in drawn[index]}
    assert len(set(drawn.values())) > 6


def test_an_outcome_needs_two_thirds_of_the_committee(books):
    books.open(0)
    for name in ("a", "b", "c"):
        books.submit(0, name, 2)
    books.close(0)
    books.say(0, {"a": (GOOD, 2, 40), "b": (GOOD, 2, 40), "c": (GOOD, 2, 40)}, verifiers=("v0",))
    books.say(0, {"a": (GOOD, 2, 40), "b": (GOOD, 2, 41)}, verifiers=("v1",))
    books.say(0, {"b": (CHEAT, 2, 0), "c": (CHEAT, 2, 0)}, verifiers=("v2",))
    outcomes = get_outcomes(books.state, books.task, 0)
    assert set(by_name(outcomes, "a", "b", "c")) == {"a"}
    assert outcomes[make_account("a")].agreed == tuple(sorted((make_account("v0"), make_account("v1"))))


def test_no_outcome_before_the_last_reveal_can_have_come(books):
    books.play(0, {"a": (GOOD, 3, 60)})
    books.state.block_number = get_times(books.task, 0).opening_deadline
    books.task.outcomes.clear()
    assert get_outcomes(books.state, books.task, 0) == {}
    books.state.block_number += 1
    assert set(get_outcomes(books.state, books.task, 0)) == {make_account("a")}


def test_rows_on_what_was_not_receipted_count_for_nothing(books):
    books.open(0)
    books.submit(0, "a", 2, receipted=False)
    books.submit(0, "b", 2)
    books.close(0)
    books.say(0, {"a": (GOOD, 2, 40), "b": (GOOD, 2, 40), "nobody": (GOOD, 2, 40)})
    assert set(get_outcomes(books.state, books.task, 0)) == {make_account("b")}


def test_rows_of_verifiers_that_were_not_drawn_count_for_nothing():
    books = Books(nodes={"a": 8}, verifiers=tuple(f"v{i}" for i in range(9)))
    books.open(0)
    books.submit(0, "a", 2)
    books.close(0)
    committee = get_committee(books.state, books.task, 0)
    others = tuple(f"v{i}" for i in range(9) if make_account(f"v{i}") not in committee)
    books.say(0, {"a": (GOOD, 2, 40)}, verifiers=others)
    assert get_outcomes(books.state, books.task, 0) == {}


def test_reasons_and_audit_counts_may_differ_between_verifiers_that_agree(books):
    """The row that counts is then the lowest, so that everybody settles the same."""
    from protocol.verdict import Row, pack_rows

    books.open(0)
    books.submit(0, "a", 2)
    books.close(0)
    for name, reason in (("v0", 18), ("v1", 17), ("v2", 19)):
        rows = pack_rows([Row(make_account("a"), CHEAT, reason, 2, 0, reason)])
        books.emit(events.VerdictRevealed(TASK, 0, make_account(name), rows, bytes(32)))
    books.state.block_number = get_times(books.task, 0).opening_deadline + 1
    outcome = get_outcomes(books.state, books.task, 0)[make_account("a")]
    assert (outcome.row.reason, outcome.row.audited) == (17, 17)
    assert len(outcome.agreed) == len(VERIFIERS)


# Audits


def audit_ppm(books, name, index):
    return get_audit_ppm(books.state, books.task, make_account(name), index)


def test_probation_ends_after_enough_good_groups_and_begins_again_after_a_failure():
    books = Books(nodes={"a": 8}, probation_groups=8, audit_ppm=50_000, num_epochs=20)
    books.play(0, {"a": (GOOD, 7, 60)})
    settled = get_times(books.task, 0).opening_deadline
    known = next(i for i in range(80) if get_times(books.task, i).audit_block > settled)
    assert audit_ppm(books, "a", known) == PPM
    books.play(known, {"a": (GOOD, 1, 10)})
    after = next(i for i in range(80) if get_times(books.task, i).audit_block > books.state.block_number)
    assert audit_ppm(books, "a", after) == 50_000
    assert audit_ppm(books, "a", known) == PPM
    assert audit_ppm(books, "b", after) == PPM
    books.play(after, {"a": (SHORT, 1, 0)})
    later = next(i for i in range(80) if get_times(books.task, i).audit_block > books.state.block_number)
    assert audit_ppm(books, "a", later) == 50_000
    books.play(later, {"a": (UNPAID, 8, 0)})
    last = next(i for i in range(80) if get_times(books.task, i).audit_block > books.state.block_number)
    assert audit_ppm(books, "a", last) == PPM


def test_audited_leaves_need_both_a_commitment_and_a_beacon(books):
    books.open(0)
    books.submit(0, "a", 3)
    assert get_audited(books.state, books.task, 0, make_account("a"), **CHAIN) == ()
    books.close(0)
    assert get_audited(books.state, books.task, 0, make_account("a"), **CHAIN) == (0, 1, 2)
    assert get_audited(books.state, books.task, 0, make_account("b"), **CHAIN) == ()
    assert books.state.participants[make_account("a")].bonded == STAKE
