"""L5: random callers do random things in random order, and an independent checker counts the money after every step.

The checker reads token balances and events only, and keeps its own books: deposit = paid + refunded + burned + remaining
for each task, every contract holds exactly what it owes, nobody claims twice, and nobody is slashed by voters with less than
two thirds of the verifiers' stake. A failure prints the steps that led to it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
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

from protocol.ledger import events as ev
from tests.support.evm_ledger import (
    BURN_ADDRESS,
    MONEY,
    NAMES,
    ROLES,
    SPEC,
    TERMS,
    VERIFIERS,
    EvmLedger,
    RevertedError,
    claim,
    fresh_ledger,
    settlement,
)

CALLERS = st.sampled_from(NAMES[1:])
NODES = st.sampled_from(("node", "node2"))
PICK = st.integers(0, 7)
TASKS_MAX = 6


def _mostly(right: st.SearchStrategy[Any], other: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Three draws of four are sensible: a state machine of mere nonsense moves no money."""
    return st.integers(0, 3).flatmap(lambda n: other if n == 3 else right)


INITIATOR = _mostly(st.just("initiator"), CALLERS)
VOTERS = _mostly(st.just({"verifier", "verifier2"}), st.sets(CALLERS, min_size=1))


class Checker:
    """Books kept from events, in no way from the contracts' own accounts.

    Attributes:
        owed: task -> what the book must hold for it.
        stakes: account -> [(block, bonded)], and unbonding per account.
        votes: (task, epoch, settlement hash) -> verifiers; cleared when the epoch's attempt ends.
    """

    def __init__(self, ledger: EvmLedger) -> None:
        self.ledger = ledger
        self.owed: dict[bytes, int] = {}
        self.deposits: dict[bytes, int] = {}
        self.moved: dict[bytes, Counter[str]] = defaultdict(Counter)
        self.settled: dict[bytes, tuple[int, int]] = {}
        self.claimed: dict[tuple[bytes, bytes], int] = defaultdict(int)
        self.stakes = {ledger.accounts[name]: [(0, stake)] for name, (_, stake) in ROLES.items()}
        self.unbonding: dict[bytes, int] = defaultdict(int)
        self.votes: dict[tuple[bytes, int, bytes], set[bytes]] = defaultdict(set)
        self.pending: dict[bytes, ev.SettlementPending] = {}
        self.may_slash: dict[bytes, set[bytes]] = defaultdict(set)
        self.bonds: dict[bytes, int] = {}
        self.burned = ledger.balance(BURN_ADDRESS)

    def see(self, event: ev.Event, block: int) -> None:
        """Book one event."""
        match event:
            case ev.TaskPublished(task=task, deposit=deposit):
                self.deposits[task] = self.owed[task] = deposit
                self.settled[task] = (0, 0)
            case ev.TaskToppedUp(task=task, deposit=deposit):
                assert deposit > self.deposits[task]
                self.owed[task] += deposit - self.deposits[task]
                self.deposits[task] = deposit
            case ev.Claimed(task=task, account=account, amount=amount, cumulative=cumulative):
                assert amount > 0
                self.claimed[task, account] += amount
                assert self.claimed[task, account] == cumulative, "claimed twice"
                self._move(task, "paid", amount)
                assert self.moved[task]["paid"] <= self.settled[task][0], "paid more than was settled"
            case ev.TaskClosed(task=task, refunded=refunded, burned=burned):
                self._move(task, "refunded", refunded)
                self._move(task, "burned", burned)
                assert self.owed[task] == self.settled[task][0] - self.moved[task]["paid"], (
                    "unclaimed earnings are gone"
                )
            case ev.StakeChanged(account=account, bonded=bonded, unbonding=unbonding):
                self.stakes[account].append((block, bonded))
                self.unbonding[account] = unbonding
            case ev.Slashed(account=account, task=task, amount=amount):
                assert account in self.may_slash[task], "slashed without a settlement that says so"
                self.may_slash[task].remove(account)
                self.burned += amount
            case _:
                self._see_court(event)

    def _see_court(self, event: ev.Event) -> None:
        match event:
            case ev.SettlementVoted(task=task, epoch=epoch, verifier=verifier, settlement=hashed):
                self.votes[task, epoch, hashed].add(verifier)
            case ev.SettlementPending(task=task, epoch=epoch):
                assert task not in self.pending
                self._assert_two_thirds(task, epoch)
                self.pending[task] = event
            case ev.SettlementChallenged(task=task, bond=bond):
                self.bonds[task] = bond
            case ev.SettlementVoided(task=task, epoch=epoch):
                del self.pending[task], self.bonds[task]
                self._end_attempt(task, epoch)
            case ev.SettlementFinal(task=task, epoch=epoch, paid_total=paid, burned_total=burned):
                pending = self.pending.pop(task)
                assert (pending.epoch, pending.paid_total) == (epoch, paid)
                self.may_slash[task] = set(pending.slashed)
                self.burned += self.bonds.pop(task, 0)
                self._move(task, "burned", burned - self.settled[task][1])
                self.settled[task] = (paid, burned)
                self._end_attempt(task, epoch)

    def _move(self, task: bytes, where: str, amount: int) -> None:
        assert 0 <= amount <= self.owed[task], f"{where} {amount} of {self.owed[task]}"
        self.owed[task] -= amount
        self.moved[task][where] += amount
        self.burned += amount if where == "burned" else 0

    def _end_attempt(self, task: bytes, epoch: int) -> None:
        for key in [key for key in self.votes if key[:2] == (task, epoch)]:
            del self.votes[key]

    def _assert_two_thirds(self, task: bytes, epoch: int) -> None:
        snapshot = self.ledger.view("book", "lastRevealOf", task, epoch)
        weights = {
            self.ledger.accounts[name]: [b for at, b in self.stakes[self.ledger.accounts[name]] if at <= snapshot][-1]
            for name in VERIFIERS
        }
        best = max(sum(weights[v] for v in voters) for key, voters in self.votes.items() if key[:2] == (task, epoch))
        assert best * 3 >= sum(weights.values()) * 2 > 0, "pending without two thirds"

    def check(self) -> None:
        """Compare what contracts hold and say with the books."""
        balance = self.ledger.balance
        for task, deposit in self.deposits.items():
            moved = self.moved[task]
            row = (deposit, moved["paid"], moved["refunded"], moved["burned"], self.owed[task])
            assert self.ledger.view("book", "escrowOf", task) == row
            assert deposit == sum(row[1:])
        assert balance("book") == sum(self.owed.values())
        assert balance("registry") == sum(history[-1][1] for history in self.stakes.values()) + sum(
            self.unbonding.values()
        )
        assert balance("court") == sum(self.bonds.values())
        assert balance(BURN_ADDRESS) == self.burned

    def check_supply(self) -> None:
        """No token was made or lost anywhere."""
        balance = self.ledger.balance
        holders = [*NAMES[1:], "book", "registry", "court", BURN_ADDRESS]
        assert sum(balance(holder) for holder in holders) == MONEY * (len(NAMES) - 1)


class RandomCallers(RuleBasedStateMachine):
    """Mostly sensible calls, so that money really moves, by anybody, on any of up to three tasks."""

    def __init__(self) -> None:
        super().__init__()
        self._fixture = fresh_ledger()
        self.ledger = next(self._fixture)
        self.checker = Checker(self.ledger)
        self.tasks: list[bytes] = []
        self.proposals: dict[bytes, list[dict[bytes, int]]] = defaultdict(list)

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
            last = self.ledger.view("book", "lastRevealOf", task, epoch)
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
        for task, earnings in [(task, e) for task in self.tasks for e in self.proposals[task][-2:]]:
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
            last = self.ledger.view("book", "lastRevealOf", task, max(epochs, 1) - 1)
            self.ledger.mine_until(max(self.ledger.block, last + TERMS.timeout_blocks + 1))
        self._try(who, "book", "close", task)

    @rule(who=CALLERS, amount=st.integers(0, 1_200), bond=st.booleans())
    def stake(self, who: str, amount: int, bond: bool) -> None:
        if not self._try(who, "registry", "withdraw"):
            self._try(who, "registry", "addStake" if bond else "startUnbond", amount)

    @invariant()
    def money_is_conserved(self) -> None:
        self.checker.check()


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
    _run(4)


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
