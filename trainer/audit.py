"""Re-running a training step from public data: the ledger, lineage records, bundles, and the parent's optimiser state.

`audit_policy` finds the bundles of a lineage's leaves, checks and scores them as the trainer did, takes the step again and
compares content hashes. The parent's optimiser state and the settings come from the trainer, and both must hash to what its
lineage says. Equal hashes prove the step. Unequal ones prove nothing across different hardware, thread counts or
library versions, where the last bits of a sum differ: `Audit.distance` says how far apart the weights are. Where policies are
adapters the step starts from the parent's adapter (for version 1, from the one that the settings' seed gives) and the base
policy, and adapters are compared: they are published as they are trained, so nothing is hidden by a rounding.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file

from models.adapter import ADAPTER_WEIGHTS, is_adapter
from models.policy import WEIGHTS
from protocol.errors import Fault, Ignore, Reason, Reject
from protocol.ledger.state import Task
from protocol.merkle import compute_root
from protocol.messages import Lineage, compute_bundle_key
from protocol.ports import BlobStore, Environment, Ledger, PolicyStore, Scorer
from protocol.rounds import get_round_policy
from trainer.batch import TrainingGroup
from trainer.config import TrainerConfig
from trainer.ingest import Scorers, check_submission
from trainer.lineage import fetch_lineage
from trainer.policy import write_files
from trainer.step import Learner, StepReport


@dataclass(frozen=True)
class Audit:
    """Outcome of a re-run.

    Attributes:
        recorded / computed: content hashes on the ledger and of our own result.
        distance: largest absolute difference of a weight, 0 when the hashes are equal.
        report: what our own run of the step gave.
    """

    version: int
    recorded: bytes
    computed: bytes
    distance: float
    report: StepReport

    def require_equal(self) -> None:
        """Raises `Reject` when the policies differ; see the module on when that says anything."""
        if self.computed != self.recorded:
            raise Reject(
                Reason.MANIFEST,
                f"policy {self.version} is not what its lineage gives",
                observed=f"content hash {self.recorded.hex()[:16]}, largest weight difference {self.distance:.3g}",
                limit=self.computed.hex()[:16],
                todo="compare on the trainer's hardware, thread count and library versions before accusing it",
            )


async def audit_policy(
    ledger: Ledger,
    task: Task,
    version: int,
    *,
    blobs: BlobStore,
    policies: PolicyStore,
    environment: Environment,
    make_scorer: Callable[[Path], Scorer],
    config: TrainerConfig,
    optimizer: bytes,
    hash_folder: Callable[[Path], bytes],
    scratch: Path,
    device: str = "cpu",
    threads: int = 1,
) -> Audit:
    """Re-run the step that made policy `version` (at least 1).

    Args:
        config: the trainer's settings.
        optimizer: its optimiser state before the step (optimizer.safetensors of the parent generation).
        hash_folder: content hash of a policy folder, as the ledger knows policies.
        scratch: where the re-made policy is written; must not exist.

    Raises:
        Reject: the lineage contradicts the ledger, or names leaves that it may not use.
        Fault: something needed cannot be had.
    """
    recorded, parent = task.policies[version], task.policies[version - 1]
    lineage = await fetch_lineage(ledger, blobs, task, recorded)
    _validate_lineage(task, version, lineage, config, optimizer)
    scorers = Scorers(make_scorer)
    groups = await _collect_groups(ledger, task, lineage, blobs, policies, environment, scorers)
    folder = await policies.fetch(task.task, parent.version)
    reference = await policies.fetch(task.task, 0) if config.kl and not task.spec.adapter.rank else None

    def rerun() -> tuple[StepReport, bytes]:
        learner = Learner(
            config,
            folder,
            temperature=task.spec.sampling.temperature_milli / 1000,
            optimizer=optimizer,
            adapter=task.spec.adapter,
            base_policy=task.spec.base_policy,
            reference=reference,
            vocab_size=environment.vocab_size,
            device=device,
            threads=threads,
        )
        report = learner.step(groups, version - 1)
        write_files(scratch, learner.encode_policy())
        return report, hash_folder(scratch)

    report, computed = await asyncio.to_thread(rerun)
    distance = 0.0
    if computed != recorded.policy:
        theirs = await policies.fetch(task.task, version)
        distance = await asyncio.to_thread(_measure_distance, scratch, theirs)
    return Audit(version, recorded.policy, computed, distance, report)


def _validate_lineage(task: Task, version: int, lineage: Lineage, config: TrainerConfig, optimizer: bytes) -> None:
    """A lineage must agree with the ledger's records and with what the trainer handed out."""
    recorded, parent = task.policies[version], task.policies[version - 1]
    claims: list[tuple[str, object, object]] = [
        ("policy version", lineage.policy_version, version),
        ("policy", lineage.policy.hex(), recorded.policy.hex()),
        ("parent", lineage.parent.hex(), parent.policy.hex()),
        ("batch root", lineage.batch_root.hex(), recorded.batch_root.hex()),
        ("root of the leaves", compute_root(lineage.leaves).hex(), recorded.batch_root.hex()),
        ("number of different leaves", len(set(lineage.leaves)), len(lineage.leaves)),
        ("settings", lineage.config_hash.hex(), config.compute_hash(task.spec.sampling.temperature_milli).hex()),
        ("optimiser state", lineage.optimizer_hash.hex(), hashlib.sha256(optimizer).hexdigest()),
    ]
    for what, observed, limit in claims:
        if observed != limit:
            raise Reject(Reason.MANIFEST, f"{what} of the lineage of policy {version}", observed=observed, limit=limit)


async def _collect_groups(
    ledger: Ledger,
    task: Task,
    lineage: Lineage,
    blobs: BlobStore,
    policies: PolicyStore,
    environment: Environment,
    scorers: Scorers,
) -> list[TrainingGroup]:
    """The groups behind a lineage's leaves, in its order, each checked as on admission."""
    wanted = dict.fromkeys(lineage.leaves)
    found: dict[bytes, TrainingGroup] = {}
    for round_index, account in _list_candidates(task, lineage.policy_version - 1):
        if len(found) == len(wanted):
            break
        data = await blobs.get(compute_bundle_key(task.task, round_index, account))
        policy = get_round_policy(task, round_index)
        assert policy is not None
        folder = None if scorers.has(policy.version) else await policies.fetch(task.task, policy.version)
        loaded = await asyncio.to_thread(scorers.get, policy.version, folder)
        try:
            groups = await asyncio.to_thread(
                check_submission,
                ledger.state,
                task,
                round_index,
                account,
                data,
                chain_id=ledger.chain_id,
                ledger=ledger.address,
                environment=environment,
                loaded=loaded,
            )
        except (Reject, Ignore):
            # Somebody's bad submission; were it in the batch, its leaves would stay unfound.
            continue
        found |= {group.leaf: group for group in groups if group.leaf in wanted}
    missing = [leaf for leaf in wanted if leaf not in found]
    if missing:
        raise Reject(
            Reason.MANIFEST,
            f"policy {lineage.policy_version} was trained on leaves that no good, fresh submission has",
            observed=f"{len(missing)} of {len(wanted)}, first {missing[0].hex()[:16]}",
            limit="leaves of receipted submissions that pass every check, at most max_staleness versions old",
        )
    return [found[leaf] for leaf in lineage.leaves]


def _list_candidates(task: Task, version: int) -> Iterable[tuple[int, bytes]]:
    """Receipted submissions that were fresh for a trainer at `version`, newest round first."""
    for round_index in sorted(task.receipts, reverse=True):
        policy = get_round_policy(task, round_index)
        if policy is not None and 0 <= version - policy.version <= task.spec.max_staleness:
            for account in sorted(task.receipts[round_index]):
                yield round_index, account


def _measure_distance(mine: Path, theirs: Path) -> float:
    name = ADAPTER_WEIGHTS if is_adapter(mine) else WEIGHTS
    ours, other = load_file(mine / name), load_file(theirs / name)
    if ours.keys() != other.keys() or any(ours[name].shape != other[name].shape for name in ours):
        raise Fault(f"{theirs} has other tensors than its parent")
    return max(float((ours[name].double() - other[name].double()).abs().max()) for name in ours)
