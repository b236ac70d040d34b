"""Completions in which the environment speaks: where they end, which tokens are sampled, what breaks the rules."""

from __future__ import annotations

import pytest

from protocol.episodes import compute_response, compute_sampled, make_respond, validate_turns
from protocol.errors import Fault, Reason, Reject
from protocol.task import Sampling
from tests.support.episodes import STOP, Talker, make_episode_spec

SPEC = make_episode_spec(12)
#: Answers the first stop with three tokens, one of them a stop token, the second with one, and ends at the third.
TALKER = Talker({1: (7, STOP, 8), 2: (9,)})


def check(tokens, talker=TALKER, spec=SPEC):
    validate_turns(spec, talker, 0, tokens, (0, 0))
    return compute_sampled(spec, talker, 0, tokens).tolist()


def refuse(tokens, talker=TALKER, spec=SPEC):
    with pytest.raises(Reject) as caught:
        validate_turns(spec, talker, 0, tokens, (3, 1))
    assert caught.value.where == (3, 1)
    assert caught.value.severe
    return caught.value.reason


def test_a_whole_episode():
    made = (4, STOP, 7, STOP, 8, STOP, 9, 5, STOP)
    assert check(made) == [0, 1, 5, 7, 8]


def test_a_stop_token_of_the_environments_is_no_end():
    """Position 3 is a stop token that nobody sampled: the completion goes on behind it, and must."""
    assert check((STOP, 7, STOP, 8, 4, STOP, 9, STOP)) == [0, 4, 5, 7]
    assert refuse((STOP, 7, STOP)) is Reason.RESPONSE
    assert refuse((STOP, 7, STOP, 8)) is Reason.TERMINATION


def test_the_environment_was_last_to_speak():
    """Every answer leaves room for a sampled token, so a completion that ends in one is not over."""
    assert refuse((4, STOP, 7, STOP, 8, STOP, 9)) is Reason.TERMINATION


@pytest.mark.parametrize(
    "tokens",
    [
        (4, STOP),  # nothing of it
        (4, STOP, 7),  # a part
        (4, STOP, 7, STOP),
        (4, STOP, 7, STOP, 6, STOP, 9, STOP),  # another token
        (4, STOP, 7, 8, 5, STOP, 9, STOP),  # one left out
        (4, STOP, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5),  # sampled over it
        (4, STOP, 5, 7, STOP, 8, STOP, 9, STOP),  # one put in front
    ],
)
def test_answers_that_are_not_the_environments(tokens):
    assert refuse(tokens) is Reason.RESPONSE


def test_endings():
    assert refuse((4, STOP, 7, STOP, 8, STOP, 9, STOP, 4)) is Reason.TERMINATION  # goes on after the end
    assert refuse((4, STOP, 7, STOP, 8, 5, 5)) is Reason.TERMINATION  # stops early
    assert check((4, STOP, 7, STOP, 8, *[5] * 7)) == [0, 1, *range(5, 12)]  # at max_tokens
    assert check((4,) * 12) == list(range(12))
    assert check((*(4,) * 11, STOP)) == list(range(12))


@pytest.mark.parametrize(
    ("max_tokens", "ends"),
    [(3, True), (4, True), (5, True), (6, False), (7, False)],
)
def test_an_answer_that_leaves_no_room_is_not_given(max_tokens, ends):
    """A stop at position 2 and an answer of three tokens: a sampled token must fit behind them."""
    spec, talker = make_episode_spec(max_tokens), Talker({1: (7, 7, 7)})
    assert compute_response(spec, talker, 0, (4, STOP)) == (() if ends else (7, 7, 7))
    if ends:
        assert check((4, STOP), talker, spec) == [0, 1]
        assert refuse((4, STOP, 7, 7, 7)[:max_tokens], talker, spec) is Reason.TERMINATION
    else:
        assert refuse((4, STOP), talker, spec) is Reason.RESPONSE
        assert check((4, STOP, 7, 7, 7, *[5] * (max_tokens - 5)), talker, spec) == [0, 1, *range(5, max_tokens)]


def test_an_environment_that_never_answers_is_the_plain_rule():
    silent = Talker({})
    assert check((4, 5, STOP), silent) == [0, 1, 2]
    assert check((STOP,), silent) == [0]
    assert refuse((4, STOP, 5), silent) is Reason.TERMINATION
    assert refuse((4, 5), silent) is Reason.TERMINATION


@pytest.mark.parametrize("answer", [(-1,), (99,), (7, 10), ("7",), (True,), (7.0,)])
def test_ids_that_are_no_tokens_are_the_environments_fault(answer):
    with pytest.raises(Fault, match="outside"):
        compute_response(SPEC, Talker({1: answer}), 0, (STOP,))
    with pytest.raises(Fault):
        validate_turns(SPEC, Talker({1: answer}), 0, (STOP, 7), (0, 0))
    with pytest.raises(Fault):
        compute_sampled(SPEC, Talker({1: answer}), 0, (STOP, 7))


def test_a_list_is_an_answer_too():
    """What an environment returns is compared as tokens, whatever sequence holds them."""
    talker = Talker({1: [7, 8]})
    assert make_respond(SPEC, talker, 0)((STOP,)) == (7, 8)
    assert check((STOP, 7, 8, STOP), talker) == [0, 3]


def test_an_environment_that_fails_rejects_nobody():
    class Broken(Talker):
        def respond(self, index, completion):
            raise Fault("no tool")

    with pytest.raises(Fault, match="no tool"):
        validate_turns(SPEC, Broken({}), 0, (STOP, 7), (0, 0))


def test_it_is_asked_about_its_own_words_only_when_they_were_sampled():
    """The environment sees completions that end in a stop token somebody sampled, once each."""
    talker = Talker({1: (7, STOP, 8), 2: (STOP,)})
    validate_turns(SPEC, talker, 0, (4, STOP, 7, STOP, 8, STOP, STOP, STOP), (0, 0))
    assert talker.asked == [(4, STOP), (4, STOP, 7, STOP, 8, STOP), (4, STOP, 7, STOP, 8, STOP, STOP, STOP)]


def test_two_stop_tokens():
    spec = make_episode_spec(8)
    spec = type(spec)(
        **{**{f: getattr(spec, f) for f in spec.__struct_fields__}, "sampling": Sampling(1000, 8, (STOP, 2))}
    )
    talker = Talker({1: (7,)}, stops=(STOP, 2))
    assert check((2, 7, STOP), talker, spec) == [0, 2]
