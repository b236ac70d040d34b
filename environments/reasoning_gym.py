"""Any data set of the reasoning-gym package whose scorer can be run on a stranger's answer.

Arguments: `dataset` (a registered name), `seed`, `size` (number of questions), `config` (the set's own options), and those of
environments.text. Entry i of a set is a function of (seed, i) in that package, so every participant sees the same question.
The reward is the set's own `score_answer`, clipped to 0..1, in millionths. When the package itself fails there is no reward
at all (`Fault`): an infrastructure error is never a 0. Sets listed in `REFUSED` are not taken, with the reason.
"""

from __future__ import annotations

import importlib.metadata
import re
import sys
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from environments.arguments import Field, read_arguments
from environments.files import Kind
from environments.text import (
    TEXT_FIELDS,
    TextEnvironment,
    TextOptions,
    list_text_files,
    make_codec,
    read_options,
    read_text_sources,
    to_micro,
)
from protocol.errors import ConfigError, Fault

SIZE_MAX = 10_000_000

#: Longest run of digits in an answer that a scorer sees. Some compute with what they find, and no honest answer is longer.
DIGITS_MAX = 100
#: Deepest nesting of brackets in an answer that a scorer sees. How deep a parser follows depends on the process.
NESTING_MAX = 32

_EVALUATES = "its scorer evaluates the answer as Python code"
_HASHES = "its questions or known answers depend on the process's hash seed"
_RAISES = "its scorer fails on answers that are not of the form it expects"
#: Sets of reasoning-gym 0.1.25 that are not taken, and why; all others were measured (docs/environments.md).
REFUSED = {
    "binary_matrix": _EVALUATES,
    "boxnet": _RAISES,
    "codeio": "it executes code that nobody reviewed, and its answers differ between processes",
    "coin_flip": _RAISES,
    "composite": "it is made of other sets, which would not be looked at; name one of them",
    "countdown": _EVALUATES,
    "game_of_life": _RAISES,
    "intermediate_integration": _EVALUATES,
    "isomorphic_strings": _HASHES,
    "knight_swap": _HASHES,
    "list_functions": "its questions are drawn from an unseeded generator",
    "n_queens": _EVALUATES,
    "polynomial_multiplication": _EVALUATES,
    "pool_matrix": "it reseeds numpy's global generator, which other threads draw from",
    "prime_factorization": _RAISES,
    "puzzle24": _EVALUATES,
    "ransom_note": _HASHES,
    "simple_integration": _EVALUATES,
    "spiral_matrix": _EVALUATES,
    "string_insertion": _EVALUATES,
    "word_ladder": _HASHES,
}
#: Options that would let a task read a file of the participant's.
REFUSED_OPTIONS = ("data_file",)

_LONG_NUMBER = re.compile(rf"\d{{{DIGITS_MAX + 1}}}")

_FIELDS = {
    "dataset": Field(str),
    "seed": Field(int, 0, low=0, high=2**32 - 1),
    "size": Field(int, 10_000, low=1, high=SIZE_MAX),
    "config": Field(dict, {}),
    **TEXT_FIELDS,
}


class ReasoningGym:
    """The questions of one set; see `environments.text.Questions`.

    Args:
        dataset: name in reasoning_gym's registry.
        seed / size: as the package defines them.
        config: the set's own options.

    Raises:
        ConfigError: for a set that the package does not have or that is refused, or options that it refuses.
    """

    def __init__(self, dataset: str, *, seed: int, size: int, config: Mapping[str, Any]) -> None:
        self.dataset = _create(dataset, seed, size, config)
        self._name, self._size = dataset, size
        self._entry = lru_cache(maxsize=1024)(self._read_entry)

    @property
    def num_questions(self) -> int:
        return self._size

    def _read_entry(self, index: int) -> dict[str, Any]:
        try:
            entry: dict[str, Any] = self.dataset[index]
        except Exception as error:  # another package's code: whatever it raises, nobody is to blame
            raise Fault(f"reasoning_gym {self._name} gives no entry {index}: {error!r}") from error
        return entry

    def question(self, index: int) -> str:
        """The set's own text."""
        return str(self._entry(index)["question"])

    def known_answer(self, index: int) -> str | None:
        """The set's own answer, where it gives one."""
        answer = self._entry(index).get("answer")
        return None if answer is None else str(answer)

    def grade(self, index: int, answer: str) -> int:
        """`score_answer`. Raises `Fault` when it fails or gives no finite number.

        An answer with a longer run of digits than `DIGITS_MAX`, or nested deeper than `NESTING_MAX`, counts as an empty one.
        """
        entry = self._entry(index)
        answer = "" if _LONG_NUMBER.search(answer) or _count_nesting(answer) > NESTING_MAX else answer
        try:
            score = float(self.dataset.score_answer(answer, entry))
        except Exception as error:  # as above
            raise Fault(f"reasoning_gym {self._name} cannot score entry {index}: {error!r}") from error
        return to_micro(f"reasoning_gym {self._name} entry {index}", score)


def _count_nesting(text: str) -> int:
    """Most brackets of any kind that are open at once, closed ones of any kind counting as theirs."""
    depth = deepest = 0
    for character in text:
        if character in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif character in ")]}":
            depth = max(depth - 1, 0)
    return deepest


def _create(dataset: str, seed: int, size: int, config: Mapping[str, Any]) -> Any:
    if dataset in REFUSED:
        raise ConfigError(f"reasoning_gym {dataset} is not taken: {REFUSED[dataset]}; choose another set")
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
    for name in ("seed", "size"):
        if name in config:
            raise ConfigError(f"reasoning_gym: {name} belongs beside config, not in it")
    for name in REFUSED_OPTIONS:
        if name in config:
            raise ConfigError(f"reasoning_gym: option {name} names a file: a task cannot read this machine's files")
    try:
        return reasoning_gym.create_dataset(dataset, seed=seed, size=size, **config)
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(f"reasoning_gym {dataset} refuses its options {config}: {error}") from None


def _read(args: Mapping[str, Any]) -> tuple[ReasoningGym, TextOptions]:
    table = read_arguments("reasoning_gym", args, _FIELDS)
    questions = ReasoningGym(table["dataset"], seed=table["seed"], size=table["size"], config=table["config"])
    return questions, read_options("reasoning_gym", table)


def make(args: Mapping[str, Any], files: Mapping[str, bytes]) -> TextEnvironment:
    """Environment of task arguments; see the module's head. Raises `ConfigError`."""
    questions, options = _read(args)
    return TextEnvironment(questions, make_codec(options, files), options)


def list_files(args: Mapping[str, Any]) -> dict[str, Kind]:
    """The tokenizer, if one is named. Raises `ConfigError`."""
    return list_text_files(read_options("reasoning_gym", read_arguments("reasoning_gym", args, _FIELDS)))


def read_sources(args: Mapping[str, Any]) -> list[tuple[str, bytes]]:
    """What decides prompts and rewards: this file, the set's own module, the text modules, and versions of packages."""
    questions, options = _read(args)
    module = Path(str(sys.modules[type(questions.dataset).__module__].__file__))
    return [
        ("reasoning_gym.py", Path(__file__).read_bytes()),
        (type(questions.dataset).__module__, module.read_bytes()),
        *((name, importlib.metadata.version(name).encode()) for name in ("reasoning-gym", "sympy")),
        *read_text_sources(options),
    ]
