"""Installed environments: prompts and rewards by name, allow-listed, pinned by hash.

A task names an entry of this registry, its arguments and a content hash; it never brings code. `content_hash` covers the
entry, its arguments and the source files that decide prompts and rewards, so a node, a verifier and a trainer that
would compute different rewards refuse the task instead of disagreeing about it. Modules are imported on first use.
Neighbours: protocol.ports.Environment is what an entry gives, protocol.task.Environment is how a task names it.
"""

from __future__ import annotations

import importlib
import json
from types import ModuleType
from typing import Any

from protocol.codec import tagged_hash
from protocol.errors import ConfigError
from protocol.ports import Environment
from protocol.task import Environment as EnvironmentSpec

#: Entry name -> module with `make(args) -> Environment` and `read_sources(args) -> list[(name, bytes)]`.
ENTRIES = {
    "sort": "environments.sort",
    "reasoning_gym": "environments.reasoning_gym",
}

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


def content_hash(entry: str, args: str) -> bytes:
    """Hash of an installed environment with these arguments.

    Args:
        entry: name in `ENTRIES`.
        args: canonical JSON object.

    Raises:
        ConfigError: for an unknown entry or arguments that it does not take.
    """
    parts = [entry.encode(), args.encode()]
    for name, data in _get_module(entry).read_sources(_parse_args(entry, args)):
        parts += [name.encode(), data]
    return tagged_hash("environment", *parts)


def load(spec: EnvironmentSpec) -> Environment:
    """Make the environment a task names.

    Raises:
        ConfigError: when it is not installed, does not take these arguments, or is not the one the task was published
            with (the message names both hashes).
    """
    try:
        installed = content_hash(spec.entry, spec.args)
    except ConfigError:
        raise
    except Exception as error:  # arguments are a stranger's, and an environment's own code reads them
        raise ConfigError(f"environment {spec.entry} takes no arguments like {spec.args[:80]!r}: {error}") from None
    if installed != spec.content_hash:
        raise ConfigError(
            f"environment {spec.entry} {spec.args} is not the one of this task: observed {installed.hex()}, "
            f"limit {spec.content_hash.hex()}; install the version of troth the task was published with"
        )
    try:
        environment: Environment = _get_module(spec.entry).make(_parse_args(spec.entry, spec.args))
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"environment {spec.entry} takes no arguments like {spec.args[:80]!r}: {error}") from None
    return environment
