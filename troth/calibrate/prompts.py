"""Prompts to calibrate with: random tokens, those of an installed environment, or a file of token ids.

The same sources, seed and number give the same requests. Neighbours: troth.calibrate.measure generates from them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import environments
from protocol.errors import ConfigError
from protocol.ports import SampleRequest
from protocol.task import Environment

RANDOM = "random"
#: Tokens of random prompts, shortest and longest, both included.
RANDOM_TOKENS = (1, 64)
#: Largest file of prompts, in bytes, and most tokens of one prompt in it.
FILE_BYTES_MAX = 1 << 24
PROMPT_TOKENS_MAX = 1 << 15


def make_requests(
    sources: Sequence[str], num_requests: int, *, vocab: int, folder: Path, args: str, seed: int
) -> list[SampleRequest]:
    """Requests with prompts from every source in turn and keys of their own.

    Args:
        sources: each `random`, the name of an installed environment, or a file with one JSON list of token ids a line.
        vocab: token ids of the model.
        folder: of the policy, where an environment's files may be.
        args: arguments of the environments, a JSON object.

    Raises:
        ConfigError: for a source that is none of these, or tokens that the model does not have.
    """
    rng = np.random.default_rng(seed)
    lists = [_make_prompts(source, -(-num_requests // len(sources)), vocab, folder, args, rng) for source in sources]
    prompts = [prompt for row in zip(*lists, strict=True) for prompt in row][:num_requests]
    keys = rng.integers(0, 2**64, num_requests, dtype=np.uint64).tolist()
    return [SampleRequest(prompt, key) for prompt, key in zip(prompts, keys, strict=True)]


def _make_prompts(
    source: str, count: int, vocab: int, folder: Path, args: str, rng: np.random.Generator
) -> list[tuple[int, ...]]:
    if source == RANDOM:
        lengths = rng.integers(RANDOM_TOKENS[0], RANDOM_TOKENS[1] + 1, count)
        return [tuple(rng.integers(0, vocab, length).tolist()) for length in lengths]
    if source in environments.ENTRIES:
        spec = Environment(source, args, environments.content_hash(source, args))
        environment = environments.load(spec, [folder])
        found = [environment.prompt(i) for i in rng.integers(0, environment.num_prompts, count).tolist()]
    elif Path(source).is_file():
        known = read_prompts(Path(source))
        found = [known[i] for i in rng.integers(0, len(known), count).tolist()]
    else:
        raise ConfigError(
            f"prompts are {source!r}, expected {RANDOM}, a file of token ids, or an environment: "
            f"{', '.join(sorted(environments.ENTRIES))}"
        )
    highest = max(max(prompt) for prompt in found)
    if highest >= vocab:
        raise ConfigError(f"prompts of {source} have token {highest}, the model's go from 0 to {vocab - 1}")
    return found


def read_prompts(path: Path) -> list[tuple[int, ...]]:
    """Prompts of a file, one JSON list of token ids a line.

    Raises:
        ConfigError: naming the line.
    """
    if path.stat().st_size > FILE_BYTES_MAX:
        raise ConfigError(f"{path} has {path.stat().st_size} bytes, limit {FILE_BYTES_MAX}")
    prompts = []
    for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
        if not line.strip():
            continue
        try:
            tokens = json.loads(line)
        except (ValueError, RecursionError):
            tokens = None
        good = isinstance(tokens, list) and 1 <= len(tokens) <= PROMPT_TOKENS_MAX
        if not good or not all(type(token) is int and token >= 0 for token in tokens):
            raise ConfigError(
                f"{path} line {number} is {line[:60]!r}, expected a JSON list of 1 to {PROMPT_TOKENS_MAX} token ids"
            )
        prompts.append(tuple(tokens))
    if not prompts:
        raise ConfigError(f"{path} has no prompts: expected one JSON list of token ids a line")
    return prompts
