"""What files the policies of a task may consist of: whole weights, or an adapter of exactly the task's terms.

`require_form` judges a manifest's list of files before anything is fetched; `validate_content` an assembled adapter.
`measure_adapter` and `require_small` are what an initiator and a trainer ask before a task costs anybody anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from models.adapter import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    compute_file_sizes,
    validate_adapter_folder,
)
from models.policy import CONFIG, WEIGHTS
from protocol.adapter import Adapter
from protocol.errors import ConfigError, Fault
from protocol.task import TaskSpec

#: An adapter is for fetching little: at most this share of the base policy's bytes, in 1/10000.
ADAPTER_SHARE_BPS_MAX = 100
#: Base policies below this many bytes are fetched in a moment anyway; their adapters may be of any size.
SMALL_BASE_BYTES = 16 << 20


class AdapterSize(NamedTuple):
    """What a new version of an adapter costs to fetch, beside what the base policy costs once. Bytes."""

    adapter_bytes: int
    base_bytes: int

    @property
    def share_bps(self) -> int:
        """The adapter's share of the base, in 1/10000, rounded up."""
        return -(-self.adapter_bytes * 10_000 // max(1, self.base_bytes))

    def describe(self) -> str:
        """For people."""
        return (
            f"an adapter has {self.adapter_bytes} bytes, {self.share_bps / 100:.2f} % of the base's {self.base_bytes}"
        )


def require_form(spec: TaskSpec, version: int, files: Mapping[str, int], base: Path | None) -> None:
    """Check the names (and an adapter's sizes) of a policy's files.

    Args:
        files: size in bytes by name, as a manifest lists them.
        base: folder of version 0; needed for later versions of a task with an adapter.

    Raises:
        Fault: when a policy of this version must consist of other files.
    """
    if version and spec.adapter.rank:
        assert base is not None
        expected = compute_file_sizes(spec.adapter, spec.base_policy, base)
        if files != expected:
            raise Fault(
                f"policy {version} lists {_describe(files)}, the task's adapter of rank {spec.adapter.rank} consists of "
                f"{_describe(expected)}: it is not used"
            )
        return
    if odd := sorted({ADAPTER_CONFIG, ADAPTER_WEIGHTS} & files.keys()):
        raise Fault(f"policy {version} lists {odd[0]}, but it must be whole: it is not used")
    if missing := sorted({CONFIG, WEIGHTS} - files.keys()):
        raise Fault(f"policy {version} lists no {missing[0]}, but it must be whole: it is not used")


def _describe(files: Mapping[str, int]) -> str:
    listed = [f"{name} ({size} bytes)" for name, size in sorted(files.items())[:4]]
    return ", ".join(listed) + (f" and {len(files) - 4} more" if len(files) > 4 else "")


def validate_content(spec: TaskSpec, folder: Path) -> None:
    """Check an assembled adapter, linked to its base: terms, shapes, finite numbers. Raises `Fault`."""
    validate_adapter_folder(folder, spec.adapter, spec.base_policy)


def measure_adapter(adapter: Adapter, base: Path) -> AdapterSize:
    """Bytes of every adapter with these terms on a base policy.

    Raises:
        Fault: when the base has no such modules, or is not a policy.
    """
    sizes = compute_file_sizes(adapter, bytes(32), base)
    try:
        weights = (base / WEIGHTS).stat().st_size
    except OSError as error:
        raise Fault(f"{base / WEIGHTS} cannot be read: {error.strerror}") from None
    return AdapterSize(sum(sizes.values()), weights)


def require_fitting(spec: TaskSpec, base: Path) -> None:
    """Check a task's adapter against the folder of its base policy; nothing to check where policies are whole.

    Raises:
        ConfigError: when the base has no such modules, or the adapter is too large to be worth being one.
    """
    if spec.adapter.rank:
        try:
            size = measure_adapter(spec.adapter, base)
        except Fault as error:
            raise ConfigError(f"the task's adapter does not fit its base policy {base}: {error}") from None
        require_small(size)


def require_small(size: AdapterSize) -> None:
    """Refuse an adapter that is not worth being one. Raises `ConfigError`."""
    if size.base_bytes > SMALL_BASE_BYTES and size.adapter_bytes * 10_000 > ADAPTER_SHARE_BPS_MAX * size.base_bytes:
        raise ConfigError(
            f"{size.describe()}, limit {ADAPTER_SHARE_BPS_MAX / 100:g} %: choose a lower adapter.rank or fewer "
            "adapter.modules, or publish whole policies"
        )
