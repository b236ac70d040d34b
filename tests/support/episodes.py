"""Environments that answer by rote, for tests of completions with several turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from protocol.codec import PROTOCOL_VERSION
from protocol.presets import MINIMAL, PROFILE_FP32
from protocol.task import Environment as EnvironmentSpec
from protocol.task import Sampling, TaskSpec

STOP = 1
VOCAB = 10


class Talker:
    """Answers its n-th sampled stop token (from 1) with `answers[n]`, and is silent behind others.

    Attributes:
        asked: completions it was asked about.
    """

    num_prompts = 4
    vocab_size = VOCAB

    def __init__(self, answers: Mapping[int, Any], *, stops: Sequence[int] = (STOP,)) -> None:
        self.answers, self.stops = answers, stops
        self.asked: list[tuple[int, ...]] = []

    def prompt(self, index: int) -> tuple[int, ...]:
        """Two tokens."""
        return (2, 3 + index)

    def respond(self, index: int, completion: Sequence[int]) -> Any:
        """The answer to the last token."""
        self.asked.append(tuple(completion))
        turn, position = 0, 0
        while True:
            position += 1
            if completion[position - 1] in self.stops:
                turn += 1
                if position >= len(completion):
                    return self.answers.get(turn, ())
                position += len(self.answers.get(turn, ()))
            if position >= len(completion):
                return ()

    def reward(self, index: int, completion: Sequence[int]) -> int:
        """Nothing."""
        return 0


def make_episode_spec(max_tokens: int) -> TaskSpec:
    """A task of which only the sampling matters."""
    return TaskSpec(
        version=PROTOCOL_VERSION,
        name="episodes",
        base_policy=bytes(32),
        base_manifest=bytes(32),
        environment=EnvironmentSpec("sort", "{}", bytes(32)),
        licence_data="CC0-1.0",
        licence_model="Apache-2.0",
        sampling=Sampling(1000, max_tokens, (STOP,)),
        group_size=2,
        groups_per_round=1,
        slots_max=1,
        max_staleness=1,
        profile=PROFILE_FP32,
        schedule=MINIMAL.schedule,
        economics=MINIMAL.economics,
        verifiers_per_round=3,
        trainer=bytes(20),
        token=bytes(20),
    )
