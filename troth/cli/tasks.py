"""Commands about keys, policies, tasks and money."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from troth.cli.app import Config, Json, Yes, app, emit, keys_app, policy_app, run, settings_of, table, task_app


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
def policy_describe(
    folder: Path,
    rank: Annotated[int, typer.Option(help="rank of LoRA adapters on this policy; 0 for whole policies")] = 0,
    alpha: Annotated[int, typer.Option(help="updates are scaled by alpha / rank; 0 for twice the rank")] = 0,
    modules: Annotated[str, typer.Option(help="linear modules that are adapted, with commas")] = "q_proj,v_proj",
    config: Config = None,
    json_: Json = False,
) -> None:
    """Content hash and base manifest of a policy folder, signed with the trainer's key: what task.toml names."""
    from protocol.adapter import WHOLE_POLICIES, Adapter
    from troth.commands import policy_describe as work

    names = tuple(sorted(name.strip() for name in modules.split(",")))
    shown = run(work(settings_of(config), folder, Adapter(rank, alpha or 2 * rank, names) if rank else WHOLE_POLICIES))
    if json_:
        emit(shown)
        return
    for name in ("base_policy", "base_manifest", "trainer"):
        print(f'{name} = "{shown[name]}"')
    if rank:
        terms, size = shown["adapter"], shown["adapter_bytes"]
        listed = ", ".join(f'"{name}"' for name in terms["modules"])
        print(f"adapter = {{ rank = {terms['rank']}, alpha = {terms['alpha']}, modules = [{listed}] }}")
        share = 100 * size / shown["base_bytes"]
        print(f"an adapter has {size} bytes, {share:.2f} % of the base's {shown['base_bytes']}", file=sys.stderr)


@policy_app.command("merge")
def policy_merge(
    folder: Path,
    target: Path,
    base: Annotated[Path | None, typer.Option(help="folder of the base policy, if FOLDER is not linked to it")] = None,
    dtype: Annotated[str, typer.Option(help="type of the weights; the base policy's own by default")] = "",
    json_: Json = False,
) -> None:
    """Write the policy of an adapter folder as plain weights, in a new folder TARGET."""
    from troth.commands import policy_merge as work

    shown = work(folder, target, base, dtype)
    emit(shown) if json_ else print("\n".join(f"{name}: {value}" for name, value in shown.items()))


@task_app.command("publish")
def task_publish(
    file: Path,
    base: Annotated[
        Path | None, typer.Option(help="folder of the base policy; needed when policies are adapters")
    ] = None,
    check: Annotated[bool, typer.Option(help="look at the environment first (`troth env check`)")] = True,
    config: Config = None,
    yes: Yes = False,
    json_: Json = False,
) -> None:
    """Publish a task file and put its reward into escrow."""
    from troth.commands import task_publish as work

    shown = run(work(settings_of(config), file, yes=yes, base=base, check=check))
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
    columns = ["account", "stake", "slashed", "groups_good", "audit_probability", "evidence_log10"]
    table(shown["nodes"], [*columns, "suspended", "caught_by", "unclaimed"])


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
