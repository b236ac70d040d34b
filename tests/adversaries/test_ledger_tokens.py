"""L4: tokens that call back, charge, lie or freeze take nothing and block nobody."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from eth_utils import keccak

from protocol.ledger.events import Event, Role, SettlementFinal, SettlementVoided, TaskClosed, TaskPublished
from tests.support.evm_ledger import BURN_ADDRESS, MONEY, SPEC, STAKE, TERMS, EvmLedger, claim, register_all

GUARD = keccak(text="ReentrancyGuardReentrantCall()")[:4]


@cache
def _hooked() -> tuple[EvmLedger, Any]:
    ledger = EvmLedger("test/HookToken")
    register_all(ledger)
    ledger.create("mallory", "test/Reenterer")
    for spender in ("registry", "court", "book"):
        _as_mallory(ledger, "token", "approve", ledger.address(spender), 2**256 - 1)
    ledger.fund(ledger.address("mallory"))
    return ledger, ledger.tester.take_snapshot()


@pytest.fixture
def hooked() -> EvmLedger:
    """A ledger on a token that tells senders and receivers; `mallory` is a contract that calls back."""
    ledger, snapshot = _hooked()
    ledger.tester.revert_to_snapshot(snapshot)
    return ledger


def _as_mallory(ledger: EvmLedger, contract: str, function: str, *arguments: Any) -> list[Event]:
    data = ledger.data(contract, function, *arguments)
    return ledger.send("stranger", "mallory", "execute", ledger.address(contract), data)


def _arm(ledger: EvmLedger, contract: str, function: str, *arguments: Any) -> None:
    """What mallory calls whenever its tokens move."""
    ledger.send("stranger", "mallory", "arm", ledger.address(contract), ledger.data(contract, function, *arguments))


def _assert_refused(ledger: EvmLedger) -> None:
    """The call from within the transfer was made, and hit the guard."""
    assert ledger.view("mallory", "numTried") >= 1
    assert ledger.view("mallory", "numSucceeded") == 0
    assert ledger.view("mallory", "lastError") == GUARD


def test_l4_reentrant_claim_pays_once(hooked: EvmLedger) -> None:
    task, mallory = hooked.publish(), hooked.address("mallory")
    earnings = {mallory: 100, hooked.address("node"): 900}
    hooked.settle(task, 0, earnings)
    arguments = claim(task, earnings, mallory)
    _arm(hooked, "book", "claim", *arguments)
    hooked.send("stranger", "book", "claim", *arguments)
    _assert_refused(hooked)
    assert hooked.balance(mallory) == MONEY + 100
    assert hooked.view("book", "escrowOf", task) == (3_500, 100, 0, 0, 3_400)


def test_l4_reentrant_claim_many_pays_once(hooked: EvmLedger) -> None:
    task, mallory = hooked.publish(), hooked.address("mallory")
    earnings = {mallory: 100, hooked.address("node"): 900}
    hooked.settle(task, 0, earnings)
    _, account, cumulative, proof = claim(task, earnings, mallory)
    many = (task, (account,) * 2, (cumulative,) * 2, (proof,) * 2)
    _arm(hooked, "book", "claimMany", *many)
    hooked.send("stranger", "book", "claimMany", *many)
    _assert_refused(hooked)
    assert hooked.balance(mallory) == MONEY + 100


def test_l4_reentrant_close_refunds_once(hooked: EvmLedger) -> None:
    published = _as_mallory(hooked, "book", "publish", hooked.terms(), SPEC, 3_500)[0]
    assert isinstance(published, TaskPublished)
    hooked.publish()  # somebody else's money is there to be taken
    _as_mallory(hooked, "book", "cancel", published.task)
    _arm(hooked, "book", "close", published.task)
    closed = TaskClosed(published.task, 3_500, 0)
    assert hooked.send("stranger", "book", "close", published.task) == [closed]
    _assert_refused(hooked)
    assert (hooked.balance("mallory"), hooked.balance("book")) == (MONEY, 3_500)


def test_l4_reentrant_top_up_counts_what_arrived(hooked: EvmLedger) -> None:
    task = hooked.publish()
    _arm(hooked, "book", "topUp", task, 500)
    _as_mallory(hooked, "book", "topUp", task, 500)
    _assert_refused(hooked)
    assert hooked.view("book", "escrowOf", task)[0] == hooked.balance("book") == 4_000


def test_l4_reentrant_withdrawal_pays_once(hooked: EvmLedger) -> None:
    _as_mallory(hooked, "registry", "register", int(Role.NODE), b"k" * 32, b"", STAKE)
    _as_mallory(hooked, "registry", "startUnbond", STAKE)
    hooked.mine_until(hooked.view("registry", "unbondingOf", hooked.address("mallory"))[1])
    _arm(hooked, "registry", "withdraw")
    _as_mallory(hooked, "registry", "withdraw")
    _assert_refused(hooked)
    assert hooked.balance("mallory") == MONEY


def test_l4_reentrant_bond_is_returned_once(hooked: EvmLedger) -> None:
    """Called back while its bond returns, a challenger finds the settlement gone and every door closed."""
    _as_mallory(hooked, "registry", "register", int(Role.NODE), b"k" * 32, b"", STAKE)
    task = hooked.publish()
    hooked.vote(task, 0, {})
    _as_mallory(hooked, "court", "challenge", task, 0)
    _arm(hooked, "court", "finalize", task, 0)
    assert hooked.finalize(task, 0) == [SettlementVoided(task, 0)]
    _assert_refused(hooked)
    assert (hooked.balance("mallory"), hooked.balance("court")) == (MONEY - STAKE, 0)


def test_l4_reentry_into_another_contract_sees_consistent_books(hooked: EvmLedger) -> None:
    """In the middle of its claim mallory publishes a task: the guard is the book's, and refuses that too; but it may bond
    stake in the registry, and both contracts still hold exactly what their books say."""
    task, mallory = hooked.publish(), hooked.address("mallory")
    earnings = {mallory: 100, hooked.address("node"): 900}
    hooked.settle(task, 0, earnings)
    held = hooked.balance("registry")
    _arm(hooked, "registry", "register", int(Role.NODE), b"k" * 32, b"", STAKE)
    hooked.send("stranger", "book", "claim", *claim(task, earnings, mallory))
    assert hooked.view("mallory", "numSucceeded") == 1
    assert hooked.balance("registry") == held + STAKE
    assert hooked.balance("book") == hooked.view("book", "escrowOf", task)[4] == 3_400


def test_l4_fee_token_is_refused() -> None:
    ledger = EvmLedger("test/FeeToken")
    error = ledger.error("initiator", "book", "publish", ledger.terms(), SPEC, 3_500)
    assert error == ("TransferAmountWrong", 3_500, 3_465)
    error = ledger.error("node", "registry", "register", int(Role.NODE), b"k" * 32, b"", STAKE)
    assert error == ("TransferAmountWrong", STAKE, 990)
    assert ledger.balance("book") == ledger.balance("registry") == 0


def test_l4_false_returning_token_is_refused() -> None:
    ledger = EvmLedger("test/FalseToken")
    refused = ("SafeERC20FailedOperation", ledger.address("token"))
    assert ledger.error("initiator", "book", "publish", ledger.terms(), SPEC, 3_500) == refused
    assert ledger.error("node", "registry", "register", int(Role.NODE), b"k" * 32, b"", STAKE) == refused


def test_l4_frozen_challenger_does_not_stop_the_task() -> None:
    """A bond that cannot be sent back waits for its owner; the voided settlement is voided all the same."""
    ledger = EvmLedger("test/FreezeToken")
    register_all(ledger)
    task, node = ledger.publish(), ledger.address("node")
    before = ledger.balance("node")
    ledger.vote(task, 0, {})
    ledger.send("node", "court", "challenge", task, 0)
    ledger.send("deployer", "token", "freeze", node, True)
    assert ledger.finalize(task, 0) == [SettlementVoided(task, 0)]
    assert ledger.view("court", "bondOf", node) == TERMS.challenge_bond
    ledger.settle(task, 0, {}, voters=["verifier", "verifier3"])
    assert ledger.error("node", "court", "withdrawBond") == ("Frozen", node)
    ledger.send("deployer", "token", "freeze", node, False)
    ledger.send("node", "court", "withdrawBond")
    assert (ledger.balance("node"), ledger.balance("court")) == (before, 0)
    assert ledger.error("node", "court", "withdrawBond") == ("NoBond", node)


def test_l4_frozen_earner_does_not_stop_others() -> None:
    ledger = EvmLedger("test/FreezeToken")
    register_all(ledger)
    task, node, node2 = ledger.publish(), ledger.address("node"), ledger.address("node2")
    earnings = {node: 100, node2: 200}
    ledger.vote(task, 0, earnings, burned=9, slashed=(node,))
    ledger.send("deployer", "token", "freeze", node, True)
    assert isinstance(ledger.finalize(task, 0)[0], SettlementFinal)
    assert ledger.error("node", "book", "claim", *claim(task, earnings, node)) == ("Frozen", node)
    ledger.send("node2", "book", "claim", *claim(task, earnings, node2))
    assert ledger.balance(BURN_ADDRESS) == 9 + STAKE // 2
    ledger.send("deployer", "token", "freeze", node, False)
    ledger.send("stranger", "book", "claim", *claim(task, earnings, node))
    assert ledger.view("book", "escrowOf", task) == (3_500, 300, 0, 9, 3_191)
