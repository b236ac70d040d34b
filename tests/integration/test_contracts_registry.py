"""`Beacons` and `StakeRegistry`: every function and every error."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from protocol.ledger.events import (
    BeaconRecorded,
    ParticipantRegistered,
    RecordChanged,
    Role,
    StakeChanged,
)
from tests.support.evm_ledger import MONEY, STAKE, UNBOND_BLOCKS, EvmLedger, fresh_ledger

KEY = b"\x07" * 32


@pytest.fixture
def ledger() -> Iterator[EvmLedger]:
    yield from fresh_ledger()


def test_beacon_is_the_block_hash_and_is_kept(ledger: EvmLedger) -> None:
    number = ledger.block - 1
    expected = bytes.fromhex(ledger.tester.get_block_by_number(number)["hash"][2:])
    assert ledger.view("beacons", "hashOf", number) == bytes(32)
    assert ledger.send("stranger", "beacons", "record", number) == [BeaconRecorded(number, expected)]
    assert ledger.send("node", "beacons", "record", number) == []
    assert ledger.view("beacons", "hashOf", number) == expected


@pytest.mark.parametrize("ahead", [0, 1, 1_000])
def test_beacon_of_a_block_that_is_not_over(ledger: EvmLedger, ahead: int) -> None:
    number = ledger.block + ahead
    assert ledger.error("stranger", "beacons", "record", number) == ("BeaconOutOfReach", number, ledger.block)


def test_beacon_reaches_back_256_blocks(ledger: EvmLedger) -> None:
    number = ledger.block
    ledger.mine_until(number + 256)
    ledger.call("stranger", "beacons", "record", number)
    ledger.mine_until(number + 257)
    assert ledger.error("stranger", "beacons", "record", number) == ("BeaconOutOfReach", number, ledger.block)


def test_register_bonds_the_first_stake(ledger: EvmLedger) -> None:
    total = ledger.view("registry", "totalBonded", int(Role.NODE))
    emitted = ledger.send("stranger", "registry", "register", int(Role.NODE), KEY, b"record", 17)
    account = ledger.address("stranger")
    assert emitted == [ParticipantRegistered(account, Role.NODE, KEY, b"record", 17)]
    assert ledger.view("registry", "roleOf", account) == Role.NODE
    assert ledger.view("registry", "bondedOf", account) == 17
    assert ledger.view("registry", "totalBonded", int(Role.NODE)) == total + 17
    assert ledger.balance("stranger") == MONEY - 17


def test_register_refuses(ledger: EvmLedger) -> None:
    def error(*arguments: object) -> tuple[object, ...]:
        return ledger.error("stranger", "registry", "register", *arguments)

    assert error(0, KEY, b"", 0) == ("UnknownRole", 0)
    assert error(5, KEY, b"", 0) == ("UnknownRole", 5)
    assert error(1, bytes(32), b"", 0) == ("ZeroValue",)
    assert error(1, KEY, b"x" * 1025, 0) == ("TooLong", 1025, 1024)
    assert error(1, KEY, b"", MONEY + 1)[0] == "ERC20InsufficientBalance"
    ledger.call("stranger", "registry", "register", 1, KEY, b"x" * 1024, 0)
    again = ledger.error("node", "registry", "register", int(Role.VERIFIER), KEY, b"", 0)
    assert again == ("AlreadyRegistered", ledger.address("node"), Role.NODE)


def test_set_record(ledger: EvmLedger) -> None:
    assert ledger.send("node", "registry", "setRecord", b"new") == [RecordChanged(ledger.address("node"), b"new")]
    assert ledger.error("node", "registry", "setRecord", b"x" * 1025) == ("TooLong", 1025, 1024)
    assert ledger.error("stranger", "registry", "setRecord", b"") == ("WrongRole", ledger.address("stranger"), 0)


def test_add_stake(ledger: EvmLedger) -> None:
    assert ledger.send("node", "registry", "addStake", 5) == [StakeChanged(ledger.address("node"), STAKE + 5, 0)]
    assert ledger.error("node", "registry", "addStake", 0) == ("ZeroValue",)
    assert ledger.error("stranger", "registry", "addStake", 5) == ("WrongRole", ledger.address("stranger"), 0)


def test_unbond_in_parts_forms_one_sum_with_the_latest_release(ledger: EvmLedger) -> None:
    account = ledger.address("node")
    assert ledger.error("node", "registry", "withdraw") == ("NothingUnbonding", account)
    assert ledger.error("node", "registry", "startUnbond", 0) == ("ZeroValue",)
    assert ledger.error("node", "registry", "startUnbond", STAKE + 1) == ("UnbondTooMuch", STAKE + 1, STAKE)
    assert ledger.error("stranger", "registry", "startUnbond", 1)[0] == "WrongRole"

    assert ledger.send("node", "registry", "startUnbond", 300) == [StakeChanged(account, STAKE - 300, 300)]
    ledger.mine_until(ledger.block + 10)
    release = ledger.block + UNBOND_BLOCKS
    assert ledger.send("node", "registry", "startUnbond", 200) == [StakeChanged(account, STAKE - 500, 500)]
    assert ledger.view("registry", "unbondingOf", account) == (500, release)

    ledger.mine_until(release - 1)
    assert ledger.error("node", "registry", "withdraw") == ("TooEarly", release - 1, release)
    ledger.mine_until(release)
    before = ledger.balance("node")
    assert ledger.send("node", "registry", "withdraw") == [StakeChanged(account, STAKE - 500, 0)]
    assert ledger.balance("node") == before + 500
    assert ledger.error("node", "registry", "withdraw") == ("NothingUnbonding", account)


def test_stake_history_is_by_end_of_block(ledger: EvmLedger) -> None:
    account, before = ledger.address("verifier"), ledger.block - 1
    total = ledger.view("registry", "totalBonded", int(Role.VERIFIER))
    ledger.send("verifier", "registry", "addStake", 5)
    assert ledger.view("registry", "bondedAt", account, before) == 4 * STAKE
    assert ledger.view("registry", "bondedAt", account, before + 1) == 4 * STAKE + 5
    assert ledger.view("registry", "totalBondedAt", int(Role.VERIFIER), before) == total
    assert ledger.view("registry", "totalBondedAt", int(Role.VERIFIER), before + 1) == total + 5
    for function, key in (("bondedAt", account), ("totalBondedAt", 2)):
        now = ledger.block
        assert ledger.error("stranger", "registry", function, key, now) == ("TooEarly", now, now + 1)


def test_slash_is_the_courts(ledger: EvmLedger) -> None:
    for who in ("node", "deployer", "initiator", "verifier"):
        error = ledger.error(who, "registry", "slash", ledger.address("node2"), KEY, 1)
        assert error == ("Unauthorized", ledger.address(who), ledger.address("court"))
