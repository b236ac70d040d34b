"""The verifier's parts alone: status of a rejection, journal of verdicts, turns of attesters and settlers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from protocol.errors import DETERMINISTIC, Fault, Reason, Reject
from protocol.ledger import events
from protocol.ledger.state import Settlement
from protocol.settlement import SettlementResult
from protocol.verdict import Status
from tests.support.ledger_kit import Books
from tests.support.scenario import make_account
from verifier import attester, settler
from verifier.journal import Journal, VerdictRecord
from verifier.judge import FINDING_CHARS_MAX, get_status

NUMERIC = frozenset(Reason) - DETERMINISTIC - {Reason.QUOTA}


@pytest.mark.parametrize("reason", sorted(DETERMINISTIC))
def test_exact_failures_are_cheats(reason):
    assert get_status(Reject(reason, "x")) is Status.CHEAT


@pytest.mark.parametrize("reason", sorted(NUMERIC))
def test_numeric_failures_are_cheats_above_their_second_limit_only(reason):
    assert get_status(Reject(reason, "x")) is Status.UNPAID
    assert get_status(Reject(reason, "x", severe=True)) is Status.CHEAT


def test_an_incomplete_round_is_never_a_cheat():
    assert get_status(Reject(Reason.QUOTA, "x", severe=True)) is Status.SHORT


def make_record(index, size=10):
    return VerdictRecord(index, b"r" * 32, b"s" * size, b"t" * 32, b"c" * 32)


def test_a_journal_gives_back_what_was_added(tmp_path):
    journal = Journal(tmp_path / "j")
    for index in (0, 7, 12):
        journal.add(make_record(index))
    assert Journal(tmp_path / "j").records == journal.records == {i: make_record(i) for i in (0, 7, 12)}
    journal.drop(7)
    journal.drop(99)
    assert set(Journal(tmp_path / "j").records) == {0, 12}


class Killed(BaseException):
    """Stands for SIGKILL."""


@pytest.mark.parametrize(("call", "nth", "kept"), [("fsync", 1, False), ("replace", 1, False), ("fsync", 2, True)])
def test_a_crash_at_any_disk_boundary_leaves_the_old_record_or_the_new(tmp_path, monkeypatch, call, nth, kept):
    journal, count = Journal(tmp_path), 0
    journal.add(make_record(1, size=5))
    place = os if call == "fsync" else Path
    original = getattr(place, call)

    def dying(*arguments):
        nonlocal count
        count += 1
        if count == nth:
            raise Killed
        return original(*arguments)

    monkeypatch.setattr(place, call, dying)
    with pytest.raises(Killed):
        journal.add(make_record(1, size=6))
    monkeypatch.undo()
    assert Journal(tmp_path).records == {1: make_record(1, size=6 if kept else 5)}


def test_a_full_disk_is_our_own_fault(tmp_path, monkeypatch):
    journal = Journal(tmp_path)

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(Fault, match="No space left on device; free some disk"):
        journal.add(make_record(1))
    assert journal.records == {}


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x95\x00", b"\x91" * 10_000])
def test_a_damaged_record_is_named(tmp_path, data):
    (tmp_path / "00000003.verdict").write_bytes(data)
    with pytest.raises(Fault, match=r"00000003.verdict is damaged"):
        Journal(tmp_path)


def test_half_a_temporary_file_is_no_record(tmp_path):
    (tmp_path / "00000003.tmp").write_bytes(b"\x95\x03")
    assert Journal(tmp_path).records == {}


def test_attesters_take_turns_in_pairs():
    books = Books(nodes={"node": 8})
    for name in ("r0", "r1", "r2"):
        books.register(name, events.Role.RELAY)
    names = ("v0", "v1", "v2", "r0", "r1", "r2")
    turns = [attester.get_turn(books.state, make_account(name), b"\1" * 32, 1) for name in names]
    assert sorted(turns) == [0, 0, 2, 2, 4, 4]
    other = [attester.get_turn(books.state, make_account(name), b"\2" * 32, 1) for name in names]
    assert turns != other
    assert attester.get_turn(books.state, make_account("node"), b"\1" * 32, 1) > 10**6
    books.set_stake("r0", 0, 5)
    assert attester.get_turn(books.state, make_account("r0"), b"\1" * 32, 1) > 10**6


def test_settlers_take_turns_one_by_one():
    books = Books(nodes={"node": 8})
    names, task = ("v0", "v1", "v2"), b"\1" * 32
    assert sorted(settler.get_turn(books.state, make_account(name), task, 0) for name in names) == [0, 1, 2]
    assert settler.get_turn(books.state, make_account("node"), task, 0) == 3
    firsts = {min(names, key=lambda n: settler.get_turn(books.state, make_account(n), task, e)) for e in range(20)}
    assert firsts == set(names)


@pytest.mark.parametrize(
    "change",
    [{"root": b"\2" * 32}, {"paid_total": 6}, {"burned_total": 7}, {"slashed": ()}, {"slashed": (b"\2" * 20,)}],
)
def test_a_settlement_that_differs_in_anything_is_another(change):
    own = SettlementResult(0, b"\1" * 32, 5, 6, (b"\1" * 20,), {})
    fields = {"root": b"\1" * 32, "paid_total": 5, "burned_total": 6, "slashed": (b"\1" * 20,)}
    assert settler.is_same(Settlement(epoch=0, challenge_end=9, **fields), own)
    assert not settler.is_same(Settlement(epoch=0, challenge_end=9, **{**fields, **change}), own)


def test_texts_of_findings_are_bounded():
    assert FINDING_CHARS_MAX <= 400
