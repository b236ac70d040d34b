"""Profile files: the fields of a `ProofProfile` in TOML, with a record of what they rest on. Loads nothing heavy.

A file is written whole by `format_profile` and read back by `read_profile`; profiles that are shipped with the software are in
`configs/profiles`, by name. The record (`[measured]`) is for people and tables: a task hashes the profile's own fields.
Neighbours: troth.task_file names profiles in tasks, troth.calibrate.tables prints the records.
"""

from __future__ import annotations

import difflib
import json
import math
from pathlib import Path
from typing import Any, NamedTuple

from protocol.errors import ConfigError
from protocol.task import ProofProfile
from troth.settings import read_toml

SUFFIX = ".toml"
MEASURED = "measured"
#: Beside the packages, in a checkout and where a wheel is installed alike.
SHIPPED = Path(__file__).parents[2] / "configs" / "profiles"


class ProfileFile(NamedTuple):
    """A profile and the record of its measurement, empty where a file has none."""

    profile: ProofProfile
    measured: dict[str, Any]


def find_shipped() -> dict[str, Path]:
    """Files of the profiles that come with the software, by name."""
    return {path.stem: path for path in sorted(SHIPPED.glob(f"*{SUFFIX}"))}


def load_profile(name: str, folder: Path) -> ProofProfile:
    """A profile by the name of a shipped one, or by the path of a file.

    Args:
        folder: what a relative path is relative to.

    Raises:
        ConfigError: when there is none; the message lists those that exist.
    """
    shipped = find_shipped()
    if name in shipped:
        return read_profile(shipped[name]).profile
    path = folder / name
    if name.endswith(SUFFIX):
        return read_profile(path).profile
    near = difflib.get_close_matches(name, shipped, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    raise ConfigError(
        f"unknown profile {name!r}: {hint}shipped are {', '.join(shipped)}; a file of your own ends in {SUFFIX}"
    )


def read_profile(path: Path) -> ProfileFile:
    """Read a profile file.

    Raises:
        ConfigError: naming the field, what was seen and what is expected.
    """
    table = read_toml(path)
    measured = table.pop(MEASURED, {})
    fields = ProofProfile.__struct_fields__
    missing = [field for field in fields if field not in table]
    unknown = [key for key in table if key not in fields]
    if missing or unknown:
        what = f"lacks {', '.join(missing)}" if missing else f"has unknown keys {', '.join(unknown)}"
        raise ConfigError(f"{path} {what}: a profile file has {', '.join(fields)}, and a table [{MEASURED}]")
    for field in fields:
        kind = str if field in ("name", "dtype") else int
        if type(table[field]) is not kind:
            raise ConfigError(f"{path}: {field} is {table[field]!r}, expected {kind.__name__}")
    if not isinstance(measured, dict):
        raise ConfigError(f"{path}: {MEASURED} is {measured!r}, expected a table")
    return ProfileFile(ProofProfile(**table), measured)


def format_profile(profile: ProofProfile, measured: dict[str, Any]) -> str:
    """The text of a profile file; `read_profile` gives both back."""
    lines = ["# Written by `troth calibrate`; docs/calibration.md says how to read it.\n"]
    lines += [f"{field} = {_format(getattr(profile, field))}\n" for field in profile.__struct_fields__]
    return "".join([*lines, *_format_table(MEASURED, measured)])


def _format_table(name: str, table: dict[str, Any]) -> list[str]:
    """A table: plain values, then its tables, then its lists of tables."""
    lines = [f"\n[{name}]\n"]
    nested = {key: value for key, value in table.items() if isinstance(value, dict) or _is_tables(value)}
    lines += [f"{key} = {_format(value)}\n" for key, value in table.items() if key not in nested]
    for key, value in nested.items():
        if isinstance(value, dict):
            lines += _format_table(f"{name}.{key}", value)
    for key, value in nested.items():
        if not isinstance(value, dict):
            for row in value:
                lines.append(f"\n[[{name}.{key}]]\n")
                lines += [f"{inner} = {_format(entry)}\n" for inner, entry in row.items()]
    return lines


def _is_tables(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict)


def _format(value: Any) -> str:
    """A plain value in TOML, whose strings, numbers and lists of them are written as in JSON."""
    if isinstance(value, float) and not math.isfinite(value):
        return "inf" if value > 0 else "-inf" if value < 0 else "nan"
    if isinstance(value, list | tuple):
        return f"[{', '.join(_format(entry) for entry in value)}]"
    return json.dumps(value)
