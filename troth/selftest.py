"""`troth node selftest`: would this node's rollouts be accepted?

A few slots are made with the node's own engine and settings, under an assignment that no ledger knows, and every check of
a verifier runs on all of them: structure, rewards, commitment format, then a prefill in the numeric type of the task's
profile. The checks are the ones that verifiers run, not copies. Nothing is signed, committed or uploaded.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from inference.rollouts import make_bundle, make_groups, validate_own
from protocol.checks import (
    Assignment,
    compute_near_ties_max,
    count_near_ties,
    make_replays,
    validate_match,
    validate_scored,
)
from protocol.errors import ConfigError, Reject
from protocol.messages import Group
from protocol.ports import Engine, Environment, Scored, Scorer
from protocol.task import ProofProfile, TaskSpec
from protocol.toploc import ChunkMatch, match_proofs

GROUPS_DEFAULT = 2
GROUPS_MAX = 64


class Check(NamedTuple):
    """One number against its limit. `passed` is None for a fact that is not judged."""

    name: str
    passed: bool | None
    observed: str
    limit: str
    todo: str = ""


class SelfTest(NamedTuple):
    """The answer. `accepted` is whether a verifier that audits everything would pay for all of it."""

    accepted: bool
    checks: list[Check]
    rollouts: int
    tokens: int
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        """Speed of generation, commitments included."""
        return self.tokens / max(self.seconds, 1e-9)


def make_assignment(spec: TaskSpec, slots: int, beacon: bytes) -> Assignment:
    """An assignment of nobody: chain 0, an account without a key, and a beacon that is no block's hash."""
    account = bytes(20)
    return Assignment(0, bytes(20), bytes(32), 0, account, beacon, spec.base_policy, 0, slots)


def run_selftest(
    spec: TaskSpec,
    environment: Environment,
    engine: Engine,
    scorer: Scorer,
    folder: Path,
    *,
    slots: int = GROUPS_DEFAULT,
    beacon: bytes | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> SelfTest:
    """Make `slots` groups and judge them.

    Args:
        engine: as the node would use it; a policy is loaded here.
        scorer: as a verifier of the task would use it.
        beacon: what the prompts and keys follow from; random when None.

    Raises:
        ConfigError: for a number of slots that makes no sense.
        Fault: when the policy, the engine, the environment or the scorer fails: that is no answer.
    """
    if not 1 <= slots <= GROUPS_MAX:
        raise ConfigError(f"groups is {slots}, expected 1 to {GROUPS_MAX}")
    assignment = make_assignment(spec, slots, secrets.token_bytes(32) if beacon is None else beacon)
    engine.load(folder)
    started = clock()
    made = make_groups(spec, environment, engine, assignment)
    seconds = clock() - started
    samples = [sample for group in made.groups for sample in group.samples]
    tokens = sum(len(sample.tokens) for sample in samples)
    checks = [
        Check("policy loads and generates", True, f"{len(samples)} rollouts, {tokens} tokens", "at least 1 rollout"),
        Check("speed", None, f"{tokens / max(seconds, 1e-9):.0f} tokens/s in {seconds:.2f} s", ""),
    ]
    try:
        validate_own(spec, environment, assignment, make_bundle(assignment, made.groups), made.hidden)
    except Reject as error:
        checks.append(_failed("structure, rewards, commitment format", error))
        return SelfTest(False, checks, len(samples), tokens, seconds)
    rewards = [sample.reward_micro / 1e6 for sample in samples]
    observed = f"mean reward {float(np.mean(rewards)):.3f}"
    checks.append(Check("structure, rewards, commitment format", True, observed, "as recomputed"))
    scorer.load(folder)
    replays = make_replays(spec, environment, assignment, made.groups)
    temperature = spec.sampling.temperature_milli / 1000
    scored = scorer.score(replays.requests, replays.completions, temperature=temperature, sampled=replays.sampled)
    checks += list_numbers(spec, made.groups, scored)
    try:
        validate_scored(spec, made.groups, scored)
    except Reject as error:
        checks.append(_failed("verdict", error))
        return SelfTest(False, checks, len(samples), tokens, seconds)
    checks.append(Check("verdict", True, "good", "good"))
    return SelfTest(True, checks, len(samples), tokens, seconds)


def list_numbers(spec: TaskSpec, groups: Sequence[Group], scored: Sequence[Scored]) -> list[Check]:
    """Every number a verifier compares, at its worst, with the profile's limit."""
    profile = spec.profile
    proofs = [sample.proofs for group in groups for sample in group.samples]
    gaps = np.concatenate([one.gaps for one in scored])
    tolerance = profile.replay_tolerance_micro / 1e6
    near_ties = [count_near_ties(profile, one.gaps) for one in scored]
    crowded = max(range(len(scored)), key=lambda i: near_ties[i] - compute_near_ties_max(profile, len(scored[i].gaps)))
    near_max = compute_near_ties_max(profile, len(scored[crowded].gaps))
    checks = [
        Check(
            "replay of every token",
            float(gaps.max()) <= tolerance,
            f"worst gap {gaps.max():.6f}, {int((gaps > tolerance).sum())} of {len(gaps)} tokens above the limit",
            f"{tolerance:.6f} logit/T",
            f"use the profile's engine and numeric type ({profile.name}), temperature and vocabulary",
        ),
        Check(
            "near-ties",
            near_ties[crowded] <= near_max,
            f"{near_ties[crowded]} of {len(scored[crowded].gaps)} tokens in the worst rollout, {sum(near_ties)} of "
            f"{len(gaps)} in all",
            str(near_max),
        ),
    ]
    try:
        matches = match_proofs(
            [one.hidden for one in scored],
            proofs,
            topk=profile.topk,
            chunk=profile.chunk,
            modulus_min=profile.modulus_min,
        )
    except Reject as error:
        return [*checks, _failed("activations", error)]
    chunks = [match for rollout in matches for match in rollout]
    refused = sum(not _matches(profile, match) for match in chunks)
    worst = max(chunks, key=lambda match: (match.mismatches / match.size, match.mantissa_mean))
    observed = f"{worst.mismatches}/{worst.size} mismatches, mantissa mean {worst.mantissa_mean:.3f}, median "
    limit = f"{profile.exponent_mismatches_max * worst.size // profile.topk} mismatches, mean "
    checks.append(
        Check(
            "activations, worst chunk",
            refused == 0,
            f"{observed}{worst.mantissa_median:.0f}; {refused} of {len(chunks)} chunks refused",
            f"{limit}{profile.mantissa_mean_milli_max / 1000}, median {profile.mantissa_median_max}",
            f"set compute.dtype to what the profile {profile.name} was measured with",
        )
    )
    return checks


def _matches(profile: ProofProfile, match: ChunkMatch) -> bool:
    try:
        validate_match(profile, match, ())
    except Reject:
        return False
    return True


def _failed(name: str, error: Reject) -> Check:
    return Check(
        name, False, f"{error.reason.name.lower()}: {error.what}; {error.observed}", str(error.limit), error.todo
    )


def describe(result: SelfTest) -> dict[str, Any]:
    """Plain data for `--json`."""
    return {
        "accepted": result.accepted,
        "rollouts": result.rollouts,
        "tokens": result.tokens,
        "tokens_per_s": round(result.tokens_per_s, 1),
        "checks": [check._asdict() for check in result.checks],
    }


def make_local_spec(folder: Path, entry: str, args: str, max_tokens: int, stops: list[int], groups: int) -> TaskSpec:
    """The terms of a task that is nowhere published: the minimal preset and the fp32 profile over a local policy.

    Raises:
        ConfigError: for a folder that is not there, or terms that no task may have.
    """
    import environments
    from protocol.codec import PROTOCOL_VERSION
    from protocol.presets import MINIMAL, PROFILE_FP32
    from protocol.task import Environment as EnvironmentSpec
    from protocol.task import Sampling, validate_spec
    from shardcast.folder import hash_folder
    from troth.network import LINKS

    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder: give --policy a policy's folder, or --task a task on the ledger")
    spec = TaskSpec(
        version=PROTOCOL_VERSION,
        name="selftest",
        base_policy=hash_folder(folder, links=LINKS),
        base_manifest=bytes(32),
        environment=EnvironmentSpec(entry, args, environments.content_hash(entry, args)),
        licence_data="not published",
        licence_model="not published",
        sampling=Sampling(1000, max_tokens, tuple(stops)),
        group_size=16,
        groups_per_round=max(groups, 1),
        slots_max=max(groups, 1),
        max_staleness=0,
        profile=PROFILE_FP32,
        schedule=MINIMAL.schedule,
        economics=MINIMAL.economics,
        verifiers_per_round=MINIMAL.verifiers_per_round,
        trainer=bytes(20),
        token=bytes(20),
    )
    validate_spec(spec)
    return spec
