"""Two sets of task numbers: `minimal` for one machine and tests, `mainnet` for networks of strangers.

`validate_preset` holds the relations between the numbers that make the protocol safe; a test applies it to both.
"""

from __future__ import annotations

from typing import NamedTuple

from protocol.errors import ConfigError
from protocol.task import Economics, ProofProfile, Schedule, compute_round_times


class Preset(NamedTuple):
    """Numbers of a task that do not depend on its model or data.

    Attributes:
        unbond_blocks: stake stays slashable this long after unbonding starts (set when the contracts are deployed).
        verifiers_per_round: committee size.
        verifier_pool_min: verifiers that must be registered; 2 x committee + 1 leaves room for a fresh committee.
    """

    name: str
    schedule: Schedule
    economics: Economics
    verifiers_per_round: int
    verifier_pool_min: int
    unbond_blocks: int


#: The shipped profile of the same name (configs/profiles): limits of the demo model in fp32 as `troth calibrate` chose them.
#: Honest figures are so far below the protocol's floors that the floors decide; bets are tuned for a policy one step old.
PROFILE_FP32 = ProofProfile(
    name="torch-fp32",
    dtype="float32",
    topk=128,
    chunk=32,
    exponent_mismatches_max=4,
    mantissa_mean_milli_max=250,
    mantissa_median_max=0,
    modulus_min=65_433,
    replay_tolerance_micro=500,
    replay_severe_micro=5_000,
    near_ties_sequence_max=1,
    near_ties_per_1k_max=1,
    share_null_ppm=2_000,
    share_bet_milli=387_269,
    ties_null_ppm=50,
    ties_bet_milli=5_512,
)

#: The committee is the whole pool: there is no redraw and no fresh committee on appeal.
MINIMAL = Preset(
    name="minimal",
    schedule=Schedule(
        start_delay_blocks=8,
        round_blocks=6,
        epoch_rounds=8,
        num_epochs=6,
        grace_blocks=1,
        commit_blocks=7,
        receipt_blocks=4,
        finality_blocks=1,
        verdict_commit_blocks=8,
        verdict_reveal_blocks=4,
        challenge_blocks=6,
        timeout_blocks=60,
    ),
    economics=Economics(
        reward_base=1_000,
        reward_token=100,
        verifier_fee=20_000,
        node_stake_min=10_000_000,
        verifier_stake_min=10_000_000,
        slash_bps=5_000,
        challenge_bond=1_000_000,
        audit_ppm=100_000,
        probation_groups=20,
    ),
    verifiers_per_round=3,
    verifier_pool_min=3,
    unbond_blocks=200,
)

#: For a chain with 2-second blocks: rounds of 2 minutes, epochs of a day.
MAINNET = Preset(
    name="mainnet",
    schedule=Schedule(
        start_delay_blocks=1_800,
        round_blocks=60,
        epoch_rounds=720,
        num_epochs=30,
        grace_blocks=10,
        commit_blocks=90,
        receipt_blocks=45,
        finality_blocks=30,
        verdict_commit_blocks=60,
        verdict_reveal_blocks=30,
        challenge_blocks=43_200,
        timeout_blocks=302_400,
    ),
    economics=Economics(
        reward_base=10**12,
        reward_token=10**9,
        verifier_fee=10**14,
        node_stake_min=10**20,
        verifier_stake_min=10**21,
        slash_bps=10_000,
        challenge_bond=10**19,
        audit_ppm=50_000,
        probation_groups=20,
    ),
    verifiers_per_round=3,
    verifier_pool_min=7,
    unbond_blocks=200_000,
)

PRESETS = {preset.name: preset for preset in (MINIMAL, MAINNET)}


def validate_preset(preset: Preset) -> None:
    """Check the relations a preset must keep.

    Raises:
        ConfigError: naming the relation that does not hold.
    """
    s = preset.schedule
    times = compute_round_times(s, 0, 0)
    relations = {
        "both beacons of a round are recorded within the 256 blocks a chain remembers": times.verdict_commit_deadline
        < 250,
        "the audit beacon is later than every commitment and receipt": times.audit_block
        > times.receipt_deadline - (s.finality_blocks == 0),
        "unbonding outlasts an epoch, its verdicts, its canaries and a challenged settlement": preset.unbond_blocks
        > s.epoch_rounds * s.round_blocks + times.confirm_deadline + 2 * s.challenge_blocks,
        "the timeout leaves room for a challenged settlement": s.timeout_blocks > 2 * s.challenge_blocks,
        "there are verifiers enough for a committee": preset.verifier_pool_min >= preset.verifiers_per_round,
        "no verifier decides alone": preset.verifiers_per_round >= 3,
    }
    for relation, holds in relations.items():
        if not holds:
            raise ConfigError(f"preset {preset.name}: {relation} does not hold")
