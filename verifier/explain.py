"""Every check on one rollout, with what was observed and the limit: for the node that made it and for any third party.

Runs the same rules as the judge, on public data, and goes on after a failure where the next check still makes sense.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from protocol.checks import (
    Assignment,
    compute_near_ties_max,
    count_near_ties,
    get_assignment,
    make_replays,
    validate_group,
    validate_match,
    validate_quota,
    validate_tokens,
)
from protocol.episodes import compute_sampled
from protocol.errors import Fault, Ignore, Reject
from protocol.ledger.state import LedgerState, Task
from protocol.messages import Bundle, Group, Sample, compute_bundle_bytes_max
from protocol.ports import Environment, Scored, Scorer
from protocol.rounds import get_audited, get_committee, get_outcomes
from protocol.toploc import ChunkMatch, match_proofs, validate_format
from protocol.verdict import Status
from verifier.evidence import open_served


class Check(NamedTuple):
    """One line of an explanation. `passed` is None for facts that are not checks."""

    name: str
    passed: bool | None
    observed: str
    limit: str
    text: str = ""


class Numbers(NamedTuple):
    """What the prefill of a rollout gave.

    Attributes:
        sampled: int64 [sampled], positions in the completion.
        tokens: the completion.
        matches: one a chunk of sampled tokens.
    """

    sampled: NDArray[np.int64]
    tokens: tuple[int, ...]
    scored: Scored
    matches: tuple[ChunkMatch, ...]


class Rollout(NamedTuple):
    """Which rollout."""

    round_index: int
    account: bytes
    slot: int
    sample: int


def explain(
    state: LedgerState,
    task: Task,
    rollout: Rollout,
    data: bytes | None,
    *,
    environment: Environment,
    scorer: Scorer,
    hidden: int,
    chain_id: int,
    ledger: bytes,
    observe: Callable[[Numbers], None] = lambda numbers: None,
) -> Iterator[Check]:
    """Yield checks in the order of docs/protocol.md.

    Args:
        data: the sealed bundle, None when no relay has it.
        scorer: has the round's policy loaded; `hidden` is its hidden size.
        observe: told every number of the prefill, once there are any.

    Raises:
        Fault: when our own numbers or environment fail.
    """
    round_index, account = rollout.round_index, rollout.account
    try:
        assignment = get_assignment(state, task, round_index, account, chain_id=chain_id, ledger=ledger)
    except (Reject, Ignore) as error:
        yield Check("assignment", False, "none", "slots in this round", str(error))
        return
    yield Check("assignment", True, f"{assignment.quota} slots, policy {assignment.policy_version}", "at least 1 slot")
    commitment = task.commitments.get(round_index, {}).get(account)
    if commitment is None:
        yield Check("commitment", False, "no root on the ledger", "one root by the commit deadline")
        return
    yield Check("commitment", True, f"block {commitment.block_number}", "one root by the commit deadline")
    receipted = account in task.receipts.get(round_index, {})
    yield Check("receipt", receipted, "on the ledger" if receipted else "none", "by the receipt deadline")
    if data is None:
        yield Check("bundle", False, "no relay has it", "available")
        return
    yield Check("size", None, f"{len(data)} bytes", f"{compute_bundle_bytes_max(task.spec, task.spec.slots_max)} bytes")
    try:
        bundle = open_served(task.spec, assignment, commitment, data, state.participants[account].network_key)
    except Reject as error:
        yield _failed("envelope", error)
        return
    except Ignore as error:
        yield Check("envelope", False, "not this node's bundle of this round", "signed by the node", str(error))
        return
    yield Check("envelope", True, f"root {commitment.root.hex()[:16]}, signed", "schema, signature, root, policy")
    yield _checked("quota", lambda: validate_quota(assignment, bundle), len(bundle.groups), assignment.quota)
    yield from _explain_group(state, task, rollout, bundle, assignment, environment, scorer, hidden, observe)
    yield from _explain_verdicts(state, task, rollout)


def _count_sampled(task: Task, environment: Environment, group: Group, sample: Sample) -> int:
    """Sampled tokens of a completion; all of a malformed one, which another check refuses."""
    try:
        return len(compute_sampled(task.spec, environment, group.prompt_index, sample.tokens))
    except (Reject, IndexError):
        return len(sample.tokens)


def _failed(name: str, error: Reject) -> Check:
    return Check(name, False, str(error.observed), str(error.limit), str(error))


def _checked(name: str, check: Callable[[], None], observed: object, limit: object) -> Check:
    """Run a check that raises; show its own numbers when it fails."""
    try:
        check()
    except Reject as error:
        return _failed(name, error)
    return Check(name, True, str(observed), str(limit))


def _explain_group(
    state: LedgerState,
    task: Task,
    rollout: Rollout,
    bundle: Bundle,
    assignment: Assignment,
    environment: Environment,
    scorer: Scorer,
    hidden: int,
    observe: Callable[[Numbers], None],
) -> Iterator[Check]:
    spec, slot = task.spec, rollout.slot
    if slot >= len(bundle.groups) or rollout.sample >= len(bundle.groups[slot].samples):
        yield Check("rollout", False, f"{len(bundle.groups)} groups", f"slot {slot}, sample {rollout.sample}")
        return
    group = bundle.groups[slot]
    sample = group.samples[rollout.sample]
    yield _checked(
        "structure and rewards of the group",
        lambda: validate_group(spec, environment, assignment, slot, group),
        f"prompt {group.prompt_index}, {len(group.samples)} samples, this reward {sample.reward_micro / 1e6}",
        f"assigned prompt, {spec.group_size} samples, recomputed rewards",
    )
    yield _checked(
        "commitment format",
        lambda: validate_format(
            sample.proofs,
            num_tokens=_count_sampled(task, environment, group, sample),
            hidden=hidden,
            topk=spec.profile.topk,
            chunk=spec.profile.chunk,
            modulus_min=spec.profile.modulus_min,
        ),
        f"{len(sample.proofs)} commitments",
        f"{len(sample.tokens)} tokens in chunks of {spec.profile.chunk}",
    )
    drawn = get_audited(
        state, task, rollout.round_index, rollout.account, chain_id=assignment.chain_id, ledger=assignment.ledger
    )
    yield Check(
        "audit lottery", None, f"slots {list(drawn)}", f"slot {slot}", "drawn" if slot in drawn else "not drawn"
    )
    yield from _explain_numbers(task, rollout, group, assignment, environment, scorer, observe)


def _explain_numbers(
    task: Task,
    rollout: Rollout,
    group: Group,
    assignment: Assignment,
    environment: Environment,
    scorer: Scorer,
    observe: Callable[[Numbers], None],
) -> Iterator[Check]:
    """Prefill this one rollout and show its numbers."""
    spec, profile = task.spec, task.spec.profile
    sample = group.samples[rollout.sample]
    try:
        validate_tokens(spec, environment, group.prompt_index, sample.tokens, (rollout.slot, rollout.sample))
        requests, completions, sampled = make_replays(spec, environment, assignment, [group])
    except (Reject, IndexError) as error:  # no model can be asked about it; the group's own check has said so
        yield Check("activations", None, "no numbers", "", str(error))
        return
    try:
        one = slice(rollout.sample, rollout.sample + 1)
        [scored] = scorer.score(
            requests[one],
            completions[one],
            temperature=spec.sampling.temperature_milli / 1000,
            sampled=sampled[one],
        )
        [matches] = match_proofs(
            [scored.hidden],
            [sample.proofs],
            topk=profile.topk,
            chunk=profile.chunk,
            modulus_min=profile.modulus_min,
        )
    except Reject as error:
        yield _failed("activations", error)
        return
    except Fault as error:
        yield Check("activations", None, "no numbers", "", str(error))
        return
    observe(Numbers(sampled[rollout.sample], sample.tokens, scored, matches))
    for number, match in enumerate(matches):
        where = (rollout.slot, rollout.sample, number * profile.chunk)
        yield _checked(
            f"activations, chunk {number}",
            partial(validate_match, profile, match, where),
            f"{match.mismatches}/{match.size} mismatches, mantissa mean {match.mantissa_mean:.3f}, "
            f"median {match.mantissa_median:.0f}",
            f"{profile.exponent_mismatches_max * match.size // profile.topk} mismatches, mean "
            f"{profile.mantissa_mean_milli_max / 1000}, median {profile.mantissa_median_max}",
        )
    worst, tolerance = int(np.argmax(scored.gaps)), profile.replay_tolerance_micro / 1e6
    gap = float(scored.gaps[worst])
    yield Check("replay", gap <= tolerance, f"gap {gap:.6f} at sampled token {worst}", f"{tolerance:.6f} logit/T")
    near, near_max = count_near_ties(profile, scored.gaps), compute_near_ties_max(profile, len(scored.gaps))
    yield Check("near-ties", near <= near_max, f"{near} of {len(scored.gaps)} sampled tokens", str(near_max))
    yield Check("log-probability", None, f"mean {scored.logprobs.mean():.4f}", "the trainer's own is used")


def _explain_verdicts(state: LedgerState, task: Task, rollout: Rollout) -> Iterator[Check]:
    """What the committee said, as far as it is revealed."""
    committee = get_committee(state, task, rollout.round_index)
    revealed = [v for v in committee if v in task.reveals.get(rollout.round_index, {})]
    outcome = get_outcomes(state, task, rollout.round_index).get(rollout.account)
    text = f"{len(revealed)} of {len(committee)} verifiers revealed"
    if outcome is None:
        yield Check("verdict", None, "none (yet)", "2/3 of the committee", text)
    else:
        good = outcome.row.status is Status.GOOD
        yield Check("verdict", good, outcome.row.status.name.lower(), "good", f"{text}, {len(outcome.agreed)} agree")
