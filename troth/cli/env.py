"""Commands about environments: look at one, prove that it is fit to be published, list them."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from troth.cli.app import Config, Json, app, emit, settings_of, table

if TYPE_CHECKING:
    from protocol.task import Environment

env_app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, help="Look at environments and check them.")
app.add_typer(env_app, name="env")

Which = Annotated[str, typer.Argument(help="A task file (.toml), or the name of an installed environment.")]
Args = Annotated[str, typer.Option("--args", help="Arguments of the environment, a JSON object.")]
Files = Annotated[list[Path] | None, typer.Option("--files", help="Folder with the environment's files; repeatable.")]


def _read_spec(which: str, args: str) -> tuple[Environment, int]:
    """The environment a user names, and the longest completion of the task (0 without one)."""
    import environments
    from protocol.errors import ConfigError
    from protocol.task import Environment

    if which.endswith(".toml"):
        from troth.node_commands import load_spec

        spec = load_spec(Path(which))
        return spec.environment, spec.sampling.max_tokens
    try:
        found = json.loads(args)
    except ValueError as error:
        raise ConfigError(f"--args is {args[:80]!r}, expected a JSON object: {error}") from None
    canonical = json.dumps(found, sort_keys=True, separators=(",", ":"))
    return Environment(which, canonical, environments.content_hash(which, canonical)), 0


def _folders(config: list[Path] | None, files: list[Path] | None) -> list[Path]:
    return [*(files or []), *(Path(folder) for folder in settings_of(config).environment_folders)]


@env_app.command("list")
def env_list(json_: Json = False) -> None:
    """Names of installed environments, and what each is."""
    import importlib

    import environments

    rows = []
    for name, module in sorted(environments.ENTRIES.items()):
        text = (importlib.import_module(module).__doc__ or "").strip().splitlines()[0]
        rows.append({"entry": name, "what": text})
    emit(rows) if json_ else table(rows, ["entry", "what"])


@env_app.command("check")
def env_check(
    which: Which,
    args: Args = "{}",
    files: Files = None,
    prompts: Annotated[int, typer.Option(min=1, max=1000, help="Prompts to look at.")] = 8,
    max_tokens: Annotated[int, typer.Option(min=0, help="Longest completion; 0 is the task's own, else 256.")] = 0,
    config: Config = None,
    json_: Json = False,
) -> None:
    """Prove that an environment is deterministic, bounded, and does nothing besides. Exit 3 when it is not.

    It works in two fresh processes with another hash seed, locale, time zone, folder and order, on hostile completions. What
    Python itself does is watched by an audit hook, which compiled code can get around.
    """
    from troth.environment_check import check_environment

    spec, task_tokens = _read_spec(which, args)
    length = max_tokens or task_tokens or 256
    rows = [
        row._asdict()
        for row in check_environment(spec, _folders(config, files), num_prompts=prompts, max_tokens=length)
    ]
    failed = [row["check"] for row in rows if row["status"] == "failed"]
    if json_:
        emit(
            {
                "entry": spec.entry,
                "args": spec.args,
                "content_hash": spec.content_hash.hex(),
                "rows": rows,
                "ok": not failed,
            }
        )
    else:
        table(rows, ["check", "status", "observed", "limit"])
        print(
            f"environment {spec.entry}: {'not fit: ' + ', '.join(failed) if failed else 'fit to be published'}",
            file=sys.stderr,
        )
    if failed:
        raise typer.Exit(3)


@env_app.command("sample")
def env_sample(
    which: Which,
    args: Args = "{}",
    files: Files = None,
    number: Annotated[int, typer.Option("-n", min=1, max=1000, help="Prompts to show.")] = 3,
    first: Annotated[int, typer.Option(min=0, help="Index of the first prompt.")] = 0,
    completion: Annotated[list[str] | None, typer.Option(help="A completion to be rewarded; repeatable.")] = None,
    config: Config = None,
    json_: Json = False,
) -> None:
    """Show prompts, right answers where they are known, and the rewards of completions."""
    from troth.environment_check import sample_environment

    spec, _ = _read_spec(which, args)
    with contextlib.redirect_stdout(sys.stderr):  # some packages print while they make a question
        rows = sample_environment(
            spec, _folders(config, files), num_prompts=number, first=first, completions=completion or []
        )
    if json_:
        emit(rows)
    else:
        for row in rows:
            _print_sample(row)


def _print_sample(row: dict[str, Any]) -> None:
    print(f"prompt {row['index']} ({row['tokens']} tokens)\n{row['prompt']}")
    if row["answer"] is not None:
        print(f"right answer (reward {row['reward']}): {row['answer']}")
    for one in row["completions"]:
        print(f"completion (reward {one['reward']}): {one['completion']}")
    print()
