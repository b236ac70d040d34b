"""L5: random callers do random things in random order, and an independent checker counts the money after every step.

The checker reads token balances and events only, and keeps its own books: deposit = paid + refunded + burned + remaining
for each task, every contract holds exactly what it owes, nobody claims twice, and nobody is slashed by voters with less than
two thirds of the verifiers' stake. A failure prints the steps that led to it.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.support.evm_codec import RevertedError
from tests.support.evm_ledger import (
    NAMES,
    SPEC,
    TERMS,
    VERIFIERS,
    claim,
    fresh_ledger,
    settlement,
)
from tests.support.ledger_checker import Checker

CALLERS = st.sampled_from(NAMES[1:])
NODES = st.sampled_from(("node", "node2"))
PICK = st.integers(0, 7)
TASKS_MAX = 4


def _mostly(right: st.SearchStrategy[Any], other: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Three draws of four are sensible: a state machine of mere nonsense moves no money."""
    return st.integers(0, 3).flatmap(lambda n: other if n == 3 else right)


INITIATOR = _mostly(st.just("initiator"), CALLERS)
VOTERS = _mostly(st.just({"verifier", "verifier2"}), st.sets(CALLERS, min_size=1))


class RandomCallers(RuleBasedStateMachine):
    """Mostly sensible calls, so that money really moves, by anybody, on any of up to three tasks."""

    def __init__(self) -> None:
        super().__init__()
        self._fixture = fresh_ledger()
        self.ledger = next(self._fixture)
        self.checker = Checker(self.ledger)
        self.tasks: list[bytes] = []
        self.proposals: dict[bytes, list[dict[bytes, int]]] = defaultdict(list)
        self.is_changed = True

    def teardown(self) -> None:
        self.checker.check_supply()
        next(self._fixture, None)

    def _try(self, who: str, contract: str, function: str, *arguments: Any) -> bool:
        block = self.ledger.block
        try:
            emitted = self.ledger.send(who, contract, function, *arguments)
        except RevertedError:
            return False
        for event in emitted:
            self.checker.see(event, block)
        self.is_changed = True
        return True

    def _task(self, pick: int) -> bytes:
        return self.tasks[pick % len(self.tasks)]

    def _round(self, task: bytes, back: int) -> int:
        start = self.ledger.view("book", "stateOf", task)[1]
        return max(0, (self.ledger.block - 1 - start) // TERMS.round_blocks - back)

    @rule(blocks=st.integers(1, 9))
    def mine(self, blocks: int) -> None:
        self.ledger.mine_until(self.ledger.block + blocks)

    @initialize(deposit=st.integers(2_000, 3_600))
    def first(self, deposit: int) -> None:
        self.publish("initiator", deposit)

    @precondition(lambda self: len(self.tasks) < TASKS_MAX)
    @rule(who=CALLERS, deposit=st.integers(990, 3_600))
    def publish(self, who: str, deposit: int) -> None:
        known = len(self.checker.deposits)
        self._try(who, "book", "publish", self.ledger.terms(), SPEC, deposit)
        self.tasks.extend(list(self.checker.deposits)[known:])
        for node in ("node", "node2"):
            self._try(node, "book", "join", self.tasks[-1], 2)

    @precondition(lambda self: self.tasks)
    @rule(pick=PICK, who=CALLERS, amount=st.integers(0, 1_500))
    def top_up(self, pick: int, who: str, amount: int) -> None:
        self._try(who, "book", "topUp", self._task(pick), amount)

    @precondition(lambda self: self.tasks)
    @rule(pick=PICK, who=INITIATOR, wait=st.integers(0, 20))
    def cancel(self, pick: int, who: str, wait: int) -> None:
        self.ledger.mine_until(self.ledger.block + wait)
        self._try(who, "book", "cancel", self._task(pick))

    @precondition(lambda self: self.tasks)
    @rule(pick=PICK, who=NODES, slots=st.integers(0, 4))
    def join_or_leave(self, pick: int, who: str, slots: int) -> None:
        if not self._try(who, "book", "join", self._task(pick), slots):
            self._try(who, "book", "leave", self._task(pick))

    @precondition(lambda self: self.tasks)
    @rule(pick=PICK, who=NODES, leaves=st.integers(1, 4), back=st.integers(0, 1))
    def work(self, pick: int, who: str, leaves: int, back: int) -> None:
        task = self._task(pick)
        index, start = self._round(task, back), self.ledger.view("book", "stateOf", task)[1]
        self._try(who, "beacons", "record", start + index * TERMS.round_blocks)
        if self._try(who, "book", "commit", task, index, b"\x44" * 32, leaves, bytes(32)):
            self._try("relay", "book", "receipt", task, index, (self.ledger.address(who),))

    @precondition(lambda self: self.tasks)
    @rule(
        pick=PICK,
        voters=VOTERS,
        pay=st.integers(0, 700),
        wait=_mostly(st.just(True), st.just(False)),
        slash=st.booleans(),
    )
    def vote(self, pick: int, voters: set[str], pay: int, wait: bool, slash: bool) -> None:
        """Some group votes for one settlement of the next epoch: often verifiers, sometimes anybody."""
        task = self._task(pick)
        epoch, _, paid, burned = self.ledger.view("book", "settlementOf", task)
        if wait:
            last = self.ledger.view("book", "lastConfirmOf", task, epoch)
            self.ledger.mine_until(max(self.ledger.block, last + 1))
        node, node2 = self.ledger.address("node"), self.ledger.address("node2")
        earned = next((e for e in reversed(self.proposals[task]) if sum(e.values()) == paid), {})
        earnings = {node: earned.get(node, 0) + pay - pay // 3, node2: earned.get(node2, 0) + pay // 3}
        self.proposals[task].append(earnings)
        slashed = [node] if slash else []
        for voter in sorted(voters):
            self._try(
                voter,
                "court",
                "voteSettlement",
                *settlement(task, epoch, earnings, burned=burned + pay // 7, slashed=slashed),
            )

    @precondition(lambda self: self.checker.pending)
    @rule(pick=PICK, who=CALLERS, upholders=st.sets(st.sampled_from(VERIFIERS), min_size=1))
    def challenge(self, pick: int, who: str, upholders: set[str]) -> None:
        pending = list(self.checker.pending.values())
        target = pending[pick % len(pending)]
        self._try(who, "court", "challenge", target.task, target.epoch)
        for voter in sorted(upholders):
            self._try(voter, "court", "voteChallenge", target.task, target.epoch, True)

    @precondition(lambda self: self.checker.pending)
    @rule(pick=PICK, who=CALLERS, wait=_mostly(st.just(True), st.just(False)))
    def finalize(self, pick: int, who: str, wait: bool) -> None:
        pending = list(self.checker.pending.values())
        target = pending[pick % len(pending)]
        if wait:
            _, challenge_end, vote_end, _, _ = self.ledger.view("court", "pendingOf", target.task)
            self.ledger.mine_until(max(self.ledger.block, challenge_end + 1, vote_end + 1))
        self._try(who, "court", "finalize", target.task, target.epoch)

    @precondition(lambda self: any(self.proposals.values()))
    @rule(who=CALLERS, node=NODES, many=st.booleans())
    def claim(self, who: str, node: str, many: bool) -> None:
        for task, earnings in ((known, e) for known in self.tasks for e in self.proposals[known][-2:]):
            _, account, cumulative, proof = claim(task, earnings, self.ledger.address(node))
            if many:
                self._try(who, "book", "claimMany", task, (account,) * 2, (cumulative,) * 2, (proof,) * 2)
            else:
                self._try(who, "book", "claim", task, account, cumulative, proof)

    @precondition(lambda self: self.tasks)
    @rule(pick=PICK, who=CALLERS, wait=_mostly(st.just(False), st.just(True)))
    def close(self, pick: int, who: str, wait: bool) -> None:
        task = self._task(pick)
        if wait:
            epochs = self.ledger.view("book", "stateOf", task)[2] // TERMS.epoch_rounds
            last = self.ledger.view("book", "lastConfirmOf", task, max(epochs, 1) - 1)
            self.ledger.mine_until(max(self.ledger.block, last + TERMS.timeout_blocks + 1))
        self._try(who, "book", "close", task)

    @rule(who=CALLERS, amount=st.integers(0, 1_200), bond=st.booleans())
    def stake(self, who: str, amount: int, bond: bool) -> None:
        if not self._try(who, "registry", "withdraw"):
            self._try(who, "registry", "addStake" if bond else "startUnbond", amount)

    @invariant()
    def money_is_conserved(self) -> None:
        if self.is_changed:  # empty blocks and refused calls move nothing
            self.checker.check()
        self.is_changed = False


def _run(examples: int) -> None:
    run_state_machine_as_test(
        RandomCallers,
        settings=settings(
            max_examples=examples,
            stateful_step_count=100,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            print_blob=True,
        ),
    )


def test_l5_money_is_conserved() -> None:
    _run(3)


@pytest.mark.nightly
def test_l5_money_is_conserved_for_long() -> None:
    _run(300)


def test_l5_checker_notices_missing_money() -> None:
    """The checker itself: one unit more in a contract than in the books is found."""
    fixture = fresh_ledger()
    ledger = next(fixture)
    checker = Checker(ledger)
    checker.check()
    ledger.send("stranger", "token", "transfer", ledger.address("book"), 1)
    with pytest.raises(AssertionError):
        checker.check()
    next(fixture, None)
