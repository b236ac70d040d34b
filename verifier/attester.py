"""Attesting policies: fetch every byte of a new policy, serve it, and say so on the ledger. No torch.

Two attestations make a policy eligible for rounds, so attesters take turns: a hash of the policy ranks them, the first two act
at once, the others follow in pairs while the policy is still not eligible. Verifiers and relays run the same code.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from protocol.codec import tagged_hash
from protocol.errors import Fault
from protocol.ledger.calls import AttestPolicy
from protocol.ledger.events import Role
from protocol.ledger.state import ATTESTATIONS_NEEDED, LedgerState, Policy, Task
from protocol.ports import Ledger, PolicyStore

log = logging.getLogger("troth.verifier")

#: Blocks between the turns of two pairs of attesters.
TURN_BLOCKS = 2
#: Longest pause between two tries to fetch a policy that nobody serves.
RETRY_BLOCKS_MAX = 256
#: Newest policies that are fetched and, where needed, attested.
NEWEST = 3


def get_turn(state: LedgerState, account: bytes, policy: bytes, stake_min: int) -> int:
    """Blocks that an attester lets pass before it acts: 0 for the first pair. The ledger asks for `stake_min`."""
    attesters = [
        p.account
        for p in state.participants.values()
        if p.role in (Role.RELAY, Role.VERIFIER) and p.bonded >= stake_min
    ]
    ranked = sorted(attesters, key=lambda other: tagged_hash("attester", policy, other))
    return ranked.index(account) // ATTESTATIONS_NEEDED * TURN_BLOCKS if account in ranked else 1 << 30


class Attester:
    """Fetches new policies in the background and attests them when it is our turn."""

    def __init__(
        self, *, ledger: Ledger, policies: PolicyStore, events: Callable[[str, dict[str, object]], None]
    ) -> None:
        self._ledger = ledger
        self._policies = policies
        self._events = events
        self._fetches: dict[tuple[bytes, int], asyncio.Task[None]] = {}
        self._here: set[tuple[bytes, int]] = set()
        #: Failed fetches so far, and the block before which none is tried again.
        self._failed: dict[tuple[bytes, int], tuple[int, int]] = {}

    async def step(self, task: Task) -> None:
        """Start fetches of the newest policies; attest those that are here, needed, and ours to attest."""
        for done in [key for key, fetch in self._fetches.items() if fetch.done()]:
            del self._fetches[done]
        for policy in task.policies[-NEWEST:]:
            key = (task.task, policy.version)
            if key in self._here:
                await self._attest(task, policy)
            elif key not in self._fetches and self._ledger.state.block_number >= self._failed.get(key, (0, 0))[1]:
                self._fetches[key] = asyncio.create_task(self._fetch(task.task, policy.version))

    async def close(self) -> None:
        """Stop background fetches."""
        for fetch in self._fetches.values():
            fetch.cancel()
        await asyncio.gather(*self._fetches.values(), return_exceptions=True)

    async def _fetch(self, task: bytes, version: int) -> None:
        try:
            await self._policies.fetch(task, version)
            self._here.add((task, version))
        except Fault as error:
            times = self._failed.get((task, version), (0, 0))[0] + 1
            wait_blocks = min(2**times, RETRY_BLOCKS_MAX)
            self._failed[task, version] = (times, self._ledger.state.block_number + wait_blocks)
            log.info("policy %d: %s", version, error)
            if times == 1:
                self._events("policy_missing", {"version": version, "text": str(error)})

    async def _attest(self, task: Task, policy: Policy) -> None:
        state = self._ledger.state
        if policy.eligible_block is not None or self._ledger.account in policy.attestations:
            return
        turn = get_turn(state, self._ledger.account, policy.policy, task.spec.economics.verifier_stake_min)
        if state.block_number >= policy.block_number + turn:
            await self._ledger.submit(
                f"attest/{task.task.hex()}/{policy.version}", AttestPolicy(task.task, policy.version)
            )
