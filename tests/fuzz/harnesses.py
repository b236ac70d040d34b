"""Every parser of bytes that a stranger can send, and of files that a crash or a bad disk can leave behind, by name.

`make fuzz` runs all of them under atheris; the default suite runs a fixed sample of each (tests/fuzz/test_fuzz_sample.py).
"""

from __future__ import annotations

from collections.abc import Collection

from tests.fuzz import (
    targets_chain,
    targets_disk,
    targets_judging,
    targets_messages,
    targets_models,
    targets_operator,
    targets_shardcast,
    targets_work,
)
from tests.fuzz.kit import Harness

HARNESSES: dict[str, Harness] = {
    name: harness
    for module in (
        targets_messages,
        targets_work,
        targets_judging,
        targets_shardcast,
        targets_chain,
        targets_models,
        targets_operator,
        targets_disk,
    )
    for name, harness in module.HARNESSES.items()
}


def split_runs(total: int, only: Collection[str] = ()) -> dict[str, int]:
    """Inputs of each harness in a run of `total`, at least, by their shares; of all harnesses unless `only` names some."""
    chosen = {name: harness.share for name, harness in HARNESSES.items() if not only or name in only}
    parts = sum(chosen.values())
    return {name: -(-total * share // parts) for name, share in chosen.items()}
