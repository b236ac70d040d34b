"""L1, L2, L3, L6, L7, V2: nobody is paid twice, early, or in another's place."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from protocol.ledger.events import Claimed
from protocol.verdict import compute_verdict_commitment
from tests.support.evm_ledger import EvmLedger, claim, fresh_ledger, register_all


@pytest.fixture
def ledger() -> Iterator[EvmLedger]:
    yield from fresh_ledger()


def _settled(ledger: EvmLedger) -> tuple[bytes, dict[bytes, int]]:
    task = ledger.publish()
    earnings = {ledger.address("node"): 100, ledger.address("node2"): 30}
    ledger.settle(task, 0, earnings)
    return task, earnings


@pytest.mark.parametrize("difference", [{"chain_id": 7}, {"first_nonce": 1}])
def test_l1_earnings_of_one_ledger_cannot_be_claimed_on_another(ledger: EvmLedger, difference: dict[str, int]) -> None:
    """Same accounts, spec and nonce on another chain (a fork) or in other contracts: the task differs, so the leaf does."""
    task, earnings = _settled(ledger)
    other = EvmLedger(**difference)
    register_all(other)
    assert other.accounts == ledger.accounts
    assert (other.address("book") == ledger.address("book")) == ("chain_id" in difference)
    foreign = other.publish()
    assert foreign != task
    other.settle(foreign, 0, earnings)
    arguments = claim(task, earnings, other.address("node"))
    assert other.error("node", "book", "claim", *arguments) == ("UnknownTask", task)
    assert other.error("node", "book", "claim", foreign, *arguments[1:])[0] == "BadProof"


def test_l2_repeated_claim(ledger: EvmLedger) -> None:
    task, earnings = _settled(ledger)
    arguments = claim(task, earnings, ledger.address("node"))
    ledger.send("node", "book", "claim", *arguments)
    for who in ("node", "node2", "stranger"):
        assert ledger.error(who, "book", "claim", *arguments) == ("NothingToClaim", 100)


def test_l2_one_account_many_times_in_one_call(ledger: EvmLedger) -> None:
    task, earnings = _settled(ledger)
    node = ledger.address("node")
    _, _, cumulative, proof = claim(task, earnings, node)
    emitted = ledger.send("node", "book", "claimMany", task, (node,) * 3, (cumulative,) * 3, (proof,) * 3)
    assert emitted == [Claimed(task, node, 100, 100)]


def test_l2_two_claims_in_one_block(ledger: EvmLedger) -> None:
    task, earnings = _settled(ledger)
    before = ledger.balance("node")
    arguments = claim(task, earnings, ledger.address("node"))
    calls = [(who, "book", "claim", arguments) for who in ("node", "stranger")]
    assert ledger.send_in_one_block(*calls) == [1, 0]
    assert ledger.balance("node") == before + 100


def test_l2_claim_again_under_the_next_root(ledger: EvmLedger) -> None:
    """Cumulative amounts: an old claim lowers what the next root gives."""
    task, earnings = _settled(ledger)
    node = ledger.address("node")
    ledger.send("node", "book", "claim", *claim(task, earnings, node))
    ledger.settle(task, 1, earnings)
    assert ledger.error("node", "book", "claim", *claim(task, earnings, node)) == ("NothingToClaim", 100)


@pytest.mark.parametrize("challenged", [False, True])
def test_l3_claimable_strictly_after_the_window(ledger: EvmLedger, challenged: bool) -> None:
    """At the end of the window -1 and 0 nothing can be finalized or claimed; at +1 both, in this order."""
    task, node = ledger.publish(), ledger.address("node")
    earnings = {node: 100}
    ledger.vote(task, 0, earnings)
    end = ledger.view("court", "pendingOf", task)[1]
    if challenged:
        ledger.mine_until(end)
        ledger.send("node2", "court", "challenge", task, 0)
        for voter in ("verifier", "verifier2"):
            ledger.send(voter, "court", "voteChallenge", task, 0, True)
        end = ledger.view("court", "pendingOf", task)[2]
    for block in (end - 1, end):
        ledger.mine_until(block)
        assert ledger.error("node", "court", "finalize", task, 0) == ("TooEarly", block, end + 1)
        assert ledger.error("node", "book", "claim", *claim(task, earnings, node)) == ("BadProof", node, 100)
    calls = [("node", "court", "finalize", (task, 0)), ("node2", "book", "claim", claim(task, earnings, node))]
    ledger.mine_until(end + 1)
    assert ledger.send_in_one_block(*calls) == [1, 1]


def test_l3_voided_settlement_is_never_claimable(ledger: EvmLedger) -> None:
    task, node = ledger.publish(), ledger.address("node")
    ledger.vote(task, 0, {node: 100})
    ledger.send("node2", "court", "challenge", task, 0)
    ledger.finalize(task, 0)
    assert ledger.error("node", "book", "claim", *claim(task, {node: 100}, node)) == ("BadProof", node, 100)


def test_l6_front_run_claim_pays_the_earner(ledger: EvmLedger) -> None:
    task, earnings = _settled(ledger)
    before, stranger = ledger.balance("node"), ledger.balance("stranger")
    arguments = claim(task, earnings, ledger.address("node"))
    assert ledger.send_in_one_block(("stranger", "book", "claim", arguments), ("node", "book", "claim", arguments)) == [
        1,
        0,
    ]
    assert (ledger.balance("node"), ledger.balance("stranger")) == (before + 100, stranger)


def test_l6_copied_publication_takes_nobodys_task_id(ledger: EvmLedger) -> None:
    expected = ledger.call("initiator", "book", "publish", ledger.terms(), b"a task", 3_500)
    ledger.send("stranger", "book", "publish", ledger.terms(), b"a task", 3_500)
    assert ledger.publish() == expected


def test_l6_copied_root_counts_for_its_sender_only(ledger: EvmLedger) -> None:
    task = ledger.publish()
    for who in ("node", "node2"):
        ledger.send(who, "book", "join", task, 1)
    start = ledger.times(task, 0)[0]
    ledger.record_beacon(start)
    root = b"\x55" * 32
    calls = [(who, "book", "commit", (task, 0, root, 1, root)) for who in ("node2", "node")]
    assert ledger.send_in_one_block(*calls) == [1, 1]
    assert ledger.view("book", "commitmentOf", task, 0, ledger.address("node"))[0] == root


def test_v2_copied_verdict_commitment_cannot_be_revealed(ledger: EvmLedger) -> None:
    task = ledger.publish()
    rows, report, salt = b"\x05" * 32, b"\x06" * 32, b"\x07" * 32
    commitment = compute_verdict_commitment(
        task=task, round_index=0, verifier=ledger.address("verifier"), rows=rows, report=report, salt=salt
    )
    _, _, _, audit, deadline, _ = ledger.times(task, 0)
    ledger.record_beacon(audit)
    calls = [(who, "court", "commitVerdict", (task, 0, commitment)) for who in ("verifier2", "verifier")]
    assert ledger.send_in_one_block(*calls) == [1, 1]
    ledger.mine_until(deadline + 1)
    ledger.send("verifier", "court", "revealVerdict", task, 0, rows, report, salt)
    error = ledger.error("verifier2", "court", "revealVerdict", task, 0, rows, report, salt)
    assert error[:2] == ("CommitmentMismatch", commitment)


def test_l7_cost_of_settling_does_not_grow_with_tasks(ledger: EvmLedger) -> None:
    """Publishing many minimal tasks burdens nobody else: votes, finalization and claims cost the same gas."""

    def gas_of_settling() -> int:
        task = ledger.publish()
        ledger.settle(task, 0, {ledger.address("node"): 100})
        return sum(
            ledger.tester.get_transaction_receipt(tx)["gas_used"]
            for number in range(ledger.block - 9, ledger.block)
            for tx in ledger.tester.get_block_by_number(number)["transactions"]
        )

    gas_of_settling()  # storage that is written for the first time costs more
    alone = gas_of_settling()
    for _ in range(15):
        ledger.send("stranger", "book", "publish", ledger.terms(), b"spam", 1_000)
    assert gas_of_settling() == pytest.approx(alone, abs=200)  # calldata of other hashes
