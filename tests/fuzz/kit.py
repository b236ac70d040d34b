"""What a fuzz harness is.

A harness takes any bytes, hands them to the real parser, and returns in one word what became of them: `accepted`, or the
refusal. Only the refusals that the parser documents are caught; anything else that is raised is a crash. Where a parser has
one canonical form, a harness also makes the accepted bytes again and compares.
Neighbours: tests.fuzz.harnesses lists them all, tests.fuzz.mutate changes seeds, tests.fuzz.run is the coverage-guided run.
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from protocol.errors import Reject

ACCEPTED = "accepted"


class Target(NamedTuple):
    """A parser made ready.

    Attributes:
        fuzz: bytes in, outcome in one word out; raises for a crash.
        seeds: valid inputs, made by the project's own writers.
    """

    fuzz: Callable[[bytes], str]
    seeds: list[bytes]


class Harness(NamedTuple):
    """One entry of the registry.

    Attributes:
        make: from an empty folder for its files, the target.
        shape: how its inputs are built (tests.fuzz.mutate).
        share: of all inputs of a long run, in parts.
        bytes_max: longest input.
        rss_mb: memory the whole process may have in a long run, the interpreter and its imports included.
        examples: inputs in the default suite.
    """

    make: Callable[[Path], Target]
    shape: str
    share: int = 40
    bytes_max: int = 4096
    rss_mb: int = 512
    examples: int = 30


def attempt(kinds: type[Exception] | tuple[type[Exception], ...], work: Callable[[], Any]) -> str:
    """Run a parser; the outcome in one word. Exceptions that are not of `kinds` pass through."""
    try:
        work()
    except kinds as error:
        return error.reason.name if isinstance(error, Reject) else type(error).__name__
    return ACCEPTED


@contextmanager
def bounded_memory(extra_bytes: int) -> Iterator[None]:
    """At most so much address space more than now, within the block; more is a `MemoryError` or the end of the process."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    old = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + extra_bytes, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, old)
