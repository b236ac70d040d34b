"""The `troth` command. stdout is data, stderr is for people; exit 0 done, 1 failed, 2 usage, 3 rejected.

Every option of a role is a setting: `--config file.toml` (repeatable, merged left to right), then `--key value`.
Heavy imports happen inside the commands, so that `troth --help` is quick and roles without a model never load torch.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from collections.abc import Awaitable
from pathlib import Path
from typing import Annotated, Any

import typer

from protocol.errors import ConfigError, Fault, Ignore, Reject

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False, help=__doc__)


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
_WITHOUT_SETTINGS = ("devnet", "demo", "doctor", "fund", "keys")


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


@app.command()
def devnet(
    host: str = "127.0.0.1",
    port: int = 8545,
    block_seconds: float = 1.0,
    chain_id: int = 31337,
    directory: Path = Path("run/devnet"),
    seed: int = 0,
) -> None:
    """Run a local chain with the contracts deployed, blocks on a fixed tick."""
    from troth.devnet import run_devnet

    _stop_on_sigterm()
    print(f"devnet: http://{host}:{port} chain {chain_id}, a block every {block_seconds} s", file=sys.stderr)
    run_devnet(host, port, block_seconds, chain_id, directory, seed)


@app.command()
def fund(
    accounts: Annotated[list[str], typer.Argument(help="addresses, or paths of keystores")],
    tokens: int = 0,
    ether: float = 1.0,
    rpc: str = "http://127.0.0.1:8545",
) -> None:
    """Give accounts of a devnet ether for gas and escrow tokens. Devnets only."""
    from troth.commands import fund as work

    run(work(rpc, accounts, tokens, ether))


@keys_app.command("new")
def keys_new(
    path: Path = Path("keystore.json"),
    work_factor: Annotated[int, typer.Option(help="scrypt N, a power of two.")] = 2**15,
    json_: Json = False,
) -> None:
    """Make a keystore. The password comes from TROTH_PASSWORD, TROTH_PASSWORD_FILE or a prompt."""
    from troth.keystore import create, read_password

    keys = create(path, read_password(confirm=True), scrypt_n=work_factor)
    shown = {"account": "0x" + keys.account.hex(), "network_key": keys.network.public.hex(), "keystore": str(path)}
    emit(shown) if json_ else print("\n".join(f"{name}: {value}" for name, value in shown.items()))


@keys_app.command("show")
def keys_show(path: Path = Path("keystore.json"), json_: Json = False) -> None:
    """Show the public side of a keystore."""
    from troth.keystore import load, read_password

    keys = load(path, read_password())
    shown = {"account": "0x" + keys.account.hex(), "network_key": keys.network.public.hex()}
    emit(shown) if json_ else print("\n".join(f"{name}: {value}" for name, value in shown.items()))


@policy_app.command("init")
def policy_init(
    folder: Path,
    entry: str = "sort",
    args: str = '{"digits":4}',
    seed: int = 0,
    json_: Json = False,
) -> None:
    """Make the demo's base policy: a small model, warmed up until it is right one time in four."""
    from troth.commands import policy_init as work

    shown = work(folder, entry, args, seed)
    emit(shown) if json_ else print("\n".join(f"{name}: {value}" for name, value in shown.items()))


@policy_app.command("evaluate")
def policy_evaluate(
    folders: list[Path],
    entry: str = "sort",
    args: str = '{"digits":4}',
    max_tokens: int = 6,
    stop_token: int = 1,
    samples: int = 2,
    json_: Json = False,
) -> None:
    """Mean reward of policy folders on held-out prompts, which no round ever assigns; the same noise for each."""
    from troth.commands import policy_evaluate as work

    rows = work(folders, entry, args, max_tokens=max_tokens, stop_token=stop_token, samples=samples)
    emit(rows) if json_ else table(rows, ["folder", "reward", "error", "prompts", "samples"])


@policy_app.command("describe")
def policy_describe(folder: Path, config: Config = None, json_: Json = False) -> None:
    """Content hash and base manifest of a policy folder, signed with the trainer's key: what task.toml names."""
    from troth.commands import policy_describe as work

    shown = run(work(settings_of(config), folder))
    emit(shown) if json_ else print("\n".join(f'{name} = "{value}"' for name, value in shown.items()))


@task_app.command("publish")
def task_publish(file: Path, config: Config = None, yes: Yes = False, json_: Json = False) -> None:
    """Publish a task file and put its reward into escrow."""
    from troth.commands import task_publish as work

    shown = run(work(settings_of(config), file, yes=yes))
    emit(shown) if json_ else print(f"task {shown['task']} published, round 0 starts at block {shown['start_block']}")


@task_app.command("list")
def task_list(config: Config = None, json_: Json = False) -> None:
    """All tasks on the ledger."""
    from troth.commands import task_list as work

    rows = run(work(settings_of(config)))
    emit(rows) if json_ else table(rows, ["task", "name", "phase", "round", "end_round", "policy_version", "deposit"])


@task_app.command("show")
def task_show(task: Annotated[str, typer.Argument()] = "", config: Config = None, json_: Json = False) -> None:
    """One task: its terms, its state, its escrow."""
    from troth.commands import task_show as work

    emit(run(work(settings_of(config), task)))


@task_app.command("cancel")
def task_cancel(task: str, config: Config = None, yes: Yes = False) -> None:
    """Open no rounds from the next epoch on. What was earned stays payable, the rest goes back at the close."""
    from troth.commands import task_cancel as work

    print(run(work(settings_of(config), task, yes=yes)))


@task_app.command("close")
def task_close(task: str, config: Config = None, yes: Yes = False, json_: Json = False) -> None:
    """Refund what nobody earned, once the task is settled or timed out. Anybody may do it."""
    from troth.commands import task_close as work

    shown = run(work(settings_of(config), task, yes=yes))
    emit(shown) if json_ else print(f"closed: {shown['refunded']} refunded, {shown['burned']} burned")


@app.command()
def stake(
    action: Annotated[str, typer.Argument(help="show, add, unbond or withdraw")] = "show",
    amount: int = 0,
    config: Config = None,
    yes: Yes = False,
    json_: Json = False,
) -> None:
    """Show or change this account's stake."""
    from troth.commands import stake as work

    shown = run(work(settings_of(config), action, amount, yes=yes))
    emit(shown) if json_ else print("\n".join(f"{name}: {value}" for name, value in shown.items()))


@app.command()
def claim(
    accounts: Annotated[list[str] | None, typer.Argument(help="accounts to pay; this one by default")] = None,
    all_: Annotated[bool, typer.Option("--all", help="pay everybody, in batches")] = False,
    config: Config = None,
    yes: Yes = False,
    json_: Json = False,
) -> None:
    """Claim what final settlements owe. Money goes to the account that earned it, whoever sends the claim."""
    from troth.commands import claim as work

    rows = run(work(settings_of(config), accounts or [], everybody=all_, yes=yes))
    emit(rows) if json_ else table(rows, ["account", "claimed", "cumulative"])


@app.command()
def status(config: Config = None, json_: Json = False) -> None:
    """The task, its nodes, their standing and unclaimed earnings, from the ledger."""
    from troth.commands import status as work

    shown = run(work(settings_of(config)))
    if json_:
        emit(shown)
        return
    for name, value in shown["task"].items():
        print(f"{name}: {value}")
    columns = ["account", "stake", "slashed", "groups_good", "audit_probability", "suspended", "caught_by", "unclaimed"]
    table(shown["nodes"], columns)


@app.command()
def explain(rollout: str, config: Config = None, json_: Json = False) -> None:
    """Run every check on one rollout (TASK/ROUND/ACCOUNT/SLOT/SAMPLE) from public data and show each number."""
    from troth.commands import explain as work

    rows = run(work(settings_of(config), rollout))
    if json_:
        emit(rows)
    else:
        for row in rows:
            mark = {True: "ok  ", False: "FAIL", None: "-   "}[row["passed"]]
            print(f"{mark} {row['name']}: observed {row['observed']}, limit {row['limit']}  {row['text']}".rstrip())
    if any(row["passed"] is False for row in rows):
        raise typer.Exit(3)


@app.command()
def doctor(directory: Path = Path("run"), role: str = "", json_: Json = False) -> None:
    """Is this machine and environment fit for which role, and why not."""
    from troth.doctor import ROLES, examine, summarise

    if role and role not in ROLES:
        raise ConfigError(f"role is {role!r}, expected one of {', '.join(ROLES)}")
    shown = summarise(examine(directory))
    if json_:
        emit(shown)
    else:
        for finding in shown["findings"]:
            print(f"{'ok  ' if finding['fine'] else 'FAIL'} {finding['name']}: {finding['observed']}")
        for name, fit in shown["fit"].items():
            print(f"{name}: {'fit' if fit else 'not fit: ' + ' | '.join(shown['against'][name])}")
    wanted = [role] if role else list(ROLES)
    if not all(shown["fit"][name] for name in wanted):
        raise typer.Exit(1)


def _run_role(role: str, config: list[Path] | None, yes: bool, **options: Any) -> None:
    from troth.roles import run_role

    run(run_role(role, settings_of(config), yes=yes, **options))


@node_app.command("run")
def node_run(
    config: Config = None,
    yes: Yes = False,
    cheat: Annotated[str, typer.Option(help="Misbehave like this adversary; for tests and demos.", hidden=True)] = "",
) -> None:
    """Run a rollout node until it is told to stop."""
    _run_role("node", config, yes, cheat=cheat)


@verifier_app.command("run")
def verifier_run(config: Config = None, yes: Yes = False) -> None:
    """Run a verifier until it is told to stop."""
    _run_role("verifier", config, yes)


@trainer_app.command("run")
def trainer_run(config: Config = None, yes: Yes = False) -> None:
    """Run the trainer until it is told to stop."""
    _run_role("trainer", config, yes)


@relay_app.command("run")
def relay_run(config: Config = None, yes: Yes = False) -> None:
    """Run a relay until it is told to stop."""
    _run_role("relay", config, yes)


@app.command()
def demo(
    seed: int = 0,
    nodes: Annotated[int, typer.Option(min=1, max=8, help="Honest nodes.")] = 3,
    cheats: Annotated[str, typer.Option(help="Comma-separated adversaries, or none.")] = "",
    minutes: Annotated[float, typer.Option(min=0.0, max=60.0, help="Run time in all; 0 for the default length.")] = 0.0,
    directory: Annotated[Path | None, typer.Option(help="Where processes keep their state.")] = None,
    keep: Annotated[bool, typer.Option(help="Leave that directory in place.")] = False,
    json_: Json = False,
) -> None:
    """Run a whole network on this machine: initiator, trainer, relay, nodes, cheats, verifiers, a chain."""
    from troth.demo import run_demo

    raise typer.Exit(
        run_demo(
            seed=seed,
            num_nodes=nodes,
            cheats=cheats,
            minutes=minutes,
            directory=directory,
            keep=keep,
            as_json=json_,
        )
    )


def _stop_on_sigterm() -> None:
    """SIGTERM ends a process the way Ctrl-C does."""
    import signal

    def stop(signum: int, frame: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stop)


def main() -> None:
    """Entry point: turn the four kinds of error into messages and exit codes."""
    logging.basicConfig(
        level=os.environ.get("TROTH_LOG", "WARNING").upper(),
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    try:
        rest, overrides = split_overrides(sys.argv[1:])
        _overrides[:] = overrides
        app(args=rest, prog_name="troth")
    except ConfigError as error:
        print(f"troth: {error}", file=sys.stderr)
        sys.exit(2)
    except Reject as error:
        print(f"troth: rejected: {error}", file=sys.stderr)
        sys.exit(3)
    except (Fault, Ignore) as error:
        print(f"troth: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        # The reader of our stdout went away (for example `| head`): nothing is wrong with us.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(0)


if __name__ == "__main__":
    main()
