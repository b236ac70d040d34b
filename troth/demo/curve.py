"""The reward curve of a run: one point per recorded policy, from the trainer's public lineage records.

Points are on disk as soon as they are known, so a run that is interrupted leaves the curve of what it did. The picture is
drawn from the same points and nothing else.
"""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import NamedTuple

COLUMNS = ("policy", "seconds", "rollouts", "reward")
WIDTH, HEIGHT = 640, 360
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 16, 40, 44


class Point(NamedTuple):
    """One training step.

    Attributes:
        policy: version that the step made.
        seconds: from the task's publication to when the policy was first seen on the ledger.
        rollouts: verified rollouts that it was trained on.
        reward: their mean reward, 0 to 1; they were made by older policies.
    """

    policy: int
    seconds: float
    rollouts: int
    reward: float


class Curve:
    """Points of a run, in the order of policies.

    Args:
        folder: gets `curve.csv` with every point, and `curve.svg` when the run ends.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self.points: list[Point] = []

    def add(self, point: Point) -> None:
        """Add a point and put all of them on disk."""
        self.points.append(point)
        (self._folder / "curve.csv").write_text(format_csv(self.points))

    def draw(self, title: str, held_out: tuple[float, ...] = ()) -> None:
        """Write the picture; see `format_svg`."""
        (self._folder / "curve.svg").write_text(format_svg(self.points, title, held_out))


def format_csv(points: list[Point]) -> str:
    """The points as CSV with a head line."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows((p.policy, round(p.seconds, 1), p.rollouts, round(p.reward, 4)) for p in points)
    return out.getvalue()


def read_csv(text: str) -> list[Point]:
    """What `format_csv` wrote. Raises `ValueError` when the text is something else."""
    rows = list(csv.reader(io.StringIO(text)))
    if not rows or tuple(rows[0]) != COLUMNS:
        raise ValueError(f"first line is {rows[:1]}, expected {','.join(COLUMNS)}")
    return [Point(int(policy), float(seconds), int(n), float(reward)) for policy, seconds, n, reward in rows[1:]]


def format_svg(points: list[Point], title: str, held_out: tuple[float, ...] = ()) -> str:
    """The points as a picture.

    Args:
        held_out: rewards of the first and, when known, of the last policy on held-out prompts, drawn at the two ends.
    """
    last = max((point.policy for point in points), default=1)

    def x(policy: float) -> float:
        return _LEFT + (WIDTH - _LEFT - _RIGHT) * policy / max(last, 1)

    def y(reward: float) -> float:
        return _TOP + (HEIGHT - _TOP - _BOTTOM) * (1 - reward)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{_LEFT}" y="20" font-size="14">{_escape(title)}</text>',
        f'<text x="{(_LEFT + WIDTH - _RIGHT) / 2}" y="{HEIGHT - 8}" text-anchor="middle">policy version</text>',
    ]
    for step in range(6):
        level = step / 5
        parts.append(
            f'<line x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y(level):.1f}" y2="{y(level):.1f}" stroke="#ddd"/>'
        )
        parts.append(f'<text x="{_LEFT - 8}" y="{y(level) + 4:.1f}" text-anchor="end">{level:.1f}</text>')
    for policy in range(0, last + 1, max(1, -(-last // 10))):
        parts.append(f'<text x="{x(policy):.1f}" y="{HEIGHT - _BOTTOM + 18}" text-anchor="middle">{policy}</text>')
    line = " ".join(f"{x(point.policy):.1f},{y(point.reward):.1f}" for point in points)
    parts.append(f'<polyline points="{line}" fill="none" stroke="#1f77b4" stroke-width="2"/>')
    parts += [f'<circle cx="{x(p.policy):.1f}" cy="{y(p.reward):.1f}" r="3" fill="#1f77b4"/>' for p in points]
    for policy, reward in zip((0, last), held_out, strict=False):
        parts.append(
            f'<rect x="{x(policy) - 5:.1f}" y="{y(reward) - 5:.1f}" width="10" height="10" fill="none" stroke="#d62728" '
            'stroke-width="2"/>'
        )
    legend = "dots: verified rollouts of each training step" + ("; squares: held-out prompts" if held_out else "")
    parts.append(f'<text x="{WIDTH - _RIGHT}" y="36" text-anchor="end" font-size="11">{legend}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _escape(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
