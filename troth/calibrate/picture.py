"""A picture of how far other policies are from honest work: one line per alternative, two statistics side by side.

Each line spans the middle 90 % of rollouts with a tick at the median; the dashed line is the limit or null that the profile
sets. Written by hand as SVG, so that it needs no package and is the same bytes for the same figures.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from protocol.task import ProofProfile
from troth.calibrate.statistics import Floats, Observed, average_by_rollout

WIDTH, ROW, TOP, LEFT, PANEL, GAP = 900, 18, 66, 170, 340, 30
#: Values below it are drawn at it: there are no zeros on a logarithmic axis.
LOWEST = 1e-4
_DECADES = range(-4, 3)
HONEST, OTHER, LINE = "#1f77b4", "#d62728", "#555"


class _Panel(NamedTuple):
    """One statistic: its title, the values of each rollout, and the dashed line."""

    title: str
    values: Mapping[str, Floats]
    limit: float


def format_picture(
    profile: ProofProfile, honest: Mapping[str, Observed], alternatives: Mapping[str, Observed], title: str
) -> str:
    """The picture as SVG: honest pairs first, then alternatives in the order of their share."""
    ordered = sorted(alternatives, key=lambda name: float(alternatives[name].shares.mean()))
    rows = {**honest, **{name: alternatives[name] for name in ordered}}
    panels = (
        _Panel(
            "differing entries, share by rollout (dashed: null)",
            {name: _average(one, one.shares) for name, one in rows.items()},
            profile.share_null_ppm / 1e6,
        ),
        _Panel(
            "mantissa mean in ulps, worst chunk (dashed: limit)",
            {name: _worst(one) for name, one in rows.items()},
            profile.mantissa_mean_milli_max / 1e3,
        ),
    )
    height = TOP + ROW * len(rows) + 30
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="11">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="10" y="20" font-size="14">{_escape(title)}</text>',
        f'<text x="10" y="38" fill="{HONEST}">honest engine pairs</text>',
        f'<text x="120" y="38" fill="{OTHER}">other policies</text>',
    ]
    for index, name in enumerate(rows):
        colour = HONEST if name in honest else OTHER
        parts.append(
            f'<text x="{LEFT - 8}" y="{_y(index) + 4}" text-anchor="end" fill="{colour}">{_escape(name)}</text>'
        )
    for number, panel in enumerate(panels):
        parts += _draw(panel, LEFT + number * (PANEL + GAP), height, set(honest))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _average(one: Observed, values: Floats) -> Floats:
    return average_by_rollout(values, one.chunk_rollouts, one.num_rollouts)


def _worst(one: Observed) -> Floats:
    worst = np.zeros(one.num_rollouts)
    finite = np.minimum(one.means, 10.0 ** _DECADES[-1])
    np.maximum.at(worst, one.chunk_rollouts, finite)
    return worst


def _y(index: int) -> int:
    return TOP + ROW * index + ROW // 2


def _x(value: float, left: int) -> float:
    low, high = _DECADES[0], _DECADES[-1]
    place = (math.log10(max(value, LOWEST)) - low) / (high - low)
    return left + PANEL * min(max(place, 0.0), 1.0)


def _draw(panel: _Panel, left: int, height: int, honest: set[str]) -> list[str]:
    bottom = height - 24
    parts = [f'<text x="{left}" y="{TOP - 10}" font-weight="bold">{_escape(panel.title)}</text>']
    for decade in _DECADES:
        x = _x(10.0**decade, left)
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{bottom}" stroke="#ddd"/>')
        label = "0" if 10.0**decade <= LOWEST else f"{10.0**decade:g}"
        parts.append(f'<text x="{x:.1f}" y="{bottom + 14}" text-anchor="middle">{label}</text>')
    for index, (name, values) in enumerate(panel.values.items()):
        colour, y = HONEST if name in honest else OTHER, _y(index)
        low, middle, high = (_x(float(value), left) for value in np.percentile(values, (5, 50, 95)))
        width = max(high - low, 1.0)
        parts.append(f'<rect x="{low:.1f}" y="{y - 4}" width="{width:.1f}" height="8" fill="{colour}" opacity="0.45"/>')
        parts.append(f'<rect x="{middle - 1:.1f}" y="{y - 6}" width="2" height="12" fill="{colour}"/>')
    x = _x(panel.limit, left)
    parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{bottom}" stroke="{LINE}" stroke-dasharray="4 3"/>')
    return parts


def _escape(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
