"""From a generation on disk to a policy on the ledger: publish its bytes, store its lineage record, record it.

Everything is a function of the generation, so doing it again after a restart sends the same bytes under the same intent:
a generation that was published but not recorded is recorded, never trained again. Versions are recorded in order.
Neighbours: trainer.worker calls `step`; protocol.messages.Lineage is what an auditor reads.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, NamedTuple

from protocol.errors import Fault
from protocol.identity import NetworkKey
from protocol.ledger.calls import RecordPolicy
from protocol.ledger.state import Task
from protocol.merkle import compute_root
from protocol.messages import Lineage, compute_lineage_key, make_domain, seal
from protocol.ports import BlobStore, Ledger, PolicyStore
from trainer.checkpoint import Generation
from trainer.lineage import make_lineage

#: A call that the contract refuses this often will not be accepted.
ATTEMPTS_MAX = 5


class Diverged(Fault):
    """The ledger has another policy under a version that we made: this lineage is not the ledger's."""


class Released(NamedTuple):
    """A published policy: content hash, manifest hash, hash of its sealed lineage record."""

    policy: bytes
    manifest: bytes
    lineage: bytes


class Releaser:
    """Publishes and records generations.

    Args:
        key: the trainer's network key, which signs lineage records.
    """

    def __init__(
        self,
        *,
        ledger: Ledger,
        blobs: BlobStore,
        policies: PolicyStore,
        key: NetworkKey,
        events: Callable[[str, dict[str, Any]], None],
    ) -> None:
        self._ledger = ledger
        self._blobs = blobs
        self._policies = policies
        self._key = key
        self._events = events
        self._released: dict[int, Released] = {}
        self._stored: set[int] = set()
        self._refused: dict[int, int] = {}

    def forget(self) -> None:
        """Start over with another lineage."""
        self._released.clear()
        self._stored.clear()
        self._refused.clear()

    async def publish(self, task: Task, generation: Generation) -> Released:
        """Serve a generation's bytes; the hashes of its record. Repeating it gives the same.

        Raises:
            Diverged: the ledger has another policy under this version.
            Fault: it could not be published now.
        """
        version = generation.version
        recorded = task.policies[version] if version < len(task.policies) else None
        if not generation.state.parent:
            # Adopted from the ledger, where others published it.
            if recorded is None or recorded.policy.hex() != generation.state.adopted:
                raise Diverged(f"policy {version}, which was adopted, is not on the ledger any more")
            return Released(recorded.policy, recorded.manifest, recorded.lineage)
        before = task.policies[version - 1] if version - 1 < len(task.policies) else None
        if before is not None and before.policy.hex() != generation.state.parent:
            raise Diverged(
                f"policy {version} was made from {generation.state.parent[:16]}, policy {version - 1} on the ledger is "
                f"{before.policy.hex()[:16]}"
            )
        if version not in self._released:
            policy, manifest = await self._policies.publish(task.task, version, version - 1, generation.policy)
            lineage = hashlib.sha256(self._seal(task, generation, policy)).digest()
            self._released[version] = Released(policy, manifest, lineage)
        released = self._released[version]
        if recorded is not None and recorded.policy != released.policy:
            raise Diverged(
                f"policy {version} on the ledger is {recorded.policy.hex()[:16]}, ours is {released.policy.hex()[:16]}"
            )
        return released

    async def record(self, task: Task, generation: Generation) -> None:
        """Store the lineage record and record the policy, unless the ledger has it.

        Raises:
            Fault: no relay took the lineage record, or the contract keeps refusing.
        """
        version = generation.version
        if version < len(task.policies):
            return
        released = await self.publish(task, generation)
        if version not in self._stored:
            await self._blobs.put(
                compute_lineage_key(task.task, version), self._seal(task, generation, released.policy)
            )
            self._stored.add(version)
        for attempt in range(ATTEMPTS_MAX):
            intent = f"policy/{task.task.hex()}/{version}/{released.policy.hex()[:16]}/{attempt}"
            outcome = self._ledger.outcome(intent)
            if outcome.status != "reverted":
                break
            if self._refused.get(version, 0) <= attempt:
                self._refused[version] = attempt + 1
                self._events("refused", {"intent": intent, "text": outcome.error})
        else:
            raise Fault(f"the ledger refuses policy {version}: {outcome.error}; is this the task's trainer account?")
        if outcome.status == "unknown":
            call = RecordPolicy(
                task.task,
                version,
                released.policy,
                released.manifest,
                compute_root([bytes.fromhex(leaf) for leaf in generation.state.leaves]),
                released.lineage,
            )
            await self._ledger.submit(intent, call)
            self._events("recorded", {"version": version, "policy": released.policy, "lineage": released.lineage})
        for old in [old for old in self._released if old < version - 2]:
            del self._released[old]
            self._stored.discard(old)

    def _seal(self, task: Task, generation: Generation, policy: bytes) -> bytes:
        domain = make_domain(self._ledger.chain_id, self._ledger.address, task.task, Lineage)
        return seal(self._key, domain, make_lineage(task.task, generation.state, policy))
