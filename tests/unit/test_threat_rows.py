"""docs/threat-model.md and the tests agree: every row of the table has a test with its id in its name, and no id is unknown."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
#: A function's name begins with the id: test_r9_one_token_edited.
_NAMED = re.compile(r"test_([a-z]\d{1,2})_", re.IGNORECASE)
_RANGE = re.compile(r"([A-Z])(\d+) - ([A-Z])(\d+)")
_ID = re.compile(r"[A-Z]\d+")
#: Names that look like an id and are none.
_NO_ROWS = {"V0", "V1"}
#: Rows that the attacks' catalogue asks an adversary for.
WANTED = (
    {f"R{n}" for n in range(1, 17)}
    | {f"C{n}" for n in range(1, 7)}
    | {f"V{n}" for n in range(2, 10)}
    | {f"S{n}" for n in range(1, 5)}
)


def expand(cell: str) -> set[str]:
    """Ids of a table's first cell: `L2, L3` and `W1 - W4` are several."""
    found = set(_ID.findall(cell))
    for letter, first, other, last in _RANGE.findall(cell):
        assert letter == other
        found |= {f"{letter}{number}" for number in range(int(first), int(last) + 1)}
    return found


@cache
def read_rows() -> frozenset[str]:
    """Ids that docs/threat-model.md lists as stopped."""
    text = (ROOT / "docs" / "threat-model.md").read_text()
    table = text.partition("## Attacks and tests")[2].partition("## Not stopped yet")[0]
    cells = [line.split("|")[1].strip() for line in table.splitlines() if line.startswith("|")]
    return frozenset().union(*(expand(cell) for cell in cells))


@cache
def find_tests() -> dict[str, list[str]]:
    """Test functions by the id in their name."""
    found: dict[str, list[str]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            named = _NAMED.match(node.name) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else None
            if named:
                found.setdefault(named[1].upper(), []).append(f"{path.name}::{node.name}")
    return found


def test_the_table_has_every_row_that_is_wanted():
    assert WANTED - read_rows() == set()


@pytest.mark.parametrize("row", sorted(read_rows()))
def test_every_row_has_a_test(row):
    assert find_tests().get(row), (
        f"docs/threat-model.md lists {row} as stopped, but no test is called test_{row.lower()}_..."
    )


def test_every_id_in_a_test_is_a_row():
    assert set(find_tests()) - read_rows() - _NO_ROWS == set()


def test_ranges_and_lists_are_read():
    assert expand("W1 - W4, W6") == {"W1", "W2", "W3", "W4", "W6"}
