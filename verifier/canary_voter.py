"""Fresh verifiers' part in canaries: judge what was opened in a round we were not drawn for, and vote on it.

The same judge, on the leaves that the same lottery drew, so a verifier that looked then agrees with one that looks now.
Without a row there is no vote. `fetch` and `vote` run as jobs of `verifier.worker`, which has one judge and decides when it
is free. Neighbours: protocol.canaries counts the votes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from protocol.canaries import get_fresh, is_defective
from protocol.errors import Fault, Ignore, Reject
from protocol.ledger.calls import ConfirmCanary
from protocol.ledger.state import Task
from protocol.messages import compute_bundle_key
from protocol.ports import BlobStore, Ledger, PolicyStore
from protocol.rounds import get_committee, get_round_policy, get_times
from verifier.isolated_judge import RoundJudge
from verifier.judge import get_submissions

log = logging.getLogger("troth.verifier")

#: A canary is given up after so many attempts to fetch or judge it.
ATTEMPTS_MAX = 3

#: Round and node.
Opened = tuple[int, bytes]


class CanaryVoter:
    """Votes on opened canaries of one task. Arguments are those of `VerifierWorker`."""

    def __init__(
        self,
        *,
        ledger: Ledger,
        judge: RoundJudge,
        policies: PolicyStore,
        blobs: BlobStore,
        events: Callable[[str, dict[str, object]], None],
    ) -> None:
        self._ledger, self._judge = ledger, judge
        self._policies, self._blobs, self._events = policies, blobs, events
        self._fetched: dict[Opened, tuple[bytes, Path, Path | None]] = {}
        self._attempts: dict[Opened, int] = {}

    def find_due(self, task: Task) -> list[Opened]:
        """Opened canaries that we may vote on, have not voted on, and have not given up; oldest first."""
        state, account = self._ledger.state, self._ledger.account
        due = []
        for round_index, canaries in sorted(task.canaries.items()):
            times = get_times(task, round_index)
            if state.block_number >= times.confirm_deadline:
                continue
            committee = get_committee(state, task, round_index)
            if account in get_fresh(state, task, committee, times.verdict_reveal_deadline):
                due += [(round_index, node) for node in sorted(canaries) if self._is_open(task, round_index, node)]
        kept = set(due)
        self._fetched = {opened: found for opened, found in self._fetched.items() if opened in kept}
        self._attempts = {opened: count for opened, count in self._attempts.items() if opened in kept}
        return [opened for opened in due if self._attempts.get(opened, 0) < ATTEMPTS_MAX]

    def is_fetched(self, opened: Opened) -> bool:
        """Whether everything that judging a canary needs is here."""
        return opened in self._fetched

    async def fetch(self, task: Task, opened: Opened) -> None:
        """Fetch the bundle and the policy it was made with."""
        round_index, node = opened
        policy = get_round_policy(task, round_index)
        try:
            if policy is None:
                raise Fault(f"round {round_index} has no policy")
            data = await self._blobs.get(compute_bundle_key(task.task, round_index, node))
            folder = await self._policies.fetch(task.task, policy.version)
            base = await self._policies.fetch(task.task, 0) if self._judge.needs_base else None
        except (Fault, Ignore, Reject) as error:
            self._fail(opened, error)
        else:
            self._fetched[opened] = (data, folder, base)

    async def vote(self, task: Task, opened: Opened, seconds: float | None) -> None:
        """Judge a fetched canary and vote, if there is a row."""
        (round_index, node), (data, folder, base) = opened, self._fetched.pop(opened)
        ledger = self._ledger
        try:
            submissions, known = get_submissions(
                ledger.state, task, round_index, {node: data}, chain_id=ledger.chain_id, ledger=ledger.address
            )
            said, _ = await self._judge.judge(task.spec, submissions, folder=folder, base=base, seconds=seconds)
            rows = known.join(said).rows
            if not rows:
                raise Fault("what the relays serve gives no row")
        except (Fault, Ignore) as error:
            self._fail(opened, error)
            return
        defective = is_defective(rows[0])
        await ledger.submit(self._name(task, opened), ConfirmCanary(task.task, round_index, node, defective))
        self._events("canary_vote", {"round": round_index, "account": node, "defective": defective})

    def _is_open(self, task: Task, round_index: int, node: bytes) -> bool:
        voted = self._ledger.account in task.canaries[round_index][node].votes
        return not voted and self._ledger.outcome(self._name(task, (round_index, node))).status == "unknown"

    def _fail(self, opened: Opened, error: Exception) -> None:
        self._attempts[opened] = self._attempts.get(opened, 0) + 1
        log.warning("canary of round %d, node 0x%s: no vote (yet): %s", opened[0], opened[1].hex(), error)
        self._events("fault", {"round": opened[0], "text": str(error)})

    @staticmethod
    def _name(task: Task, opened: Opened) -> str:
        return f"canary-vote/{task.task.hex()}/{opened[0]}/{opened[1].hex()}"
