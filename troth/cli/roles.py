"""Commands that run something: the devnet, the roles, the demo, and the doctor."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from protocol.errors import ConfigError
from troth.cli.app import Config, Json, Yes, app, emit, node_app, relay_app, run, settings_of, trainer_app, verifier_app


def _run_role(role: str, config: list[Path] | None, yes: bool, **options: Any) -> None:
    from troth.roles import run_role

    run(run_role(role, settings_of(config), yes=yes, **options))


def _stop_on_sigterm() -> None:
    """SIGTERM ends a process the way Ctrl-C does."""

    def stop(signum: int, frame: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stop)


@app.command()
def devnet(
    host: str = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65_535)] = 8545,
    block_seconds: Annotated[float, typer.Option(min=0.01, max=3600.0)] = 1.0,
    chain_id: Annotated[int, typer.Option(min=1, max=2**53)] = 31337,
    directory: Path = Path("run/devnet"),
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1)] = 0,
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


@app.command()
def doctor(
    role: str = "",
    config: Config = None,
    tokens_per_second: Annotated[
        float | None, typer.Option(help="Speed to reckon with; timed on a synthetic model when not given.")
    ] = None,
    json_: Json = False,
) -> None:
    """Is this machine and environment fit for which role, and why not. With --task ID or FILE.toml: for that task, and
    what it would earn here, before anything is downloaded."""
    from troth.doctor import ROLES, examine, summarise

    if role and role not in ROLES:
        raise ConfigError(f"role is {role!r}, expected one of {', '.join(ROLES)}")
    settings = settings_of(config)
    shown = summarise(examine(Path(settings.directory)))
    wanted = [role] if role else ["node"] if settings.task else list(ROLES)
    fit = all(shown["fit"][name] for name in wanted)
    if settings.task:
        from troth import doctor_task

        shown["task"] = doctor_task.describe(run(doctor_task.examine(settings, tokens_per_second)))
        fit = fit and shown["task"]["fit"]
    if json_:
        emit(shown)
    else:
        _print_findings(shown)
    if not fit:
        raise typer.Exit(1)


_MARKS = {"ok": "ok  ", "warn": "warn", "fail": "FAIL"}


def _print_findings(shown: dict[str, Any]) -> None:
    for finding in shown["findings"]:
        print(f"{'ok  ' if finding['fine'] else 'FAIL'} {finding['name']}: {finding['observed']}")
    for name, fit in shown["fit"].items():
        print(f"{name}: {'fit' if fit else 'not fit: ' + ' | '.join(shown['against'][name])}")
    task = shown.get("task")
    if task is None:
        return
    for line in task["lines"]:
        limit = f", limit {line['limit']}" if line["limit"] else ""
        todo = f"; {line['todo']}" if line["todo"] else ""
        print(
            f"{ {'ok': 'ok  ', 'warn': 'warn', 'fail': 'FAIL'}[line['level']] } {line['name']}: {line['observed']}{limit}{todo}"
        )
    print(
        f"expected: {task['rollouts_per_hour']:.0f} accepted rollouts and {task['reward_per_hour']} token units an hour, if"
    )
    for assumption in task["assumptions"]:
        print(f"  {assumption}")
    print(f"this task: {'fit' if task['fit'] else 'not fit'}")


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
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1)] = 0,
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
