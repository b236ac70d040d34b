"""What all commands share: the typer application, options, output, settings overrides.

stdout is data, stderr is for people; exit 0 done, 1 failed, 2 usage, 3 rejected.

Every option of a role is a setting: `--config file.toml` (repeatable, merged left to right), then `--key value`.
Heavy imports happen inside the commands, so that `troth --help` is quick and roles without a model never load torch.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable
from pathlib import Path
from typing import Annotated, Any

import typer

HELP = """Trustless reinforcement learning: publish tasks, make rollouts, verify, train, claim.

stdout is data, stderr is for people; exit 0 done, 1 failed, 2 usage, 3 rejected. Every option of a role is a setting:
`--config file.toml` (repeatable, merged left to right), then `--key value`."""

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False, help=HELP)


def _group(name: str, text: str) -> typer.Typer:
    group = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, help=text)
    app.add_typer(group, name=name)
    return group


keys_app = _group("keys", "Make and show keys.")
task_app = _group("task", "Publish, list and cancel tasks.")
node_app = _group("node", "Make rollouts.")
verifier_app = _group("verifier", "Check rollouts, vote on settlements.")
trainer_app = _group("trainer", "Turn accepted rollouts into policies.")
relay_app = _group("relay", "Store and serve bundles, policies and reports.")
policy_app = _group("policy", "Make and describe base policies.")

Config = Annotated[list[Path] | None, typer.Option("--config", "-c", help="Settings file (TOML); repeatable.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Send without asking.")]


def emit(value: Any) -> None:
    """Print one JSON value on stdout."""
    print(json.dumps(value, indent=1))


def table(rows: list[dict[str, Any]], columns: list[str]) -> None:
    """Print rows as an aligned table on stdout."""
    cells = [columns, *([str(row.get(column, "")) for column in columns] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    for row in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def run(work: Awaitable[Any]) -> Any:
    """Run a coroutine to its end."""

    async def main() -> Any:
        return await work

    return asyncio.run(main())


#: `--key value` settings of this command line, taken out before typer sees it.
_overrides: list[str] = []
#: Commands whose options are their own; all others take settings.
_WITHOUT_SETTINGS = ("calibrate", "devnet", "demo", "demo-smollm", "fund", "keys")


def set_overrides(arguments: list[str]) -> None:
    """Remember the settings of this command line."""
    _overrides[:] = arguments


def split_overrides(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Take `--table.key value` and `--key value` settings out of a command line.

    Returns:
        The rest, and the settings.
    """
    from troth.settings import RoleSettings

    if not arguments or arguments[0] in _WITHOUT_SETTINGS or arguments[0].startswith("-"):
        return arguments, []
    rest, overrides, pending = [], [], list(arguments)
    while pending:
        argument = pending.pop(0)
        name = argument[2:].partition("=")[0]
        if argument.startswith("--") and ("." in name or name in RoleSettings.model_fields):
            overrides.append(argument)
            if "=" not in argument and pending:
                overrides.append(pending.pop(0))
        else:
            rest.append(argument)
    return rest, overrides


def settings_of(config: list[Path] | None) -> Any:
    """Settings from --config files and the `--key value` arguments."""
    from troth.settings import load_settings

    files = config or ([Path("troth.toml")] if Path("troth.toml").exists() else [])
    return load_settings(files, _overrides)
