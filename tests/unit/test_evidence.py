"""The sequential test: what an audit adds, how rounds multiply, what an alarm does to outcomes, pay, places and views."""

from __future__ import annotations

import _pydecimal
import decimal
import math

import numpy as np
import pytest
from msgspec.structs import replace

from protocol import rounds
from protocol.errors import Reason
from protocol.evidence import (
    ALARM,
    EVIDENCE_MAX,
    EVIDENCE_MIN,
    NO_TRIAL,
    Trial,
    compute_evidence,
    compute_expected_rollouts,
    compute_median,
    compute_next,
    describe_trial,
    is_alarm,
)
from protocol.ledger import events
from protocol.presets import PROFILE_FP32
from protocol.rounds import get_history, get_outcomes, get_quotas, get_times, get_trial, is_suspended
from protocol.settlement import compute_settlement, get_epoch_deadline
from protocol.toploc import ChunkMatch
from protocol.verdict import Status, unpack_rows
from tests.support.ledger_kit import TASK, VERIFIERS, Books
from tests.support.scenario import make_account
from troth.views import count_rollouts, describe_nodes

GOOD, SHORT, UNPAID, CHEAT = Status.GOOD, Status.SHORT, Status.UNPAID, Status.CHEAT
PROFILE = replace(
    PROFILE_FP32, share_null_ppm=10_000, share_bet_milli=20_000, ties_null_ppm=1_000, ties_bet_milli=20_000
)
NAT = 256


def match(differing, size=100):
    return ChunkMatch(0, 0, 0.0, 0.0, size, differing)


def gaps(tokens, misses):
    return np.array([0.01] * misses + [0.0] * (tokens - misses))


# One audit


def test_an_audit_adds_the_logarithms_of_its_bets():
    chunks = [[match(0), match(3)], [match(1, 4)]]
    nats = math.log(1 - 0.2) + math.log(1 + 20 * (0.03 - 0.01)) + math.log(1 + 20 * (0.25 - 0.01))
    nats += 2 * math.log(1 + 20 * 0.999) + 68 * math.log(1 - 0.02)
    assert compute_evidence(PROFILE, chunks, [gaps(40, 2), gaps(30, 0)]) == math.floor(NAT * nats)


def test_an_audit_of_nothing_adds_nothing():
    assert compute_evidence(PROFILE, [], []) == 0
    assert compute_evidence(replace(PROFILE, share_bet_milli=0, ties_bet_milli=0), [[match(50)]], [gaps(9, 9)]) == 0


def test_evidence_is_rounded_down_on_both_sides_of_zero():
    up, down = compute_evidence(PROFILE, [[match(2)]], []), compute_evidence(PROFILE, [[match(0)]], [])
    assert (up, down) == (46, -58)  # 46.67 and -57.13 parts


def test_evidence_is_clipped_to_its_two_bytes():
    assert compute_evidence(PROFILE, [[match(100)] * 1000], []) == EVIDENCE_MAX == 32_767
    assert compute_evidence(PROFILE, [[match(0)] * 1000], []) == EVIDENCE_MIN == -32_768


def test_more_that_differs_never_counts_less():
    values = [compute_evidence(PROFILE, [[match(n)]], [gaps(50, 0)]) for n in range(101)]
    assert values == sorted(values)
    values = [compute_evidence(PROFILE, [[match(1)]], [gaps(50, n)]) for n in range(51)]
    assert values == sorted(values)


@pytest.mark.parametrize(
    ("values", "median"), [([5], 5), ([9, 1], 1), ([9, 1, 2], 2), ([9, 9, 1, 2], 2), ([9, 9, 9, 1, 2], 9)]
)
def test_the_median_is_the_lower_one(values, median):
    assert compute_median(values) == median


# Many rounds


def run_trial(evidence):
    trial = NO_TRIAL
    for one in evidence:
        trial = compute_next(trial, one)
    return trial


def test_a_trial_mixes_over_the_rounds_in_which_cheating_may_have_begun():
    nats = [0.5, -1.0, 2.0, 0.25]
    expected = sum(math.exp(sum(nats[start:])) / ((start + 1) * (start + 2)) for start in range(4))
    trial = run_trial([int(NAT * one) for one in nats])
    assert trial.rounds == 4
    assert math.isclose(float(trial.value), expected, rel_tol=1e-12)


def test_the_weights_of_all_rounds_are_at_most_one():
    """With evidence 0 throughout, R_t is the sum of the weights so far: t / (t + 1), never more."""
    trial = NO_TRIAL
    for rounds_so_far in range(1, 400):
        trial = compute_next(trial, 0)
        assert trial.value * (rounds_so_far + 1) <= rounds_so_far
    assert math.isclose(float(trial.value), 399 / 400)


def test_a_trial_is_the_same_number_everywhere():
    """Digits that another implementation must give, whatever the decimal context of the thread is."""
    evidence = [1, -300, 32_767, -32_768, 4_000, 0, 77]
    expected = "2662132.668850763607712379508976601"
    with decimal.localcontext(decimal.Context(prec=3, rounding=decimal.ROUND_UP)):
        assert str(run_trial(evidence).value) == expected
    context = _pydecimal.Context(prec=34, rounding=_pydecimal.ROUND_DOWN, Emin=-400_000_000, Emax=400_000_000)
    value = _pydecimal.Decimal(0)
    for number, one in enumerate(evidence, 1):
        weight = context.divide(_pydecimal.Decimal(1), _pydecimal.Decimal(number * (number + 1)))
        factor = context.exp(context.divide(_pydecimal.Decimal(one), _pydecimal.Decimal(256)))
        value = context.multiply(factor, context.add(value, weight))
    assert str(value) == expected


@pytest.mark.parametrize("extreme", [EVIDENCE_MIN, EVIDENCE_MAX])
def test_a_million_rounds_at_either_extreme_stay_within_the_numbers(extreme):
    exponent = int(10**6 * extreme / NAT / math.log(10))
    trial = compute_next(Trial(10**6, decimal.Decimal(f"1e{exponent}")), extreme)
    assert trial.value > 0
    assert is_alarm(trial) == (extreme > 0)
    assert math.isfinite(trial.log10)


def test_the_alarm_is_at_a_million_and_not_below():
    assert is_alarm(Trial(1, decimal.Decimal(ALARM)))
    assert not is_alarm(Trial(1, decimal.Decimal("999999.9999999999999999999999999999")))
    assert not is_alarm(run_trial([int(NAT * math.log(2 * ALARM))]))
    assert is_alarm(run_trial([int(NAT * math.log(2 * ALARM)) + 1]))


def test_expected_delays_follow_from_the_drift():
    drift = 2 * math.log(1 + 20 * 0.09) + 60 * (0.01 * math.log(1 + 20 * 0.999) + 0.99 * math.log(1 - 0.02))
    assert math.isclose(compute_expected_rollouts(PROFILE, 0.1, 0.01, 2, 60), math.log(2 * ALARM) / drift)
    later = compute_expected_rollouts(PROFILE, 0.1, 0.01, 2, 60, honest_rounds=500)
    assert math.isclose(later, math.log(ALARM * 501 * 502) / drift)
    assert compute_expected_rollouts(PROFILE, [0.0, 0.2], 0.01, 2, 60) > math.log(2 * ALARM) / drift
    assert compute_expected_rollouts(PROFILE, 0.01, 0.001, 2, 60) == math.inf


# On the ledger


@pytest.fixture
def books():
    return Books(nodes={"a": 8, "b": 8})


def wait(books, index):
    """Let everything about a round be said."""
    books.state.block_number = max(books.state.block_number, get_times(books.task, index)[-1] + 1)


def play(books, index, verdicts, evidence):
    books.play(index, verdicts, evidence)
    wait(books, index)


def outcome_of(books, index, name):
    wait(books, index)
    return get_outcomes(books.state, books.task, index)[make_account(name)]


def test_an_alarm_makes_its_round_a_cheat_that_every_verifier_called_good(books):
    play(books, 0, {"a": (GOOD, 4, 90), "b": (GOOD, 4, 90)}, {"a": 8 * NAT, "b": -NAT})
    play(books, 1, {"a": (GOOD, 4, 90), "b": (GOOD, 4, 90)}, {"a": 8 * NAT, "b": -NAT})
    first, second = outcome_of(books, 0, "a"), outcome_of(books, 1, "a")
    assert (first.row.status, first.row.evidence) == (GOOD, 8 * NAT)
    assert (second.row.status, second.row.reason, second.row.tokens) == (CHEAT, Reason.EVIDENCE, 0)
    assert (second.row.groups, second.row.audited, second.row.evidence) == (4, 1, 8 * NAT)
    assert len(second.agreed) == len(VERIFIERS)
    assert (second.trial.rounds, is_alarm(first.trial), is_alarm(second.trial)) == (2, False, True)
    assert outcome_of(books, 1, "b").row.status is GOOD
    said = unpack_rows(books.task.reveals[1][make_account("v0")].rows)
    assert {row.status for row in said} == {GOOD}


def test_an_alarm_is_slashed_forfeits_its_epoch_and_ends_its_place(books):
    play(books, 0, {"a": (GOOD, 4, 90), "b": (GOOD, 4, 90)}, {"a": 8 * NAT})
    play(books, 1, {"a": (GOOD, 4, 90), "b": (GOOD, 4, 90)}, {"a": 8 * NAT})
    assert len(get_history(books.state, books.task, make_account("a"), books.state.block_number)) == 2
    deadline = books.task.judged[make_account("a")][-1][0]
    assert not is_suspended(books.state, books.task, make_account("a"), deadline)
    assert is_suspended(books.state, books.task, make_account("a"), deadline + 1)
    later = next(index for index in range(2, 12) if get_times(books.task, index).start > deadline)
    books.open(later)
    assert set(get_quotas(books.state, books.task, later)) == {make_account("b")}
    books.state.block_number = get_epoch_deadline(books.task, 0) + 1
    result, economics = compute_settlement(books.state, books.task, 0), books.spec.economics
    assert result.slashed == (make_account("a"),)
    assert make_account("a") not in result.earnings
    assert result.earnings[make_account("v0")] == 2 * economics.verifier_fee
    assert result.burned_total == 0


def test_settled_pay_of_earlier_epochs_stays_with_the_node():
    books = Books(nodes={"a": 8})
    play(books, 0, {"a": (GOOD, 4, 90)}, {"a": 8 * NAT})
    play(books, 4, {"a": (GOOD, 4, 90)}, {"a": 8 * NAT})
    books.state.block_number = get_epoch_deadline(books.task, 1) + 1
    first, second = (compute_settlement(books.state, books.task, epoch) for epoch in (0, 1))
    assert (first.slashed, second.slashed) == ((), (make_account("a"),))
    assert second.earnings[make_account("a")] == first.earnings[make_account("a")] > 0


def test_what_else_a_round_was_called_is_kept_below_the_alarm_and_cheats_keep_their_reason(books):
    play(books, 0, {"a": (UNPAID, 4, 0), "b": (CHEAT, 4, 0)}, {"a": 8 * NAT, "b": 20 * NAT})
    play(books, 1, {"a": (SHORT, 2, 0)}, {"a": 0})
    play(books, 2, {"a": (UNPAID, 4, 0)}, {"a": 9 * NAT})
    assert outcome_of(books, 0, "a").row.status is UNPAID
    assert outcome_of(books, 0, "b").row.reason == Reason.REPLAY
    assert outcome_of(books, 1, "a").row.status is SHORT
    assert (outcome_of(books, 2, "a").row.status, outcome_of(books, 2, "a").row.reason) == (CHEAT, Reason.EVIDENCE)


def test_verifiers_agree_although_their_evidence_differs_and_a_minority_moves_nothing(books):
    for index, lie in ((0, EVIDENCE_MAX), (1, EVIDENCE_MIN)):
        books.open(index)
        books.submit(index, "a", 4)
        books.close(index)
        for verifier, evidence in (("v0", -30), ("v1", -31), ("v2", lie)):
            books.say(index, {"a": (GOOD, 4, 90)}, verifiers=(verifier,), evidence={"a": evidence})
    assert [outcome_of(books, index, "a").row.evidence for index in (0, 1)] == [-30, -31]
    assert outcome_of(books, 0, "a").row.status is GOOD


def test_one_of_two_that_agree_cannot_raise_the_evidence(books):
    """The third was silent: even half of those who agree raises nothing."""
    books.open(0)
    books.submit(0, "a", 4)
    books.close(0)
    books.say(0, {"a": (GOOD, 4, 90)}, verifiers=("v0",), evidence={"a": -30})
    books.say(0, {"a": (GOOD, 4, 90)}, verifiers=("v1",), evidence={"a": EVIDENCE_MAX})
    outcome = outcome_of(books, 0, "a")
    assert (outcome.row.evidence, outcome.row.status) == (-30, GOOD)


def test_rounds_without_an_outcome_count_for_nothing(books):
    play(books, 0, {"a": (GOOD, 4, 90)}, {"a": 100})
    books.open(1)
    books.submit(1, "a", 4)
    books.close(1)
    for verifier, tokens in (("v0", 1), ("v1", 2), ("v2", 3)):
        books.say(1, {"a": (GOOD, 4, tokens)}, verifiers=(verifier,), evidence={"a": EVIDENCE_MAX})
    books.open(2)
    books.submit(2, "a", 4, receipted=False)
    books.close(2)
    books.say(2, {"a": (GOOD, 4, 90)}, evidence={"a": EVIDENCE_MAX})
    play(books, 3, {"a": (GOOD, 4, 90)}, {"a": 200})
    assert [get_outcomes(books.state, books.task, index) for index in (1, 2)] == [{}, {}]
    steps = get_trial(books.state, books.task, make_account("a"), books.state.block_number)
    assert [(step.round_index, step.evidence, step.trial.rounds) for step in steps] == [(0, 100, 1), (3, 200, 2)]
    assert steps[-1].trial == outcome_of(books, 3, "a").trial == run_trial([100, 200])


def play_long(num_rounds=40):
    books = Books(nodes={"a": 8, "b": 8}, num_epochs=20)
    for index in range(num_rounds):
        verdicts = {"a": (GOOD, 4, 90), "b": (GOOD, 4, 90)} if index % 7 else {"b": (GOOD, 4, 90)}
        play(books, index, verdicts, {"a": 40 * (index % 11) - 100, "b": 400 if index > 20 else -60})
    return books


def test_the_order_of_questions_changes_no_answer():
    asked = []
    for order in (range(40), range(39, -1, -1), (20, 3, 39, 0, *range(40))):
        books = play_long()
        for index in order:
            get_outcomes(books.state, books.task, index)
        asked.append([get_outcomes(books.state, books.task, index) for index in range(40)])
    assert asked[0] == asked[1] == asked[2]
    assert any(outcome.row.reason == Reason.EVIDENCE for outcomes in asked[0] for outcome in outcomes.values())


def test_an_answer_does_not_depend_on_what_came_later():
    """Each round as it was known in the first block after its reveals."""
    late = play_long()
    for index in range(40):
        early = play_long(index + 1)
        early.state.block_number = get_times(early.task, index)[-1] + 1
        assert get_outcomes(early.state, early.task, index) == get_outcomes(late.state, late.task, index)


def test_each_round_is_derived_once_and_in_no_depth(monkeypatch):
    books, calls = Books(nodes={"a": 8}, num_epochs=500, deposit=10**18), []
    for index in range(1500):
        play(books, index, {"a": (GOOD, 8, 90)}, {"a": -5})
    books.task.outcomes.clear()
    original = rounds.compute_next
    monkeypatch.setattr(rounds, "compute_next", lambda *given: calls.append(1) or original(*given))
    assert outcome_of(books, 1499, "a").trial.rounds == 1500
    assert len(get_history(books.state, books.task, make_account("a"), books.state.block_number)) == 1500
    assert len(calls) == 1500


def test_rounds_nobody_committed_to_have_no_outcome_however_late_it_is(books):
    play(books, 0, {"a": (GOOD, 4, 90)}, {})
    books.state.block_number = 10**12
    assert get_outcomes(books.state, books.task, 10**9) == {}
    assert len(books.task.outcomes) <= 1


def test_the_trial_of_a_block_shows_only_rounds_known_in_it(books):
    for index in range(3):
        play(books, index, {"a": (GOOD, 4, 90)}, {"a": 256})
    account = make_account("a")
    assert len(get_history(books.state, books.task, account, books.state.block_number)) == 3
    deadline = books.task.judged[account][1][0]
    assert [step.round_index for step in get_trial(books.state, books.task, account, deadline)] == [0]
    assert [step.round_index for step in get_trial(books.state, books.task, account, deadline + 1)] == [0, 1]
    assert get_trial(books.state, books.task, make_account("b"), deadline) == []


def test_views_show_the_trial_and_the_reason(books):
    play(books, 0, {"a": (GOOD, 4, 90)}, {"a": 10 * NAT})
    play(books, 1, {"a": (GOOD, 4, 90)}, {"a": 10 * NAT})
    rows = {row["account"]: row for row in describe_nodes(books.state, books.task)}
    shown, idle = (rows["0x" + make_account(name).hex()] for name in ("a", "b"))
    assert (shown["caught_by"], shown["suspended"]) == ("evidence", True)
    assert shown["evidence"]["nats_by_round"] == {"0": 10.0, "1": 10.0}
    assert shown["evidence_log10"] == shown["evidence"]["log10"] == pytest.approx(8.385, abs=0.001)
    assert shown["evidence"]["alarm_log10"] == 6.0
    assert (idle["evidence_log10"], idle["evidence"]["rounds"], idle["caught_by"]) == (None, 0, None)
    counted = count_rollouts(books.state, books.task)
    assert counted == {"accepted": 16, "rejected": {"evidence": 16}}


def test_a_description_shows_the_latest_rounds():
    books = Books(nodes={"a": 8})
    for index in range(12):
        play(books, index, {"a": (GOOD, 4, 90)}, {"a": index})
    shown = describe_trial(get_trial(books.state, books.task, make_account("a"), books.state.block_number))
    assert (shown["rounds"], list(shown["nats_by_round"])) == (12, [str(index) for index in range(4, 12)])


def test_a_malformed_reveal_leaves_the_others_evidence(books):
    books.open(0)
    books.submit(0, "a", 4)
    books.close(0)
    books.say(0, {"a": (GOOD, 4, 90)}, verifiers=("v0", "v1"), evidence={"a": -30})
    books.emit(events.VerdictRevealed(TASK, 0, make_account("v2"), b"\1" * 33, bytes(32)))
    assert (outcome_of(books, 0, "a").row.evidence, len(outcome_of(books, 0, "a").agreed)) == (-30, 2)
