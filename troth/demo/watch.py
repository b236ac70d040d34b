"""Progress of a demo: a table on a terminal, plain lines elsewhere. Shows what the ledger says, nothing else."""

from __future__ import annotations

import sys
import time
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from protocol.ledger.state import LedgerState, Task
from protocol.messages import Lineage
from troth.views import describe_nodes, describe_task, hex_account

LINE_SECONDS = 10.0


class Screen:
    """Progress on stderr.

    Args:
        names: account -> name of the participant.
    """

    def __init__(self, names: dict[bytes, str]) -> None:
        self._names = {hex_account(account): name for account, name in names.items()}
        self._console = Console(stderr=True)
        self._live = Live(console=self._console, auto_refresh=False) if self._console.is_terminal else None
        self._started = time.monotonic()
        self._line_due = 0.0
        self._draw_due = 0.0

    def __enter__(self) -> Screen:
        if self._live is not None:
            self._live.__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        if self._live is not None:
            self._live.__exit__(*exc)

    def say(self, text: str) -> None:
        """One line about what is going on."""
        line = f"[{time.monotonic() - self._started:5.0f} s] {text}"
        if self._live is not None:
            self._live.console.print(line, highlight=False)
        else:
            print(line, file=sys.stderr, flush=True)

    def show(self, state: LedgerState, task: Task, lineage: Lineage | None) -> None:
        """Show the task's state, at most once a second on a terminal, every ten seconds elsewhere."""
        now = time.monotonic()
        if self._live is not None:
            if now >= self._draw_due:
                self._draw_due = now + 1.0
                self._live.update(self._table(state, task, lineage), refresh=True)
        elif now >= self._line_due:
            self._line_due = now + LINE_SECONDS
            self.say(self._line(state, task, lineage))

    def _line(self, state: LedgerState, task: Task, lineage: Lineage | None) -> str:
        shown = describe_task(state, task)
        rollouts = shown["rollouts"]
        reward = "-" if lineage is None else f"{lineage.reward_micro / 1e6:.2f}"
        rejected = ", ".join(f"{k} {v}" for k, v in rollouts["rejected"].items()) or "none"
        unclaimed = sum(row["unclaimed"] for row in describe_nodes(state, task))
        return (
            f"{shown['phase']} round {shown['round']}/{shown['end_round']}, policy {shown['policy_version']}, "
            f"mean reward {reward}, accepted {rollouts['accepted']}, rejected: {rejected}, unclaimed {unclaimed}"
        )

    def _table(self, state: LedgerState, task: Task, lineage: Lineage | None) -> Table:
        grid = Table(title=self._line(state, task, lineage), title_justify="left", expand=False)
        columns = ("node", "stake", "slashed", "groups good", "audited/total", "p", "standing", "unclaimed")
        for column in columns:
            grid.add_column(column, justify="left" if column in ("node", "standing") else "right")
        for row in describe_nodes(state, task):
            standing = f"caught: {row['caught_by']}" if row["caught_by"] else ""
            grid.add_row(
                self._names.get(row["account"], row["account"][:12]),
                str(row["stake"]),
                str(row["slashed"]),
                str(row["groups_good"]),
                f"{row['leaves_audited']}/{row['leaves_total']}",
                f"{row['audit_probability']:.2f}",
                standing,
                str(row["unclaimed"]),
            )
        return grid
