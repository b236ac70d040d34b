"""`troth doctor --task`: is this machine fit for this task, and what would it earn? Said before anything is downloaded.

`examine` gathers (troth.doctor_facts), `judge` is a pure function from facts to lines: ok, warn or fail, what was
observed, the limit, and what to do. Nothing is signed or sent. Neighbours: troth.doctor_estimate turns a speed into
reward per hour, troth.doctor holds what does not depend on a task.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from protocol.errors import ConfigError, Fault
from protocol.ledger.events import Role
from protocol.rounds import get_end_round, get_times, is_suspended
from troth.commands import reading
from troth.doctor_estimate import estimate, get_mean_tokens, get_quota, get_time_to_commit
from troth.doctor_facts import Facts, examine_ledger, examine_machine, find_task
from troth.doctor_speed import check_given, measure_speed
from troth.fit import compute_disk_need, compute_need
from troth.forms import ADAPTER_SHARE_BPS_MAX
from troth.node_commands import find_task_file, load_spec
from troth.settings import RoleSettings
from troth.views import hex_account

Level = Literal["ok", "warn", "fail"]
#: Rollouts generated together at most while timing.
TIMED_ROLLOUTS_MAX = 64
GIB = 2**30


class Line(NamedTuple):
    """One finding."""

    name: str
    level: Level
    observed: str
    limit: str = ""
    todo: str = ""


async def examine(settings: RoleSettings, tokens_per_second: float | None) -> Facts:
    """Find out everything about a task and this machine.

    Args:
        settings: `task` is an id on the ledger or the path of a task file.
        tokens_per_second: measured on a synthetic model when None.

    Raises:
        ConfigError: when there is no such task.
        Fault: when a task is named by id and the ledger is away.
    """
    given = None if tokens_per_second is None else check_given(tokens_per_second)
    path = find_task_file(settings)
    if path is not None:
        facts = Facts(load_spec(path), settings)
        facts.policy_error = "a task file names no place to ask: publish it, then give its id"
        try:
            async with reading(settings) as ledger:
                await examine_ledger(facts, ledger)
        except (Fault, ConfigError) as error:
            facts.ledger_error = str(error)
    else:
        async with reading(settings) as ledger:
            task = find_task(ledger, settings.task)
            facts = Facts(task.spec, settings, task=task, state=ledger.state)
            await examine_ledger(facts, ledger)
    examine_machine(facts)
    if given is not None:
        facts.tokens_per_s, facts.speed_from = given.tokens_per_s, given.how
    elif facts.base is not None and facts.base.config is not None and not facts.engine_error:
        try:
            rollouts = min(TIMED_ROLLOUTS_MAX, get_quota(facts) * facts.spec.group_size)
            speed = measure_speed(
                facts.base.config,
                settings.compute,
                rollouts=rollouts,
                max_tokens=facts.spec.sampling.max_tokens,
            )
            facts.tokens_per_s, facts.speed_from = speed.tokens_per_s, speed.how
        except (Fault, ConfigError) as error:
            facts.speed_from = str(error)
    return facts


def judge(facts: Facts) -> list[Line]:
    """All findings, in the order in which they matter."""
    lines = [*_judge_task(facts), *_judge_ledger(facts), *_judge_policy(facts), *_judge_software(facts)]
    return [*lines, *_judge_account(facts), *_judge_pace(facts)]


def _judge_task(facts: Facts) -> list[Line]:
    task, state = facts.task, facts.state
    if task is None or state is None:
        return [Line("task", "warn", f"{facts.spec.name}, a file", "a task on the ledger", "publish it to know more")]
    end, block = get_end_round(task), state.block_number
    epoch = facts.spec.schedule.epoch_rounds
    next_epoch = (
        0 if block < task.start_block else (block - task.start_block) // facts.spec.schedule.round_blocks // epoch + 1
    )
    first = get_times(task, next_epoch * epoch)
    if task.closed or next_epoch * epoch >= end:
        return [Line("task", "fail", f"{facts.spec.name}: no epoch begins any more", f"round {end} is past the end")]
    text = f"joining now counts from epoch {next_epoch}, block {first.start} ({first.start - block} blocks from now)"
    return [Line("task", "ok", facts.spec.name), Line("registration window", "ok", text, f"{end} rounds in all")]


def _judge_ledger(facts: Facts) -> list[Line]:
    clock = facts.clock
    if facts.ledger_error or clock is None:
        return [Line("ledger", "fail", facts.ledger_error or "not asked", "a node that answers", "check ledger.rpc")]
    lag = clock.lag
    observed = f"newest block {clock.head} is {clock.age_s:.0f} s old, a block every {clock.block_s:.2f} s"
    return [Line("ledger clock", "fail" if lag else "ok", observed, f"{clock.limit_s:.0f} s", lag and "check the node")]


def _judge_policy(facts: Facts) -> list[Line]:
    spec, dtype = facts.spec, facts.settings.compute.dtype
    lines = []
    if facts.base is None:
        text = facts.policy_error or "not asked"
        return [Line("policy", "warn", f"size unknown: {text}", "its manifest", "ask again when a relay serves it")]
    if facts.base.config is not None:
        try:
            least = compute_need(facts.base.config, spec, dtype, 1).total_bytes
            wanted = compute_need(facts.base.config, spec, dtype, spec.group_size).swap_bytes
        except (Fault, ConfigError) as error:
            lines.append(Line("memory", "fail", str(error), "a policy that can be run", "choose another task or dtype"))
        else:
            free = facts.free_memory
            level: Level = "ok" if free is None or free >= wanted else "warn" if free >= least else "fail"
            seen = "unknown" if free is None else f"{free / GIB:.2f} GiB free"
            limit = f"{least / GIB:.2f} GiB at least, {wanted / GIB:.2f} GiB for a group at a time and policy swaps"
            todo = "" if level == "ok" else "free memory, or use a smaller compute.dtype that the task's profile takes"
            lines.append(Line("memory", level, f"{seen}, model in {dtype}", limit, todo))
    following = get_next_bytes(facts)
    need = compute_disk_need(facts.base.bytes_total, following)
    level = "ok" if facts.free_disk >= need else "warn" if facts.free_disk >= 2 * facts.base.bytes_total else "fail"
    todo = "" if level == "ok" else "free disk, or choose another directory"
    lines.append(Line("disk", level, f"{facts.free_disk / GIB:.2f} GiB free", f"{need / GIB:.2f} GiB", todo))
    return [*lines, _judge_link(facts, following)]


def get_next_bytes(facts: Facts) -> int:
    """Bytes of each policy after the base: those of the newest, else the most an adapter may have, else the base's."""
    assert facts.base is not None
    if facts.latest is not None:
        return facts.latest.bytes_total
    if facts.spec.adapter.rank:
        return facts.base.bytes_total * ADAPTER_SHARE_BPS_MAX // 10_000
    return facts.base.bytes_total


def _judge_link(facts: Facts, following: int) -> Line:
    assert facts.base is not None
    if facts.bytes_per_s is None:
        return Line("link", "warn", f"not measured: {facts.policy_error}", "", "ask again when a relay answers")
    base_s, next_s = facts.base.bytes_total / facts.bytes_per_s, following / facts.bytes_per_s
    observed = (
        f"{facts.bytes_per_s / 2**20:.2f} MiB/s: base {facts.base.bytes_total / 2**20:.1f} MiB in {base_s:.0f} s, each policy "
        f"after it {following / 2**20:.1f} MiB in {next_s:.1f} s"
    )
    if facts.clock is None or not facts.clock.block_s:
        return Line("link", "ok", observed)
    round_s = facts.clock.block_s * facts.spec.schedule.round_blocks
    level: Level = "ok" if next_s < round_s else "warn"
    todo = "" if level == "ok" else "policies may come slower than rounds: those rounds are skipped"
    return Line("link", level, observed, f"a round of {round_s:.0f} s", todo)


def _judge_software(facts: Facts) -> list[Line]:
    spec, compute = facts.spec, facts.settings.compute
    lines = [
        Line("engine", "fail", facts.engine_error, compute.engine, "install it, or set compute.engine")
        if facts.engine_error
        else Line("engine", "ok", f"{compute.engine} on {compute.device}")
    ]
    wanted = spec.profile.dtype
    fine = compute.dtype == wanted
    todo = "" if fine else f"set compute.dtype = {wanted!r}, then run `troth node selftest`"
    lines.append(Line("numeric type", "ok" if fine else "fail", compute.dtype, f"{wanted} ({spec.profile.name})", todo))
    if facts.environment_error:
        lines.append(Line("environment", "fail", facts.environment_error, spec.environment.entry, "install it"))
    else:
        files = f", {len(facts.environment_files)} files with the base policy" if facts.environment_files else ""
        lines.append(Line("environment", "ok", f"{spec.environment.entry}, same content hash{files}"))
    if facts.sandbox_missing:
        lines.append(Line("sandbox", "fail", facts.sandbox_missing, "all of its layers", "see docs/environments.md"))
    elif facts.sandbox_active:
        lines.append(Line("sandbox", "ok", ", ".join(facts.sandbox_active)))
    return lines


def _judge_account(facts: Facts) -> list[Line]:
    stake_min = facts.spec.economics.node_stake_min
    if facts.account is None:
        path = facts.settings.keystore_path
        return [
            Line("account", "warn", f"no keystore at {path}", "an account with a stake", "make one: `troth keys new`")
        ]
    known = None if facts.state is None else facts.state.participants.get(facts.account)
    lines = [Line("account", "ok", hex_account(facts.account))]
    if known is not None and known.role != Role.NODE:
        role = known.role.name.lower()
        lines.append(Line("role", "fail", f"registered as {role}", "node", "one account has one role: use other keys"))
    elif known is not None and known.bonded >= stake_min:
        lines.append(Line("stake", "ok", f"{known.bonded} bonded", f"{stake_min}"))
    else:
        bonded = 0 if known is None else known.bonded
        level: Level = "ok" if bonded + facts.tokens >= stake_min else "fail"
        todo = f"set stake = {stake_min} or more" if level == "ok" else "get tokens of the ledger's escrow token"
        lines.append(Line("stake", level, f"{bonded} bonded, {facts.tokens} to bond", f"{stake_min}", todo))
    gas: Level = "ok" if facts.wei > 0 else "fail"
    lines.append(Line("gas", gas, f"{facts.wei} wei", "above 0", "" if facts.wei else "get some of the chain's coin"))
    task, state = facts.task, facts.state
    if task is not None and state is not None and is_suspended(state, task, facts.account, state.block_number):
        lines.append(Line("standing", "fail", "suspended for a confirmed cheat", "none", "this account is out here"))
    return lines


def _judge_pace(facts: Facts) -> list[Line]:
    quota = get_quota(facts)
    lines = [
        Line("quota", "ok", f"{quota} groups a round at present", f"{facts.spec.slots_max} slots, shared by all nodes")
    ]
    if facts.tokens_per_s is None:
        todo = "give --tokens-per-second"
        return [*lines, Line("speed", "warn", f"unknown: {facts.speed_from or 'no policy to time'}", "", todo)]
    speed = f"{facts.tokens_per_s:.0f} tokens/s ({facts.speed_from})"
    if facts.clock is None or not facts.clock.block_s:
        return [*lines, Line("speed", "ok", speed)]
    time_s = get_time_to_commit(facts)
    needed_s = quota * facts.spec.group_size * get_mean_tokens(facts)[0] / facts.tokens_per_s
    fitting = int(quota * time_s / needed_s)
    observed = f"{speed}: {quota} groups in {needed_s:.1f} s"
    if fitting >= quota:
        return [*lines, Line("speed", "ok", observed, f"{time_s:.1f} s to commit")]
    if fitting >= 1:
        return [*lines, Line("speed", "warn", observed, f"{time_s:.1f} s to commit", f"set slots = {fitting}")]
    return [*lines, Line("speed", "fail", observed, f"{time_s:.1f} s to commit", "not one group is done in time")]


def describe(facts: Facts) -> dict[str, Any]:
    """Plain data for printing. `fit` is False when a line says fail."""
    lines, expected = judge(facts), estimate(facts)
    return {
        "task": facts.spec.name if facts.task is None else facts.task.task.hex(),
        "fit": all(line.level != "fail" for line in lines),
        "lines": [line._asdict() for line in lines],
        "rollouts_per_hour": round(expected.rollouts_per_hour, 1),
        "reward_per_hour": round(expected.reward_per_hour),
        "assumptions": expected.assumptions,
    }
