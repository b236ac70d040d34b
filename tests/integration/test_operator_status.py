"""`troth node status` as people and health checks see it, and the line a node shows on a terminal."""

from __future__ import annotations

import io
import json
import os
import sys

import pytest

from inference.status import Condition, StatusFile
from tests.support.network import PASSWORD, SCRYPT_N, run_troth
from troth.keystore import create
from troth.lock import DirectoryLock
from troth.roles import _show

WORKING = Condition("working", "3 of 8 groups made", "the round is made", 17)
REJECTION = {
    "round": 12,
    "text": "replay: a token is not the one that sampling gives; observed score gap 4.2; limit 0.001 logit/T",
    "observed": "score gap 4.2",
    "limit": "0.001 logit/T",
    "reproduce": "troth explain 5958/12/0xab/0/3",
}


def test_no_node_ever_ran_here(tmp_path):
    done = run_troth("node", "status", "--directory", tmp_path)
    assert done.returncode == 1
    assert "no node has run in this directory" in done.stderr


def test_a_running_node_is_healthy_and_a_killed_one_is_not(tmp_path):
    lock = DirectoryLock(tmp_path)
    status = StatusFile(tmp_path / "status.json")
    status.set(WORKING, block=99, tokens_per_s=120.0)
    status.add_rejection(REJECTION)
    done = run_troth("node", "status", "--directory", tmp_path)
    assert done.returncode == 0
    assert done.stdout.startswith("working since ")
    assert "reason: 3 of 8 groups made" in done.stdout
    assert "ends when: the round is made" in done.stdout
    assert "observed score gap 4.2, limit 0.001 logit/T; troth explain 5958/12/0xab/0/3" in done.stdout
    lock.close()  # what the system does when the process is killed
    done = run_troth("node", "status", "--json", "--directory", tmp_path)
    shown = json.loads(done.stdout)
    assert done.returncode == 1
    assert (shown["state"], shown["last_state"], shown["running"], shown["block"]) == ("stopped", "working", False, 99)
    assert "the process is gone" in shown["reason"]
    assert shown["rejections"][0]["round"] == 12


@pytest.mark.parametrize("text", ["", "{}", '{"version": 9}', "\x00"])
def test_a_damaged_status_file_is_one_line(tmp_path, text):
    (tmp_path / "status.json").write_text(text)
    done = run_troth("node", "status", "--directory", tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("troth: ")
    assert done.stdout == ""


def test_a_node_that_cannot_start_leaves_its_reason(tmp_path):
    create(tmp_path / "keystore.json", PASSWORD, scrypt_n=SCRYPT_N)
    done = run_troth("node", "run", "--yes", "--directory", tmp_path, "--ledger.rpc", "http://127.0.0.1:1")
    assert done.returncode == 1
    shown = json.loads(run_troth("node", "status", "--json", "--directory", tmp_path).stdout)
    assert shown["state"] == "stopped"
    assert "no ledger node at http://127.0.0.1:1" in shown["reason"]


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_one_line_on_a_terminal_and_silence_elsewhere(monkeypatch):
    screen, pipe = Terminal(), io.StringIO()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr("troth.roles.shutil.get_terminal_size", lambda: os.terminal_size((40, 25)))
    _show(WORKING)
    assert screen.getvalue() == "\r\x1b[K" + "node: working: 3 of 8 groups made (until the round is made)"[:39]
    monkeypatch.setattr(sys, "stderr", pipe)
    _show(WORKING)
    assert pipe.getvalue() == ""
    _show(Condition("refused", "another machine", "somebody acts"))
    assert pipe.getvalue() == "node: refused: another machine (until somebody acts)\n"
