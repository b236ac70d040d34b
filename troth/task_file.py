"""`task.toml`: the file an initiator writes, and the canonical `TaskSpec` it becomes.

A preset fills in the schedule and the economics; the file overrides what it names. A proof profile is named (one that is
shipped, or a file that `troth calibrate` wrote), or given as a table of what differs from its `base`. Every mistake is
reported with the key, what was seen and what is expected.
"""

from __future__ import annotations

import difflib
import json
from pathlib import Path
from typing import Any

from pydantic import Field

from protocol.adapter import Adapter
from protocol.codec import PROTOCOL_VERSION
from protocol.errors import ConfigError
from protocol.presets import PRESETS, PROFILE_FP32
from protocol.task import (
    Economics,
    Environment,
    ProofProfile,
    Sampling,
    Schedule,
    TaskSpec,
    compute_epoch_pay_max,
    validate_spec,
)
from troth.calibrate.files import load_profile
from troth.settings import Section, read_toml, validate


class EnvironmentTable(Section):
    entry: str
    args: dict[str, Any] = {}


class SamplingTable(Section):
    temperature: float = Field(1.0, gt=0, le=10)
    max_tokens: int
    stop_tokens: list[int]


class EscrowTable(Section):
    deposit: int = Field(gt=0)


class AdapterTable(Section):
    """LoRA; a rank of 0 means that policies are whole. `alpha` is twice the rank where it is not given."""

    rank: int = 0
    alpha: int | None = None
    modules: list[str] = []

    def to_adapter(self) -> Adapter:
        alpha = 2 * self.rank if self.alpha is None else self.alpha
        return Adapter(self.rank, alpha, tuple(sorted(self.modules)))


class TaskTable(Section):
    """The whole file."""

    name: str
    preset: str = "minimal"
    base_policy: str
    base_manifest: str
    licence_data: str = ""
    licence_model: str = ""
    group_size: int = 16
    groups_per_round: int = 32
    slots_max: int = 16
    max_staleness: int = 4
    trainer: str
    environment: EnvironmentTable
    sampling: SamplingTable
    escrow: EscrowTable
    adapter: AdapterTable = AdapterTable()
    profile: str | dict[str, Any] = {}
    schedule: dict[str, int] = {}
    economics: dict[str, int] = {}


def _hex(name: str, text: str, length: int) -> bytes:
    try:
        value = bytes.fromhex(text.removeprefix("0x"))
    except ValueError:
        value = b""
    if len(value) != length:
        raise ConfigError(f"{name} is {text!r}, expected {length} bytes of hex")
    return value


def _replace(kind: type[Any], base: Any, table: dict[str, Any], name: str) -> Any:
    """A struct with some fields replaced; an unknown field names the nearest one."""
    for key in table:
        if key not in kind.__struct_fields__:
            near = difflib.get_close_matches(key, kind.__struct_fields__, n=1, cutoff=0.4)
            hint = f"did you mean {name}.{near[0]}?" if near else f"known keys: {', '.join(kind.__struct_fields__)}"
            raise ConfigError(f"unknown key {name}.{key}: {hint}")
    values = {field: table.get(field, getattr(base, field)) for field in kind.__struct_fields__}
    for field, value in values.items():
        if type(value) is not type(getattr(base, field)):
            kind_name = type(getattr(base, field)).__name__
            raise ConfigError(f"{name}.{field} is {value!r}, expected {kind_name}")
    return kind(**values)


def load_task_file(path: Path, *, token: bytes, content_hash: Any) -> tuple[TaskSpec, int]:
    """Read a task file.

    Args:
        token: address of the ledger's escrow token.
        content_hash: function (entry, args JSON) -> hash of the installed environment.

    Returns:
        The validated spec and the deposit.

    Raises:
        ConfigError: naming the key, what was seen and what is expected.
    """
    table = validate(TaskTable, read_toml(path), str(path))
    try:
        return _build_spec(table, token, content_hash, path.parent), table.escrow.deposit
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def _find_profile(given: str | dict[str, Any], folder: Path) -> ProofProfile:
    """A profile from its name or file, or from a table: fields that replace those of `base`, by default the fp32 preset."""
    if isinstance(given, str):
        return load_profile(given, folder)
    fields = dict(given)
    base = fields.pop("base", None)
    if base is not None and not isinstance(base, str):
        raise ConfigError(f"profile.base is {base!r}, expected the name of a profile, or a file")
    start = PROFILE_FP32 if base is None else load_profile(base, folder)
    found: ProofProfile = _replace(ProofProfile, start, fields, "profile")
    return found


def _build_spec(table: TaskTable, token: bytes, content_hash: Any, folder: Path) -> TaskSpec:
    preset = PRESETS.get(table.preset)
    if preset is None:
        raise ConfigError(f"preset is {table.preset!r}, expected one of {', '.join(PRESETS)}")
    temperature_milli = round(table.sampling.temperature * 1000)
    if temperature_milli / 1000 != table.sampling.temperature:
        raise ConfigError(f"sampling.temperature {table.sampling.temperature} has more than three decimals")
    args = json.dumps(table.environment.args, sort_keys=True, separators=(",", ":"))
    spec = TaskSpec(
        version=PROTOCOL_VERSION,
        name=table.name,
        base_policy=_hex("base_policy", table.base_policy, 32),
        base_manifest=_hex("base_manifest", table.base_manifest, 32),
        environment=Environment(table.environment.entry, args, content_hash(table.environment.entry, args)),
        licence_data=table.licence_data,
        licence_model=table.licence_model,
        sampling=Sampling(temperature_milli, table.sampling.max_tokens, tuple(table.sampling.stop_tokens)),
        group_size=table.group_size,
        groups_per_round=table.groups_per_round,
        slots_max=table.slots_max,
        max_staleness=table.max_staleness,
        profile=_find_profile(table.profile, folder),
        schedule=_replace(Schedule, preset.schedule, table.schedule, "schedule"),
        economics=_replace(Economics, preset.economics, table.economics, "economics"),
        verifiers_per_round=preset.verifiers_per_round,
        trainer=_hex("trainer", table.trainer, 20),
        token=token,
        adapter=table.adapter.to_adapter(),
    )
    validate_spec(spec)
    needed = compute_epoch_pay_max(spec)
    if table.escrow.deposit < needed:
        raise ConfigError(
            f"escrow.deposit is {table.escrow.deposit}, expected at least {needed} for one epoch "
            f"({spec.schedule.epoch_rounds} rounds of {spec.groups_per_round} groups at their maximum pay)"
        )
    return spec
