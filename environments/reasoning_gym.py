"""Any data set of the reasoning-gym package, read and answered in bytes.

Arguments: `dataset` (a registered name), `seed`, `size` (number of prompts), `config` (the set's own options) and
`prompt_bytes_max`. Entry i of a set is a function of (seed, i) in that package, so every participant sees the same prompt.
Tokens are the 256 byte values and one end token; a prompt longer than `prompt_bytes_max` bytes keeps its end. The reward is
the set's own `score_answer`, clipped to 0..1, in millionths. When the package itself fails there is no reward at all
(`Fault`): an infrastructure error is never a 0.
"""

from __future__ import annotations

import importlib.metadata
import math
import sys
from collections.abc import Sequence
from functools import lru_cache
from itertools import takewhile
from pathlib import Path
from typing import Any

from protocol.errors import ConfigError, Fault

EOS = 256
VOCAB_SIZE = 257
SIZE_MAX = 10_000_000
PROMPT_BYTES_MAX = 65_536

_DEFAULTS: dict[str, Any] = {"config": {}, "prompt_bytes_max": 4096, "seed": 0, "size": 10_000}


class ReasoningGymEnvironment:
    """One data set.

    Args:
        dataset: name in reasoning_gym's registry.
        seed / size: as the package defines them.
        config: the set's own options.
        prompt_bytes_max: longest prompt, in tokens (one a byte).

    Raises:
        ConfigError: for a set that the package does not have, or options that it refuses.
    """

    def __init__(self, dataset: str, *, seed: int, size: int, config: dict[str, Any], prompt_bytes_max: int) -> None:
        self._dataset = _create(dataset, seed, size, config)
        self._name = dataset
        self._size = size
        self._prompt_bytes_max = prompt_bytes_max
        self._entry = lru_cache(maxsize=1024)(self._read_entry)

    @property
    def num_prompts(self) -> int:
        return self._size

    @property
    def vocab_size(self) -> int:
        return VOCAB_SIZE

    def _read_entry(self, index: int) -> dict[str, Any]:
        if not 0 <= index < self._size:
            raise IndexError(f"prompt index is {index}, expected 0 to {self._size - 1}")
        try:
            entry: dict[str, Any] = self._dataset[index]
        except Exception as error:  # a stranger's code: whatever it raises, nobody is to blame
            raise Fault(f"reasoning_gym {self._name} gives no entry {index}: {error!r}") from error
        return entry

    def prompt(self, index: int) -> tuple[int, ...]:
        """UTF-8 bytes of the question, its last `prompt_bytes_max`."""
        question = str(self._entry(index)["question"]).encode()
        return tuple(question[-self._prompt_bytes_max :])

    def respond(self, index: int, completion: Sequence[int]) -> tuple[int, ...]:
        """Nothing: a stop token ends the completion."""
        return ()

    def reward(self, index: int, completion: Sequence[int]) -> int:
        """`score_answer` of the completion's text up to the end token, in millionths.

        Raises:
            Fault: when scoring fails or gives no finite number.
        """
        entry = self._entry(index)
        body = takewhile(lambda token: 0 <= token < EOS, completion)
        answer = bytes(body).decode(errors="replace")
        try:
            score = float(self._dataset.score_answer(answer, entry))
        except Exception as error:  # as above
            raise Fault(f"reasoning_gym {self._name} cannot score entry {index}: {error!r}") from error
        if not math.isfinite(score):
            raise Fault(f"reasoning_gym {self._name} scored entry {index} {score}, expected a number from 0 to 1")
        return round(min(max(score, 0.0), 1.0) * 1_000_000)


def _create(dataset: str, seed: int, size: int, config: dict[str, Any]) -> Any:
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ConfigError(f"environment reasoning_gym needs the reasoning-gym package: {error}") from None
    if dataset not in DATASETS:
        import difflib

        near = difflib.get_close_matches(dataset, DATASETS, n=1)
        hint = f"did you mean {near[0]}?" if near else "see reasoning_gym.factory.DATASETS"
        raise ConfigError(f"reasoning_gym has no data set {dataset!r}: {hint}")
    try:
        return reasoning_gym.create_dataset(dataset, seed=seed, size=size, **config)
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(f"reasoning_gym {dataset} refuses its options {config}: {error}") from None


def _validate(args: dict[str, Any]) -> dict[str, Any]:
    unknown = sorted(set(args) - {"dataset", *_DEFAULTS})
    if unknown:
        raise ConfigError(f"reasoning_gym: unknown argument {unknown[0]!r}, expected dataset, {', '.join(_DEFAULTS)}")
    merged = {**_DEFAULTS, **args}
    for name, kind in (("dataset", str), ("config", dict), ("seed", int), ("size", int), ("prompt_bytes_max", int)):
        if type(merged.get(name)) is not kind:
            raise ConfigError(f"reasoning_gym: {name} is {merged.get(name)!r}, expected {kind.__name__}")
    for name, high in (("size", SIZE_MAX), ("prompt_bytes_max", PROMPT_BYTES_MAX)):
        if not 1 <= merged[name] <= high:
            raise ConfigError(f"reasoning_gym: {name} is {merged[name]}, expected 1 to {high}")
    for name in ("seed", "size"):
        if name in merged["config"]:
            raise ConfigError(f"reasoning_gym: {name} belongs beside config, not in it")
    return merged


def make(args: dict[str, Any]) -> ReasoningGymEnvironment:
    """Environment of task arguments; see the module's head. Raises `ConfigError`."""
    return ReasoningGymEnvironment(**_validate(args))


def read_sources(args: dict[str, Any]) -> list[tuple[str, bytes]]:
    """What decides prompts and rewards: this file, the set's own module, and the package's version."""
    table = _validate(args)
    made = _create(table["dataset"], table["seed"], table["size"], table["config"])
    module = Path(str(sys.modules[type(made).__module__].__file__))
    version = importlib.metadata.version("reasoning-gym")
    return [
        ("reasoning_gym.py", Path(__file__).read_bytes()),
        (type(made).__module__, module.read_bytes()),
        ("version", version.encode()),
    ]
