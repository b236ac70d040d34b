"""Entry `math`: a data set whose reward is math-verify's comparison with the gold answer (environments.math_answer).

Arguments are those of environments.dataset without `reward`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from environments import dataset
from environments.files import Kind
from environments.text import TextEnvironment
from protocol.errors import ConfigError


def _as_dataset(args: Mapping[str, Any]) -> dict[str, Any]:
    if "reward" in args:
        raise ConfigError("math: unknown argument 'reward': entry math has one reward, use entry dataset for another")
    return {**args, "reward": dataset.MATH}


def make(args: Mapping[str, Any], files: Mapping[str, bytes]) -> TextEnvironment:
    """Environment of task arguments. Raises `ConfigError`."""
    return dataset.make(_as_dataset(args), files)


def list_files(args: Mapping[str, Any]) -> dict[str, Kind]:
    """The data, and the tokenizer if one is named. Raises `ConfigError`."""
    return dataset.list_files(_as_dataset(args))


def read_sources(args: Mapping[str, Any]) -> list[tuple[str, bytes]]:
    """What decides prompts and rewards: this file, and what a data set names. Raises `ConfigError`."""
    return [("math_set.py", Path(__file__).read_bytes()), *dataset.read_sources(_as_dataset(args))]
