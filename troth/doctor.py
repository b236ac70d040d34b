"""`troth doctor`: is this machine and this environment fit for a role, and if not, why not and what to do.

Each finding is a fact with its consequence. Nothing is changed and nothing is downloaded.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
from pathlib import Path
from typing import Any, NamedTuple

#: Import names that this distribution provides; another distribution providing one of them would shadow it.
PACKAGES = (
    "protocol",
    "inference",
    "verifier",
    "trainer",
    "shardcast",
    "contracts",
    "environments",
    "models",
    "troth",
    "configs",
)
_NEEDS = {
    "relay": ("msgspec", "zmq", "web3"),
    "node": ("msgspec", "zmq", "web3", "torch", "transformers", "safetensors"),
    "verifier": ("msgspec", "zmq", "web3", "torch", "transformers", "safetensors"),
    "trainer": ("msgspec", "zmq", "web3", "torch", "transformers", "safetensors"),
    "devnet": ("eth", "aiohttp", "web3"),
}
ROLES = tuple(_NEEDS)
MEMORY_GIB_MIN = {"relay": 0.5, "devnet": 0.5, "node": 1.0, "verifier": 1.0, "trainer": 1.5}
DISK_GIB_MIN = 1.0


class Finding(NamedTuple):
    """One fact. `roles` are those that cannot run because of it; empty when it is fine."""

    name: str
    fine: bool
    observed: str
    todo: str
    roles: tuple[str, ...]


def find_shadowed() -> dict[str, list[str]]:
    """Top-level names of ours that other installed distributions also provide."""
    owners = importlib.metadata.packages_distributions()
    return {
        name: others
        for name in PACKAGES
        if (others := sorted({owner for owner in owners.get(name, []) if owner.lower() != "troth"}))
    }


def _memory_gib() -> float:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    except (ValueError, OSError):
        return 0.0


def _curve_available() -> bool:
    try:
        import zmq
    except ImportError:
        return False
    return bool(zmq.has("curve"))


def examine(directory: Path) -> list[Finding]:
    """All findings for a working directory."""
    findings = []
    version = platform.python_version()
    findings.append(Finding("python", sys.version_info[:2] == (3, 11), f"Python {version}", "use Python 3.11", ROLES))
    for package in sorted({name for names in _NEEDS.values() for name in names}):
        present = importlib.util.find_spec(package) is not None
        blocked = tuple(role for role, names in _NEEDS.items() if package in names)
        findings.append(
            Finding(
                f"package {package}",
                present,
                "installed" if present else "missing",
                "install the pinned requirements: make venv",
                blocked,
            )
        )
    curve = _curve_available()
    findings.append(
        Finding(
            "zmq curve",
            curve,
            "available" if curve else "missing",
            "use the pyzmq wheel, whose libzmq has CURVE",
            ("relay", "node", "verifier", "trainer"),
        )
    )
    shadowed = find_shadowed()
    findings.append(
        Finding(
            "import names",
            not shadowed,
            "unique" if not shadowed else f"also provided by {shadowed}",
            "uninstall the other distribution or use an environment of its own",
            ROLES,
        )
    )
    memory = _memory_gib()
    short = tuple(role for role in ROLES if memory < MEMORY_GIB_MIN[role])
    findings.append(Finding("memory", not short, f"{memory:.1f} GiB", f"needs {MEMORY_GIB_MIN}", short))
    place = directory if directory.exists() else Path.cwd()
    free = shutil.disk_usage(place).free / 2**30
    findings.append(
        Finding("disk", free >= DISK_GIB_MIN, f"{free:.1f} GiB free at {place}", f"free {DISK_GIB_MIN} GiB", ROLES)
    )
    writable = os.access(place, os.W_OK)
    findings.append(
        Finding("directory", writable, f"{place} is {'' if writable else 'not '}writable", "choose another", ROLES)
    )
    return findings


def summarise(findings: list[Finding]) -> dict[str, Any]:
    """Fitness by role with the reasons against it."""
    against: dict[str, list[str]] = {role: [] for role in ROLES}
    for finding in findings:
        if not finding.fine:
            for role in finding.roles:
                against[role].append(f"{finding.name}: {finding.observed}; {finding.todo}")
    return {
        "findings": [finding._asdict() for finding in findings],
        "fit": {role: not reasons for role, reasons in against.items()},
        "against": against,
    }
