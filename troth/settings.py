"""Settings of a role: TOML files merged left to right, then `--key value` overrides, then validation.

An unknown or mistyped key fails with the nearest known one; nothing is silently ignored. Secrets are never settings:
passwords come from the environment or a prompt (troth.keystore).
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from protocol.errors import ConfigError

#: Largest settings file that is read, in bytes.
FILE_BYTES_MAX = 1 << 20


class Section(BaseModel):
    """Base of all settings: immutable, strict about unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class LedgerSettings(Section):
    """How to reach the ledger. `deployment` is the path of a deployment.json; without one, a devnet is asked for its own."""

    rpc: str = "http://127.0.0.1:8545"
    deployment: str = ""
    chain_id: int | None = None
    finality_blocks: int = Field(0, ge=0, le=1000)
    poll_seconds: float = Field(0.25, gt=0, le=60)


class NetworkSettings(Section):
    """Where this participant serves. An empty bind means that it only dials out."""

    bind: str = ""
    advertise: str = ""


class VllmSettings(Section):
    """What a node's vLLM is built with; see docs/engines.md. Zero leaves a size to the engine."""

    tensor_parallel_size: int = Field(1, ge=1, le=64)
    pipeline_parallel_size: int = Field(1, ge=1, le=64)
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1)
    max_num_seqs: int = Field(256, ge=1, le=4096)
    max_model_len: int = Field(0, ge=0, le=1 << 22)
    enforce_eager: bool = False
    kv_cache_gib: float = Field(0.0, ge=0, le=1 << 14)


class ComputeSettings(Section):
    """What the model runs on. `engine` is what a node generates with; verifiers and trainers always use torch.

    `batch_tokens_max` is the torch engine's budget: prompt and completion tokens whose keys and values are held at once.
    """

    device: str = "cpu"
    dtype: str = "float32"
    threads: int = Field(1, ge=1, le=256)
    batch_tokens_max: int = Field(65_536, ge=16, le=1 << 24)
    engine: Literal["torch", "vllm"] = "torch"
    vllm: VllmSettings = VllmSettings()


class VerifierSettings(Section):
    """What judging may use, beyond what the judging process has when a job begins; see docs/verifier.md.

    `job_seconds` bounds one job on the clock and, per thread, in CPU time; less when the verdict is due before.
    `allow_network` serves where neither user namespaces nor seccomp filters are to be had.
    """

    memory_mib: int = Field(8192, ge=64, le=1 << 24)
    job_seconds: float = Field(600.0, gt=0, le=86_400)
    quarantine_mib: int = Field(64, ge=0, le=1 << 20)
    allow_network: bool = False


class TrainerSettings(Section):
    """Optimiser settings; the defaults are those of the demo model."""

    base: str = ""
    learning_rate: float = Field(2e-4, gt=0, lt=1)
    warmup_steps: int = Field(10, ge=0)
    total_steps: int = Field(60, ge=1)
    epochs: int = Field(2, ge=1, le=16)
    kl: float = Field(0.0, ge=0)
    entropy: float = Field(0.0, ge=0)
    minibatch_groups: int = Field(4, ge=0)
    groups_min: int = Field(0, ge=0)
    tokens_max: int = Field(16_384, ge=1)


class RoleSettings(Section):
    """All settings of one process. An empty `keystore` is keystore.json in `directory`; an empty `task` is the newest."""

    directory: str = "run"
    keystore: str = ""
    task: str = ""
    slots: int = Field(0, ge=0)
    stake: int = Field(0, ge=0)
    environment_folders: list[str] = []
    ledger: LedgerSettings = LedgerSettings()
    network: NetworkSettings = NetworkSettings()
    compute: ComputeSettings = ComputeSettings()
    verifier: VerifierSettings = VerifierSettings()
    trainer: TrainerSettings = TrainerSettings()

    @property
    def keystore_path(self) -> Path:
        """Where this participant's keystore is."""
        return Path(self.keystore) if self.keystore else Path(self.directory) / "keystore.json"


S = TypeVar("S", bound=Section)


def read_toml(path: Path) -> dict[str, Any]:
    """Parse a TOML file.

    Raises:
        ConfigError: when it is missing, too long or not TOML.
    """
    try:
        if path.stat().st_size > FILE_BYTES_MAX:
            raise ConfigError(f"{path} has {path.stat().st_size} bytes, expected at most {FILE_BYTES_MAX}")
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` wins; tables are merged key by key."""
    merged = dict(base)
    for key, value in over.items():
        if isinstance(value, Mapping) and isinstance(merged.get(key), Mapping):
            merged[key] = merge(merged[key], value)
        else:
            merged[key] = value
    return merged


def parse_overrides(arguments: Iterable[str]) -> dict[str, Any]:
    """Turn `--network.bind tcp://... --slots 4` into a nested table. Values are read as TOML, else as text.

    Raises:
        ConfigError: for an argument that is not a `--key value` pair.
    """
    table: dict[str, Any] = {}
    pending = list(arguments)
    while pending:
        flag = pending.pop(0)
        if not flag.startswith("--") or len(flag) < 3:
            raise ConfigError(f"unexpected argument {flag!r}: overrides are pairs like --ledger.poll_seconds 0.5")
        name, equals, text = flag[2:].partition("=")
        if not equals:
            if not pending:
                raise ConfigError(f"{flag} has no value")
            text = pending.pop(0)
        try:
            value = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            value = text
        key = name.replace("-", "_")
        if key in _text_keys(RoleSettings) and not isinstance(value, str):
            value = text  # a task or directory may be called 5958, or 12e4
        here = table
        *parents, leaf = key.split(".")
        for parent in parents:
            here = here.setdefault(parent, {})
        here[leaf] = value
    return table


def _text_keys(model: type[BaseModel], prefix: str = "") -> set[str]:
    """Dotted names of the settings that are text."""
    keys = set()
    for name, field in model.model_fields.items():
        if field.annotation is str:
            keys.add(prefix + name)
        elif isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            keys |= _text_keys(field.annotation, f"{prefix}{name}.")
    return keys


def _known_keys(model: type[BaseModel], prefix: str = "") -> list[str]:
    keys = []
    for name, field in model.model_fields.items():
        keys.append(prefix + name)
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            keys += _known_keys(field.annotation, f"{prefix}{name}.")
    return keys


def validate(model: type[S], table: Mapping[str, Any], source: str) -> S:
    """Validate a table.

    Raises:
        ConfigError: with one line per problem; an unknown key names the nearest known one.
    """
    try:
        return model.model_validate(table)
    except ValidationError as error:
        lines = []
        for problem in error.errors(include_url=False):
            key = ".".join(str(part) for part in problem["loc"])
            if problem["type"] == "extra_forbidden":
                near = difflib.get_close_matches(key, _known_keys(model), n=1, cutoff=0.4)
                hint = f"did you mean {near[0]}?" if near else f"known keys: {', '.join(sorted(model.model_fields))}"
                lines.append(f"unknown key {key}: {hint}")
            elif problem["type"] == "missing":
                lines.append(f"{key} is missing")
            else:
                lines.append(f"{key}: {problem['msg']}, got {problem['input']!r}")
        raise ConfigError(f"{source}: " + "; ".join(lines)) from None


def load_settings(files: Iterable[Path], overrides: Iterable[str] = ()) -> RoleSettings:
    """Settings of a role from files and overrides. Raises `ConfigError`."""
    table: dict[str, Any] = {}
    names = []
    for path in files:
        table = merge(table, read_toml(path))
        names.append(str(path))
    table = merge(table, parse_overrides(overrides))
    return validate(RoleSettings, table, " + ".join(names) or "settings")
