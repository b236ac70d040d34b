"""Settlement and quotas over random histories: money is conserved, totals only grow, and quotas fit the round.

Histories hold what a ledger would accept from anybody: too many leaves, no receipt, silent or lying verifiers, rows with any
numbers, stakes that come and go.
"""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.ledger import events
from protocol.merkle import compute_root
from protocol.rounds import get_num_epochs, get_outcomes, get_quotas, get_times
from protocol.settlement import compute_leaves, compute_settlement, get_epoch_deadline
from protocol.task import compute_epoch_pay_max, compute_leaf_pay_max
from protocol.verdict import Status
from tests.support.ledger_kit import TASK, VERIFIERS, Books
from tests.support.scenario import STAKE, make_account

NODES = ("a", "b", "c", "d")
ROUNDS = 6

WORK = st.fixed_dictionaries(
    {
        "leaves": st.integers(1, 8),
        "receipted": st.booleans(),
        "rows": st.lists(
            st.one_of(
                st.none(),
                st.tuples(st.sampled_from(Status), st.integers(0, 9), st.integers(0, 250)),
                st.tuples(st.just(Status.GOOD), st.integers(0, 2**16 - 1), st.integers(0, 2**32 - 1)),
            ),
            min_size=1,
            max_size=1,
        ),
        "dissent": st.integers(0, 3),
    }
)
HISTORIES = st.lists(st.dictionaries(st.sampled_from(NODES), WORK, max_size=4), min_size=1, max_size=ROUNDS)
SEEDS = st.binary(max_size=4)
STAKES = st.lists(st.tuples(st.sampled_from(NODES), st.integers(0, 2), st.integers(0, ROUNDS)), max_size=4)


def play(history, seed, stakes):
    """A ledger with this history."""
    books = Books(nodes=dict(zip(NODES, (8, 8, 3, 1), strict=True)), seed=seed, epoch_rounds=2, num_epochs=3)
    moves = sorted((get_times(books.task, index).start, name, amount) for name, amount, index in stakes)
    for index, round_work in enumerate(history):
        start = get_times(books.task, index).start
        while moves and moves[0][0] <= start:
            block, name, amount = moves.pop(0)
            books.set_stake(name, STAKE * amount // 2, block)
        books.open(index)
        for name, work in round_work.items():
            books.submit(index, name, work["leaves"], receipted=work["receipted"])
        books.close(index)
        for verifier_index, verifier in enumerate(VERIFIERS):
            said = {
                name: work["rows"][0]
                for name, work in round_work.items()
                if work["rows"][0] is not None and verifier_index >= work["dissent"]
            }
            books.say(index, said, verifiers=(verifier,))
    books.state.block_number = get_epoch_deadline(books.task, get_num_epochs(books.task) - 1) + 1
    return books


@settings(max_examples=60, deadline=None)
@given(HISTORIES, SEEDS, STAKES)
def test_money_is_conserved_and_only_grows(history, seed, stakes):
    books = play(history, seed, stakes)
    paid, burned, earnings, slashed = 0, 0, {}, set()
    for epoch in range(3):
        result = compute_settlement(books.state, books.task, epoch)
        assert result.paid_total == sum(result.earnings.values())
        assert result.root == compute_root(compute_leaves(TASK, result.earnings))
        assert result.paid_total >= paid
        assert result.burned_total >= burned
        assert all(result.earnings[account] >= amount for account, amount in earnings.items())
        assert all(amount > 0 for amount in result.earnings.values())
        assert result.paid_total + result.burned_total <= (epoch + 1) * compute_epoch_pay_max(books.spec)
        assert not slashed & set(result.slashed)
        paid, burned, earnings = result.paid_total, result.burned_total, result.earnings
        slashed |= set(result.slashed)


@settings(max_examples=30, deadline=None)
@given(HISTORIES, SEEDS, STAKES)
def test_a_settlement_does_not_change_once_its_reveals_are_over(history, seed, stakes):
    """Computed at its deadline or an age later, by a replica with or without what it derived before."""
    books = play(history, seed, stakes)
    late = [compute_settlement(books.state, books.task, epoch) for epoch in range(3)]
    for epoch in range(3):
        books.task.outcomes.clear()
        books.state.block_number = get_epoch_deadline(books.task, epoch) + 1
        assert compute_settlement(books.state, books.task, epoch) == late[epoch]


@settings(max_examples=60, deadline=None)
@given(HISTORIES, SEEDS, STAKES)
def test_nobody_is_paid_beyond_its_quota_or_without_two_thirds(history, seed, stakes):
    books = play(history, seed, stakes)
    most = dict.fromkeys(NODES, 0)
    for index in range(len(history)):
        outcomes, quotas = get_outcomes(books.state, books.task, index), get_quotas(books.state, books.task, index)
        for name in NODES:
            outcome = outcomes.get(make_account(name))
            if outcome is not None and outcome.row.status is Status.GOOD:
                assert len(outcome.agreed) >= 2
                assert history[index][name]["receipted"]
                most[name] += quotas.get(make_account(name), 0) * compute_leaf_pay_max(books.spec)
    earnings = compute_settlement(books.state, books.task, 2).earnings
    for name in NODES:
        assert earnings.get(make_account(name), 0) <= most[name]


@settings(max_examples=60, deadline=None)
@given(HISTORIES, SEEDS, STAKES)
def test_quotas_never_exceed_the_rounds_groups(history, seed, stakes):
    books = play(history, seed, stakes)
    for index in range(len(history)):
        quotas = get_quotas(books.state, books.task, index)
        assert sum(quotas.values()) <= books.spec.groups_per_round
        assert all(0 < quota <= books.spec.slots_max for quota in quotas.values())


@given(st.dictionaries(st.text("abcdefgh", min_size=1, max_size=3), st.integers(1, 8), min_size=1, max_size=20), SEEDS)
@settings(max_examples=40, deadline=None)
def test_fresh_nodes_share_a_round_evenly(nodes, seed):
    books = Books(nodes=nodes, seed=seed, groups_per_round=40, slots_max=8)
    books.open(0)
    quotas = get_quotas(books.state, books.task, 0)
    share = 40 // len(nodes)
    for name, slots in nodes.items():
        assert quotas.get(make_account(name), 0) in {min(share, slots), min(share + 1, slots)}
    assert sum(quotas.values()) <= 40


@settings(max_examples=30, deadline=None)
@given(HISTORIES, SEEDS)
def test_a_second_join_in_a_later_epoch_changes_no_past_quota(history, seed):
    books = play(history, seed, [])
    before = [get_quotas(books.state, books.task, index) for index in range(len(history))]
    books.emit(events.NodeJoined(TASK, make_account("a"), 1, 3))
    assert [get_quotas(books.state, books.task, index) for index in range(len(history))] == before
