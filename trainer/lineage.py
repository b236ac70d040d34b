"""Where policies come from: the state of the next generation, the public record of a step, and reading that record back.

A leaf that was consumed to make version v was sampled by version v - 1 at the newest, so it is too stale for a trainer at
version v + max_staleness: a state carries no more consumed leaves than that. Neighbours: trainer.checkpoint stores states,
trainer.release publishes lineage records, trainer.audit re-runs the steps that they describe.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from protocol.codec import PROTOCOL_VERSION, decode
from protocol.errors import Fault
from protocol.ledger.state import Policy, Task
from protocol.merkle import compute_root
from protocol.messages import LINEAGE_BYTES_MAX, Lineage, compute_lineage_key, make_domain, unseal_body
from protocol.ports import BlobStore, Ledger
from trainer.batch import TrainingGroup
from trainer.checkpoint import State


def make_lineage(task: bytes, state: State, policy: bytes) -> Lineage:
    """The public record of the step that made a generation, whose policy has the content hash `policy`."""
    leaves = tuple(bytes.fromhex(leaf) for leaf in state.leaves)
    return Lineage(
        version=PROTOCOL_VERSION,
        task=task,
        policy_version=state.version,
        parent=bytes.fromhex(state.parent),
        batch_root=compute_root(leaves),
        leaves=leaves,
        optimizer_hash=bytes.fromhex(state.optimizer_before),
        config_hash=bytes.fromhex(state.config_hash),
        policy=policy,
        reward_micro=state.reward_micro,
    )


async def fetch_lineage(ledger: Ledger, blobs: BlobStore, task: Task, policy: Policy) -> Lineage:
    """Read the lineage record of a recorded policy.

    Raises:
        Fault: no relay has the recorded bytes.
        Reject: the trainer recorded something that is no lineage record.
    """
    data = await blobs.get(compute_lineage_key(task.task, policy.version))
    if hashlib.sha256(data).digest() != policy.lineage:
        raise Fault(f"the lineage record of policy {policy.version} that a relay serves is not the recorded one")
    domain = make_domain(ledger.chain_id, ledger.address, task.task, Lineage)
    trainer = ledger.state.participants.get(task.spec.trainer)
    if trainer is None:
        raise Fault(f"trainer 0x{task.spec.trainer.hex()} is not registered: its records cannot be checked")
    body = unseal_body(data, domain, trainer.network_key, bytes_max=LINEAGE_BYTES_MAX)
    return decode(Lineage, body, bytes_max=LINEAGE_BYTES_MAX)


async def fetch_consumed(ledger: Ledger, blobs: BlobStore, task: Task) -> dict[int, tuple[str, ...]]:
    """Leaves that recorded policies have used and that could still be fresh, by version."""
    newest = len(task.policies) - 1
    consumed = {}
    for policy in task.policies[max(1, newest - task.spec.max_staleness) :]:
        lineage = await fetch_lineage(ledger, blobs, task, policy)
        consumed[policy.version] = tuple(leaf.hex() for leaf in lineage.leaves)
    return consumed


def make_adopted_state(
    policy: Policy,
    task: bytes,
    *,
    optimizer: bytes,
    config_hash: bytes,
    consumed: dict[int, tuple[str, ...]],
    seed: int,
) -> State:
    """State of a generation that was taken from the ledger, with the optimiser state it goes on with."""
    return State(
        task=task.hex(),
        version=policy.version,
        adopted=policy.policy.hex(),
        parent="",
        parent_lineage="",
        optimizer_before=hashlib.sha256(optimizer).hexdigest(),
        config_hash=config_hash.hex(),
        leaves=(),
        consumed=consumed,
        reward_micro=0,
        seed=seed,
    )


def make_next_state(
    old: State,
    batch: Sequence[TrainingGroup],
    *,
    parent: bytes,
    parent_lineage: bytes,
    optimizer_before: bytes,
    config_hash: bytes,
    reward_mean: float,
    max_staleness: int,
    seed: int,
) -> State:
    """State of the generation that a step on `batch` makes from `old`.

    Args:
        parent / parent_lineage: content hash of the old policy and hash of its lineage record.
        optimizer_before: the old optimiser state.
    """
    version = old.version + 1
    consumed = {**old.consumed, old.version: old.leaves}
    return State(
        task=old.task,
        version=version,
        adopted="",
        parent=parent.hex(),
        parent_lineage=parent_lineage.hex(),
        optimizer_before=hashlib.sha256(optimizer_before).hexdigest(),
        config_hash=config_hash.hex(),
        leaves=tuple(group.leaf.hex() for group in batch),
        consumed={v: leaves for v, leaves in consumed.items() if leaves and v >= version - max_staleness},
        reward_micro=round(reward_mean * 1e6),
        seed=seed,
    )
