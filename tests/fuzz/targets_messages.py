"""Harnesses of messages: the codec of every type, envelopes, node records, reports, tasks, Merkle proofs, verdict rows."""

from __future__ import annotations

import hashlib
from pathlib import Path

from msgspec.structs import replace

import environments
from inference.parts import Part as WorkPart
from inference.reports import describe_finding
from protocol.codec import Domain, Message, decode, encode
from protocol.errors import ConfigError, Fault, Reason, Reject
from protocol.merkle import compute_proof, compute_root, keccak, verify_proof
from protocol.messages import (
    Bundle,
    Finding,
    Group,
    Lineage,
    NodeRecord,
    Report,
    Sample,
    Signed,
    compute_bundle_bytes_max,
    make_domain,
    open_record,
    seal,
    unseal_body,
)
from protocol.task import SPEC_BYTES_MAX, TaskSpec, compute_spec_hash, compute_terms, decode_spec
from protocol.verdict import Row, Status, pack_rows, unpack_rows
from shardcast.mailbox import Entry
from shardcast.manifest import FileEntry, ManifestBody, SignedManifest
from shardcast.ratchet import Head
from tests.fuzz.kit import Harness, Target, attempt
from tests.support.scenario import make_account, make_key, make_spec
from verifier.journal import VerdictRecord

CHAIN_ID, LEDGER, TASK = 31_337, b"\xb0" * 20, b"\x11" * 32
ACCOUNT, KEY = make_account("fuzz"), make_key("fuzz")


def make_task_spec(scratch: Path, **changes: object) -> TaskSpec:
    """A valid task over an empty policy folder."""
    folder = scratch / "policy"
    folder.mkdir(exist_ok=True)
    return make_spec(folder, **changes)


def make_messages(spec: TaskSpec) -> list[Message]:
    """One of every type."""
    sample = Sample((4, 5, 1), 1_000_000, (b"\xff\xd9\0\1",))
    group = Group(0, 17, (sample, sample))
    files = (FileEntry("config.json", 5, bytes(32), (b"\1" * 32,)),)
    return [
        Domain(CHAIN_ID, LEDGER, TASK, "Bundle"),
        Signed(b"body", bytes(64)),
        NodeRecord(1, ACCOUNT, bytes(32), "tcp://192.0.2.1:7000", 3),
        sample,
        group,
        Bundle(1, TASK, 4, ACCOUNT, bytes(32), (group,)),
        Finding(ACCOUNT, 18, "replay: a token; observed 3; limit 1", (0, 1, 2)),
        Report(1, TASK, 4, ACCOUNT, (Finding(ACCOUNT, 18, "replay", (0,)),)),
        Lineage(1, TASK, 2, bytes(32), bytes(32), (bytes(32),), bytes(32), bytes(32), bytes(32), 250_000),
        spec,
        ManifestBody(1, TASK, 0, 1, 0, 1024, files, bytes(32)),
        SignedManifest(b"body", bytes(32), bytes(64)),
        Entry(bytes(32), bytes(32), 5, bytes(32)),
        Head(TASK, bytes(32), 7),
        VerdictRecord(3, bytes(32), b"report", bytes(32), bytes(32)),
        WorkPart(bytes(32), 64, (group,)),
    ]


def _codec(scratch: Path) -> Target:
    messages = make_messages(make_task_spec(scratch))
    kinds = [type(message) for message in messages]

    def fuzz(data: bytes) -> str:
        kind = kinds[data[0] % len(kinds)] if data else kinds[0]

        def work() -> None:
            assert encode(decode(kind, data[1:], bytes_max=4096)) == data[1:]

        return attempt(Reject, work)

    return Target(fuzz, [bytes([at]) + encode(message) for at, message in enumerate(messages)])


def _envelope(scratch: Path) -> Target:
    """Raw bytes as an envelope: nothing but the owner's own bytes may pass."""
    domain = make_domain(CHAIN_ID, LEDGER, TASK, Bundle)
    seeds = [seal(KEY, domain, message) for message in make_messages(make_task_spec(scratch))[:6]]
    allowed = set(seeds)

    def fuzz(data: bytes) -> str:
        outcome = attempt(Reject, lambda: unseal_body(data, domain, KEY.public, bytes_max=2048))
        assert outcome != "accepted" or data in allowed, "bytes passed that the key never signed"
        return outcome

    return Target(fuzz, seeds)


def _record(scratch: Path) -> Target:
    """The body of a node record, under a true signature."""
    domain = make_domain(CHAIN_ID, LEDGER, bytes(32), NodeRecord)

    def fuzz(data: bytes) -> str:
        def work() -> None:
            sealed = encode(Signed(data, KEY.sign(domain, data)))
            record = open_record(sealed, account=ACCOUNT, network_key=KEY.public, chain_id=CHAIN_ID, ledger=LEDGER)
            assert encode(record) == data

        return attempt(Reject, work)

    return Target(fuzz, [encode(NodeRecord(1, ACCOUNT, bytes(32), end, 1)) for end in ("", "tcp://192.0.2.1:7000")])


def _finding(scratch: Path) -> Target:
    """A finding of a verifier's report, as its node shows it on a terminal."""

    def fuzz(data: bytes) -> str:
        def work() -> None:
            shown = describe_finding(TASK, 3, decode(Finding, data, bytes_max=4096))
            assert all(str(value).isprintable() for value in shown.values())

        return attempt(Reject, work)

    texts = [str(Reject(Reason.REPLAY, "a token", observed=3, limit="1 logit/T", todo="sample")), "", "\x1b[2J"]
    return Target(fuzz, [encode(Finding(ACCOUNT, 18, text, (0, 1, 2))) for text in texts])


def _task_spec(scratch: Path) -> Target:
    """A task as the ledger carries it, and what every role computes from it first."""
    spec = make_task_spec(scratch)
    long = replace(spec, sampling=replace(spec.sampling, max_tokens=131_072, stop_tokens=(1, 2, 3)), group_size=256)

    def fuzz(data: bytes) -> str:
        def work() -> None:
            read = decode_spec(data)
            assert encode(read) == data
            assert len(compute_spec_hash(read)) == 32
            compute_terms(read)
            assert compute_bundle_bytes_max(read, read.slots_max) > 0
            assert len(data) <= SPEC_BYTES_MAX

        return attempt(Reject, work)

    return Target(fuzz, [encode(spec), encode(long)])


ENTRIES = ("sort", "calculator", "guess", "dataset", "code", "math", "nothing")
_ARGS = {
    "sort": ['{"digits":2}', "{}"],
    "calculator": ['{"digits":2,"terms":3}', '{"calls_max":2,"seed":1,"size":9,"tool":"="}'],
    "guess": ["{}", '{"price_micro":100000}'],
    "dataset": ['{"data":"' + "ab" * 32 + '","reward":"numeric"}'],
    "code": ['{"data":"' + "ab" * 32 + '","score":"all"}'],
    "math": ['{"data":"' + "ab" * 32 + '"}'],
    "nothing": ["{}"],
}


def _environment_args(scratch: Path) -> Target:
    """The environment a task names: entry and arguments are a stranger's."""

    def fuzz(data: bytes) -> str:
        entry = ENTRIES[data[0] % len(ENTRIES)] if data else ENTRIES[0]
        text = data[1:].decode(errors="replace")

        def work() -> None:
            spec = environments.EnvironmentSpec(entry, text, environments.content_hash(entry, text))
            environments.needs_files(spec)
            environments.load(spec, [scratch])

        return attempt((ConfigError, Fault), work)

    return Target(fuzz, [bytes([at]) + args.encode() for at, entry in enumerate(ENTRIES) for args in _ARGS[entry]])


def _merkle(scratch: Path) -> Target:
    leaves = [keccak(bytes([i])) for i in range(7)]
    root = compute_root(leaves)

    def fuzz(data: bytes) -> str:
        index, *_ = data[:1] or b"\0"
        proof = tuple(data[i : i + 32] for i in range(1, len(data), 32))
        leaf = leaves[index % 8] if index % 8 < 7 else keccak(data)
        outcome = attempt(Reject, lambda: verify_proof(root, leaf, proof))
        genuine = index % 8 < 7 and proof == compute_proof(leaves, index % 8)
        assert (outcome == "accepted") == genuine, "a proof that was not made from the tree"
        return outcome

    return Target(fuzz, [bytes([i]) + b"".join(compute_proof(leaves, i)) for i in range(7)])


def _verdict_rows(scratch: Path) -> Target:
    rows = [Row(hashlib.sha256(bytes([i])).digest()[:20], Status(1 + i % 4), i, 4, 99, 2, i - 2) for i in range(5)]

    def fuzz(data: bytes) -> str:
        def work() -> None:
            assert pack_rows(unpack_rows(data)) == data

        return attempt(Reject, work)

    return Target(fuzz, [pack_rows(rows[:n]) for n in (0, 1, 2, 5)])


HARNESSES = {
    "codec": Harness(_codec, "tagged", share=120),
    "envelope": Harness(_envelope, "msgpack", share=40),
    "node_record": Harness(_record, "msgpack", share=40),
    "finding": Harness(_finding, "msgpack", share=30),
    "task_spec": Harness(_task_spec, "msgpack", share=60, bytes_max=5000),
    "environment_args": Harness(_environment_args, "tagged-json", share=20, bytes_max=1200),
    "merkle_proof": Harness(_merkle, "words", share=40, bytes_max=1200),
    "verdict_rows": Harness(_verdict_rows, "words", share=60),
}
