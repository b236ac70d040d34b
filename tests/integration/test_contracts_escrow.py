"""`TaskBook`'s money: publish, top up, cancel, claim, close. Settlements come from the real Court."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from protocol.ledger.events import (
    Claimed,
    PolicyRecorded,
    TaskCancelled,
    TaskClosed,
    TaskPublished,
    TaskToppedUp,
)
from tests.support.evm_ledger import (
    BURN_ADDRESS,
    DEPOSIT,
    MONEY,
    SPEC,
    TERMS,
    UNBOND_BLOCKS,
    EvmLedger,
    claim,
    fresh_ledger,
    settlement,
)

UNKNOWN = b"\x99" * 32
BLOCKS_MAX = 10_000_000


@pytest.fixture
def ledger() -> Iterator[EvmLedger]:
    yield from fresh_ledger()


@pytest.fixture
def task(ledger: EvmLedger) -> bytes:
    return ledger.publish()


def test_publish_escrows_the_deposit(ledger: EvmLedger) -> None:
    initiator, terms = ledger.address("initiator"), ledger.terms()
    start = ledger.block + TERMS.start_delay_blocks
    published, policy = ledger.send("initiator", "book", "publish", terms, SPEC, DEPOSIT)
    assert isinstance(published, TaskPublished)
    task = published.task
    assert published == TaskPublished(task, initiator, start, DEPOSIT, SPEC)
    assert policy == PolicyRecorded(task, 0, terms.base_policy, terms.base_manifest, bytes(32), bytes(32))
    assert ledger.view("book", "escrowOf", task) == (DEPOSIT, 0, 0, 0, DEPOSIT)
    assert ledger.view("book", "stateOf", task) == (initiator, start, 6, 0, False, False)
    assert ledger.view("book", "nonceOf", initiator) == 1
    assert ledger.balance("book") == DEPOSIT
    assert ledger.balance("initiator") == MONEY - DEPOSIT


@pytest.mark.parametrize(("deposit", "end_round"), [(1_000, 2), (1_999, 2), (2_000, 4), (3_000, 6), (9_999, 6)])
def test_deposit_funds_whole_epochs(ledger: EvmLedger, deposit: int, end_round: int) -> None:
    assert ledger.view("book", "stateOf", ledger.publish(deposit))[2] == end_round


@pytest.mark.parametrize(
    ("field", "low", "high"),
    [
        ("start_delay_blocks", 1, BLOCKS_MAX),
        ("round_blocks", 1, BLOCKS_MAX),
        ("epoch_rounds", 1, BLOCKS_MAX),
        ("num_epochs", 1, BLOCKS_MAX),
        ("commit_blocks", 1, BLOCKS_MAX),
        ("receipt_blocks", 1, BLOCKS_MAX),
        ("verdict_commit_blocks", 1, BLOCKS_MAX),
        ("verdict_reveal_blocks", 1, BLOCKS_MAX),
        ("challenge_blocks", 1, BLOCKS_MAX),
        ("timeout_blocks", 1, BLOCKS_MAX),
        ("slots_max", 1, 4096),
        ("slash_bps", 1, 10_000),
    ],
)
def test_publish_bounds_the_terms(ledger: EvmLedger, field: str, low: int, high: int) -> None:
    name = field.split("_")[0] + "".join(part.capitalize() for part in field.split("_")[1:])
    for value in (0, high + 1):
        error = ledger.error("initiator", "book", "publish", ledger.terms(**{field: value}), SPEC, DEPOSIT)
        assert error == ("TermOutOfRange", name, value, low, high)


def test_publish_refuses(ledger: EvmLedger) -> None:
    def error(spec: bytes = SPEC, deposit: int = DEPOSIT, **changes: object) -> tuple[object, ...]:
        return ledger.error("initiator", "book", "publish", ledger.terms(**changes), spec, deposit)

    assert error(deposit=999) == ("DepositBelowOneEpoch", 999, 1_000)
    assert error(spec=b"") == ("ZeroValue",)
    assert error(spec=b"x" * 4097) == ("TooLong", 4097, 4096)
    ledger.call("initiator", "book", "publish", ledger.terms(), b"x" * 4096, DEPOSIT)
    assert error(epoch_pay_max=0)[:3] == ("TermOutOfRange", "epochPayMax", 0)
    assert error(trainer=bytes(20))[:2] == ("TermOutOfRange", "trainer")
    assert error(base_policy=bytes(32))[:2] == ("TermOutOfRange", "basePolicy")
    assert error(deposit=MONEY + 1)[0] == "ERC20InsufficientBalance"
    # commit + receipt + finality + verdict commit: 6 + 4 + 1 + 239 blocks
    assert error(verdict_commit_blocks=239) == ("BeaconSpanTooLong", 250, 249)
    assert error(verdict_commit_blocks=238)[0] == "UnbondingTooShort"


@pytest.mark.parametrize("field", ["round_blocks", "commit_blocks", "verdict_reveal_blocks", "challenge_blocks"])
def test_publish_wants_stake_to_outlast_settlement(ledger: EvmLedger, field: str) -> None:
    """S2: the test's terms take exactly the registry's unbonding time; a block more anywhere is refused."""
    more = {"round_blocks": 2, "verdict_reveal_blocks": 2, "challenge_blocks": 2}.get(field, 1)
    terms = ledger.terms(**{field: getattr(TERMS, field) + 1})
    error = ledger.error("initiator", "book", "publish", terms, SPEC, DEPOSIT)
    assert error == ("UnbondingTooShort", UNBOND_BLOCKS, UNBOND_BLOCKS + more)


def test_top_up_funds_more_epochs(ledger: EvmLedger) -> None:
    task = ledger.publish(1_500)
    assert ledger.send("stranger", "book", "topUp", task, 499) == [TaskToppedUp(task, 1_999)]
    assert ledger.view("book", "stateOf", task)[2] == 2
    assert ledger.send("initiator", "book", "topUp", task, 1) == [TaskToppedUp(task, 2_000)]
    assert ledger.view("book", "stateOf", task)[2] == 4
    ledger.send("initiator", "book", "topUp", task, 5_000)
    assert ledger.view("book", "stateOf", task)[2] == 6
    assert ledger.view("book", "escrowOf", task) == (7_000, 0, 0, 0, 7_000)
    assert ledger.error("initiator", "book", "topUp", task, 0) == ("ZeroValue",)
    assert ledger.error("initiator", "book", "topUp", UNKNOWN, 1) == ("UnknownTask", UNKNOWN)
    ledger.send("initiator", "book", "cancel", task)
    assert ledger.error("initiator", "book", "topUp", task, 1) == ("TaskIsCancelled", task)
    ledger.send("stranger", "book", "close", task)
    assert ledger.error("initiator", "book", "topUp", task, 1) == ("TaskIsClosed", task)


@pytest.mark.parametrize(("blocks_after_start", "end_round"), [(-1, 0), (0, 2), (7, 2), (8, 4), (16, 6), (40, 6)])
def test_cancel_ends_with_the_present_epoch(ledger: EvmLedger, blocks_after_start: int, end_round: int) -> None:
    task = ledger.publish()
    ledger.mine_until(ledger.times(task, 0)[0] + blocks_after_start)
    initiator, stranger = ledger.address("initiator"), ledger.address("stranger")
    assert ledger.error("stranger", "book", "cancel", task) == ("Unauthorized", stranger, initiator)
    assert ledger.send("initiator", "book", "cancel", task) == [TaskCancelled(task, end_round)]
    assert ledger.error("initiator", "book", "cancel", task) == ("TaskIsCancelled", task)
    assert ledger.view("book", "stateOf", task)[2] == end_round


def test_cancel_refuses_unknown_and_closed_tasks(ledger: EvmLedger, task: bytes) -> None:
    assert ledger.error("initiator", "book", "cancel", UNKNOWN) == ("UnknownTask", UNKNOWN)
    ledger.send("initiator", "book", "cancel", task)
    ledger.send("stranger", "book", "close", task)
    assert ledger.error("initiator", "book", "cancel", task) == ("TaskIsClosed", task)


def test_settle_is_the_courts(ledger: EvmLedger, task: bytes) -> None:
    for who in ("deployer", "initiator", "verifier"):
        error = ledger.error(who, "book", "settle", task, 0, UNKNOWN, 0, 0)
        assert error == ("Unauthorized", ledger.address(who), ledger.address("court"))


def test_claims_are_cumulative(ledger: EvmLedger, task: bytes) -> None:
    node, node2 = ledger.address("node"), ledger.address("node2")
    before = ledger.balance("node")
    first = {node: 100, node2: 30}
    ledger.settle(task, 0, first, burned=11)
    assert ledger.send("stranger", "book", "claim", *claim(task, first, node)) == [Claimed(task, node, 100, 100)]
    second = {node: 250, node2: 30}
    ledger.settle(task, 1, second, burned=12)
    assert ledger.error("node", "book", "claim", *claim(task, first, node))[0] == "BadProof"
    assert ledger.send("node2", "book", "claim", *claim(task, second, node)) == [Claimed(task, node, 150, 250)]
    assert ledger.balance("node") == before + 250
    assert ledger.view("book", "claimedOf", task, node) == 250
    assert ledger.view("book", "settlementOf", task)[0] == 2
    assert ledger.view("book", "settlementOf", task)[2:] == (280, 12)
    assert ledger.view("book", "escrowOf", task) == (DEPOSIT, 250, 0, 12, DEPOSIT - 262)
    assert ledger.balance(BURN_ADDRESS) == 12


def test_claim_refuses(ledger: EvmLedger, task: bytes) -> None:
    node, stranger = ledger.address("node"), ledger.address("stranger")
    earnings = {node: 100, ledger.address("node2"): 30, ledger.address("relay"): 0}
    good = claim(task, earnings, node)
    assert ledger.error("node", "book", "claim", *good) == ("BadProof", node, 100)  # nothing is settled
    ledger.settle(task, 0, earnings)
    proof = good[3]
    assert ledger.error("node", "book", "claim", UNKNOWN, *good[1:]) == ("UnknownTask", UNKNOWN)
    assert ledger.error("node", "book", "claim", task, node, 101, proof) == ("BadProof", node, 101)
    assert ledger.error("node", "book", "claim", task, stranger, 100, proof) == ("BadProof", stranger, 100)
    assert ledger.error("node", "book", "claim", task, node, 100, proof[:-1]) == ("BadProof", node, 100)
    assert ledger.error("node", "book", "claim", task, node, 100, (*proof, UNKNOWN)) == ("BadProof", node, 100)
    relay = ledger.address("relay")
    assert ledger.error("relay", "book", "claim", *claim(task, earnings, relay)) == ("NothingToClaim", 0)
    other = ledger.publish()  # same money, other task
    assert ledger.error("node", "book", "claim", other, *good[1:]) == ("BadProof", node, 100)


def test_leaves_above_the_settled_total_are_not_paid(ledger: EvmLedger, task: bytes) -> None:
    """Even a settlement that lies about its sum cannot touch money that was not settled."""
    node, node2 = ledger.address("node"), ledger.address("node2")
    earnings = {node: 100, node2: 100}
    ledger.mine_until(ledger.view("book", "lastConfirmOf", task, 0) + 1)
    root = settlement(task, 0, earnings)[2]
    for voter in ("verifier", "verifier2"):
        ledger.send(voter, "court", "voteSettlement", task, 0, root, 150, 0, ())
    ledger.finalize(task, 0)
    ledger.send("node", "book", "claim", *claim(task, earnings, node))
    assert ledger.error("node2", "book", "claim", *claim(task, earnings, node2)) == ("ClaimAboveSettled", 200, 150)


def test_claim_many_skips_what_is_not_due(ledger: EvmLedger, task: bytes) -> None:
    accounts = [ledger.address(name) for name in ("node", "node2", "relay", "verifier")]
    earnings = dict(zip(accounts, (10, 20, 0, 40), strict=True))
    ledger.settle(task, 0, earnings)
    ledger.send("node", "book", "claim", *claim(task, earnings, accounts[0]))
    parts = [claim(task, earnings, account)[1:] for account in accounts]
    columns = [tuple(column) for column in zip(*parts, strict=True)]
    assert ledger.send("stranger", "book", "claimMany", task, *columns) == [
        Claimed(task, accounts[1], 20, 20),
        Claimed(task, accounts[3], 40, 40),
    ]
    assert ledger.send("stranger", "book", "claimMany", task, *columns) == []
    assert ledger.view("book", "escrowOf", task)[1] == 70


def test_claim_many_refuses(ledger: EvmLedger, task: bytes) -> None:
    node = ledger.address("node")
    assert ledger.error("node", "book", "claimMany", task, (node,), (), ((),)) == ("LengthMismatch", 1, 0, 1)
    assert ledger.error("node", "book", "claimMany", task, (node,), (1,), ()) == ("LengthMismatch", 1, 1, 0)
    assert ledger.error("node", "book", "claimMany", task, (node,), (1,), ((),)) == ("BadProof", node, 1)
    many = ((node,) * 257, (1,) * 257, ((),) * 257)
    assert ledger.error("node", "book", "claimMany", task, *many) == ("TooLong", 257, 256)
    assert ledger.error("node", "book", "claimMany", UNKNOWN, (), (), ()) == ("UnknownTask", UNKNOWN)


def test_close_after_the_last_epoch_is_final(ledger: EvmLedger) -> None:
    task, node = ledger.publish(2_100), ledger.address("node")
    for epoch in range(2):
        error = ledger.error("stranger", "book", "close", task)
        assert error[:3] == ("NotClosable", epoch, 2)
        ledger.vote(task, epoch, {node: 300 * (epoch + 1)}, burned=50)
        assert ledger.error("stranger", "book", "close", task) == ("SettlementIsPending", task)
        ledger.finalize(task, epoch)
    before = ledger.balance("initiator")
    assert ledger.send("stranger", "book", "close", task) == [TaskClosed(task, 1_450, 0)]
    assert ledger.balance("initiator") == before + 1_450
    assert ledger.view("book", "escrowOf", task) == (2_100, 0, 1_450, 50, 600)
    assert ledger.error("stranger", "book", "close", task) == ("TaskIsClosed", task)
    ledger.mine_until(ledger.block + 1_000)
    ledger.send("stranger", "book", "claim", *claim(task, {node: 600}, node))
    assert ledger.view("book", "escrowOf", task) == (2_100, 600, 1_450, 50, 0)


def test_close_without_settlement_burns_what_was_never_judged(ledger: EvmLedger) -> None:
    """The initiator gains nothing by starving its own verifiers: receipted pay is burned, not refunded (V9)."""
    task = ledger.publish(2_100)
    ledger.send("node", "book", "join", task, 3)
    ledger.commit(task, 0, leaves=3)
    ledger.send("relay", "book", "receipt", task, 0, (ledger.address("node"),))
    timeout = ledger.view("book", "lastConfirmOf", task, 1) + TERMS.timeout_blocks
    ledger.mine_until(timeout)
    assert ledger.error("initiator", "book", "close", task) == ("NotClosable", 0, 2, timeout)
    ledger.mine_until(timeout + 1)
    assert ledger.send("stranger", "book", "close", task) == [TaskClosed(task, 1_800, 300)]
    assert ledger.view("book", "escrowOf", task) == (2_100, 0, 1_800, 300, 0)
    assert ledger.balance(BURN_ADDRESS) == 300


def test_settling_an_epoch_clears_its_pending_pay(ledger: EvmLedger) -> None:
    task = ledger.publish(2_000)
    ledger.send("node", "book", "join", task, 3)
    for round_index in (0, 2):
        ledger.commit(task, round_index, leaves=3)
        ledger.send("relay", "book", "receipt", task, round_index, (ledger.address("node"),))
    ledger.settle(task, 0, {ledger.address("node"): 300})
    assert ledger.view("book", "pendingPayOf", task, 0) == 0
    assert ledger.view("book", "pendingPayOf", task, 1) == 300
    ledger.mine_until(ledger.view("book", "lastConfirmOf", task, 1) + TERMS.timeout_blocks + 1)
    assert ledger.send("stranger", "book", "close", task) == [TaskClosed(task, 1_400, 300)]


def test_close_refuses_unknown_task(ledger: EvmLedger) -> None:
    assert ledger.error("stranger", "book", "close", UNKNOWN) == ("UnknownTask", UNKNOWN)


@pytest.mark.parametrize("view", ["termsOf", "escrowOf", "stateOf", "settlementOf"])
def test_views_refuse_unknown_tasks(ledger: EvmLedger, view: str) -> None:
    assert ledger.error("stranger", "book", view, UNKNOWN) == ("UnknownTask", UNKNOWN)


def test_tokens_sent_unasked_belong_to_nobody(ledger: EvmLedger, task: bytes) -> None:
    for contract in ("book", "court", "registry"):
        ledger.send("stranger", "token", "transfer", ledger.address(contract), 777)
    ledger.send("initiator", "book", "cancel", task)
    assert ledger.send("stranger", "book", "close", task) == [TaskClosed(task, DEPOSIT, 0)]
    assert ledger.balance("book") == 777
