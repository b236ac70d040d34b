"""Harness of what a judging process says: it has read strangers' bytes, so its replies are taken as theirs might be."""

from __future__ import annotations

import socket
from pathlib import Path

import msgspec

from protocol.errors import Fault, Reason
from protocol.ledger.state import Commitment
from protocol.messages import Finding
from protocol.verdict import Row, Status
from tests.fuzz.kit import Harness, Target, attempt
from tests.fuzz.targets_messages import ACCOUNT, TASK
from tests.fuzz.targets_work import Assignment, make_small_spec
from tests.support.scenario import make_account
from verifier.isolated_reply import validate_judgement
from verifier.isolated_wire import Done, Failed, Judged, receive_reply
from verifier.judge import Judgement, Submission


def _reply(scratch: Path) -> Target:
    """A frame from the process that has read strangers' bytes, and the judgement in it."""
    spec = make_small_spec(scratch)
    assignment = Assignment(31_337, b"\xb0" * 20, TASK, 4, ACCOUNT, b"\x22" * 32, b"\x33" * 32, 1, 2)
    commitment = Commitment(bytes(32), 2, bytes(32), 7)
    other = make_account("other")
    asked = [Submission(one, b"", assignment, commitment, bytes(32), (0,)) for one in (ACCOUNT, other)]
    rows = sorted([Row(ACCOUNT, Status.GOOD, 0, 2, 9, 1, 5), Row(other, Status.UNPAID, int(Reason.REPLAY), 2, 0, 1, 0)])
    finding = Finding(other, int(Reason.REPLAY), "replay: a token", (0, 1, 2))

    def fuzz(data: bytes) -> str:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.sendall(data)
            theirs.shutdown(socket.SHUT_WR)

            def work() -> None:
                reply = receive_reply(ours, bytes_max=4096, look=lambda: None)
                if isinstance(reply, Judged):
                    validate_judgement(spec, asked, reply)
                    assert {row.account for row in reply.judgement.rows} <= {ACCOUNT, other}

            return attempt((Fault, EOFError), work)

    replies = [Done("said"), Failed("fault", "memory"), Judged(Judgement(rows, [finding], 9, []), 0.5)]
    return Target(fuzz, [len(body).to_bytes(4, "big") + body for body in map(msgspec.msgpack.encode, replies)])


HARNESSES = {"judging_reply": Harness(_reply, "frame", share=20, bytes_max=4000)}
