"""Environments of several turns: what they answer, and what a completion with their answers is worth."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from environments import content_hash, load
from environments.calculator import DIGITS_MAX, evaluate
from environments.guess import ASK, EOS, HIGHER, LOWER, STOP_TOKENS, VOCABULARY, ZERO, GuessEnvironment
from protocol.errors import ConfigError
from protocol.task import Environment as EnvironmentSpec


def make(entry, **args):
    text = json.dumps(args, sort_keys=True, separators=(",", ":"))
    return load(EnvironmentSpec(entry, text, content_hash(entry, text)))


# guess


def play(environment, index, guesses):
    made = ()
    for guess in guesses:
        made = (*made, ZERO + guess)
        made = (*made, *environment.respond(index, made))
    return made


def test_a_game_by_hand():
    environment = make("guess")
    index = next(i for i in range(environment.num_prompts) if environment.prompt(i)[1:3] == (ZERO + 2, ZERO + 7))
    indices = [i for i in range(environment.num_prompts) if environment.prompt(i) == environment.prompt(index)]
    hidden_6 = indices[4]
    assert environment.respond(hidden_6, (ZERO + 4,)) == (HIGHER, ZERO + 5, ZERO + 7, ASK)
    assert play(environment, hidden_6, [4, 7]) == (
        ZERO + 4,
        HIGHER,
        ZERO + 5,
        ZERO + 7,
        ASK,
        ZERO + 7,
        LOWER,
        ZERO + 5,
        ZERO + 6,
        ASK,
    )
    made = play(environment, hidden_6, [4, 7, 6])
    assert made[-1] == ZERO + 6
    assert environment.reward(hidden_6, made) == 600_000
    assert environment.reward(hidden_6, (ZERO + 6,)) == 1_000_000
    assert environment.reward(hidden_6, made[:-1]) == 0
    assert environment.reward(hidden_6, (EOS,)) == 0
    assert environment.respond(hidden_6, (EOS,)) == ()


def test_halving_finds_every_digit_and_costs_what_it_should():
    environment = GuessEnvironment()
    rewards = [environment.reward(i, environment.solution(i)) for i in range(environment.num_prompts)]
    assert min(rewards) >= 1_000_000 - 3 * 200_000
    assert len({environment.prompt(i) for i in range(environment.num_prompts)}) == 45
    assert environment.vocab_size == len(VOCABULARY) == 20
    assert len(STOP_TOKENS) <= 16


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 200), st.lists(st.integers(0, 19), max_size=24))
def test_any_completion_has_a_reward_and_an_answer(index, tokens):
    environment = GuessEnvironment()
    index %= environment.num_prompts
    assert 0 <= environment.reward(index, tuple(tokens)) <= 1_000_000
    answer = environment.respond(index, tuple(tokens))
    assert len(answer) in (0, 4)
    assert all(0 <= token < 20 for token in answer)


def test_digits_of_an_answer_are_no_guesses():
    """The hidden digit stands in the environment's own words, as the last one that is left."""
    environment = GuessEnvironment()
    index = next(i for i in range(environment.num_prompts) if environment.prompt(i)[1:3] == (ZERO, ZERO + 1))
    made = play(environment, index, [1])
    assert made == (ZERO + 1, LOWER, ZERO, ZERO, ASK)
    assert environment.reward(index, made) == 0


@pytest.mark.parametrize("args", [{"price_micro": -1}, {"price_micro": 1_000_001}, {"price_micro": "1"}, {"price": 1}])
def test_arguments_of_guess(args):
    with pytest.raises(ConfigError, match="guess"):
        make("guess", **args)


# calculator


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1+2*3", "7"),
        (" ( 1 + 2 ) * 3 ", "9"),
        ("10-2-3", "5"),
        ("7/2", "3"),
        ("-7/2", "-4"),
        ("7%-3", "-2"),
        ("2*-3", "-6"),
        ("--2", "2"),
        ("007", "7"),
        ("1/0", "?"),
        ("1%0", "?"),
        ("", "?"),
        ("()", "?"),
        ("(1", "?"),
        ("1)", "?"),
        ("1+", "?"),
        ("2**3", "?"),
        ("1 2", "12"),
        ("9" * DIGITS_MAX, "9" * DIGITS_MAX),
        ("9" * DIGITS_MAX + "+1", "?"),
        ("9" * 40, "?"),
        ("(" * 17 + "1" + ")" * 17, "?"),
        ("-" * 17 + "1", "?"),
        ("1" * 129, "?"),
        ("*".join(["999999999"] * 12), "?"),
        ("__import__('os')", "?"),
        ("1e9", "?"),
        ("٣+١", "?"),
    ],
)
def test_expressions(expression, value):
    assert evaluate(expression) == value


@settings(max_examples=200, deadline=None)
@given(
    st.recursive(
        st.integers(0, 999).map(str),
        lambda inner: (
            st.tuples(inner, st.sampled_from("+-*/%"), inner).map(lambda t: f"({t[0]}{t[1]}{t[2]})")
            | inner.map(lambda t: f"(-{t})")
        ),
        max_leaves=5,
    )
)
def test_expressions_are_worth_what_python_says(expression):
    try:
        value = eval(expression.replace("/", "//"), {"__builtins__": {}})
    except ZeroDivisionError:
        assert evaluate(expression) == "?"
    else:
        assert evaluate(expression) == str(value)


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=200) | st.text("0123456789+-*/%() ", max_size=140))
def test_any_text_is_answered(text):
    value = evaluate(text)
    assert value == "?" or abs(int(value)) < 10**DIGITS_MAX


def tokens(text):
    return tuple(text.encode())


def test_a_completion_by_hand():
    environment = make("calculator", terms=2)
    assert environment.prompt(0) == tokens(environment.questions.question(0))
    assert environment.respond(0, tokens("So 12*3=")) == tokens("36")
    assert environment.respond(0, tokens("So 12*3=36\n36+4=")) == tokens("40")
    assert environment.respond(0, tokens("So 12*3=36+4=")) == tokens("40")
    assert environment.respond(0, tokens("x=")) == tokens("?")
    assert environment.respond(0, (*tokens("12*3"), 256)) == ()
    assert environment.respond(0, tokens("1=1 " * 8 + "2=")) == ()
    right = environment.known_answer(0)
    assert environment.reward(0, (*tokens(f"so it is {right}"), 256)) == 1_000_000
    assert environment.reward(0, (*tokens(f"{right}0"), 256)) == 0
    assert environment.reward(0, (256,)) == 0


def test_held_out_questions_have_the_tool_too():
    environment = make("calculator", held_out=10, size=100)
    kept = environment.held_out()
    assert (environment.num_prompts, kept.num_prompts) == (90, 10)
    assert kept.questions.question(95) not in [environment.questions.question(i) for i in range(90)]
    assert kept.prompt(5) == tokens(environment.questions.question(95))
    assert kept.respond(0, tokens("2+2=")) == tokens("4")


@pytest.mark.parametrize(
    "args", [{"tool": "=="}, {"tool": ""}, {"terms": 1}, {"digits": 10}, {"length": {}}, {"calls_max": 0}, {"size": 0}]
)
def test_arguments_of_calculator(args):
    with pytest.raises(ConfigError, match="calculator"):
        make("calculator", **args)
