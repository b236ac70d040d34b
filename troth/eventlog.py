"""What a role tells its operator: `events.jsonl` (one object a line) and `metrics.prom` (Prometheus text).

Both are only written here and only read by people, dashboards and benchmarks; no role reads another's.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

#: The event file is started anew beyond this size; one older file is kept.
FILE_BYTES_MAX = 64 << 20


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    if isinstance(value, str | int | float | bool) or value is None:
        return value
    return str(value)


class EventLog:
    """Callable as `log(kind, fields)`."""

    def __init__(self, directory: Path, role: str) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._path = directory / "events.jsonl"
        self._metrics = directory / "metrics.prom"
        self._role = role
        self._counts: dict[str, int] = {}
        self._gauges: dict[str, float] = {}
        self._sums: dict[str, float] = {}
        self._file = self._path.open("a", encoding="utf-8")
        self._metrics_due = 0.0

    def __call__(self, kind: str, fields: dict[str, Any]) -> None:
        line = json.dumps({"time": round(time.time(), 3), "role": self._role, "kind": kind, **_plain(fields)})
        self._file.write(line + "\n")
        self._file.flush()
        self._counts[kind] = self._counts.get(kind, 0) + 1
        for name, value in fields.items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                continue
            if name.startswith("cpu_") or name.endswith("_bytes"):
                self._sums[name] = self._sums.get(name, 0.0) + value
            else:
                self._gauges[f"{kind}_{name}"] = float(value)
        if self._file.tell() > FILE_BYTES_MAX:
            self._file.close()
            self._path.replace(self._path.with_suffix(".old.jsonl"))
            self._file = self._path.open("a", encoding="utf-8")
        if time.monotonic() >= self._metrics_due:
            self.write_metrics()
            self._metrics_due = time.monotonic() + 2.0

    def write_metrics(self) -> None:
        """Write the Prometheus text file, atomically."""
        label = f'{{role="{self._role}"}}'
        lines = [f'troth_events_total{{role="{self._role}",kind="{k}"}} {v}' for k, v in sorted(self._counts.items())]
        lines += [f"troth_{name}_total{label} {value:.6f}" for name, value in sorted(self._sums.items())]
        lines += [f"troth_{name}{label} {value:g}" for name, value in sorted(self._gauges.items())]
        lines.append(f"troth_process_cpu_seconds_total{label} {time.process_time():.3f}")
        temporary = self._metrics.with_suffix(".tmp")
        temporary.write_text("\n".join(lines) + "\n")
        temporary.replace(self._metrics)

    def close(self) -> None:
        """Write what is left and close."""
        self.write_metrics()
        self._file.close()
