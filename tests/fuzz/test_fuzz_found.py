"""What fuzzing found, each once: inputs that used to end in an exception that nothing documents."""

from __future__ import annotations

import hashlib
import json
import sqlite3
from contextlib import closing

import pytest

import environments
from contracts.jsonrpc import HttpRpc, Unreachable, decode_answer
from contracts.outbox import Outbox
from inference.journal import Journal
from protocol.codec import encode
from protocol.errors import ConfigError, Fault
from protocol.messages import Bundle, Signed
from protocol.task import Environment as EnvironmentSpec
from tests.fuzz.harnesses import HARNESSES
from tests.fuzz.targets_chain import run_now
from tests.fuzz.targets_messages import ACCOUNT, TASK
from tests.support.tokenizer import make_tokenizer_json
from troth import keystore
from troth.environment_files import _load_tried


def test_a_keyfile_of_another_version(tmp_path):
    path = tmp_path / "keystore.json"
    keystore.create(path, "password", scrypt_n=keystore.SCRYPT_N_MIN)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"version": 2}))
    with pytest.raises(ConfigError, match="version 3"):
        keystore.load(path, "password")


def test_a_bundle_on_disk_of_a_round_that_cannot_be(tmp_path):
    bundle = Bundle(1, TASK, -5, ACCOUNT, bytes(32), ())
    (tmp_path / "4.bundle").write_bytes(encode(Signed(encode(bundle), bytes(64))))
    with pytest.raises(ConfigError, match="move it away"):
        Journal(tmp_path, TASK, ACCOUNT)


@pytest.mark.parametrize("text", ['{"first_round": Infinity, "judged_round": 0}', "[" * 100_000])
def test_a_journal_of_numbers_and_nesting_that_python_does_not_take(tmp_path, text):
    (tmp_path / "journal.json").write_text(text)
    with pytest.raises(ConfigError, match="journal"):
        Journal(tmp_path, TASK, ACCOUNT)


def test_an_outbox_whose_pages_are_damaged(tmp_path):
    path = tmp_path / "outbox.sqlite"
    box = Outbox(path)
    for at in range(200):
        box.submit(f"commit/{at}", bytes(20), bytes(64))
    box.close()
    data = bytearray(path.read_bytes())
    with closing(sqlite3.connect(path)) as db:
        [(root,)] = db.execute("SELECT rootpage FROM sqlite_master WHERE name = 'intents'").fetchall()
    data[(root - 1) * 4096 : root * 4096] = b"\xff" * 4096
    path.write_bytes(data)
    for end in ("-wal", "-shm"):
        path.with_name(path.name + end).unlink(missing_ok=True)
    opened = Outbox(path)
    with pytest.raises(Fault, match="cannot be read"):
        opened.active()
    opened.close()


def test_a_refused_outbox_is_let_go(tmp_path):
    path = tmp_path / "outbox.sqlite"
    path.write_bytes(b"no database" * 1000)
    with pytest.raises(ConfigError, match="move it away") as caught:
        Outbox(path)
    path.unlink()
    Outbox(path).close()
    assert caught.value is not None  # its traceback keeps the first object alive until here


class _Canned(HttpRpc):
    async def _post(self, body):
        return decode_answer(b'[{"id": [], "result": 1}, {"id": {}}]')


def test_an_answer_whose_id_is_no_number():
    with pytest.raises(Unreachable, match="did not answer"):
        run_now(_Canned("http://127.0.0.1:1").batch([("eth_chainId", [])]))


@pytest.mark.parametrize("answer", [b"\4null", b"\4[1]", b'\4"0xzz"', b"\4{}"])
def test_an_answer_of_a_view_that_is_no_hex(tmp_path, answer):
    assert HARNESSES["node_answer"].make(tmp_path).fuzz(answer) == "Unreachable"


def test_a_tokenizer_that_panics_makes_its_task_unusable_and_nothing_else(tmp_path):
    """Two normalizers of which the first puts nothing in front: the tokenizers package panics on the first text."""
    table = json.loads(make_tokenizer_json())
    table["normalizer"] = {
        "type": "Sequence",
        "normalizers": [{"type": "Prepend", "prepend": ""}, {"type": "NFC"}, {"type": "Prepend", "prepend": "x"}],
    }
    table["pre_tokenizer"] = {"type": "Digits", "individual_digits": True}
    data = json.dumps(table).encode()
    (tmp_path / "tokenizer.json").write_bytes(data)
    args = json.dumps({"size": 5, "tokenizer": hashlib.sha256(data).hexdigest()}, sort_keys=True, separators=(",", ":"))
    spec = EnvironmentSpec("calculator", args, environments.content_hash("calculator", args))
    with pytest.raises(ConfigError, match="its tokenizer does not work"):
        _load_tried(spec, [tmp_path])


def test_an_outbox_whose_schema_is_no_text(tmp_path):
    path = tmp_path / "outbox.sqlite"
    Outbox(path).close()
    path.write_bytes(path.read_bytes().replace(b"CREATE TABLE intents", b"CREATE TABLE \xfcntents"))
    with pytest.raises(ConfigError, match="outbox"):
        Outbox(path).active()
