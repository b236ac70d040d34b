"""`troth calibrate`: measure a model and write the profile that tasks on it name."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from troth.cli.app import Json, app, emit

Names = Annotated[str, typer.Option(help="Names with commas; all by default.")]


def _split(text: str) -> tuple[str, ...]:
    return tuple(name for name in (part.strip() for part in text.split(",")) if name)


def _say(text: str) -> None:
    print(f"calibrate: {text}", file=sys.stderr, flush=True)


@app.command()
def calibrate(
    models: Annotated[list[Path], typer.Argument(help="A policy folder; with --table, profile files.")],
    out: Annotated[Path | None, typer.Option(help="Where the profile is written; stdout by default.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Where the picture (SVG) is written.")] = None,
    name: Annotated[str, typer.Option(help="The profile's name; by default that of --out.")] = "",
    rollouts: Annotated[int, typer.Option(min=1, max=10**6, help="Rollouts of each engine pair.")] = 1_000,
    alternative_rollouts: Annotated[int, typer.Option(min=1, max=10**6, help="Rollouts of each alternative.")] = 256,
    tokens: Annotated[int, typer.Option(min=1, max=32_768, help="Longest completion.")] = 48,
    prompts: Annotated[
        list[str] | None,
        typer.Option(
            help="random, an installed environment, or a file with a JSON list of token ids a line; repeatable."
        ),
    ] = None,
    args: Annotated[str, typer.Option("--args", help="Arguments of the environment, a JSON object.")] = "{}",
    stop_token: Annotated[list[int] | None, typer.Option(help="Token that ends a completion; repeatable.")] = None,
    temperature: Annotated[float, typer.Option(min=0.001, max=10.0)] = 1.0,
    topk: Annotated[int, typer.Option(min=1, max=1024, help="Entries of a commitment.")] = 128,
    chunk: Annotated[int, typer.Option(min=1, max=1024, help="Tokens of a commitment.")] = 32,
    pairs: Names = "",
    alternatives: Names = "",
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    threads: Annotated[int, typer.Option(min=1, max=256)] = 1,
    seed: Annotated[int, typer.Option(min=0, max=2**31)] = 0,
    vllm_python: Annotated[Path | None, typer.Option(help="Interpreter of an environment with vLLM.")] = None,
    table: Annotated[
        bool, typer.Option("--table", help="Print Markdown tables of profile files; measure nothing.")
    ] = False,
    json_: Json = False,
) -> None:
    """Measure how far honest engines differ on a model, and write limits that find other policies.

    Takes minutes for small models and hours for large ones. Refuses to write a profile that rests on too little, or under which
    nothing would be found.
    """
    from protocol.errors import ConfigError
    from troth.calibrate.files import MEASURED, SUFFIX, format_profile, read_profile

    if table:
        from troth.calibrate.tables import format_tables

        print(format_tables([read_profile(path) for path in models]), end="")
        return
    if len(models) != 1:
        raise ConfigError(f"{len(models)} models are given, expected one: each has a profile of its own")
    if out is not None and out.suffix != SUFFIX:
        raise ConfigError(f"--out is {out}, expected a name that ends in {SUFFIX}")
    from troth.calibrate.measure import Terms
    from troth.calibrate.run import Options, run_calibration

    stops = tuple(stop_token or ())
    result = run_calibration(
        Options(
            model=models[0],
            name=name or (out.stem if out else models[0].name),
            dtype=dtype,
            rollouts=rollouts,
            alternative_rollouts=alternative_rollouts,
            pairs=_split(pairs),
            alternatives=_split(alternatives),
            prompts=tuple(prompts or ("random",)),
            args=args,
            threads=threads,
            seed=seed,
            terms=Terms(temperature, tokens, stops, topk, chunk, vllm_python),
            command=shlex.join(["troth", *sys.argv[1:]]),
        ),
        _say,
    )
    text = format_profile(result.profile, result.measured)
    if picture is not None:
        picture.write_text(result.picture)
    if out is not None:
        out.write_text(text)
    if json_:
        import msgspec

        emit({"profile": msgspec.to_builtins(result.profile), MEASURED: result.measured})
    elif out is None:
        print(text, end="")
