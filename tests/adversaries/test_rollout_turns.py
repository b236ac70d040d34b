"""Adversaries of completions with several turns (R9, R10): the environment's words edited, left out, or talked over.

As in the other modules the forger commits to its own tokens with the true policy's activations and claims the reward that they
have, so that only the rule on turns, or replay, stands in its way. The task is `guess`, whose answers hold stop tokens.
"""

from __future__ import annotations

import pytest

import environments
from environments.guess import ANSWER_TOKENS, ASK, EOS, HIGHER, LOWER, STOP_TOKENS, ZERO
from protocol import episodes
from protocol.checks import count_sampled
from protocol.episodes import compute_sampled
from protocol.errors import Reason
from protocol.task import Environment as EnvironmentSpec
from protocol.task import Sampling
from protocol.verdict import Status
from tests.adversaries.mutations import put, without
from tests.support.forge import Court, count_good, count_rollouts, make_dishonest

TRIALS_MIN = 40
MAX_TOKENS = 18


@pytest.fixture(scope="module")
def court(tmp_path_factory):
    return Court(
        tmp_path_factory.mktemp("turns"),
        slots=1,
        name="turns",
        environment=EnvironmentSpec("guess", "{}", environments.content_hash("guess", "{}")),
        sampling=Sampling(1000, MAX_TOKENS, STOP_TOKENS),
    )


def find_answer(tokens):
    """Where the first answer begins, or None: behind the first guess, if anything is."""
    at = next((i for i, token in enumerate(tokens) if token in STOP_TOKENS), len(tokens))
    return at + 1 if at + 1 < len(tokens) else None


def edited(edit):
    """`edit(tokens, start)` applied to every completion with an answer in it, which starts at `start`."""

    def apply(slot, number, tokens):
        start = find_answer(tokens)
        return tokens if start is None else tuple(edit(tokens, start))[:MAX_TOKENS]

    return apply


def judge(court, bundles, reasons):
    rows = court.rows(court.submit_all(bundles))
    assert len(rows) >= TRIALS_MIN
    assert count_good(rows) == 0
    assert {row.reason for row in rows} <= reasons, {Reason(row.reason).name for row in rows}
    assert {row.status for row in rows} == {Status.CHEAT}


def forge(court, edit, reasons):
    judge(court, make_dishonest(court, [court.rewrite(one, edited(edit)) for one in court.honest().values()]), reasons)


def test_honest_control(court):
    """Honest episodes pass, as they are and with commitments made by prefill, and most of them have several turns."""
    bundles = list(court.honest().values())
    assert count_rollouts(bundles) >= 200
    rollouts = [sample.tokens for one in bundles for group in one.groups for sample in group.samples]
    assert sum(find_answer(tokens) is not None for tokens in rollouts) >= 100
    assert count_good(court.rows(court.submit_all(bundles))) == len(bundles)
    again = [court.rewrite(one, lambda slot, number, tokens: tokens) for one in bundles]
    assert count_good(court.rows(court.submit_all(again))) == len(bundles)


def test_paid_tokens_are_the_sampled_ones(court):
    """Rows count what the policy drew; the environment's tokens are in the completions and in no row."""
    honest, unpaid = court.honest(), 0
    for row in court.rows(court.submit_all(honest.values())):
        bundle = honest[row.account]
        given = sum(len(sample.tokens) for group in bundle.groups for sample in group.samples)
        own = 0
        for group in bundle.groups:
            for sample in group.samples:
                marks = compute_sampled(court.spec, court.environment, group.prompt_index, sample.tokens).tolist()
                turns = sum(sample.tokens[i] in STOP_TOKENS for i in marks[:-1])
                assert len(sample.tokens) == len(marks) + ANSWER_TOKENS * turns
                own += len(marks)
        assert row.tokens == own == count_sampled(court.spec, court.environment, bundle)
        unpaid += given - row.tokens
    assert unpaid >= 100 * ANSWER_TOKENS


@pytest.mark.parametrize(
    ("what", "edit"),
    [
        ("the sign", lambda t, at: (*t[:at], LOWER + HIGHER - t[at], *t[at + 1 :])),
        ("a bound", lambda t, at: (*t[:at], t[at], ZERO + (t[at + 1] - ZERO + 1) % 10, *t[at + 2 :])),
        ("its last token", lambda t, at: (*t[: at + 3], HIGHER, *t[at + 4 :])),
    ],
)
def test_r9_an_edited_answer(court, what, edit):
    forge(court, edit, {Reason.RESPONSE})


def test_r9_an_omitted_answer(court):
    """Left out, the rest moved up, and filled to the length that there was."""
    forge(court, lambda t, at: (*t[:at], *t[at + ANSWER_TOKENS :]), {Reason.RESPONSE})
    forge(court, lambda t, at: (*t[:at], *t[at + ANSWER_TOKENS :], *[ASK] * MAX_TOKENS), {Reason.RESPONSE})


def test_r9_one_token_of_an_answer_omitted(court):
    forge(court, lambda t, at: (*t[: at + 1], *t[at + 2 :]), {Reason.RESPONSE})


def test_r9_tokens_of_its_own_instead_of_the_answer(court):
    forge(court, lambda t, at: (*t[:at], *[ASK] * ANSWER_TOKENS, *t[at + ANSWER_TOKENS :]), {Reason.RESPONSE})


def test_r9_tokens_of_its_own_in_front_of_and_behind_the_answer(court):
    forge(court, lambda t, at: (*t[:at], ASK, *t[at:]), {Reason.RESPONSE})
    behind = lambda t, at: (*t[: at + ANSWER_TOKENS], ASK, *t[at + ANSWER_TOKENS :])  # noqa: E731
    forge(court, behind, {Reason.REPLAY, Reason.TERMINATION, Reason.RESPONSE})


def test_r9_an_answer_given_twice(court):
    twice = lambda t, at: (*t[: at + ANSWER_TOKENS], *t[at : at + ANSWER_TOKENS], *t[at + ANSWER_TOKENS :])  # noqa: E731
    forge(court, twice, {Reason.RESPONSE, Reason.REPLAY, Reason.TERMINATION})


def test_r9_the_next_sampled_token_edited(court):
    """Behind a true answer the noise still decides."""
    edit = lambda t, at: (*t[: at + ANSWER_TOKENS], EOS if t[at + ANSWER_TOKENS] != EOS else ASK)  # noqa: E731
    forge(court, edit, {Reason.REPLAY, Reason.TERMINATION})


def test_r10_ending_instead_of_taking_the_answer(court):
    """Right behind the guess, where the plain rule would let a completion end."""
    forge(court, lambda t, at: t[:at], {Reason.RESPONSE})


def test_r10_ending_within_the_answer_or_right_behind_it(court):
    """The stop token among the environment's own is no end either."""
    forge(court, lambda t, at: t[: at + 2], {Reason.RESPONSE})
    forge(court, lambda t, at: t[: at + ANSWER_TOKENS], {Reason.TERMINATION})


def test_r10_sampling_where_the_environment_speaks(court):
    """The policy goes on by itself behind a guess: its own true tokens, noise and activations."""
    made = court.make(court.policy, court.assignments(), stop_tokens=(EOS,))
    judge(court, make_dishonest(court, made), {Reason.RESPONSE, Reason.TERMINATION})


def tell(court, index):
    """An environment of the forger's own, which names the hidden digit in its answers."""
    hidden = court.environment.solution(index)[-1]

    def respond(completion):
        true = court.environment.respond(index, tuple(completion))
        given = (true[0], hidden, hidden, ASK) if true else ()
        return given if len(completion) + len(given) < MAX_TOKENS else ()

    return respond


def test_r8_answers_that_tell_more(court, monkeypatch):
    """Sampled truly behind answers that name the hidden digit: replay and activations are right, the answers are not.
    Without the rule on answers it would be paid."""
    made = court.make(court.policy, court.assignments(), respond=lambda index: tell(court, index))
    forged = make_dishonest(court, made)
    judge(court, forged, {Reason.RESPONSE})
    put(monkeypatch, episodes.validate_turns, without(episodes.validate_turns, Reason.RESPONSE))
    assert count_good(court.rows(court.submit_all(forged))) == len(forged)


def test_r8_answers_that_told_more_and_were_put_right(court):
    """As above, with the true answers put in before committing: what was sampled behind them does not follow from them."""

    def repair(bundle):
        indices = {group.slot: group.prompt_index for group in bundle.groups}

        def edit(slot, number, tokens):
            made, position = list(tokens), 0
            while position < len(made):
                position += 1
                if made[position - 1] in STOP_TOKENS and position < len(made):
                    true = court.environment.respond(indices[slot], tuple(made[:position]))
                    made[position : position + len(true)] = true
                    position += len(true)
            return tuple(made)

        return court.rewrite(bundle, edit)

    made = court.make(court.policy, court.assignments(), respond=lambda index: tell(court, index))
    rows = court.rows(court.submit_all(make_dishonest(court, [repair(one) for one in made])))
    assert len(rows) >= TRIALS_MIN // 2
    assert count_good(rows) == 0
    assert {row.reason for row in rows} <= {Reason.REPLAY, Reason.TERMINATION}
    assert sum(row.status is Status.CHEAT for row in rows) > len(rows) // 2
