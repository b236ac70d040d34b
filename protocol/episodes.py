"""Completions in which the environment speaks too: which tokens were sampled and which the environment appended.

A completion is one sequence of at most `max_tokens` tokens. After a stop token the environment may answer
(`Environment.respond`); its tokens follow, and sampling goes on behind them. An empty answer, or one that would leave no
room for another sampled token, ends the completion. The environment's tokens are recomputed by whoever checks, never
sampled and never paid. Noise positions count all tokens of the completion; commitments cover the states from which tokens
were sampled, which depend on every token before them. With an environment that never answers all of this is the plain
rule: a completion ends at its first stop token, or at `max_tokens`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from protocol.errors import Fault, Reason, Reject
from protocol.task import TaskSpec

if TYPE_CHECKING:
    from protocol.ports import Environment

#: Maps a completion that ends in a stop token to the tokens that follow; empty when it is over.
Respond = Callable[[Sequence[int]], tuple[int, ...]]


def compute_response(
    spec: TaskSpec, environment: Environment, prompt_index: int, completion: Sequence[int]
) -> tuple[int, ...]:
    """What the environment appends to a completion that ends in a stop token; empty when it is over there.

    Raises:
        Fault: when the environment fails or answers with ids that are no tokens.
    """
    response = tuple(environment.respond(prompt_index, completion))
    if any(type(token) is not int or not 0 <= token < environment.vocab_size for token in response):
        raise Fault(f"environment answered with ids outside 0 to {environment.vocab_size - 1}: {response[:16]}")
    return response if len(completion) + len(response) < spec.sampling.max_tokens else ()


def make_respond(spec: TaskSpec, environment: Environment, prompt_index: int) -> Respond:
    """`compute_response` for one prompt, as an engine calls it."""
    return partial(compute_response, spec, environment, prompt_index)


def compute_sampled(
    spec: TaskSpec, environment: Environment, prompt_index: int, tokens: Sequence[int]
) -> NDArray[np.int64]:
    """Positions of the sampled tokens of a completion, int64 ascending. Raises `Fault` like `compute_response`."""
    stops = spec.sampling.stop_tokens
    if not any(token in stops for token in tokens[:-1]):
        return np.arange(len(tokens), dtype=np.int64)
    sampled, position = [], 0
    while position < len(tokens):
        sampled.append(position)
        position += 1
        if tokens[position - 1] in stops:
            position += len(compute_response(spec, environment, prompt_index, tokens[:position]))
    return np.array(sampled, dtype=np.int64)


def validate_turns(
    spec: TaskSpec, environment: Environment, prompt_index: int, tokens: Sequence[int], where: tuple[int, ...]
) -> None:
    """A completion holds the environment's own answers, and ends where it is over and nowhere else.

    Raises:
        Reject: `TERMINATION` or `RESPONSE`.
        Fault: when the environment fails.
    """
    stops, end = spec.sampling.stop_tokens, len(tokens)
    position = 0
    while position < end:
        position += 1
        if tokens[position - 1] not in stops:
            continue
        response = compute_response(spec, environment, prompt_index, tokens[:position])
        if not response:
            if position < end:
                raise Reject(
                    Reason.TERMINATION, "completion goes on after a stop token", observed=tuple(tokens), where=where
                )
            return
        given = tuple(tokens[position : position + len(response)])
        if given != response:
            raise Reject(
                Reason.RESPONSE,
                f"tokens from position {position} on are not the environment's answer",
                observed=given,
                limit=response,
                todo="append exactly what the environment answers, and go on sampling behind it",
                where=where,
            )
        position += len(response)
    if position < spec.sampling.max_tokens:
        raise Reject(
            Reason.TERMINATION,
            "completion stops early without a stop token",
            observed=f"{end} tokens",
            limit=f"a stop token, or {spec.sampling.max_tokens} tokens",
            where=where,
        )
