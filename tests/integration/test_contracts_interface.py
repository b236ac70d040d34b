"""The contracts' ABI says what `protocol.ledger` says, the artifacts are what the sources give, and wiring is checked."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import get_args, get_origin, get_type_hints

import pytest

import contracts
from contracts.artifacts import DEPLOY_ORDER, load_artifact
from protocol.errors import ConfigError
from protocol.ledger import calls, events
from protocol.merkle import keccak
from protocol.task import Terms
from tests.support.evm_ledger import SPEC, EvmLedger, fresh_ledger

CODE_BYTES_MAX = 24_576
CALLS = [kind for kind in vars(calls).values() if isinstance(kind, type) and issubclass(kind, calls.Call)]
EVENTS = [kind for kind in vars(events).values() if isinstance(kind, type) and issubclass(kind, events.Event)]
#: Which Solidity types a Python annotation may stand for.
TYPES = {
    bytes: {"address", "bytes32", "bytes"},
    int: {"uint8", "uint32", "uint64", "uint256"},
    bool: {"bool"},
}


@pytest.fixture
def ledger() -> Iterator[EvmLedger]:
    yield from fresh_ledger()


def _snake(name: str) -> str:
    return re.sub(r"(?<!^)([A-Z])", r"_\1", name).lower()


def _entries(kind: str) -> dict[str, dict]:
    abis = [entry for name in DEPLOY_ORDER[1:] for entry in load_artifact(name).abi]
    return {entry["name"]: entry for entry in abis if entry["type"] == kind}


def _assert_types(struct: type, inputs: list[dict]) -> None:
    for hint, entry in zip(get_type_hints(struct).values(), inputs, strict=True):
        kind = entry["type"]
        while get_origin(hint) is tuple:
            hint, kind = get_args(hint)[0], kind.removesuffix("[]")
        assert kind in TYPES[hint], f"{struct.__name__}.{entry['name']} is {entry['type']}"


@pytest.mark.parametrize("kind", [kind for kind in EVENTS if kind is not events.Event])
def test_contracts_event_has_the_fields_of_its_struct(kind: type[events.Event]) -> None:
    inputs = _entries("event")[kind.__name__]["inputs"]
    assert [_snake(entry["name"]) for entry in inputs] == list(kind.__struct_fields__)
    _assert_types(kind, inputs)


def test_contracts_emit_no_event_that_the_replica_does_not_know() -> None:
    assert set(_entries("event")) == {kind.__name__ for kind in EVENTS if kind is not events.Event}


@pytest.mark.parametrize("kind", [kind for kind in CALLS if kind is not calls.Call])
def test_contracts_function_has_the_arguments_of_its_call(kind: type[calls.Call]) -> None:
    assert kind.__doc__ is not None
    contract, function, arguments = re.search(r"`(\w+)\.(\w+)\((.*?)\)`", kind.__doc__).groups()
    entry = next(e for e in load_artifact(contract).abi if e["type"] == "function" and e["name"] == function)
    assert [e["name"] for e in entry["inputs"]] == [name for name in arguments.split(", ") if name]
    if kind is not calls.Publish:
        assert [_snake(e["name"]) for e in entry["inputs"]] == list(kind.__struct_fields__)
        _assert_types(kind, entry["inputs"])


def test_contracts_terms_have_the_order_of_the_protocol() -> None:
    publish = _entries("function")["publish"]
    assert [_snake(part["name"]) for part in publish["inputs"][0]["components"]] == list(Terms._fields)


@pytest.mark.parametrize("name", DEPLOY_ORDER)
def test_contracts_code_fits_a_block_chain(name: str) -> None:
    assert 0 < len(load_artifact(name).deployed_bytecode) < CODE_BYTES_MAX


@pytest.mark.parametrize("name", ["Nothing", "../artifacts/Court", "test/../Court", "", "Court.json"])
def test_contracts_artifact_that_is_not_there(name: str) -> None:
    with pytest.raises(ConfigError, match="make contracts"):
        load_artifact(name)


@pytest.mark.npm
def test_contracts_artifacts_are_what_the_sources_give() -> None:
    root = Path(contracts.__file__).parent
    assert (root / "node_modules").is_dir(), "run `make contracts-check` first: it installs the pinned compiler"
    done = subprocess.run(["node", "tools/build.js", "--check"], cwd=root, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_contracts_lock_file_names_no_host() -> None:
    assert "://" not in (Path(contracts.__file__).parent / "package-lock.json").read_text().replace(
        "https://github.com/sponsors", ""
    )


def test_contracts_task_book_refuses_wrong_wiring(ledger: EvmLedger) -> None:
    """A court that names another book, and a registry that names another court, cannot be taken into use."""
    addresses = [ledger.address(name) for name in ("token", "registry", "beacons", "court")]
    with pytest.raises(AssertionError, match="failed"):  # court.book() is the first book
        ledger.create("book2", "TaskBook", *addresses)


def test_contracts_task_id_binds_chain_contract_initiator_and_nonce(ledger: EvmLedger) -> None:
    """L1: the same spec published twice, by another account or on another ledger is another task."""
    chain_id = ledger.tester.backend.chain.chain_id
    words = [chain_id.to_bytes(32, "big")]
    words += [ledger.address(name).rjust(32, b"\0") for name in ("book", "initiator")]
    for nonce in range(2):
        task = ledger.publish()
        assert task == keccak(b"".join(words) + nonce.to_bytes(32, "big") + keccak(SPEC))
    other = ledger.call("stranger", "book", "publish", ledger.terms(), SPEC, 3_500)
    assert other not in (task, keccak(b"".join(words) + bytes(32) + keccak(SPEC)))


@pytest.mark.parametrize("contract", ["registry", "court", "book", "beacons"])
def test_contracts_refuse_ether_and_unknown_calls(ledger: EvmLedger, contract: str) -> None:
    """Nothing is payable and there is no fallback: money sent by mistake stays with its sender."""
    artifact = load_artifact(ledger.contracts[contract][0])
    assert not any(entry.get("stateMutability") == "payable" for entry in artifact.abi)
    assert not any(entry["type"] in ("fallback", "receive") for entry in artifact.abi)
