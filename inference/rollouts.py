"""One round's work of one node as a function: assignment in, groups with commitments out.

Everything is batched over the slots of one call. Neighbours: protocol.assignment fixes prompts and keys, an Engine samples,
the Environment rewards, protocol.toploc commits; inference.worker decides when.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from protocol.assignment import compute_prompt_index, compute_sample_key
from protocol.checks import Assignment, validate_groups, validate_quota
from protocol.codec import PROTOCOL_VERSION
from protocol.episodes import make_respond
from protocol.identity import NetworkKey
from protocol.messages import Bundle, Group, Sample, compute_bundle_root, make_domain, seal
from protocol.ports import Engine, Environment, SampleRequest
from protocol.task import TaskSpec
from protocol.toploc import build_proofs


class Made(NamedTuple):
    """Groups of a round and what they cost.

    Attributes:
        hidden: hidden size of the policy that made them.
        cpu_generation_s / cpu_commitment_s: CPU seconds of this thread.
    """

    groups: tuple[Group, ...]
    hidden: int
    cpu_generation_s: float
    cpu_commitment_s: float


def make_groups(
    spec: TaskSpec,
    environment: Environment,
    engine: Engine,
    assignment: Assignment,
    slots: Sequence[int] | None = None,
) -> Made:
    """Generate, reward and commit slots of an assignment under the policy that `engine` has loaded.

    Args:
        slots: which ones, at least one; every slot of the quota when None.

    Raises:
        Fault: when the engine or the environment fails.
    """
    started = time.thread_time()
    indices, requests = [], []
    chosen = list(range(assignment.quota)) if slots is None else list(slots)
    for slot in chosen:
        seed = assignment.seed(slot)
        index = compute_prompt_index(seed, environment.num_prompts)
        prompt = environment.prompt(index)
        indices.append(index)
        respond = make_respond(spec, environment, index)
        requests += [
            SampleRequest(prompt, compute_sample_key(seed, number), respond) for number in range(spec.group_size)
        ]
    generations = engine.generate(
        requests,
        temperature=spec.sampling.temperature_milli / 1000,
        max_tokens=spec.sampling.max_tokens,
        stop_tokens=spec.sampling.stop_tokens,
    )
    generated = time.thread_time()
    proofs = build_proofs([one.hidden for one in generations], topk=spec.profile.topk, chunk=spec.profile.chunk)
    groups = []
    for number, (slot, index) in enumerate(zip(chosen, indices, strict=True)):
        rows = range(number * spec.group_size, (number + 1) * spec.group_size)
        samples = tuple(
            Sample(generations[row].tokens, environment.reward(index, generations[row].tokens), proofs[row])
            for row in rows
        )
        groups.append(Group(slot, index, samples))
    hidden = generations[0].hidden.shape[1]
    return Made(tuple(groups), hidden, generated - started, time.thread_time() - generated)


def make_bundle(assignment: Assignment, groups: tuple[Group, ...]) -> Bundle:
    """The bundle of an assignment's groups."""
    return Bundle(
        PROTOCOL_VERSION, assignment.task, assignment.round_index, assignment.account, assignment.policy, groups
    )


def validate_own(spec: TaskSpec, environment: Environment, assignment: Assignment, bundle: Bundle, hidden: int) -> None:
    """Run every check on the node's own work that needs no model, as any verifier will.

    Raises:
        Reject: with the rule that the work breaks.
    """
    validate_quota(assignment, bundle)
    validate_groups(spec, environment, assignment, bundle, hidden)


def seal_bundle(key: NetworkKey, assignment: Assignment, bundle: Bundle) -> tuple[bytes, bytes]:
    """Merkle root and signed bytes of a bundle."""
    domain = make_domain(assignment.chain_id, assignment.ledger, assignment.task, Bundle)
    return compute_bundle_root(bundle), seal(key, domain, bundle)
