"""An independent accountant for the contracts: books kept from events, compared with token balances."""

from __future__ import annotations

from collections import Counter, defaultdict

from protocol.ledger import events as ev
from tests.support.evm_ledger import BURN_ADDRESS, MONEY, NAMES, ROLES, VERIFIERS, EvmLedger


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
