"""Demo plans: what the options mean, and that the task file of every plan is one that people could publish."""

from __future__ import annotations

import pytest

from protocol.errors import ConfigError
from protocol.presets import MINIMAL
from protocol.task import compute_epoch_pay_max, compute_round_times
from troth.cheats import CHEATS as ADVERSARIES
from troth.demo.plan import CHEATS, EPOCHS_DEFAULT, make_plan, write_task
from troth.devnet import UNBOND_BLOCKS
from troth.task_file import load_task_file


def test_the_default_plan_has_every_cheat_and_full_length():
    plan = make_plan(7, 3, "", 0.0)
    assert (plan.seed, plan.cheats, plan.num_epochs, plan.is_default_length) == (7, CHEATS, EPOCHS_DEFAULT, True)
    assert plan.participants[0] == "initiator"
    assert plan.nodes == ["node0", "node1", "node2", *CHEATS]
    assert len(set(plan.participants)) == len(plan.participants)


def test_every_cheat_of_the_demo_is_an_adversary_that_nodes_know():
    assert set(CHEATS) <= set(ADVERSARIES)


@pytest.mark.parametrize(
    ("cheats", "expected"),
    [
        ("none", ()),
        ("sleeper", ("sleeper",)),
        ("sleeper,token-editor", ("sleeper", "token-editor")),
        ("sleeper,,none,", ("sleeper",)),
    ],
)
def test_cheats_are_chosen_by_name(cheats, expected):
    assert make_plan(0, 1, cheats, 0.0).cheats == expected


def test_an_unknown_cheat_is_named_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"unknown cheat 'sleper': known are stale-policy, .*sleeper, or none"):
        make_plan(0, 1, "sleper", 0.0)


def test_a_cheat_takes_part_once():
    with pytest.raises(ConfigError, match="once"):
        make_plan(0, 1, "sleeper,sleeper", 0.0)


@pytest.mark.parametrize(("minutes", "epochs"), [(0.1, 1), (1.5, 1), (3.0, 4), (60.0, 147)])
def test_minutes_become_whole_epochs_and_at_least_one(minutes, epochs):
    plan = make_plan(0, 1, "none", minutes)
    assert plan.num_epochs == epochs
    assert plan.is_default_length == (epochs >= EPOCHS_DEFAULT)


@pytest.mark.parametrize("minutes", [0.0, 0.1, 3.0, 60.0])
def test_the_task_file_of_every_plan_is_valid_and_pays_for_all_its_epochs(tmp_path, minutes):
    plan = make_plan(0, 8, "", minutes)
    path = tmp_path / "task.toml"
    path.write_text(write_task(plan, base_policy="ab" * 32, base_manifest="cd" * 32, trainer="0x" + "ef" * 20))
    spec, deposit = load_task_file(path, token=bytes(20), content_hash=lambda entry, args: bytes(32))
    assert spec.schedule.num_epochs == plan.num_epochs
    assert deposit // compute_epoch_pay_max(spec) == plan.num_epochs
    assert spec.trainer == bytes.fromhex("ef" * 20)


def test_stake_stays_slashable_on_the_devnet_until_an_epoch_of_the_plan_is_settled(tmp_path):
    path = tmp_path / "task.toml"
    path.write_text(
        write_task(make_plan(0, 3, "", 0.0), base_policy="ab" * 32, base_manifest="cd" * 32, trainer="0x" + "ef" * 20)
    )
    schedule = load_task_file(path, token=bytes(20), content_hash=lambda entry, args: bytes(32))[0].schedule
    judged = compute_round_times(schedule, 0, schedule.epoch_rounds).confirm_deadline
    assert judged + 2 * MINIMAL.schedule.challenge_blocks < UNBOND_BLOCKS
