"""Installed environments: prompts and rewards by name, allow-listed, pinned by hash.

A task names an entry of this registry, its arguments and a content hash; it never brings code. `content_hash` covers the
entry, its arguments and the source files that decide prompts and rewards, so a node, a verifier and a trainer that
would compute different rewards refuse the task instead of disagreeing about it. Modules are imported on first use.
Files that an environment needs (a tokenizer, a data set) stand in its arguments by hash, so the content hash covers them
and nobody needs them to compute it. Neighbours: protocol.ports.Environment is what an entry gives, protocol.task.Environment
is how a task names it, environments.files finds files, environments.text is what environments of questions in text share.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from environments.files import Kind, find_files
from protocol.codec import tagged_hash
from protocol.errors import ConfigError, Fault
from protocol.ports import Environment
from protocol.task import Environment as EnvironmentSpec

#: Entry name -> module with `make(args, files) -> Environment`, `read_sources(args) -> list[(name, bytes)]` and, if it needs
#: files, `list_files(args) -> dict[sha256 hex, Kind]`. `make` gets the contents of exactly those files, by hash.
ENTRIES = {
    "calculator": "environments.calculator",
    "code": "environments.code",
    "guess": "environments.guess",
    "dataset": "environments.dataset",
    "math": "environments.math_set",
    "sort": "environments.sort",
    "reasoning_gym": "environments.reasoning_gym",
    "verifiers": "environments.verifiers_adapter",
}

#: Entries whose arguments can ask for any amount of work; see `is_open_ended`.
_OPEN_ENDED = {"reasoning_gym"}

#: Longest arguments, in characters (the same limit as in a task).
ARGS_CHARS_MAX = 1024


def _get_module(entry: str) -> ModuleType:
    if entry not in ENTRIES:
        raise ConfigError(
            f"environment entry is {entry!r}, expected one of {', '.join(sorted(ENTRIES))}: "
            "environments are installed, a task cannot bring one"
        )
    return importlib.import_module(ENTRIES[entry])


def _parse_args(entry: str, args: str) -> dict[str, Any]:
    if len(args) > ARGS_CHARS_MAX:
        raise ConfigError(f"arguments of environment {entry} have {len(args)} characters, limit {ARGS_CHARS_MAX}")
    try:
        table = json.loads(args)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"arguments of environment {entry} are not JSON: {error}") from None
    if not isinstance(table, dict) or json.dumps(table, sort_keys=True, separators=(",", ":")) != args:
        raise ConfigError(
            f"arguments of environment {entry} are {args[:80]!r}, expected a canonical JSON object: "
            "sorted keys, no spaces"
        )
    return table


T = TypeVar("T")


def _ask(entry: str, args: str, ask: Callable[[], T]) -> T:
    """Run an environment's own code on arguments, which are a stranger's: whatever it chokes on, they are to blame."""
    try:
        return ask()
    except (ConfigError, Fault):
        raise
    except Exception as error:
        raise ConfigError(f"environment {entry} takes no arguments like {args[:80]!r}: {error}") from None


def content_hash(entry: str, args: str) -> bytes:
    """Hash of an installed environment with these arguments. Needs none of its files.

    Args:
        entry: name in `ENTRIES`.
        args: canonical JSON object.

    Raises:
        ConfigError: for an unknown entry or arguments that it does not take.
    """
    parts = [entry.encode(), args.encode()]
    module, table = _get_module(entry), _parse_args(entry, args)
    for name, data in _ask(entry, args, lambda: module.read_sources(table)):
        parts += [name.encode(), data]
    return tagged_hash("environment", *parts)


def _list_files(spec: EnvironmentSpec) -> dict[str, Kind]:
    module, table = _get_module(spec.entry), _parse_args(spec.entry, spec.args)
    if not hasattr(module, "list_files"):
        return {}
    files: dict[str, Kind] = _ask(spec.entry, spec.args, lambda: module.list_files(table))
    return files


def needs_files(spec: EnvironmentSpec) -> list[str]:
    """SHA-256, in hex, of the files an environment cannot be made without. Raises `ConfigError` like `content_hash`."""
    return sorted(_list_files(spec))


def is_open_ended(spec: EnvironmentSpec) -> bool:
    """Whether arguments can ask for any amount of work: such an environment is tried in a process of its own before a
    participant serves a stranger's task."""
    return spec.entry in _OPEN_ENDED


def require_files(spec: EnvironmentSpec, folders: Iterable[Path]) -> None:
    """Check that an environment's files are there. Raises like `load`, whose other work is left out."""
    find_files(_list_files(spec), folders)


def load(spec: EnvironmentSpec, folders: Iterable[Path] = ()) -> Environment:
    """Make the environment a task names.

    Args:
        folders: where its files are looked for: the base policy's folder, and the participant's own.

    Raises:
        ConfigError: when it is not installed, does not take these arguments, is not the one the task was published
            with (the message names both hashes), or a file of it is missing or not what it should be.
        Fault: when a file cannot be read.
    """
    installed = content_hash(spec.entry, spec.args)
    if installed != spec.content_hash:
        raise ConfigError(
            f"environment {spec.entry} {spec.args} is not the one of this task: observed {installed.hex()}, "
            f"limit {spec.content_hash.hex()}; install the version of troth the task was published with"
        )
    files = find_files(_list_files(spec), folders)
    module, table = _get_module(spec.entry), _parse_args(spec.entry, spec.args)
    environment: Environment = _ask(spec.entry, spec.args, lambda: module.make(table, files))
    return environment
