"""A task: what an initiator publishes, its bounds, its hash, and the block schedule every role derives from it.

All numbers in a task are integers (thousandths, millionths, blocks, token units), because a task is hashed and signed.
The canonical bytes of `TaskSpec` are on the ledger beside the escrow; `compute_terms` is the part the contract enforces.
"""

from __future__ import annotations

from typing import NamedTuple

from protocol.adapter import WHOLE_POLICIES, Adapter, validate_adapter
from protocol.codec import PROTOCOL_VERSION, Message, decode, encode, tagged_hash
from protocol.errors import ConfigError, Reason, Reject

#: Longest canonical task, in bytes.
SPEC_BYTES_MAX = 4096

#: Types of weights and activations that profiles are measured for.
PROFILE_DTYPES = ("float32", "bfloat16")

#: The strictest numeric limits a task may set; honest work in fp32 stays well inside them.
REPLAY_TOLERANCE_MICRO_MIN = 500
REPLAY_SEVERE_RATIO_MIN = 5
MANTISSA_MEAN_MILLI_MIN = 250
SHARE_NULL_PPM_MIN = 2_000
TIES_NULL_PPM_MIN = 50
#: Largest bet of the sequential test times its null: one observation at 0 never costs more than 9/10 of the evidence.
BET_MAX = 0.9


class Environment(Message, frozen=True):
    """Where prompts and rewards come from.

    Attributes:
        entry: name of an installed environment, never code or a path.
        args: canonical JSON object of its arguments.
        content_hash: what the installed environment must hash to (`environments.content_hash`).
    """

    entry: str
    args: str
    content_hash: bytes


class Sampling(Message, frozen=True):
    """How tokens are drawn. There is no truncation (top-k, top-p) and there are no stop strings.

    Attributes:
        temperature_milli: temperature in thousandths, above 0.
        max_tokens: longest completion, in tokens.
        stop_tokens: ids that end a completion (they are part of it).
    """

    temperature_milli: int
    max_tokens: int
    stop_tokens: tuple[int, ...]


class ProofProfile(Message, frozen=True):
    """What a verifier measures and where its limits are, for one model family, dtype and engine pair.

    Attributes:
        name: for people.
        dtype: torch dtype of weights and activations that the limits were measured for.
        topk: entries of the last hidden state per chunk that are committed to.
        chunk: tokens per commitment.
        exponent_mismatches_max: per chunk, of `topk` entries.
        mantissa_mean_milli_max: mean absolute mantissa difference per chunk, in thousandths of a bf16 ulp.
        mantissa_median_max: median of the same, in ulps.
        modulus_min: lowest commitment modulus an honest prover can produce.
        replay_tolerance_micro: largest Gumbel score gap of an honest near-tie, in millionths of logit / T.
        replay_severe_micro: above this gap a miss is slashable.
        near_ties_sequence_max / near_ties_per_1k_max: misses within tolerance that a rollout may have: the first number,
            and the second for every thousand sampled tokens of it.
        share_null_ppm: null hypothesis of the sequential test (protocol.evidence): the expected share of a chunk's
            compared entries whose bf16 patterns differ is at most this, in millionths.
        share_bet_milli: what the test bets on each chunk against it, in thousandths.
        ties_null_ppm / ties_bet_milli: the same for the chance that a sampled token misses the replay at all.
    """

    name: str
    dtype: str
    topk: int
    chunk: int
    exponent_mismatches_max: int
    mantissa_mean_milli_max: int
    mantissa_median_max: int
    modulus_min: int
    replay_tolerance_micro: int
    replay_severe_micro: int
    near_ties_sequence_max: int
    near_ties_per_1k_max: int
    share_null_ppm: int
    share_bet_milli: int
    ties_null_ppm: int
    ties_bet_milli: int


class Schedule(Message, frozen=True):
    """Block counts. Round r starts at S = start_block + r * round_blocks; deadlines are inclusive. See `RoundTimes`.

    Attributes:
        start_delay_blocks: from publication to round 0.
        round_blocks: from one round's start to the next.
        epoch_rounds: rounds per epoch.
        num_epochs: epochs in the task.
        grace_blocks: a policy must be eligible this long before a round starts to be that round's policy.
        commit_blocks: S to the last block for commitment roots.
        receipt_blocks: from there to the last block for data receipts.
        finality_blocks: from there to the block whose hash is the audit beacon.
        verdict_commit_blocks: from there to the last block for verdict commitments.
        verdict_reveal_blocks: from there to the last block for reveals.
        challenge_blocks: challenge window of a settlement.
        timeout_blocks: after the task's last epoch can be settled, when it may be closed without a settlement.
    """

    start_delay_blocks: int
    round_blocks: int
    epoch_rounds: int
    num_epochs: int
    grace_blocks: int
    commit_blocks: int
    receipt_blocks: int
    finality_blocks: int
    verdict_commit_blocks: int
    verdict_reveal_blocks: int
    challenge_blocks: int
    timeout_blocks: int


class Economics(Message, frozen=True):
    """Money, in the smallest unit of the escrow token, and the numbers that deter.

    Attributes:
        reward_base: per verified rollout.
        reward_token: per verified completion token (bounded by max_tokens).
        verifier_fee: per judged round and verifier that agreed with the outcome.
        node_stake_min / verifier_stake_min: below it an account does not take part.
        slash_bps: share of a cheat's stake that is burned, in 1/10000.
        challenge_bond: posted to challenge a settlement.
        audit_ppm: probability that a leaf is audited, in millionths.
        probation_groups: groups that must be judged good before a node leaves p = 1.
    """

    reward_base: int
    reward_token: int
    verifier_fee: int
    node_stake_min: int
    verifier_stake_min: int
    slash_bps: int
    challenge_bond: int
    audit_ppm: int
    probation_groups: int


class TaskSpec(Message, frozen=True):
    """One RL job. See the classes of its parts.

    Attributes:
        version: protocol version this task is pinned to.
        base_policy: content hash of policy version 0.
        base_manifest: hash of the signed manifest that describes its bytes.
        licence_data / licence_model: SPDX expressions or names; required.
        group_size: rollouts per prompt (G).
        groups_per_round: slots that are paid in one round, over all nodes.
        slots_max: most slots of one node in one round.
        max_staleness: policy versions between a rollout's policy and the trainer's at the time of use.
        verifiers_per_round: size of the drawn committee.
        trainer: ledger account that may record policies.
        token: address of the escrow token, 20 bytes.
        adapter: whether policies are whole or adapters on the base policy.
    """

    version: int
    name: str
    base_policy: bytes
    base_manifest: bytes
    environment: Environment
    licence_data: str
    licence_model: str
    sampling: Sampling
    group_size: int
    groups_per_round: int
    slots_max: int
    max_staleness: int
    profile: ProofProfile
    schedule: Schedule
    economics: Economics
    verifiers_per_round: int
    trainer: bytes
    token: bytes
    adapter: Adapter = WHOLE_POLICIES


class Terms(NamedTuple):
    """The part of a task that the contract enforces, in the order of the Solidity struct `Terms`."""

    start_delay_blocks: int
    round_blocks: int
    epoch_rounds: int
    num_epochs: int
    commit_blocks: int
    receipt_blocks: int
    finality_blocks: int
    verdict_commit_blocks: int
    verdict_reveal_blocks: int
    challenge_blocks: int
    timeout_blocks: int
    slots_max: int
    slash_bps: int
    leaf_pay_max: int
    epoch_pay_max: int
    node_stake_min: int
    verifier_stake_min: int
    challenge_bond: int
    trainer: bytes
    base_policy: bytes
    base_manifest: bytes


class RoundTimes(NamedTuple):
    """Block numbers of one round. Each deadline is the last block in which the step is accepted."""

    start: int
    commit_deadline: int
    receipt_deadline: int
    audit_block: int
    verdict_commit_deadline: int
    verdict_reveal_deadline: int
    opening_deadline: int
    confirm_deadline: int


def compute_round_times(schedule: Schedule, start_block: int, round_index: int) -> RoundTimes:
    """Deadlines of round `round_index` of a task whose round 0 starts at `start_block`."""
    start = start_block + round_index * schedule.round_blocks
    commit = start + schedule.commit_blocks
    receipt = commit + schedule.receipt_blocks
    audit = receipt + schedule.finality_blocks
    verdict_commit = audit + schedule.verdict_commit_blocks
    reveal = verdict_commit + schedule.verdict_reveal_blocks
    opening = reveal + schedule.verdict_reveal_blocks
    confirm = opening + schedule.verdict_commit_blocks  # fresh verifiers have as long as the committee had
    return RoundTimes(start, commit, receipt, audit, verdict_commit, reveal, opening, confirm)


def compute_rollout_pay(spec: TaskSpec, num_tokens: int) -> int:
    """Pay of one verified rollout: base plus per-token rate, bounded by max_tokens."""
    return spec.economics.reward_base + spec.economics.reward_token * min(num_tokens, spec.sampling.max_tokens)


def compute_leaf_pay_max(spec: TaskSpec) -> int:
    """The most one group can earn."""
    return spec.group_size * compute_rollout_pay(spec, spec.sampling.max_tokens)


def compute_epoch_pay_max(spec: TaskSpec) -> int:
    """The most one epoch can cost: every slot at its maximum and every verifier's fee."""
    per_round = spec.groups_per_round * compute_leaf_pay_max(spec)
    per_round += spec.verifiers_per_round * spec.economics.verifier_fee
    return spec.schedule.epoch_rounds * per_round


def compute_terms(spec: TaskSpec) -> Terms:
    """The contract's view of a task; it must equal what the ledger was given."""
    s, e = spec.schedule, spec.economics
    return Terms(
        s.start_delay_blocks,
        s.round_blocks,
        s.epoch_rounds,
        s.num_epochs,
        s.commit_blocks,
        s.receipt_blocks,
        s.finality_blocks,
        s.verdict_commit_blocks,
        s.verdict_reveal_blocks,
        s.challenge_blocks,
        s.timeout_blocks,
        spec.slots_max,
        e.slash_bps,
        compute_leaf_pay_max(spec),
        compute_epoch_pay_max(spec),
        e.node_stake_min,
        e.verifier_stake_min,
        e.challenge_bond,
        spec.trainer,
        spec.base_policy,
        spec.base_manifest,
    )


def compute_spec_hash(spec: TaskSpec) -> bytes:
    """Canonical hash of a task."""
    return tagged_hash("task", encode(spec))


def decode_spec(data: bytes) -> TaskSpec:
    """Parse and validate a task from the ledger.

    Raises:
        Reject: when the bytes are malformed or the task breaks a rule of `validate_spec`.
    """
    spec = decode(TaskSpec, data, bytes_max=SPEC_BYTES_MAX)
    try:
        validate_spec(spec)
    except ConfigError as error:
        raise Reject(Reason.MALFORMED, f"task breaks a rule: {error}") from None
    return spec


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def _bounded(name: str, value: int, low: int, high: int) -> None:
    _require(low <= value <= high, f"{name} is {value}, expected {low} to {high}")


def validate_spec(spec: TaskSpec) -> None:
    """Check a task's own consistency.

    Raises:
        ConfigError: naming the field, what was seen and what is expected.
    """
    _require(
        spec.version == PROTOCOL_VERSION,
        f"version is {spec.version}, this software speaks {PROTOCOL_VERSION}",
    )
    _require(1 <= len(spec.name) <= 64, f"name has {len(spec.name)} characters, expected 1 to 64")
    for name in ("base_policy", "base_manifest"):
        _require(len(getattr(spec, name)) == 32, f"{name} has {len(getattr(spec, name))} bytes, expected 32")
    _require(len(spec.environment.content_hash) == 32, "environment.content_hash must be 32 bytes")
    for name in ("trainer", "token"):
        _require(len(getattr(spec, name)) == 20, f"{name} has {len(getattr(spec, name))} bytes, expected 20")
    for name in ("licence_data", "licence_model"):
        text = getattr(spec, name).strip()
        _require(
            0 < len(text) <= 128,
            f"{name} is required: name the licence under which it is used, for example Apache-2.0",
        )
    _require(len(spec.environment.args) <= 1024, "environment.args is longer than 1024 characters")
    s = spec.sampling
    _bounded("sampling.temperature_milli", s.temperature_milli, 1, 10_000)
    _bounded("sampling.max_tokens", s.max_tokens, 1, 131_072)
    _require(1 <= len(s.stop_tokens) <= 16, "sampling.stop_tokens must name 1 to 16 token ids")
    _bounded("group_size", spec.group_size, 2, 256)
    _bounded("groups_per_round", spec.groups_per_round, 1, 65_535)
    _bounded("slots_max", spec.slots_max, 1, min(spec.groups_per_round, 4096))
    _bounded("max_staleness", spec.max_staleness, 0, 64)
    _bounded("verifiers_per_round", spec.verifiers_per_round, 1, 64)
    p = spec.profile
    _bounded("profile.topk", p.topk, 1, 1024)
    _bounded("profile.chunk", p.chunk, 1, 1024)
    _bounded("profile.modulus_min", p.modulus_min, 32_769, 65_497)
    _bounded("profile.exponent_mismatches_max", p.exponent_mismatches_max, 0, p.topk)
    # Below these an honest rollout would fail: an initiator could have nodes slashed by its own task's limits.
    _bounded("profile.replay_tolerance_micro", p.replay_tolerance_micro, REPLAY_TOLERANCE_MICRO_MIN, 10**8)
    severe_min = REPLAY_SEVERE_RATIO_MIN * p.replay_tolerance_micro
    _bounded("profile.replay_severe_micro", p.replay_severe_micro, severe_min, 10**9)
    _bounded("profile.mantissa_mean_milli_max", p.mantissa_mean_milli_max, MANTISSA_MEAN_MILLI_MIN, 127_000)
    _bounded("profile.mantissa_median_max", p.mantissa_median_max, 0, 127)
    _bounded("profile.near_ties_sequence_max", p.near_ties_sequence_max, 1, 1000)
    _bounded("profile.near_ties_per_1k_max", p.near_ties_per_1k_max, 1, 1000)
    _require(p.dtype in PROFILE_DTYPES, f"profile.dtype is {p.dtype!r}, expected one of {', '.join(PROFILE_DTYPES)}")
    for name, null_min in (("share", SHARE_NULL_PPM_MIN), ("ties", TIES_NULL_PPM_MIN)):
        null, bet = getattr(p, f"{name}_null_ppm"), getattr(p, f"{name}_bet_milli")
        _bounded(f"profile.{name}_null_ppm", null, null_min, 900_000)
        _bounded(f"profile.{name}_bet_milli", bet, 0, int(BET_MAX * 10**9 / null))
    t = spec.schedule
    for name in t.__struct_fields__:
        _bounded(
            f"schedule.{name}",
            getattr(t, name),
            0 if name in ("grace_blocks", "finality_blocks") else 1,
            10**7,
        )
    span = t.commit_blocks + t.receipt_blocks + t.finality_blocks
    _require(
        span + t.verdict_commit_blocks < 250,
        f"a round's beacons must be recorded within 256 blocks: its deadlines span {span + t.verdict_commit_blocks}",
    )
    e = spec.economics
    _bounded("economics.audit_ppm", e.audit_ppm, 1, 1_000_000)
    _bounded("economics.slash_bps", e.slash_bps, 1, 10_000)
    for name in e.__struct_fields__:
        _bounded(f"economics.{name}", getattr(e, name), 0, 2**96 - 1)
    _require(e.node_stake_min > 0 and e.verifier_stake_min > 0, "economics: minimum stakes must be above 0")
    _require(
        e.reward_base + e.reward_token > 0, "economics: reward_base and reward_token are both 0, nobody would be paid"
    )
    validate_adapter(spec.adapter)
    _bounded("what an epoch can cost", compute_epoch_pay_max(spec), 1, 2**128 - 1)
