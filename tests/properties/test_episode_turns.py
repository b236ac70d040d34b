"""Turns by brute force: a reference that lists every legal completion of a small world agrees with the rules on all others."""

from __future__ import annotations

from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.episodes import compute_sampled, validate_turns
from protocol.errors import Reject
from tests.support.episodes import STOP, Talker, make_episode_spec

ALPHABET = (STOP, 2, 3)


class Oracle:
    """Answers as a table of everything sampled so far says. It counts sampled tokens by itself, from the start."""

    num_prompts, vocab_size = 1, 10

    def __init__(self, table):
        self.table = table

    def respond(self, index, completion):
        return self.table[len(completion) % len(self.table)]


def list_legal(environment, max_tokens):
    """Every completion that sampling can give, with the positions of its sampled tokens: forwards, as an engine makes them."""
    legal, open_ends = {}, [((), ())]
    while open_ends:
        tokens, sampled = open_ends.pop()
        for token in ALPHABET:
            made, marks = (*tokens, token), (*sampled, len(tokens))
            if len(made) == max_tokens:
                legal[made] = marks
            elif token == STOP:
                answer = environment.respond(0, made)
                if answer and len(made) + len(answer) + 1 <= max_tokens:
                    open_ends.append(((*made, *answer), marks))
                else:
                    legal[made] = marks
            else:
                open_ends.append((made, marks))
    return legal


def is_accepted(spec, environment, tokens):
    try:
        validate_turns(spec, environment, 0, tokens, ())
    except Reject:
        return False
    return True


ANSWERS = st.lists(st.lists(st.sampled_from(ALPHABET), max_size=3).map(tuple), min_size=1, max_size=4)


@settings(max_examples=40, deadline=None)
@given(ANSWERS, st.integers(1, 6))
def test_exactly_what_sampling_can_give_is_accepted(table, max_tokens):
    spec, environment = make_episode_spec(max_tokens), Oracle(table)
    legal = list_legal(environment, max_tokens)
    for length in range(1, max_tokens + 1):
        for tokens in product(ALPHABET, repeat=length):
            assert is_accepted(spec, environment, tokens) == (tokens in legal), tokens
    for tokens, marks in legal.items():
        assert tuple(compute_sampled(spec, environment, 0, tokens).tolist()) == marks


@settings(max_examples=200, deadline=None)
@given(ANSWERS, st.lists(st.sampled_from(ALPHABET), min_size=1, max_size=24), st.integers(1, 24))
def test_sampled_positions_of_anything_are_ascending_and_within(table, tokens, max_tokens):
    """Also of completions that no check has seen."""
    marks = compute_sampled(make_episode_spec(max_tokens), Oracle(table), 0, tuple(tokens)).tolist()
    assert marks[0] == 0
    assert marks == sorted(set(marks))
    assert marks[-1] < len(tokens)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from(ALPHABET), min_size=1, max_size=8).map(tuple), st.integers(1, 8))
def test_without_answers_it_is_the_plain_rule(tokens, max_tokens):
    spec = make_episode_spec(max_tokens)
    ended = STOP in tokens and tokens.index(STOP) == len(tokens) - 1
    plain = ended or (STOP not in tokens and len(tokens) == max_tokens)
    if len(tokens) <= max_tokens:
        assert is_accepted(spec, Talker({}), tokens) == plain
    assert compute_sampled(spec, Talker({}), 0, tokens).tolist() == list(range(len(tokens)))
