"""`troth replay`: a verdict done again, with every number of one rollout."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from troth.cli.app import Config, Json, app, emit, run, settings_of, table


@app.command()
def replay(
    rollout: Annotated[str, typer.Argument(help="TASK/ROUND/ACCOUNT/SLOT/SAMPLE; not with --case.")] = "",
    case: Annotated[Path | None, typer.Option(help="Replay this case; no network is used.")] = None,
    save: Annotated[
        Path | None, typer.Option(help="Write everything the verdict follows from into a new folder.")
    ] = None,
    link: Annotated[
        bool, typer.Option("--link", help="With --save: link to the policy in place of copying it.")
    ] = False,
    compare: Annotated[
        bool, typer.Option("--compare", help="With --case: ask the ledger whether its facts are true.")
    ] = False,
    config: Config = None,
    json_: Json = False,
) -> None:
    """Re-run a verdict: every token (winner, gap, log-probability), every chunk, the judge's row, the committee's.

    Exit 3 when the rollout or its submission breaks a rule, when a case is not what it says, or is not the ledger's.
    """
    from protocol.errors import ConfigError
    from troth.commands import replay as work

    if bool(rollout) == (case is not None):
        raise ConfigError("name a rollout (TASK/ROUND/ACCOUNT/SLOT/SAMPLE), or a case with --case DIR; one of the two")
    if (save is not None or link) and (case is not None or save is None):
        raise ConfigError("--save DIR and --link go with a rollout, not with --case; --link goes with --save")
    if compare and case is None:
        raise ConfigError("--compare goes with --case: a rollout's facts are the ledger's own")
    shown = run(work(settings_of(config), rollout, case=case, save=save, link=link, compare=compare))
    emit(shown) if json_ else _print(shown)
    bad = any(check["passed"] is False for check in shown["checks"])
    if bad or (shown["verdict"] or {"status": "good"})["status"] != "good":
        raise typer.Exit(3)


def _print(shown: dict[str, Any]) -> None:
    for row in shown["checks"]:
        mark = {True: "ok  ", False: "FAIL", None: "-   "}[row["passed"]]
        print(f"{mark} {row['name']}: observed {row['observed']}, limit {row['limit']}  {row['text']}".rstrip())
    if shown["tokens"]:
        print()
        rows = [row | {"gap": f"{row['gap']:.6f}", "logprob": f"{row['logprob']:.4f}"} for row in shown["tokens"]]
        table(rows, ["position", "token", "winner", "gap", "logprob", "near_tie", "passed"])
    if shown["chunks"]:
        print()
        rows = [row | {"mantissa_mean": f"{row['mantissa_mean']:.3f}"} for row in shown["chunks"]]
        table(rows, list(rows[0]))
    print()
    for name, row in [("this replay", shown["verdict"]), ("outcome", shown["outcome"])]:
        print(f"{name}: {_say(row)}")
    for one in shown["committee"]:
        print(f"verifier {one['verifier']}: {_say(one['row'])}")
    if shown["finding"]:
        print(f"finding: {shown['finding']}")
    agrees = {True: "agrees with", False: "DISAGREES with", None: "cannot be compared with"}[shown["agrees"]]
    print(f"this replay {agrees} the committee, as of block {shown['block']}", file=sys.stderr)


def _say(row: dict[str, Any] | None) -> str:
    if row is None:
        return "no row"
    reason = f" ({row['reason']})" if row["reason"] else ""
    return (
        f"{row['status']}{reason}, {row['groups']} groups, {row['tokens']} tokens, {row['audited']} audited, "
        f"evidence {row['evidence_nats']:.3f} nat"
    )
