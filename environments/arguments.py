"""Arguments of an environment: which it takes, of which type, within which range. Nothing else is let through.

Arguments come from a task, so from a stranger. An unknown one is refused with the nearest known one, because an argument
that is silently ignored would make two participants disagree about what a task asks for.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, NamedTuple

from protocol.errors import ConfigError

#: Marks an argument that must be given.
REQUIRED: Any = object()


class Field(NamedTuple):
    """One argument.

    Attributes:
        kind: its exact type; `bool` is no `int` here.
        default: what stands for a missing one, `REQUIRED` if it must be given.
        low / high: range of a number, or of a text's or list's length.
        choices: the values it may have, empty for any.
    """

    kind: type[Any]
    default: Any = REQUIRED
    low: int | None = None
    high: int | None = None
    choices: tuple[str, ...] = ()


def read_arguments(entry: str, args: Mapping[str, Any], fields: Mapping[str, Field]) -> dict[str, Any]:
    """Arguments with defaults filled in.

    Raises:
        ConfigError: naming the entry, the argument, what it was and what is expected.
    """
    for name in args:
        if name not in fields:
            near = difflib.get_close_matches(name, fields, n=1)
            hint = f"did you mean {near[0]}?" if near else f"expected {', '.join(fields)}"
            raise ConfigError(f"{entry}: unknown argument {name!r}: {hint}")
    return {name: _read(f"{entry}: {name}", args.get(name, field.default), field) for name, field in fields.items()}


def _read(where: str, value: Any, field: Field) -> Any:
    if value is REQUIRED:
        raise ConfigError(f"{where} is missing, expected {field.kind.__name__}")
    if value is field.default:
        return value
    if type(value) is not field.kind:
        raise ConfigError(f"{where} is {str(value)[:80]!r}, expected {field.kind.__name__}")
    if field.choices and value not in field.choices:
        near = difflib.get_close_matches(value, field.choices, n=1)
        hint = f"did you mean {near[0]}?" if near else f"expected one of {', '.join(field.choices)}"
        raise ConfigError(f"{where} is {value[:80]!r}: {hint}")
    size: int = value if field.kind is int else len(value) if field.kind in (str, list, dict) else 0
    low, high = field.low, field.high
    if (low is not None and size < low) or (high is not None and size > high):
        what = "" if field.kind is int else "a length of "
        bounds = f"at least {low}" if high is None else f"{low if low is not None else 'at most'} to {high}"
        raise ConfigError(f"{where} is {str(value)[:80]!r}, expected {what}{bounds}")
    return value
