"""Engine pairs: how rollouts are made, how they are prefilled, and which combinations are held against each other.

A pair that is accepted is one that an honest node and an honest verifier may form under the profile. The others are measured
and reported, and limits are not taken from them: generating in one dtype and verifying in another is no honest pair.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import NamedTuple

from protocol.errors import ConfigError

#: Rollouts whose prompts and completions are prefilled together, shorter ones padded.
PADDED = 64
#: See `Maker.divisor`.
SLOW = 4


class Maker(NamedTuple):
    """How rollouts are made.

    Attributes:
        engine: `torch` (decode with a KV cache, in this process) or `vllm` (in a process of another interpreter).
        batch: rollouts decoded together.
        divisor: one in so many of the rollouts is made at all, where a maker is slow.
    """

    engine: str
    batch: int
    dtype: str
    threads: int
    divisor: int = 1


class Prefill(NamedTuple):
    """How a verifier scores them.

    Attributes:
        batch: rollouts in one forward pass, of mixed lengths and so padded; 1 for each alone.
        attention: transformers' implementation, `sdpa` or `eager`.
    """

    batch: int
    attention: str
    dtype: str
    threads: int


class Pair(NamedTuple):
    """One row of the measurement."""

    name: str
    maker: Maker
    prefill: Prefill
    is_accepted: bool


def count_rollouts(maker: Maker, asked: int) -> int:
    """How many rollouts a maker makes where `asked` are asked for of every pair."""
    return -(-asked // maker.divisor)


def make_pairs(dtype: str, threads: int, *, with_vllm: bool) -> list[Pair]:
    """All pairs of a dtype. The batch of 32 against a padded prefill is the one alternatives are measured under."""
    maker, prefill = Maker("torch", 32, dtype, threads), Prefill(PADDED, "sdpa", dtype, threads)
    other = "bfloat16" if dtype == "float32" else "float32"
    pairs = [
        Pair("batch-32", maker, prefill, True),
        Pair("batch-1", maker._replace(batch=1, divisor=SLOW), prefill, True),
        Pair("batch-8", maker._replace(batch=8), prefill, True),
        Pair("batch-64", maker._replace(batch=64), prefill, True),
        Pair("threads-made", maker._replace(threads=2 * threads, divisor=SLOW), prefill, True),
        Pair("threads-prefill", maker, prefill._replace(threads=2 * threads), True),
        Pair("eager", maker, prefill._replace(attention="eager"), True),
        Pair("unpadded", maker, prefill._replace(batch=1), True),
        Pair(
            "batch-1-eager-unpadded",
            maker._replace(batch=1, divisor=SLOW),
            prefill._replace(batch=1, attention="eager"),
            True,
        ),
    ]
    if with_vllm:
        vllm = maker._replace(engine="vllm", batch=64)
        pairs.append(Pair("vllm", vllm, prefill, True))
        pairs.append(Pair("vllm-eager", vllm, prefill._replace(attention="eager"), True))
    pairs.append(Pair(f"made-in-{other}", maker._replace(dtype=other), prefill, False))
    pairs.append(Pair(f"prefill-in-{other}", maker, prefill._replace(dtype=other), False))
    return pairs


def select_pairs(pairs: Sequence[Pair], names: Sequence[str]) -> list[Pair]:
    """Pairs by name, all where no name is given.

    Raises:
        ConfigError: for an unknown name, with those that exist.
    """
    known = {pair.name: pair for pair in pairs}
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise ConfigError(f"unknown pair {name!r}: {hint}known are {', '.join(known)}")
    return [pair for pair in pairs if not names or pair.name in names]
