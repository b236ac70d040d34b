"""Relations between the numbers of each preset, and that breaking one is noticed."""

from __future__ import annotations

import msgspec
import pytest

from protocol.errors import ConfigError
from protocol.presets import PRESETS, validate_preset


@pytest.mark.parametrize("preset", PRESETS.values(), ids=lambda preset: preset.name)
def test_relations_hold(preset):
    validate_preset(preset)


@pytest.mark.parametrize("preset", PRESETS.values(), ids=lambda preset: preset.name)
@pytest.mark.parametrize(
    ("field", "value", "relation"),
    [
        ("commit_blocks", 250, "256 blocks"),
        ("challenge_blocks", 10**6, "unbonding outlasts"),
        ("timeout_blocks", 1, "timeout leaves room"),
    ],
)
def test_a_broken_schedule_is_noticed(preset, field, value, relation):
    broken = preset._replace(schedule=msgspec.structs.replace(preset.schedule, **{field: value}))
    with pytest.raises(ConfigError, match=relation):
        validate_preset(broken)


def test_a_lone_verifier_is_noticed():
    with pytest.raises(ConfigError, match="no verifier decides alone"):
        validate_preset(PRESETS["minimal"]._replace(verifiers_per_round=1))


def test_mainnet_leaves_room_for_a_fresh_committee():
    preset = PRESETS["mainnet"]
    assert preset.verifier_pool_min >= 2 * preset.verifiers_per_round + 1
