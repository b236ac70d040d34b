"""What the node is doing now and, when it does nothing, why: one small file that is always there and always whole.

`status.json` holds the state with its reason, since when it holds, what would end it, and the last rejections. It is
replaced atomically whenever one of them changes. Written by one node, read by `troth node status`, health checks and
people. Neighbours: inference.worker says what is true after each of its steps, troth.roles what is true before there is
a worker.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from protocol.errors import Fault

State = Literal[
    "starting",  # opening keys, sockets, the ledger
    "waiting_task",  # there is no task to serve
    "waiting_registration",  # not registered, not staked, or not joined yet
    "fetching",  # the round's policy is on its way
    "working",  # rollouts are being made
    "committed",  # the round's root is on its way to the ledger, or there
    "idle",  # nothing can be done in this round
    "refused",  # this node signs nothing until somebody acts
    "stopped",  # the process ended by itself, in order
]
STATES: tuple[str, ...] = get_args(State)
STATUS_VERSION = 1
#: Rejections that are remembered.
REJECTIONS_MAX = 20
#: Longest text of a reason and largest status file that is read, in characters and bytes.
REASON_CHARS_MAX = 2_000
FILE_BYTES_MAX = 1 << 20


class Condition(NamedTuple):
    """What is true now.

    Attributes:
        reason: why this state holds, with what was observed and the limit.
        ends: what would end it.
        round_index: the round it is about, -1 for none.
    """

    state: State
    reason: str
    ends: str
    round_index: int = -1


class StatusFile:
    """Writer of one status file. Nothing it does can stop a node: a disk that refuses is told once per change.

    Args:
        path: the file; an older one is read for its rejections.
        changed: called with every new condition, for a terminal line.
        wall: seconds since the epoch; only shown, never decided on.
    """

    def __init__(
        self,
        path: Path,
        *,
        changed: Callable[[Condition], None] = lambda condition: None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._path, self._changed, self._wall = path, changed, wall
        self._since = wall()
        self._facts: dict[str, Any] = {}
        self._rejections: list[dict[str, Any]] = _read_rejections(path)
        self.condition = Condition("starting", "the node is starting", "the ledger answers")
        self.error = ""
        self._write()

    def set(self, condition: Condition, **facts: Any) -> None:
        """Say what is true now. `facts` are further fields of the file, for example block and speed."""
        if not condition.reason or not condition.ends:
            raise AssertionError(f"a condition needs a reason and an end: {condition}")
        if condition == self.condition and facts.items() <= self._facts.items():
            return
        renewed = condition != self.condition
        if (condition.state, condition.round_index) != (self.condition.state, self.condition.round_index):
            self._since = self._wall()
        self.condition = condition
        self._facts.update(facts)
        self._write()
        if renewed:
            self._changed(condition)

    def add_rejection(self, fields: dict[str, Any]) -> None:
        """Remember why work was refused."""
        self._rejections = [*self._rejections, {"time": round(self._wall(), 3), **fields}][-REJECTIONS_MAX:]
        self._write()

    def _write(self) -> None:
        table = {
            "version": STATUS_VERSION,
            "state": self.condition.state,
            "reason": self.condition.reason[:REASON_CHARS_MAX],
            "ends": self.condition.ends[:REASON_CHARS_MAX],
            "round": self.condition.round_index,
            "since": round(self._since, 3),
            **self._facts,
            "rejections": self._rejections,
        }
        temporary = self._path.with_name(self._path.name + ".tmp")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps(table))
            temporary.replace(self._path)  # not synced: after a power cut the status is old, and the node not running
        except OSError as error:
            self.error = f"{self._path}: {error.strerror}"
        else:
            self.error = ""


def read_status(path: Path) -> dict[str, Any]:
    """The fields of a status file.

    Raises:
        Fault: when there is none, or it is not one of ours.
    """
    try:
        if path.stat().st_size > FILE_BYTES_MAX:
            raise Fault(f"{path} has {path.stat().st_size} bytes, limit {FILE_BYTES_MAX}: it is no status file")
        table = json.loads(path.read_text())
    except FileNotFoundError:
        raise Fault(
            f"{path} is not there: no node has run in this directory; start one with `troth node run`"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise Fault(f"{path} cannot be read: {error}") from None
    if not isinstance(table, dict) or table.get("version") != STATUS_VERSION or table.get("state") not in STATES:
        raise Fault(f"{path} is no status file of version {STATUS_VERSION}: remove it, a running node writes it again")
    return table


def _read_rejections(path: Path) -> list[dict[str, Any]]:
    """What an earlier run was told; nothing when the file is absent or damaged."""
    try:
        found = read_status(path).get("rejections")
    except Fault:
        return []
    return [row for row in found if isinstance(row, dict)][-REJECTIONS_MAX:] if isinstance(found, list) else []
