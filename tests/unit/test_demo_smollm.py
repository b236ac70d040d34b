"""The plan of the SmolLM2 run: its pace, its task file, and what its environment is made of."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from protocol.presets import MINIMAL
from protocol.task import compute_epoch_pay_max, compute_round_times
from troth.cheats import CHEATS
from troth.demo import smollm
from troth.demo.smollm import EPOCHS_MAX, EPOCHS_MIN, ROUND_BLOCKS, ROUND_SECONDS_MAX, ROUND_SECONDS_MIN, make_plan
from troth.devnet import UNBOND_BLOCKS
from troth.smollm import TOKENIZER_SHA256
from troth.task_file import load_task_file

ROOT = Path(__file__).parents[2]


def load(plan, tmp_path):
    path = tmp_path / "task.toml"
    path.write_text(plan.task_text({"base_policy": "ab" * 32, "base_manifest": "cd" * 32, "trainer": "0x" + "ef" * 20}))
    return load_task_file(path, token=bytes(20), content_hash=lambda entry, args: bytes(32))


@pytest.mark.parametrize("seconds", [1.0, 20.0, 60.0, 133.0, 10_000.0])
@pytest.mark.parametrize("minutes", [5.0, 45.0, 600.0])
def test_a_slower_machine_gets_longer_rounds_and_never_too_few(seconds, minutes):
    plan = make_plan(0, minutes).fit(seconds)
    round_seconds = plan.block_seconds * ROUND_BLOCKS
    assert ROUND_SECONDS_MIN - 1.5 <= round_seconds <= ROUND_SECONDS_MAX + 1.5
    assert EPOCHS_MIN <= plan.num_epochs <= EPOCHS_MAX
    assert plan.is_default_length == (plan.num_rounds >= smollm.ROUNDS_DEFAULT)
    if EPOCHS_MIN < plan.num_epochs < EPOCHS_MAX:
        assert minutes * 60 - plan.epoch_rounds * round_seconds < plan.seconds_ahead
        assert plan.seconds_ahead <= minutes * 60 + plan.block_seconds
    assert plan.start_blocks * plan.block_seconds >= smollm.START_SECONDS
    assert f"about {plan.seconds_ahead / 60:.0f} minutes" in plan.describe_pace()


def test_pace_follows_the_measurement():
    slow, fast = (make_plan(0, 45.0).fit(seconds / smollm.ROUND_EVALUATIONS) for seconds in (160.0, 80.0))
    assert slow.block_seconds == pytest.approx(2 * fast.block_seconds, abs=0.15)
    assert slow.num_epochs < fast.num_epochs


def test_the_task_file_is_valid_and_pays_for_all_its_epochs(tmp_path):
    plan = make_plan(3, 45.0).fit(50.0)
    spec, deposit = load(plan, tmp_path)
    assert deposit // compute_epoch_pay_max(spec) == plan.num_epochs == spec.schedule.num_epochs
    assert (spec.adapter.rank, spec.adapter.modules) == (smollm.RANK, smollm.MODULES)
    # What the nodes are asked is what the evaluation asks, but for the questions that are kept back.
    assert spec.environment.args == plan.arguments
    assert json.loads(spec.environment.args)["tokenizer"] == TOKENIZER_SHA256
    assert (spec.sampling.max_tokens, spec.sampling.stop_tokens) == (plan.max_tokens, (plan.stop_token,))


def test_deadlines_leave_room_for_the_next_round_and_for_slashing(tmp_path):
    schedule = load(make_plan(0, 45.0).fit(50.0), tmp_path)[0].schedule
    times = compute_round_times(schedule, 0, 0)
    # The openings of a round are over before the next one's work is audited, so probation ends after one round.
    assert times.opening_deadline < compute_round_times(schedule, 0, 1).audit_block
    judged = compute_round_times(schedule, 0, schedule.epoch_rounds).confirm_deadline
    assert judged + 2 * MINIMAL.schedule.challenge_blocks < UNBOND_BLOCKS
    settled = times.confirm_deadline - times.receipt_deadline + 2 * schedule.challenge_blocks
    assert settled < smollm.SETTLE_BLOCKS


def test_the_cheat_is_one_that_nodes_know_and_slots_cover_a_round_without_it(tmp_path):
    plan = make_plan(0, 45.0)
    assert set(plan.cheats) <= set(CHEATS)
    assert plan.num_nodes * plan.slots >= smollm.GROUPS_PER_ROUND
    assert len(plan.nodes) == plan.num_nodes + len(plan.cheats)


def test_the_trainer_settings_are_ones_that_a_trainer_takes():
    from troth.settings import RoleSettings, validate

    table = tomllib.loads(make_plan(0, 45.0).fit(50.0).trainer_table())
    settings = validate(RoleSettings, {"trainer": table}, "plan")
    assert settings.trainer.groups_min == smollm.GROUPS_PER_ROUND
    assert settings.trainer.minibatch_groups == 0


def test_the_example_is_the_same_task_with_other_deadlines(tmp_path):
    example = tmp_path / "example.toml"
    head = f'base_policy = "{"ab" * 32}"\nbase_manifest = "{"cd" * 32}"\ntrainer = "0x{"ef" * 20}"\n'
    example.write_text(head + (ROOT / "examples" / "smollm" / "task.toml").read_text())
    spec, deposit = load_task_file(example, token=bytes(20), content_hash=lambda entry, args: bytes(32))
    ours = load(make_plan(0, 45.0), tmp_path)[0]
    for field in ("name", "environment", "sampling", "adapter", "group_size", "groups_per_round", "profile"):
        assert getattr(spec, field) == getattr(ours, field), field
    assert deposit // compute_epoch_pay_max(spec) >= spec.schedule.num_epochs
