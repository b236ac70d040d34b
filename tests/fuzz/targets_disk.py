"""Harnesses of a role's own disk after a crash or a bad sector: journals, parts, verdicts, generations, the outbox."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import msgspec

import environments
from contracts.outbox import Outbox
from inference.journal import Journal as NodeJournal
from inference.parts import Parts
from inference.status import STATES, STATUS_VERSION, read_status
from protocol.codec import encode
from protocol.errors import ConfigError, Fault
from protocol.messages import Signed
from tests.fuzz.kit import Harness, Target, attempt
from tests.fuzz.targets_messages import ACCOUNT, TASK
from tests.fuzz.targets_work import Assignment, make_small_spec, make_work
from trainer.checkpoint import Generations, State
from verifier.journal import Journal as VerdictJournal
from verifier.journal import VerdictRecord


def _node_journal(scratch: Path) -> Target:
    path = scratch / "journal.json"

    def fuzz(data: bytes) -> str:
        path.write_bytes(data)

        def work() -> None:
            journal = NodeJournal(scratch, TASK, ACCOUNT)
            assert type(journal.first_round) is type(journal.judged_round) is int

        return attempt(ConfigError, work)

    table: dict[str, Any] = {
        "version": 1,
        "task": TASK.hex(),
        "account": ACCOUNT.hex(),
        "first_round": 3,
        "judged_round": 2,
    }
    table |= {"foreign_round": -1, "foreign_record": 4}
    return Target(fuzz, [json.dumps(table).encode()])


def _node_work(scratch: Path) -> Target:
    """A sealed bundle (even first byte) or a part of a round in progress."""
    spec = make_small_spec(scratch)
    assignment = Assignment(31_337, b"\xb0" * 20, TASK, 4, ACCOUNT, b"\x22" * 32, b"\x33" * 32, 1, 2)
    work_folder = scratch / "work"
    work_folder.mkdir()
    bundle = make_work(spec, environments.load(spec.environment), assignment)
    Parts(work_folder).add(assignment, "fuzz", bundle.groups, 8)
    [part] = work_folder.glob("*.part")
    body = part.read_bytes()[32:]
    sealed = work_folder / "4.bundle"

    def fuzz(data: bytes) -> str:
        if data and data[0] % 2:
            good = data[0] % 4 == 1  # a digest that fits: what an older version of the software may have left
            part.write_bytes((hashlib.sha256(data[1:]).digest() if good else bytes(32)) + data[1:])
            sealed.unlink(missing_ok=True)
            groups, _ = Parts(work_folder).read(assignment, "fuzz")
            return "accepted" if groups else "dropped"
        sealed.write_bytes(data[1:])
        return attempt(ConfigError, lambda: NodeJournal(work_folder, TASK, ACCOUNT))

    return Target(fuzz, [b"\0" + encode(Signed(encode(bundle), bytes(64))), b"\1" + body])


def _node_status(scratch: Path) -> Target:
    path = scratch / "status.json"
    table = {"version": STATUS_VERSION, "state": sorted(STATES)[0], "round": 3, "rejections": [{"reason": "replay"}]}

    def fuzz(data: bytes) -> str:
        path.write_bytes(data)
        return attempt(Fault, lambda: read_status(path))

    return Target(fuzz, [json.dumps(table).encode()])


def _verdict_journal(scratch: Path) -> Target:
    path = scratch / "00000003.verdict"

    def fuzz(data: bytes) -> str:
        path.write_bytes(data)
        return attempt(Fault, lambda: VerdictJournal(scratch))

    return Target(fuzz, [encode(VerdictRecord(3, bytes(32), b"report", bytes(32), bytes(32)))])


def _generation(scratch: Path) -> Target:
    """A trainer's state file, with the marker that belongs to it."""
    fields: dict[str, Any] = dict.fromkeys(State.__struct_fields__, "")
    fields |= {"version": 1, "leaves": ("ab" * 32,), "consumed": {0: ("cd" * 32,)}, "reward_micro": 5, "seed": 3}
    state = State(**fields)
    generations = Generations(scratch / "generations")
    policy = {"config.json": b"{}", "model.safetensors": b"x"}
    made = generations.write(state, policy=policy, optimizer=b"optimizer")
    [state_path] = [path for path in made.folder.iterdir() if path.suffix == ".json"]
    marker = scratch / "generations" / "00000001.complete"
    old = hashlib.sha256(state_path.read_bytes()).hexdigest().encode()
    lines = marker.read_bytes()

    def fuzz(data: bytes) -> str:
        state_path.write_bytes(data)
        marker.write_bytes(lines.replace(old, hashlib.sha256(data).hexdigest().encode()))
        outcome = attempt(Fault, lambda: generations.load(1))
        assert (generations.load_newest() is None) == (outcome != "accepted")
        return outcome

    return Target(fuzz, [msgspec.json.encode(state)])


def _outbox(scratch: Path) -> Target:
    """The outbox's database, damaged anywhere."""
    path = scratch / "outbox.sqlite"
    box = Outbox(path)
    box.bind(chain="1")
    for at in range(3):
        box.submit(f"commit/{at}", b"\7" * 20, b"\1\2\3", 5)
    box.record_signed(1, 0, bytes(32), b"raw", gas=1, fee_cap=2, tip_cap=1)
    box.close()
    valid = path.read_bytes()

    def fuzz(data: bytes) -> str:
        for end in ("-wal", "-shm", "-journal"):
            path.with_name(path.name + end).unlink(missing_ok=True)
        path.write_bytes(data)

        def work() -> None:
            opened = Outbox(path)
            try:
                opened.bind(chain="1")
                for intent in opened.active():
                    opened.attempts(intent.seq)
                opened.next_nonce(0)
                opened.submit("new", b"\7" * 20, b"")
            finally:
                opened.close()

        return attempt((ConfigError, Fault), work)

    return Target(fuzz, [valid])


HARNESSES = {
    "node_journal": Harness(_node_journal, "json", share=10, bytes_max=2000),
    "node_work": Harness(_node_work, "tagged", share=10),
    "node_status": Harness(_node_status, "json", share=10, bytes_max=2000),
    "verdict_journal": Harness(_verdict_journal, "msgpack", share=10, bytes_max=1000),
    "trainer_state": Harness(_generation, "json", share=3, bytes_max=3000, examples=20),
    "outbox_database": Harness(_outbox, "bytes", share=2, bytes_max=70_000, examples=20),
}
