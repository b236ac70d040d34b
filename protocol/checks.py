"""The checks a submission must pass, cheap to costly. Each raises `Reject` with what was observed and the limit.

`validate_envelope` .. `validate_groups` run on 100 % of a submission and need no model; `validate_scored` judges what one
prefill under the round's policy gave, on the leaves the lottery drew. Nodes call the same functions on their own work
before they commit to it, the trainer calls them on everything it trains on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from protocol.assignment import compute_prompt_index, compute_sample_key, compute_slot_seed
from protocol.codec import PROTOCOL_VERSION, decode
from protocol.episodes import compute_sampled, validate_turns
from protocol.errors import Fault, Ignore, Reason, Reject
from protocol.ledger.state import Commitment, LedgerState, Task
from protocol.messages import (
    Bundle,
    Group,
    compute_bundle_bytes_max,
    compute_bundle_root,
    make_domain,
    unseal_body,
)
from protocol.ports import Environment, SampleRequest, Scored
from protocol.rounds import get_quotas, get_round_beacon, get_round_policy
from protocol.task import ProofProfile, TaskSpec
from protocol.toploc import ChunkMatch, match_proofs, validate_format


class Assignment(NamedTuple):
    """What the ledger says a node had to do in a round."""

    chain_id: int
    ledger: bytes
    task: bytes
    round_index: int
    account: bytes
    beacon: bytes
    policy: bytes
    policy_version: int
    quota: int

    def seed(self, slot: int) -> bytes:
        """Seed of one slot."""
        return compute_slot_seed(
            chain_id=self.chain_id,
            ledger=self.ledger,
            task=self.task,
            round_index=self.round_index,
            beacon=self.beacon,
            policy=self.policy,
            account=self.account,
            slot=slot,
        )


def get_assignment(
    state: LedgerState, task: Task, round_index: int, account: bytes, *, chain_id: int, ledger: bytes
) -> Assignment:
    """A node's assignment in a round.

    Raises:
        Ignore: when the round has no beacon (it is void) or no policy yet.
        Reject: `UNREGISTERED` when the account has no slots in this round.
    """
    beacon, policy = get_round_beacon(state, task, round_index), get_round_policy(task, round_index)
    if beacon is None or policy is None:
        raise Ignore(f"round {round_index} has no recorded beacon: it is void unless somebody records it in time")
    quota = get_quotas(state, task, round_index).get(account, 0)
    if not quota:
        raise Reject(
            Reason.UNREGISTERED,
            f"account 0x{account.hex()} has no slots in round {round_index}",
            todo="join the task before the epoch, keep the minimum stake, and do not be suspended",
        )
    return Assignment(chain_id, ledger, task.task, round_index, account, beacon, policy.policy, policy.version, quota)


def open_bundle(spec: TaskSpec, assignment: Assignment, commitment: Commitment, data: bytes, public: bytes) -> Bundle:
    """Size, schema, signature, identity, inclusion, staleness and quota: everything before looking into the groups.

    Args:
        data: the signed envelope as fetched.
        public: the node's network key as registered.

    Raises:
        Reject: with the first rule that is broken.
    """
    bytes_max = compute_bundle_bytes_max(spec, spec.slots_max)
    domain = make_domain(assignment.chain_id, assignment.ledger, assignment.task, Bundle)
    body = unseal_body(data, domain, public, bytes_max=bytes_max)
    bundle = decode(Bundle, body, bytes_max=bytes_max)
    if bundle.version != PROTOCOL_VERSION:
        raise Reject(Reason.MALFORMED, "bundle version", observed=bundle.version, limit=PROTOCOL_VERSION)
    seen = (bundle.task, bundle.round, bundle.account)
    named = (assignment.task, assignment.round_index, assignment.account)
    if seen != named:
        raise Reject(
            Reason.DUPLICATE,
            "bundle was made for another task, round or node",
            observed=f"task {seen[0].hex()[:12]} round {seen[1]} account {seen[2].hex()[:12]}",
            limit=f"task {named[0].hex()[:12]} round {named[1]} account {named[2].hex()[:12]}",
        )
    root = compute_bundle_root(bundle)
    if root != commitment.root or len(bundle.groups) != commitment.leaves:
        raise Reject(
            Reason.ROOT_MISMATCH,
            "bundle is not what was committed on the ledger",
            observed=f"root {root.hex()[:16]}, {len(bundle.groups)} leaves",
            limit=f"root {commitment.root.hex()[:16]}, {commitment.leaves} leaves",
        )
    if not bundle.policy == commitment.policy == assignment.policy:
        raise Reject(
            Reason.STALE_POLICY,
            f"round {assignment.round_index} uses policy version {assignment.policy_version}",
            observed=f"bundle {bundle.policy.hex()[:16]}, commitment {commitment.policy.hex()[:16]}",
            limit=assignment.policy.hex()[:16],
            todo=f"fetch policy version {assignment.policy_version} before the round",
        )
    return bundle


def validate_quota(assignment: Assignment, bundle: Bundle) -> None:
    """A submission must fill its quota exactly, else hard prompts could be left out.

    Raises:
        Reject: `QUOTA` (unpaid, not slashable).
    """
    if len(bundle.groups) != assignment.quota:
        raise Reject(
            Reason.QUOTA,
            f"round {assignment.round_index} is incomplete",
            observed=f"{len(bundle.groups)} groups",
            limit=f"{assignment.quota} groups",
            todo="declare fewer slots if they cannot be filled in time",
        )


def validate_group(spec: TaskSpec, environment: Environment, assignment: Assignment, index: int, group: Group) -> None:
    """Slot order, prompt, exact group size, and every rollout's structure and reward.

    Raises:
        Reject: with the rule, slot and sample.
        Fault: when the environment itself fails (never held against the node).
    """
    if group.slot != index:
        raise Reject(
            Reason.SLOT_GAP, "slots must be contiguous from 0", observed=group.slot, limit=index, where=(index,)
        )
    expected = compute_prompt_index(assignment.seed(index), environment.num_prompts)
    if group.prompt_index != expected:
        raise Reject(
            Reason.ASSIGNMENT,
            f"slot {index} was assigned another prompt",
            observed=group.prompt_index,
            limit=expected,
            where=(index,),
        )
    if len(group.samples) != spec.group_size:
        raise Reject(
            Reason.GROUP_SIZE,
            f"slot {index} has a wrong number of rollouts",
            observed=len(group.samples),
            limit=spec.group_size,
            where=(index,),
        )
    for number, sample in enumerate(group.samples):
        where = (index, number)
        validate_tokens(spec, environment, group.prompt_index, sample.tokens, where)
        reward = environment.reward(group.prompt_index, sample.tokens)
        if not 0 <= reward <= 1_000_000:
            raise Fault(f"environment returned a reward of {reward}, expected 0 to 1,000,000 millionths")
        if sample.reward_micro != reward:
            raise Reject(
                Reason.REWARD,
                f"claimed reward of slot {index} sample {number} is not what the environment gives",
                observed=sample.reward_micro,
                limit=reward,
                where=where,
            )


def validate_tokens(
    spec: TaskSpec, environment: Environment, prompt_index: int, tokens: Sequence[int], where: tuple[int, ...]
) -> None:
    """A completion has valid tokens, the environment's own answers, and its right end (protocol.episodes).

    Raises:
        Reject: `LENGTH`, `TOKEN_RANGE`, `TERMINATION` or `RESPONSE`.
        Fault: when the environment itself fails.
    """
    vocab_size = environment.vocab_size
    if not 1 <= len(tokens) <= spec.sampling.max_tokens:
        raise Reject(
            Reason.LENGTH,
            "completion length",
            observed=len(tokens),
            limit=f"1 to {spec.sampling.max_tokens}",
            where=where,
        )
    if min(tokens) < 0 or max(tokens) >= vocab_size:
        bad = next(token for token in tokens if not 0 <= token < vocab_size)
        raise Reject(Reason.TOKEN_RANGE, "token id", observed=bad, limit=f"0 to {vocab_size - 1}", where=where)
    validate_turns(spec, environment, prompt_index, tokens, where)


def validate_groups(
    spec: TaskSpec, environment: Environment, assignment: Assignment, bundle: Bundle, hidden: int
) -> None:
    """All checks on all groups that need no model.

    Args:
        hidden: hidden size of the policy, which fixes the length of short commitments.

    Raises:
        Reject: with the first rule that is broken.
    """
    for index, group in enumerate(bundle.groups):
        validate_group(spec, environment, assignment, index, group)
        for number, sample in enumerate(group.samples):
            try:
                validate_format(
                    sample.proofs,
                    num_tokens=len(compute_sampled(spec, environment, group.prompt_index, sample.tokens)),
                    hidden=hidden,
                    topk=spec.profile.topk,
                    chunk=spec.profile.chunk,
                    modulus_min=spec.profile.modulus_min,
                )
            except Reject as error:
                error.where = (index, number)
                raise


class Replays(NamedTuple):
    """What a verifier prefills: one entry per rollout in each list.

    Attributes:
        requests: prompts rebuilt from the environment, keys from the beacon.
        completions: the claimed tokens.
        sampled: positions of the tokens that were sampled, the others being the environment's.
    """

    requests: list[SampleRequest]
    completions: list[tuple[int, ...]]
    sampled: list[NDArray[np.int64]]


def make_replays(spec: TaskSpec, environment: Environment, assignment: Assignment, groups: Sequence[Group]) -> Replays:
    """What it takes to audit groups: all samples of all groups in order."""
    replays = Replays([], [], [])
    for group in groups:
        prompt, seed = environment.prompt(group.prompt_index), assignment.seed(group.slot)
        for number, sample in enumerate(group.samples):
            replays.requests.append(SampleRequest(prompt, compute_sample_key(seed, number)))
            replays.completions.append(sample.tokens)
            replays.sampled.append(compute_sampled(spec, environment, group.prompt_index, sample.tokens))
    return replays


def count_sampled(spec: TaskSpec, environment: Environment, bundle: Bundle) -> int:
    """Sampled tokens of a submission: what is paid by the token."""
    return sum(
        len(compute_sampled(spec, environment, group.prompt_index, sample.tokens))
        for group in bundle.groups
        for sample in group.samples
    )


def validate_match(profile: ProofProfile, match: ChunkMatch, where: tuple[int, ...]) -> None:
    """Compare one chunk with the profile's limits, which scale with the number of entries in a short chunk.

    Raises:
        Reject: `COMMITMENT_MISMATCH`, severe when most signs and exponents differ.
    """
    mismatches_max = profile.exponent_mismatches_max * match.size // profile.topk
    failed = (
        match.mismatches > mismatches_max
        or match.mantissa_mean * 1000 > profile.mantissa_mean_milli_max
        or match.mantissa_median > profile.mantissa_median_max
    )
    if failed:
        raise Reject(
            Reason.COMMITMENT_MISMATCH,
            "activations are not those of the round's policy",
            observed=f"{match.mismatches}/{match.size} mismatches, mantissa mean {match.mantissa_mean:.3f}, "
            f"median {match.mantissa_median:.0f}",
            limit=f"{mismatches_max} mismatches, mean {profile.mantissa_mean_milli_max / 1000}, "
            f"median {profile.mantissa_median_max}",
            todo="generate with the round's policy, dtype and engine pair of the task's profile",
            where=where,
            severe=match.mismatches * 2 > match.size,
        )


def match_groups(
    profile: ProofProfile, groups: Sequence[Group], scored: Sequence[Scored]
) -> list[tuple[ChunkMatch, ...]]:
    """Compare the commitments of audited groups with a verifier's own prefill: per sample, its chunks.

    Raises:
        Reject: `COMMITMENT_FORMAT`.
        Fault: when the verifier's own activations are not finite.
    """
    return match_proofs(
        [s.hidden for s in scored],
        [sample.proofs for group in groups for sample in group.samples],
        topk=profile.topk,
        chunk=profile.chunk,
        modulus_min=profile.modulus_min,
    )


def validate_scored(
    spec: TaskSpec,
    groups: Sequence[Group],
    scored: Sequence[Scored],
    matches: Sequence[Sequence[ChunkMatch]] | None = None,
) -> None:
    """Judge audited groups by a verifier's own prefill: commitment match and Gumbel replay at every position.

    Args:
        scored: one per sample, in the order of `make_replays`.
        matches: what `match_groups` said of these, where it was asked already.

    Raises:
        Reject: `COMMITMENT_MISMATCH`, `REPLAY` or `NEAR_TIES`; the severest failure is raised first.
        Fault: when the verifier's own numbers are not finite.
    """
    profile = spec.profile
    places = [(group.slot, number) for group in groups for number in range(len(group.samples))]
    failures = [*_replay_failures(profile, places, scored)]
    matches = match_groups(profile, groups, scored) if matches is None else matches
    for place, chunks in zip(places, matches, strict=True):
        for number, match in enumerate(chunks):
            try:
                validate_match(profile, match, (*place, number * profile.chunk))
            except Reject as error:
                failures.append(error)
    if failures:
        raise max(failures, key=lambda error: error.severe)


def _replay_failures(
    profile: ProofProfile, places: Sequence[tuple[int, int]], scored: Sequence[Scored]
) -> list[Reject]:
    """The worst replay gap above tolerance, and too many near-ties within it: in a rollout, and in all of them together."""
    tolerance = profile.replay_tolerance_micro / 1e6
    worst, worst_where, failures = 0.0, (0, 0, 0), []
    crowded: list[tuple[str, int, int, tuple[int, ...]]] = []
    near_ties = [count_near_ties(profile, one.gaps) for one in scored]
    for (slot, number), one, observed in zip(places, scored, near_ties, strict=True):
        position = int(one.gaps.argmax())
        if one.gaps[position] > worst:
            worst, worst_where = float(one.gaps[position]), (slot, number, position)
        limit = compute_near_ties_max(profile, len(one.gaps))
        if observed > limit:
            what = f"too many near-ties in slot {slot}, sample {number}, of {len(one.gaps)} sampled tokens"
            crowded.append((what, observed, limit, (slot, number)))
    if worst > tolerance:
        failures.append(
            Reject(
                Reason.REPLAY,
                "a token is not the one that sampling gives at slot {}, sample {}, sampled token {}".format(
                    *worst_where
                ),
                observed=f"score gap {worst:.6f}",
                limit=f"{tolerance:.6f} logit/T",
                todo="sample with the assigned key at the task's temperature, and change nothing afterwards",
                where=worst_where,
                severe=worst * 1e6 > profile.replay_severe_micro,
            )
        )
    num_tokens = sum(len(one.gaps) for one in scored)
    limit = compute_near_ties_max(profile, num_tokens, num_rollouts=len(scored))
    if sum(near_ties) > limit:
        what = f"too many near-ties in {len(scored)} audited rollouts of {num_tokens} sampled tokens together"
        crowded.append((what, sum(near_ties), limit, ()))
    todo = "generate with the dtype and engine pair of the task's profile, and take no runner-up for the winner"
    for what, observed, limit, where in crowded:
        failures.append(Reject(Reason.NEAR_TIES, what, observed=observed, limit=limit, todo=todo, where=where))
    return failures


def count_near_ties(profile: ProofProfile, gaps: NDArray[np.float64]) -> int:
    """Sampled tokens that miss the replay within tolerance."""
    return int(((gaps > 0) & (gaps <= profile.replay_tolerance_micro / 1e6)).sum())


def compute_near_ties_max(profile: ProofProfile, num_tokens: int, *, num_rollouts: int = 1) -> int:
    """Near-ties that rollouts may have together.

    A rollout has what is expected of its length, and `near_ties_sequence_max` for how much honest counts scatter. The scatter
    of independent counts grows with the square root of their number, so that is what several rollouts get together: without
    it every rollout, however short, would be a free choice (docs/replay.md).

    Args:
        num_tokens: sampled tokens in all of them.
    """
    roots = math.isqrt(max(num_rollouts, 1) - 1) + 1  # the square root, rounded up
    return profile.near_ties_sequence_max * roots + profile.near_ties_per_1k_max * num_tokens // 1000
