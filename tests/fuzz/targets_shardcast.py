"""Harnesses of the mesh: manifests, headers of requests and answers, and the small records that it keeps on disk."""

from __future__ import annotations

import hashlib
from pathlib import Path

from protocol.codec import encode
from protocol.errors import Fault, Ignore, Reason, Reject
from protocol.identity import NetworkKey
from shardcast import wire
from shardcast.content import sha256
from shardcast.mailbox import Entry, Mailbox
from shardcast.manifest import (
    FileEntry,
    ManifestBody,
    SignedManifest,
    check_name,
    content_hash,
    manifest_domain,
    read_manifest,
    sign_manifest,
    verify_equivocation,
    verify_manifest,
)
from shardcast.ratchet import Head, Ratchet
from tests.fuzz.kit import Harness, Target, attempt

TRAINER, TASK = NetworkKey(b"\x07" * 32), b"\x11" * 32
DOMAIN = manifest_domain(31_337, b"\x22" * 20, TASK)


def make_body(version: int = 1) -> ManifestBody:
    """Two files, the larger with three shards."""
    shards = tuple(hashlib.sha256(bytes([i])).digest() for i in range(3))
    files = (
        FileEntry("config.json", 5, bytes(32), shards[:1]),
        FileEntry("model.safetensors", 2500, bytes(32), shards),
    )
    files = (FileEntry("config.json", 5, bytes(32), (b"\1" * 32,)), files[1])
    return ManifestBody(1, TASK, 0, version, version - 1, 1024, files, content_hash(files))


def _manifest(scratch: Path) -> Target:
    """A body under the trainer's own signature."""

    def fuzz(data: bytes) -> str:
        signed = encode(SignedManifest(data, TRAINER.public, TRAINER.sign(DOMAIN, data)))

        def work() -> None:
            manifest = verify_manifest(signed, TRAINER.public, DOMAIN, allowed_suffixes=(".json", ".safetensors"))
            assert encode(manifest.body) == data
            assert manifest.hash == sha256(signed)
            assert sum(len(file.shards) for file in manifest.body.files) >= len(manifest.shards)
            for file in manifest.body.files:
                assert (scratch / file.name).resolve().parent == scratch.resolve(), "a name that leaves its folder"

        return attempt(Reject, work)

    return Target(fuzz, [encode(make_body(version)) for version in (0, 1)])


def _manifest_envelope(scratch: Path) -> Target:
    """Raw bytes as a signed manifest, alone and as evidence of equivocation."""
    seeds = [sign_manifest(make_body(version), TRAINER, DOMAIN).data for version in (1, 2)]
    allowed = set(seeds)

    def fuzz(data: bytes) -> str:
        outcome = attempt(Reject, lambda: verify_manifest(data, TRAINER.public, DOMAIN))
        assert outcome != "accepted" or data in allowed, "a manifest that the trainer never signed"
        framed = attempt(Reject, lambda: verify_equivocation(seeds[0], data, TRAINER.public, DOMAIN))
        assert framed != "accepted", "evidence against a trainer that signed one manifest a version"
        attempt(Reject, lambda: read_manifest(data))
        return outcome

    return Target(fuzz, seeds)


def _file_name(scratch: Path) -> Target:
    def fuzz(data: bytes) -> str:
        name = data.decode(errors="surrogateescape")
        outcome = attempt(Reject, lambda: check_name(name))
        if outcome == "accepted":
            assert (scratch / name).resolve().parent == scratch.resolve()
            assert not name.startswith((".", "-"))
        return outcome

    return Target(fuzz, [b"model.safetensors", b"a..b", b"../x", b"A_b-9.json"])


REQUESTS = [
    wire.Get(1, 0, bytes(32), 0),
    wire.Have(2, bytes(32)),
    wire.Put(3, bytes(32), bytes(32), 9),
    wire.Part(3, 0),
]
ANSWERS = [
    wire.Chunk(1, 9, 0),
    wire.Bitmap(2),
    wire.Want(3, 0, 4),
    wire.Done(3),
    wire.failed(4, Reject(Reason.MALFORMED, "a rule", observed=3, limit=2, todo="mend it")),
    wire.failed(5, Fault("busy")),
    wire.failed(6, Ignore("old")),
]


def _request(scratch: Path) -> Target:
    """A header frame at a server; the first byte says how many payload frames follow."""

    def fuzz(data: bytes) -> str:
        frames = data[0] % 4 if data else 0

        def work() -> None:
            assert wire.pack(wire.unpack(wire.REQUESTS, data[1:], frames)) == data[1:]

        return attempt(Reject, work)

    return Target(fuzz, [bytes([isinstance(one, wire.Part)]) + wire.pack(one) for one in REQUESTS])


def _answer(scratch: Path) -> Target:
    """A header frame at a client, and the error it stands for."""

    def fuzz(data: bytes) -> str:
        frames = data[0] % 4 if data else 0

        def work() -> None:
            answer = wire.unpack(wire.ANSWERS, data[1:], frames)
            assert wire.pack(answer) == data[1:]
            if isinstance(answer, wire.Failed):
                again = wire.failed(answer.id, wire.to_error(answer))
                assert isinstance(again, wire.Failed)

        return attempt(Reject, work)

    return Target(fuzz, [bytes([isinstance(one, (wire.Chunk, wire.Bitmap))]) + wire.pack(one) for one in ANSWERS])


def _mailbox(scratch: Path) -> Target:
    """An index entry on disk, torn or damaged: opening drops it and what nobody refers to."""
    root, temporary = scratch / "mail", scratch / "tmp"
    temporary.mkdir()
    letter, key = b"letter", b"\5" * 32
    Mailbox(root, temporary, bytes_max=1 << 20, sender_bytes_max=1 << 20).put(b"\6" * 32, key, letter)
    index = root / "index" / key.hex()
    good = index.read_bytes()
    shelf = next(path for path in (root / "content").rglob("*") if path.is_file())

    def fuzz(data: bytes) -> str:
        index.write_bytes(data)
        shelf.write_bytes(letter)
        mailbox = Mailbox(root, temporary, bytes_max=1 << 20, sender_bytes_max=1 << 20)
        if mailbox.keys():
            assert mailbox.keys() == [key]
            assert mailbox.get(key) == letter
            return "accepted"
        assert not index.exists()
        return "dropped"

    return Target(fuzz, [good, encode(Entry(key, sha256(letter), len(letter), bytes(32)))])


def _ratchet(scratch: Path) -> Target:
    """The record of the highest version: without it a rollback would be accepted, so damage is a `Fault`."""
    root, temporary = scratch / "store", scratch / "tmp"
    temporary.mkdir()
    manifest = sign_manifest(make_body(3), TRAINER, DOMAIN)
    Ratchet(root, temporary).admit(manifest.data, TRAINER.public, DOMAIN, expected=manifest.hash)
    [head] = (root / "heads").iterdir()
    kept = root / "manifests" / manifest.hash.hex()

    def fuzz(data: bytes) -> str:
        on_head = not data or data[0] % 2 == 0
        head.write_bytes(data[1:] if on_head else seeds[0][1:])
        kept.write_bytes(manifest.data if on_head else data[1:])
        return attempt(Fault, lambda: Ratchet(root, temporary))

    seeds = [b"\0" + encode(Head(TASK, TRAINER.public, 3)), b"\1" + manifest.data]
    return Target(fuzz, seeds)


HARNESSES = {
    "manifest": Harness(_manifest, "msgpack", share=80),
    "manifest_envelope": Harness(_manifest_envelope, "msgpack", share=40),
    "file_name": Harness(_file_name, "bytes", share=20, bytes_max=100),
    "mesh_request": Harness(_request, "tagged", share=60, bytes_max=5000),
    "mesh_answer": Harness(_answer, "tagged", share=60, bytes_max=5000),
    "mailbox_index": Harness(_mailbox, "msgpack", share=5, bytes_max=400),
    "ratchet_head": Harness(_ratchet, "tagged", share=5, bytes_max=2000),
}
