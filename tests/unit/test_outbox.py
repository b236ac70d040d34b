"""The outbox: idempotent names, one nonce per intent, allowed transitions, one process, and what survives reopening."""

import sqlite3
import subprocess
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from contracts import outbox as ob
from contracts.outbox import Outbox
from protocol.errors import ConfigError, Fault

TARGET = b"\x01" * 20


@pytest.fixture
def path(tmp_path):
    return tmp_path / "outbox.sqlite"


@pytest.fixture
def outbox(path):
    box = Outbox(path)
    yield box
    box.close()


def sign(box, seq, nonce, tag=b"\x00"):
    box.record_signed(seq, nonce, tag * 32, b"raw" + tag, gas=1, fee_cap=2, tip_cap=1)


def test_same_intent_twice_is_one_intent(outbox):
    assert outbox.submit("join/1", TARGET, b"a")
    assert not outbox.submit("join/1", TARGET, b"b")
    assert [item.calldata for item in outbox.active()] == [b"a"]


def test_amounts_larger_than_64_bits_survive(outbox):
    outbox.submit("stake", TARGET, b"", spend=2**96)
    assert outbox.get("stake").spend == 2**96


def test_walk_to_final_survives_reopening_at_every_state(path):
    steps = [
        (lambda box, seq: sign(box, seq, 5), ob.SIGNED),
        (lambda box, seq: box.record_sent(seq), ob.SENT),
        (lambda box, seq: box.record_included(seq, 9, b"h" * 32), ob.INCLUDED),
        (lambda box, seq: box.record_final(seq), ob.FINAL),
    ]
    box = Outbox(path)
    box.submit("i", TARGET, b"data")
    for step, state in steps:
        step(box, box.get("i").seq)
        box.close()
        box = Outbox(path)
        assert box.get("i").state == state
    assert box.get("i").block_number == 9
    assert [attempt.raw for attempt in box.attempts(box.get("i").seq)] == [b"raw\x00"]
    assert box.active() == []
    box.close()


def test_two_intents_never_share_a_nonce(outbox):
    outbox.submit("a", TARGET, b"")
    outbox.submit("b", TARGET, b"")
    sign(outbox, 1, 7, b"\x01")
    with pytest.raises(sqlite3.IntegrityError):
        sign(outbox, 2, 7, b"\x02")
    assert outbox.get("b").state == ob.QUEUED
    assert outbox.attempts(2) == []


def test_next_nonce_is_after_ours_and_the_chains(outbox):
    assert outbox.next_nonce(0) == 0
    assert outbox.next_nonce(4) == 4
    outbox.submit("a", TARGET, b"")
    sign(outbox, 1, 7)
    assert outbox.next_nonce(4) == 8
    assert outbox.next_nonce(20) == 20


def test_replacement_keeps_intent_and_nonce(outbox):
    outbox.submit("a", TARGET, b"")
    sign(outbox, 1, 7, b"\x01")
    outbox.record_sent(1)
    sign(outbox, 1, 7, b"\x02")
    assert outbox.get("a").state == ob.SIGNED
    assert [attempt.nonce for attempt in outbox.attempts(1)] == [7, 7]


def test_orphaned_keeps_its_bytes_and_lost_is_signed_afresh(outbox):
    outbox.submit("a", TARGET, b"")
    sign(outbox, 1, 7)
    outbox.record_included(1, 3, b"h" * 32)
    outbox.record_orphaned(1)
    assert (outbox.get("a").state, outbox.get("a").nonce) == (ob.SIGNED, 7)
    outbox.record_lost(1)
    assert (outbox.get("a").state, outbox.get("a").nonce) == (ob.QUEUED, None)


@pytest.mark.parametrize(
    "step",
    [
        lambda box: box.record_sent(1),
        lambda box: box.record_final(1),
        lambda box: box.record_included(1, 1, b"h" * 32),
        lambda box: box.record_orphaned(1),
        lambda box: box.record_lost(1),
    ],
)
def test_queued_intent_cannot_skip_a_state(outbox, step):
    outbox.submit("a", TARGET, b"")
    with pytest.raises(Fault, match="row 1"):
        step(outbox)
    assert outbox.get("a").state == ob.QUEUED


def test_final_intent_is_never_signed_again(outbox):
    outbox.submit("a", TARGET, b"")
    sign(outbox, 1, 0)
    outbox.record_included(1, 1, b"h" * 32)
    outbox.record_final(1)
    with pytest.raises(Fault):
        sign(outbox, 1, 1, b"\x05")
    assert len(outbox.attempts(1)) == 1


def test_binding_to_another_chain_names_both(outbox):
    outbox.bind(account="0xaa", genesis="0x01")
    outbox.bind(account="0xaa", genesis="0x01")
    with pytest.raises(ConfigError, match=r"0x01.*0x02"):
        outbox.bind(account="0xaa", genesis="0x02")


def test_second_process_is_refused(path, outbox):
    outbox.submit("a", TARGET, b"")
    code = f"from pathlib import Path; from contracts.outbox import Outbox; Outbox(Path({str(path)!r}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0
    assert "in use by another process" in done.stderr


def test_file_that_is_no_database_is_refused(path):
    path.write_bytes(b"not a database at all" * 100)
    with pytest.raises(ConfigError, match="not a database"):
        Outbox(path)


def test_file_is_private(path, outbox):
    assert path.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("name", ["", "x" * 257])
def test_intent_names_are_bounded(outbox, name):
    with pytest.raises(ConfigError, match="characters"):
        outbox.submit(name, TARGET, b"")


def test_disk_failure_is_a_fault_and_changes_nothing(outbox):
    outbox.submit("a", TARGET, b"")
    # No page may be added any more: what a full disk looks like to SQLite.
    (pages,) = outbox._db.execute("PRAGMA page_count").fetchone()
    outbox._db.execute(f"PRAGMA max_page_count={pages}")
    with pytest.raises(Fault, match="cannot be written"):
        outbox.submit("b", TARGET, b"x" * 100_000)
    assert outbox.get("b") is None
    assert [item.intent for item in outbox.active()] == ["a"]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(0, 6)), max_size=30))
def test_any_sequence_of_steps_keeps_nonces_unique(tmp_path_factory, steps):
    box = Outbox(tmp_path_factory.mktemp("box") / "o.sqlite")
    for seq in range(1, 7):
        box.submit(str(seq), TARGET, b"")
    for index, (which, kind, chain_nonce) in enumerate(steps):
        seq = which + 1
        moves = [
            lambda s=seq, c=chain_nonce, i=index: sign(box, s, box.next_nonce(c), bytes([i + 1])),
            lambda s=seq: box.record_sent(s),
            lambda s=seq: box.record_included(s, 1, b"h" * 32),
            lambda s=seq: box.record_lost(s),
            lambda s=seq: box.record_final(s),
            lambda s=seq: box.record_reverted(s, "e"),
        ]
        try:
            moves[kind]()
        except Fault:
            continue
    held = [box.get(str(seq)).nonce for seq in range(1, 7)]
    held = [nonce for nonce in held if nonce is not None]
    assert len(held) == len(set(held))
    finals = [item for item in (box.get(str(seq)) for seq in range(1, 7)) if item.state == ob.FINAL]
    assert all(box.attempts(item.seq) for item in finals)
    box.close()
