"""L10: every function against every role. There is no owner, no pause, no upgrade: the deployer is a stranger."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from contracts.artifacts import DEPLOY_ORDER, load_artifact
from protocol.canaries import compute_seal
from tests.support.evm_ledger import NAMES, STAKE, EvmLedger, claim, fresh_ledger

HASH = b"\x44" * 32
VERIFIERS = {"verifier", "verifier2", "verifier3"}
NODES = {"node", "node2"}
REGISTERED = {"trainer", "relay"} | NODES | VERIFIERS
EVERYBODY = set(NAMES)
#: How a contract says that the caller is the wrong one.
REFUSALS = {"Unauthorized", "WrongRole", "NotMember", "NotMemberInEpoch", "CommitmentMismatch"}

Setup = Callable[[EvmLedger, bytes], tuple[Any, ...]]


def _joined(ledger: EvmLedger, task: bytes) -> tuple[Any, ...]:
    for name in NODES:
        ledger.send(name, "book", "join", task, 1)
    return (task,)


def _round_open(ledger: EvmLedger, task: bytes) -> tuple[Any, ...]:
    _joined(ledger, task)
    ledger.record_beacon(ledger.times(task, 0)[0])
    return task, 0, HASH, 1, HASH


def _committed(ledger: EvmLedger, task: bytes) -> tuple[Any, ...]:
    _joined(ledger, task)
    ledger.commit(task, 0)
    return task, 0, (ledger.address("node"),)


def _audit_open(ledger: EvmLedger, task: bytes) -> tuple[Any, ...]:
    ledger.record_beacon(ledger.times(task, 0)[3])
    return task, 0, HASH


def _epoch_over(ledger: EvmLedger, task: bytes) -> tuple[Any, ...]:
    ledger.mine_until(ledger.view("book", "lastConfirmOf", task, 0) + 1)
    return task, 0, HASH, 0, 0, ()


def _pending(ledger: EvmLedger, task: bytes) -> tuple[Any, ...]:
    ledger.vote(task, 0, {ledger.address("node"): 5})
    return task, 0


def _challenged(ledger: EvmLedger, task: bytes) -> tuple[Any, ...]:
    _pending(ledger, task)
    ledger.send("node", "court", "challenge", task, 0)
    return task, 0, True


def _finalizable(ledger: EvmLedger, task: bytes) -> tuple[Any, ...]:
    _pending(ledger, task)
    ledger.mine_until(ledger.view("court", "pendingOf", task)[1] + 1)
    return task, 0


def _settled(ledger: EvmLedger, task: bytes) -> tuple[Any, ...]:
    node = ledger.address("node")
    ledger.settle(task, 0, {node: 5})
    return claim(task, {node: 5}, node)


def _settled_many(ledger: EvmLedger, task: bytes) -> tuple[Any, ...]:
    _, account, cumulative, proof = _settled(ledger, task)
    return task, (account,), (cumulative,), (proof,)


def _opened(ledger: EvmLedger, task: bytes) -> tuple[Any, ...]:
    node = ledger.address("node")
    ledger.send("node", "book", "join", task, 1)
    ledger.send("stranger", "canaries", "seal", compute_seal(task=task, round_index=0, node=node, salt=HASH), 0)
    ledger.commit(task, 0)
    ledger.mine_until(ledger.times(task, 0)[5] + 1)
    ledger.send("node", "canaries", "open", task, 0, HASH)
    return task, 0, node, True


def _cancelled(ledger: EvmLedger, task: bytes) -> tuple[Any, ...]:
    ledger.send("initiator", "book", "cancel", task)
    return (task,)


def _with(*arguments: Any) -> Setup:
    return lambda _, task: (task, *arguments)


#: Function, the state in which it works, and who may call it.
MATRIX: dict[tuple[str, str], tuple[Setup, set[str]]] = {
    ("registry", "register"): (lambda *_: (1, HASH, b"", 1), EVERYBODY - REGISTERED - {"deployer"}),
    ("registry", "setRecord"): (lambda *_: (b"",), REGISTERED),
    ("registry", "addStake"): (lambda *_: (1,), REGISTERED),
    ("registry", "startUnbond"): (lambda *_: (1,), NODES | VERIFIERS | {"relay"}),
    ("registry", "slash"): (lambda ledger, task: (ledger.address("node"), task, 1), set()),
    ("beacons", "record"): (lambda ledger, _: (ledger.block - 1,), EVERYBODY),
    ("book", "publish"): (lambda ledger, _: (ledger.terms(), b"x", 1_000), EVERYBODY - {"deployer"}),
    ("book", "topUp"): (_with(1), EVERYBODY - {"deployer"}),
    ("book", "cancel"): (_with(), {"initiator"}),
    ("book", "join"): (_with(1), NODES),
    ("book", "leave"): (_joined, NODES),
    ("book", "commit"): (_round_open, NODES),
    ("book", "receipt"): (_committed, {"relay"}),
    ("book", "recordPolicy"): (_with(1, HASH, HASH, HASH, HASH), {"trainer"}),
    ("book", "attestPolicy"): (_with(0), {"relay"} | VERIFIERS),
    ("book", "settle"): (_epoch_over, set()),
    ("book", "claim"): (_settled, EVERYBODY),
    ("book", "claimMany"): (_settled_many, EVERYBODY),
    ("book", "close"): (_cancelled, EVERYBODY),
    ("court", "commitVerdict"): (_audit_open, VERIFIERS),
    ("court", "voteSettlement"): (_epoch_over, VERIFIERS),
    ("court", "challenge"): (_pending, REGISTERED),
    ("court", "voteChallenge"): (_challenged, VERIFIERS),
    ("court", "finalize"): (_finalizable, EVERYBODY),
    ("canaries", "seal"): (lambda *_: (HASH, 1), EVERYBODY - {"deployer"}),
    ("canaries", "confirm"): (_opened, VERIFIERS),
}
#: Functions that only ever concern the caller's own money or secret: tested where they are.
OWN = {
    ("registry", "withdraw"),
    ("court", "revealVerdict"),
    ("court", "withdrawBond"),
    ("canaries", "open"),
    ("canaries", "withdraw"),
}
#: The deployer holds no tokens and an account without stake has none to unbond: refused, for want of money, not of power.
POOR = {"ERC20InsufficientAllowance", "ERC20InsufficientBalance", "AlreadyRegistered", "UnbondTooMuch"}


@pytest.fixture
def ledger() -> Iterator[EvmLedger]:
    yield from fresh_ledger()


@pytest.mark.parametrize(("contract", "function"), MATRIX, ids=[f"{c}-{f}" for c, f in MATRIX])
def test_l10_only_the_right_role_may(ledger: EvmLedger, contract: str, function: str) -> None:
    setup, allowed = MATRIX[contract, function]
    arguments = setup(ledger, ledger.publish())
    if (contract, function) == ("book", "settle"):
        arguments = arguments[:5]
    for who in NAMES:
        if who in allowed:
            ledger.call(who, contract, function, *arguments)
        else:
            assert ledger.error(who, contract, function, *arguments)[0] in REFUSALS | POOR, who


def test_l10_matrix_has_every_function_that_changes_anything() -> None:
    names = {
        "Beacons": "beacons",
        "StakeRegistry": "registry",
        "TaskBook": "book",
        "Court": "court",
        "Canaries": "canaries",
    }
    found = {
        (names[name], entry["name"])
        for name in DEPLOY_ORDER[1:]
        for entry in load_artifact(name).abi
        if entry["type"] == "function" and entry["stateMutability"] not in ("view", "pure")
    }
    assert found == set(MATRIX) | OWN


def test_l10_role_is_for_ever(ledger: EvmLedger) -> None:
    """A slashed verifier cannot come back as a node of the same account, nor with a clean slate."""
    ledger.send("verifier", "registry", "startUnbond", 4 * STAKE)
    for role in range(1, 5):
        error = ledger.error("verifier", "registry", "register", role, HASH, b"", 0)
        assert error == ("AlreadyRegistered", ledger.address("verifier"), 2)
