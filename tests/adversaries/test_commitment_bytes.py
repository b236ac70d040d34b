"""C5: malformed bytes. Whatever a stranger serves, the judge's own process lives on and the only outcome is a `Reject`.

All inputs of a kind go through `open_bundle` and the checks behind it in one process of its own with little memory and
stack; its exit code and its account of what happened are what is tested. V5 (few bytes that claim many) is the same door.
"""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from protocol.codec import encode
from protocol.errors import Reason
from tests.support.forge import count_good, count_rollouts, edit_samples

ROOT = Path(__file__).parents[2]
MUTATIONS = 2_000

CHILD = """
import collections, json, pickle, resource, sys
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
with open(sys.argv[1], "rb") as file:
    spec, assignment, commitment, public, inputs = pickle.load(file)  # written by the test itself
import environments
from protocol.checks import open_bundle, validate_groups, validate_quota
from protocol.errors import Reject
environment = environments.load(spec.environment)
seen = collections.Counter()
for data in inputs:
    try:
        bundle = open_bundle(spec, assignment, commitment, data, public)
        validate_quota(assignment, bundle)
        validate_groups(spec, environment, assignment, bundle, 64)
    except Reject as error:
        seen[error.reason.name] += 1
    else:
        seen["accepted"] += 1
print(json.dumps(seen))
"""


@pytest.fixture(scope="module")
def victim(court):
    """One node's honest bundle, its submission and what the ledger knows about it."""
    account, bundle = next(iter(court.honest().items()))
    submission = court.submit(bundle)
    state, task = court.close_round({account: submission})
    public = state.participants[account].network_key
    return bundle, submission, (court.spec, court.assignment(account), task.commitments[0][account], public)


def run_child(tmp_path, known, inputs):
    """Feed inputs to a process of its own; returns how often each outcome came, after a clean exit."""
    path = tmp_path / "inputs"
    path.write_bytes(pickle.dumps((*known, list(inputs))))
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(path)], capture_output=True, text=True, cwd=ROOT, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def mutate(data, rng):
    """One of: bytes flipped, cut, doubled, removed, inserted."""
    data, kind = bytearray(data), int(rng.integers(0, 5))
    at = int(rng.integers(0, len(data)))
    if kind == 0:
        for position in rng.integers(0, len(data), int(rng.integers(1, 6))):
            data[int(position)] ^= int(rng.integers(1, 256))
    elif kind == 1:
        del data[at:]
    elif kind == 2:
        data += data[at:]
    elif kind == 3:
        del data[at : at + int(rng.integers(1, 9))]
    else:
        data[at:at] = rng.bytes(int(rng.integers(1, 9)))
    return bytes(data)


#: MessagePack heads that claim far more than follows: bin32, str32, array32, map32, ext32 of 2^32 - 1.
HUGE = [b"\xc6", b"\xdb", b"\xdd", b"\xdf", b"\xc9"]


def hostile_bodies():
    deep = 100_000
    return [
        b"",
        b"\xc0",
        b"\xc1",
        b"\0\0",
        b"\x90",
        b"\x96",
        *(head + b"\xff" * 4 for head in HUGE),
        *(b"\x96\x01" + head + b"\xff" * 4 for head in HUGE),
        *(b"\x96" + head + b"\xff\xff\xff\xff" + b"\0" * 64 for head in HUGE),
        b"\x91" * deep,
        b"\x81" * deep,
        b"\x91" * deep + b"\xc0",
        b"\xdd\x00\x00\x00\x01" * (deep // 5),
        b"\x96" * 64 + b"\x01",
        b"\xff" * 4096,
        msgspec.msgpack.encode({"version": 1, "task": b"", "round": 0}),
        msgspec.msgpack.encode([1, b"", 0, b"", b"", [[0, 0, [[[2] * 10**5, 0, []]]]]]),
    ]


def test_honest_control(court, victim, tmp_path):
    bundle, submission, known = victim
    assert run_child(tmp_path, known, [submission.data] * 25) == {"accepted": 25}
    assert count_rollouts([bundle] * 25) >= 200


def test_c5_envelopes_that_are_none(victim, tmp_path):
    _, _, known = victim
    inputs = [
        *hostile_bodies(),
        *(bytes([i]) for i in range(256)),
        *(bytes([i, j]) for i in range(16) for j in range(16)),
    ]
    seen = run_child(tmp_path, known, inputs)
    assert seen == {"MALFORMED": len(inputs)}


def test_c5_bodies_that_are_none_under_a_true_signature(court, victim, tmp_path):
    bundle, _, known = victim
    inputs = [court.seal_body(bundle.account, body) for body in hostile_bodies()]
    inputs += [court.seal_body(bundle.account, bytes([i])) for i in range(256)]
    assert run_child(tmp_path, known, inputs) == {"MALFORMED": len(inputs)}


def test_c5_mutations_of_a_good_envelope(victim, tmp_path):
    """Only bytes that are exactly the honest ones are accepted, and no mutation gives those."""
    _, submission, known = victim
    rng = np.random.default_rng(5)
    inputs = [made for _ in range(MUTATIONS) if (made := mutate(submission.data, rng)) != submission.data]
    seen = run_child(tmp_path, known, inputs)
    assert sum(seen.values()) == len(inputs)
    assert set(seen) == {"MALFORMED", "SIGNATURE"}


def test_c5_mutations_of_a_good_body_under_a_true_signature(court, victim, tmp_path):
    """Past the signature: the root on the ledger still names one bundle and no other."""
    bundle, _, known = victim
    rng, body = np.random.default_rng(6), encode(bundle)
    inputs = [court.seal_body(bundle.account, made) for _ in range(MUTATIONS) if (made := mutate(body, rng)) != body]
    seen = run_child(tmp_path, known, inputs)
    assert sum(seen.values()) == len(inputs)
    assert set(seen) <= {"MALFORMED", "DUPLICATE", "ROOT_MISMATCH", "STALE_POLICY"}
    assert seen["ROOT_MISMATCH"] > 0


def test_c5_other_encodings_of_the_same_bundle(court, victim, tmp_path):
    """Longer MessagePack forms of the same numbers and lists parse, but are not canonical: there is one byte string."""
    bundle, _, known = victim
    body = encode(bundle)
    assert body[:2] == b"\x96\x01"
    longer = [
        b"\xdc\x00\x06" + body[1:],
        b"\xdd\x00\x00\x00\x06" + body[1:],
        b"\x96\xcc\x01" + body[2:],
        b"\x96\xcd\x00\x01" + body[2:],
        b"\x96\xcf" + bytes(7) + b"\x01" + body[2:],
        b"\x96\xd0\x01" + body[2:],
        b"\x96\xd3" + bytes(7) + b"\x01" + body[2:],
        body + b"\xc0",
        body + b"\0",
    ]
    seen = run_child(tmp_path, known, [court.seal_body(bundle.account, one) for one in longer])
    assert seen == {"MALFORMED": len(longer)}


PROOFS = [
    b"",
    b"\0\0",
    b"\xff\xd9",
    b"\0",
    bytes(258),
    b"\xff" * 258,
    bytes(256),
    bytes(260),
    b"\0\x01" + bytes(256),
    b"\x80\x01" + bytes(256),
    b"\xff\xd9" + b"\xff" * 256,
    b"\xff\xd9" + b"\xff\xd9" * 128,
]


def test_c5_malformed_commitments_before_the_judge(court):
    """Modulus 0, empty, two bytes, all ones: committed to, signed, served by every node."""
    bundles = [
        edit_samples(one, lambda s, i=i: replace(s, proofs=(PROOFS[i % len(PROOFS)],)))
        for i, one in enumerate(court.honest().values())
    ]
    rows = court.rows(court.submit_all(bundles))
    assert len(rows) >= 50
    assert count_good(rows) == 0
    assert {row.reason for row in rows} <= {Reason.COMMITMENT_FORMAT, Reason.MALFORMED}


def test_c5_garbage_beside_honest_work(court):
    """What one node serves does not touch the verdict on another."""
    accounts = list(court.honest())
    submissions = court.submit_all(court.honest().values())
    bodies = [body for body in hostile_bodies() if len(body) < 2_000]  # longer ones are not even parsed
    for account, body in zip(accounts[::2], bodies * 2, strict=False):
        submissions[account] = submissions[account]._replace(data=court.seal_body(account, body))
    by_account = {row.account: row for row in court.rows(submissions)}
    hostile = set(accounts[::2])
    assert all(by_account[a].reason == Reason.MALFORMED for a in hostile)
    assert all(by_account[a].reason == 0 for a in accounts if a not in hostile)


def test_c5_unsigned_garbage_beside_honest_work(court):
    """What nobody signed accuses nobody."""
    accounts = list(court.honest())
    submissions = court.submit_all(court.honest().values())
    for account, body in zip(accounts[::2], hostile_bodies() * 2, strict=False):
        submissions[account] = submissions[account]._replace(data=body)
    judgement = court.judge(submissions)
    assert {row.account for row in judgement.rows} == set(accounts[1::2])
    assert count_good(judgement.rows) == len(judgement.rows)
    assert judgement.findings == []
