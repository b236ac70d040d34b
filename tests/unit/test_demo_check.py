"""The judge of a demo finds each thing that can be wrong with a run, and nothing wrong with a good one."""

from __future__ import annotations

import copy

import pytest

from protocol.ledger.state import Task
from troth.demo.check import find_failures, render
from troth.demo.plan import HELD_OUT_MIN, make_plan, write_task
from troth.task_file import load_task_file

KINDS = ("stale-policy", "false-reward", "token-editor", "sleeper")


def _cheat(kind):
    return {
        "node": "0x" + "11" * 20,
        "kind": kind,
        "caught_by": "replay",
        "slashed": 10_000,
        "groups_good_before": 0,
        "leaves_audited": 4,
        "leaves_total": 8,
        "caught_round": 5,
        "caught_at_probability": 0.05 if kind == "sleeper" else 1.0,
        "audited_when_caught": "2/4",
    }


SUMMARY = {
    "task": "ab" * 32,
    "reward_first": 0.25,
    "reward_last": 0.75,
    "held_out": HELD_OUT_MIN,
    "policies": 40,
    "rollouts": {"accepted": 9_000, "rejected": {"replay": 64}},
    "cheats": [_cheat(kind) for kind in KINDS],
    "honest_rejected": 0,
    "honest_late": 1,
    "claims": {
        "node0": {"account": "0x" + "22" * 20, "claimed": 700, "received": 700, "slashed": 0},
        "verifier0": {"account": "0x" + "33" * 20, "claimed": 300, "slashed": 0},
    },
    "escrow": {
        "deposit": 5_000,
        "paid": 1_000,
        "refunded": 3_500,
        "burned": 500,
        "remaining": 0,
        "conserved": True,
        "held_by_contract": 0,
    },
    "seconds": 240.0,
}


@pytest.fixture
def plan():
    return make_plan(0, 3, "", 0.0)


@pytest.fixture
def task(plan, tmp_path):
    file = tmp_path / "task.toml"
    file.write_text(write_task(plan, base_policy="ab" * 32, base_manifest="cd" * 32, trainer="0x" + "ef" * 20))
    spec, deposit = load_task_file(file, token=bytes(20), content_hash=lambda entry, args: bytes(32))
    task = Task(bytes(32), bytes(20), 100, deposit, spec)
    task.closed = True
    task.claimed = {bytes.fromhex("22" * 20): 700, bytes.fromhex("33" * 20): 300}
    return task


def test_a_good_run_has_no_failure(plan, task):
    assert find_failures(plan, SUMMARY, task) == []


def _set(*path, value):
    def change(summary, task):
        here = summary
        for key in path[:-1]:
            here = here[key]
        here[path[-1]] = value

    return change


def _drop_cheat(summary, task):
    del summary["cheats"][0]


def _reopen(summary, task):
    task.closed = False


def _claim_more(summary, task):
    task.claimed[bytes(20)] = 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_set("reward_last", value=0.54), "mean reward grew by 0.290, expected at least 0.3"),
        (_set("reward_last", value=0.1), "mean reward grew by -0.150"),
        (_set("held_out", value=HELD_OUT_MIN - 1), f"evaluated on {HELD_OUT_MIN - 1} held-out prompts"),
        *[(_set("cheats", i, "caught_by", value=None), f"cheat {kind} was not caught") for i, kind in enumerate(KINDS)],
        *[(_set("cheats", i, "slashed", value=0), f"cheat {kind} was not caught") for i, kind in enumerate(KINDS)],
        (_drop_cheat, "cheat stale-policy was not caught and slashed"),
        (_set("cheats", 3, "caught_at_probability", value=1.0), "the sleeper was caught on probation"),
        (_set("honest_rejected", value=16), "16 rollouts of honest nodes were rejected"),
        (_set("claims", "node0", "slashed", value=5), "honest node0 was slashed by 5"),
        (_set("claims", "verifier0", "slashed", value=5), "honest verifier0 was slashed by 5"),
        (_set("claims", "node0", "claimed", value=0), "node0 claimed nothing"),
        (_set("claims", "verifier0", "claimed", value=0), "verifier0 claimed nothing"),
        (_set("escrow", "conserved", value=False), "deposit is not paid + refunded + burned + remaining"),
        (_set("escrow", "held_by_contract", value=1), "the escrow holds 1, its books say 0"),
        (_set("escrow", "paid", value=999), "the escrow paid 999, claims add up to 1000"),
        (_claim_more, "the escrow paid 1000, claims add up to 1001"),
        (_reopen, "the task was not closed"),
    ],
)
def test_each_failure_is_found_and_only_that_one(plan, task, change, said):
    summary = copy.deepcopy(SUMMARY)
    change(summary, task)
    failures = find_failures(plan, summary, task)
    assert len(failures) == 1
    assert said in failures[0]


def test_a_short_run_need_not_learn_but_must_catch(task):
    short = make_plan(0, 3, "", 1.5)
    summary = copy.deepcopy(SUMMARY)
    summary["reward_last"] = summary["reward_first"]
    assert find_failures(short, summary, task) == []
    summary["cheats"][1]["slashed"] = 0
    assert find_failures(short, summary, task) == ["cheat false-reward was not caught and slashed"]


def test_several_failures_are_all_told(plan, task):
    summary = copy.deepcopy(SUMMARY)
    summary["honest_rejected"] = 1
    summary["escrow"]["conserved"] = False
    task.closed = False
    assert len(find_failures(plan, summary, task)) == 3


def test_the_text_names_every_cheat_claim_and_the_escrow():
    text = render(SUMMARY, {})
    for word in (*KINDS, "node0", "verifier0", "conserved", "0.250 first -> 0.750 last", "9000 accepted", "replay 64"):
        assert word in text
    broken = copy.deepcopy(SUMMARY)
    broken["escrow"]["conserved"] = False
    assert "NOT CONSERVED" in render(broken, {})
