"""`troth demo` as a stranger runs it: one command, real processes, and a summary that keeps its promises."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from troth.demo.plan import CHEATS

MINUTES = 3
SECONDS_MAX = 420


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The demo's process, run to its end from an empty directory; its state is kept where a failure can be looked at."""
    here = tmp_path_factory.mktemp("demo")
    command = ["demo", "--json", "--minutes", str(MINUTES), "--directory", str(here / "run")]
    return subprocess.run(
        [sys.executable, "-m", "troth", *command], capture_output=True, text=True, timeout=SECONDS_MAX, cwd=here
    )


@pytest.fixture(scope="module")
def summary(finished):
    return json.loads(finished.stdout)


pytestmark = [pytest.mark.slow, pytest.mark.timeout(SECONDS_MAX + 60)]


def test_it_ends_well_and_stdout_is_one_json_object(finished):
    assert finished.returncode == 0, finished.stderr[-4000:]
    assert json.loads(finished.stdout)["failures"] == []
    assert "Traceback" not in finished.stderr


def test_the_summary_has_what_is_documented(summary):
    assert 0.0 <= summary["reward_first"] <= 1.0
    assert 0.0 <= summary["reward_last"] <= 1.0
    assert summary["policies"] > 1
    assert summary["rollouts"]["accepted"] > 0
    assert sum(summary["rollouts"]["rejected"].values()) > 0
    assert summary["seconds"] > 0
    assert set(summary["escrow"]) >= {"deposit", "paid", "refunded", "burned", "remaining", "conserved"}


def test_every_cheat_is_caught_and_slashed(summary):
    cheats = {cheat["kind"]: cheat for cheat in summary["cheats"]}
    assert set(cheats) == set(CHEATS)
    for kind, cheat in cheats.items():
        assert cheat["caught_by"], kind
        assert cheat["slashed"] > 0, kind
        assert cheat["node"].startswith("0x"), kind


def test_nobody_honest_is_rejected_or_slashed_and_all_are_paid(summary):
    assert summary["honest_rejected"] == 0
    assert set(summary["claims"]) == {f"{kind}{i}" for kind in ("node", "verifier") for i in range(3)}
    for name, claim in summary["claims"].items():
        assert claim["slashed"] == 0, name
        assert claim["claimed"] > 0, name


def test_no_money_is_made_or_lost(summary):
    escrow = summary["escrow"]
    assert escrow["conserved"] is True
    assert escrow["deposit"] == escrow["paid"] + escrow["refunded"] + escrow["burned"] + escrow["remaining"]
    assert escrow["paid"] == sum(claim["claimed"] for claim in summary["claims"].values())
    assert escrow["held_by_contract"] == escrow["remaining"]
