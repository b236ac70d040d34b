"""L8: whichever role vanishes, at whatever point, all money leaves the task; and all stake leaves the registry."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.support.evm_ledger import (
    BURN_ADDRESS,
    DEPOSIT,
    ROLES,
    TERMS,
    UNBOND_BLOCKS,
    EvmLedger,
    claim,
    fresh_ledger,
)


@pytest.fixture
def ledger() -> Iterator[EvmLedger]:
    yield from fresh_ledger()


def _nobody(ledger: EvmLedger, task: bytes) -> None:
    """Nodes, relays, verifiers, trainer: nobody ever did anything."""


def _commitments_only(ledger: EvmLedger, task: bytes) -> None:
    """Relays vanished: no receipts."""
    ledger.send("node", "book", "join", task, 4)
    ledger.commit(task, 0, leaves=4)


def _receipts_only(ledger: EvmLedger, task: bytes) -> None:
    """Verifiers vanished before judging."""
    _commitments_only(ledger, task)
    ledger.send("relay", "book", "receipt", task, 0, (ledger.address("node"),))


def _split_vote(ledger: EvmLedger, task: bytes) -> None:
    """Verifiers never agree."""
    _receipts_only(ledger, task)
    for burned, voter in enumerate(("verifier", "verifier2", "verifier3")):
        ledger.vote(task, 0, {}, burned=burned, voters=[voter])


def _never_finalized(ledger: EvmLedger, task: bytes) -> None:
    """Nobody finalized a pending settlement before everybody vanished."""
    _receipts_only(ledger, task)
    ledger.vote(task, 0, {ledger.address("node"): 350})


def _challenged(ledger: EvmLedger, task: bytes) -> None:
    """A challenged settlement, on which nobody votes."""
    _never_finalized(ledger, task)
    ledger.send("node2", "court", "challenge", task, 0)


def _voided(ledger: EvmLedger, task: bytes) -> None:
    """A voided settlement that is never voted on again."""
    _challenged(ledger, task)
    ledger.finalize(task, 0)


def _first_epoch_only(ledger: EvmLedger, task: bytes) -> None:
    """Verifiers vanished after the first epoch."""
    _receipts_only(ledger, task)
    ledger.settle(task, 0, {ledger.address("node"): 350}, burned=20)


def _cancelled(ledger: EvmLedger, task: bytes) -> None:
    """The initiator cancels and vanishes; the running epoch goes on."""
    _receipts_only(ledger, task)
    ledger.send("initiator", "book", "cancel", task)


#: What happened before everybody vanished, and what is burned and earned then; the rest is the initiator's.
CASES: list[tuple[Callable[[EvmLedger, bytes], None], int, int]] = [
    (_nobody, 0, 0),
    (_commitments_only, 0, 0),
    (_receipts_only, 400, 0),
    (_split_vote, 400, 0),
    (_never_finalized, 0, 350),
    (_challenged, 400, 0),
    (_voided, 400, 0),
    (_first_epoch_only, 20, 350),
    (_cancelled, 400, 0),
]


@pytest.mark.parametrize(("happened", "burned", "earned"), CASES, ids=[case[0].__name__.strip("_") for case in CASES])
def test_l8_all_funds_exit(
    ledger: EvmLedger, happened: Callable[[EvmLedger, bytes], None], burned: int, earned: int
) -> None:
    """A stranger needs nobody's help to end the task after its timeout."""
    balances = {name: ledger.balance(name) for name in ("initiator", "node", "node2")}
    task = ledger.publish()
    happened(ledger, task)
    end_round = ledger.view("book", "stateOf", task)[2]
    last_epoch = end_round // TERMS.epoch_rounds - 1
    timeout = ledger.view("book", "lastConfirmOf", task, last_epoch) + TERMS.timeout_blocks
    ledger.mine_until(timeout)
    assert ledger.error("stranger", "book", "close", task)[0] in ("NotClosable", "SettlementIsPending")
    ledger.mine_until(timeout + 1)
    if ledger.view("court", "isPending", task):
        ledger.send("stranger", "court", "finalize", task, 0)
    ledger.send("stranger", "book", "close", task)
    if earned:
        node = ledger.address("node")
        ledger.send("stranger", "book", "claim", *claim(task, {node: earned}, node))
    assert ledger.view("book", "escrowOf", task) == (DEPOSIT, earned, DEPOSIT - earned - burned, burned, 0)
    assert ledger.balance("book") == ledger.balance("court") == 0
    assert ledger.balance(BURN_ADDRESS) == burned
    assert ledger.balance("initiator") == balances["initiator"] - burned - earned
    assert ledger.balance("node") == balances["node"] + earned
    assert ledger.balance("node2") == balances["node2"]


def test_l8_all_stake_exits(ledger: EvmLedger) -> None:
    """Nobody's consent is needed to withdraw: not while tasks run, not with reservations, not with votes cast."""
    task = ledger.publish()
    ledger.send("node", "book", "join", task, 4)
    ledger.commit(task, 0, leaves=4)
    ledger.vote(task, 0, {ledger.address("node"): 100})
    staked = [name for name, (_, stake) in ROLES.items() if stake]
    for name in staked:
        ledger.send(name, "registry", "startUnbond", ROLES[name][1])
    ledger.mine_until(ledger.block + UNBOND_BLOCKS)
    for name in staked:
        ledger.send(name, "registry", "withdraw")
    assert ledger.balance("registry") == 0


def test_l8_cancelled_before_the_start_is_closed_at_once(ledger: EvmLedger) -> None:
    before = ledger.balance("initiator")
    task = ledger.publish()
    ledger.send("initiator", "book", "cancel", task)
    ledger.send("stranger", "book", "close", task)
    assert ledger.balance("initiator") == before


def test_l8_no_settlement_after_close(ledger: EvmLedger) -> None:
    task = ledger.publish()
    _split_vote(ledger, task)
    ledger.mine_until(ledger.view("book", "lastConfirmOf", task, 2) + TERMS.timeout_blocks + 1)
    ledger.send("stranger", "book", "close", task)
    arguments = (task, 0, bytes(32), 0, 0, ())
    assert ledger.error("verifier", "court", "voteSettlement", *arguments) == ("TaskIsClosed", task)
