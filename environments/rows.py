"""Rows of a data file in JSON lines: one object a line, each of one type, bounded before it is parsed."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import TypeVar

import msgspec

from protocol.errors import ConfigError

T = TypeVar("T", bound=msgspec.Struct)


def decode_rows(
    what: str, data: bytes, row_type: type[T], validate: Callable[[T], None], *, line_bytes_max: int, rows_max: int
) -> list[T]:
    """All rows of a file. Blank lines are none, and there may be as many of them as of rows.

    Args:
        what: the data's name in errors.
        validate: raises `ConfigError` for a row that is not as it should be.

    Raises:
        ConfigError: with the number of the line.
    """
    decoder = msgspec.json.Decoder(row_type)
    rows: list[T] = []
    for number, line in enumerate(io.BytesIO(data), start=1):
        if number > 2 * rows_max:
            raise ConfigError(
                f"{what} has more than {2 * rows_max} lines, limit {rows_max} rows and as many blank lines"
            )
        text = line.strip()
        if not text:
            continue
        if len(text) > line_bytes_max or len(rows) >= rows_max:
            raise ConfigError(
                f"{what} line {number} has {len(text)} bytes after {len(rows)} rows, limits {line_bytes_max} and {rows_max}"
            )
        try:
            row = decoder.decode(text)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            fields = ", ".join(row_type.__struct_fields__)
            raise ConfigError(f"{what} line {number} is not a row: {error}; expected {fields}") from None
        try:
            validate(row)
        except ConfigError as error:
            raise ConfigError(f"{what} line {number}: {error}") from None
        rows.append(row)
    if not rows:
        raise ConfigError(f"{what} has no rows, expected at least one")
    return rows
