"""Commands about a node that is running or about to: its status, and the self-test."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from troth.cli.app import Config, Json, emit, node_app, run, settings_of


@node_app.command("status")
def node_status(config: Config = None, json_: Json = False) -> None:
    """What the node in --directory does now, since when, why, and what would end it. Exit 1 when it is not running."""
    from troth.node_commands import node_status as work

    shown = work(settings_of(config))
    if json_:
        emit(shown)
    else:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(shown["since"]))
        print(f"{shown['state']} since {since} ({shown['for_s']:.0f} s)")
        print(f"reason: {shown['reason']}")
        print(f"ends when: {shown['ends']}")
        for name in ("account", "task", "round", "block", "tokens_per_s", "blocks_per_rollout"):
            if name in shown:
                print(f"{name}: {shown[name]}")
        if evidence := shown.get("evidence"):
            nats = ", ".join(f"round {index} {added:+.3f}" for index, added in evidence["nats_by_round"].items())
            print(f"evidence: log10 {evidence['log10']}, alarm at {evidence['alarm_log10']}; nats added: {nats}")
        for row in shown["rejections"]:
            print(f"rejected in round {row.get('round')}: {row.get('text')}")
            print(f"  observed {row.get('observed') or '-'}, limit {row.get('limit') or '-'}; {row.get('reproduce')}")
    if not shown["running"]:
        raise typer.Exit(1)


@node_app.command("selftest")
def node_selftest(
    config: Config = None,
    policy: Annotated[Path | None, typer.Option(help="A local policy folder; fetched when absent.")] = None,
    environment: Annotated[str, typer.Option(help="Environment entry, where no --task is given.")] = "",
    args: Annotated[str, typer.Option(help="Its arguments as canonical JSON.")] = "{}",
    max_tokens: Annotated[int, typer.Option(min=1, max=131_072)] = 64,
    stop_token: Annotated[list[int] | None, typer.Option(help="Repeatable.")] = None,
    groups: Annotated[int, typer.Option(min=1, max=64, help="Groups to make.")] = 2,
    verifier_dtype: Annotated[str, typer.Option(help="Numeric type of the verifiers' prefill.")] = "",
    json_: Json = False,
) -> None:
    """Would I be accepted? Make a few rollouts with this node's engine and run a verifier's checks on all of them.

    --task ID, --task FILE.toml with --policy, or --policy with --environment. Commits nothing. Exit 3 when refused.
    """
    from troth.node_commands import node_selftest as work

    shown = run(
        work(
            settings_of(config),
            policy=policy,
            entry=environment,
            args=args,
            max_tokens=max_tokens,
            stops=stop_token or [1],
            groups=groups,
            verifier_dtype=verifier_dtype,
        )
    )
    if json_:
        emit(shown)
    else:
        for check in shown["checks"]:
            mark = {True: "ok  ", False: "FAIL", None: "-   "}[check["passed"]]
            limit = f", limit {check['limit']}" if check["limit"] else ""
            print(f"{mark} {check['name']}: observed {check['observed']}{limit}")
            if check["passed"] is False and check["todo"]:
                print(f"     {check['todo']}")
        print(f"would be accepted: {'yes' if shown['accepted'] else 'no'}")
    if not shown["accepted"]:
        raise typer.Exit(3)
