"""Hostile bytes and manifests: W1 poisoned shards, W2 equivocation, W3 rollback, W4 liar bitmaps, W8 path traversal."""

from __future__ import annotations

import asyncio
import errno
import os
import random
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

import shardcast.files
from protocol.codec import decode
from protocol.errors import Fault, Reason, Reject
from protocol.identity import NetworkKey
from shardcast import wire
from shardcast.manifest import (
    Equivocation,
    FileEntry,
    Manifest,
    content_hash,
    sign_manifest,
    verify_equivocation,
    verify_manifest,
)
from shardcast.store import ShardStore
from tests.support.shardcast_kit import (
    DOMAIN,
    SHARD,
    TRAINER,
    Events,
    MutatingStore,
    SlowStore,
    fill,
    make_folder,
    make_manifest,
    make_peer,
    raw_server,
    until,
)

Mutation = Callable[[bytes, int, bytes], bytes]


def _flip(position: int, bit: int) -> Mutation:
    def mutate(digest: bytes, offset: int, data: bytes) -> bytes:
        forged = bytearray(data)
        forged[position % len(forged)] ^= 1 << bit
        return bytes(forged)

    return mutate


def _forgeries() -> list[tuple[str, Mutation]]:
    """Every class of byte (first, inner, last), every bit, and bytes that are missing, extra, zero or of another shard."""
    flips = [(f"bit {bit} of byte {at}", _flip(at, bit)) for at in (0, 1, 37, 2048, -2, -1) for bit in range(8)]
    return [
        *flips,
        ("truncated", lambda digest, offset, data: data[:-1]),
        ("empty", lambda digest, offset, data: b""),
        ("extended", lambda digest, offset, data: data + b"\0"),
        ("zeroed", lambda digest, offset, data: bytes(len(data))),
        ("reversed", lambda digest, offset, data: data[::-1]),
        ("another shard", lambda digest, offset, data: random.Random(4).randbytes(len(data))),
    ]


def test_w1_poisoned_shards_ban_their_sender_and_the_fetch_completes(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "policy", num_shards=4)
    manifest = make_manifest(folder)
    forgeries = _forgeries()
    assert len(forgeries) >= 50
    now: list[Mutation] = [forgeries[0][1]]

    async def attack(name: str, root: Path, liar, honest) -> None:
        events = Events()
        with ShardStore(root) as store:
            async with make_peer(store, 9, listen=False, on_event=events) as node:
                with pytest.raises(Fault, match="banned"):
                    await node.fetch(manifest, [liar.address])
                assert set(store.missing(manifest)) == set(manifest.shards), f"{name}: no forged byte is kept"
                assert node.banned == {liar.public_key}, name
                assert events.named("banned")[0]["peer"] == liar.public_key.hex(), name
                await node.fetch(manifest, [liar.address, honest.address])
                assert store.missing(manifest) == [], name
                assert node.banned == {liar.public_key}, f"{name}: nobody else is blamed"

    async def run() -> None:
        with (
            MutatingStore(tmp_path / "liar", lambda *chunk: now[0](*chunk)) as bad,
            ShardStore(tmp_path / "honest") as good,
        ):
            fill(bad, manifest, folder)
            fill(good, manifest, folder)
            async with make_peer(bad, 1) as liar, make_peer(good, 2) as honest:
                for number, (name, mutate) in enumerate(forgeries):
                    now[0] = mutate
                    await attack(name, tmp_path / f"node{number}", liar, honest)

    asyncio.run(run())


def test_w1_poison_in_the_middle_of_a_swarm(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "policy")
    manifest = make_manifest(folder)

    async def run() -> None:
        with (
            MutatingStore(tmp_path / "liar", _flip(100, 3)) as bad,
            SlowStore(tmp_path / "honest", 0.02) as good,
            ShardStore(tmp_path / "node") as store,
        ):
            fill(bad, manifest, folder)
            fill(good, manifest, folder)
            async with make_peer(bad, 1) as liar, make_peer(good, 2) as honest, make_peer(store, 3) as node:
                await node.fetch(manifest, [liar.address, honest.address])
                assert node.banned == {liar.public_key}
                assert node.metrics["verify_failures"] > 0
                target = store.assemble(manifest, tmp_path / "out")
        for path in folder.iterdir():
            assert (target / path.name).read_bytes() == path.read_bytes()

    asyncio.run(run())


def test_w1_wrong_blob_under_a_hash_bans_its_sender(tmp_path: Path) -> None:
    async def run() -> None:
        with MutatingStore(tmp_path / "a", _flip(0, 0)) as bad, ShardStore(tmp_path / "b") as store:
            digest = bad.put(b"some blob")
            async with make_peer(bad, 1) as liar, make_peer(store, 2) as node:
                with pytest.raises(Fault, match="do not match their hash"):
                    await node.get_blob(digest, [liar.address])
                assert node.banned == {liar.public_key}

    asyncio.run(run())


def test_w2_two_manifests_of_one_version_are_evidence(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "policy")
    first = make_manifest(folder, version=7)
    (folder / "config.json").write_text("{}")
    second = make_manifest(folder, version=7)
    with ShardStore(tmp_path / "a") as store:
        store.admit_manifest(first.data, TRAINER.public, DOMAIN, expected=first.hash)
    with ShardStore(tmp_path / "a") as store, pytest.raises(Equivocation) as caught:
        store.admit_manifest(second.data, TRAINER.public, DOMAIN, expected=second.hash)
    proof = caught.value
    assert {proof.first, proof.second} == {first.data, second.data}
    verify_equivocation(proof.first, proof.second, TRAINER.public, DOMAIN)


def test_w2_nobody_can_be_framed(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "policy")
    first, later = make_manifest(folder, version=7), make_manifest(folder, version=8)
    forged = sign_manifest(msgspec.structs.replace(first.body, epoch=5), NetworkKey(b"\x08" * 32), DOMAIN)
    for other in (first, later, forged):
        with pytest.raises(Reject):
            verify_equivocation(first.data, other.data, TRAINER.public, DOMAIN)


def test_w3_rollback_is_refused_after_restart(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "policy", num_shards=1)
    manifests = [make_manifest(folder, version=version) for version in range(60)]
    root = tmp_path / "store"
    refused = 0
    for highest in range(9, 60, 10):
        with ShardStore(root) as store:
            newest = manifests[highest]
            store.admit_manifest(newest.data, TRAINER.public, DOMAIN, expected=newest.hash)
        for older in manifests[max(0, highest - 9) : highest]:
            with ShardStore(root) as store:
                assert store.highest_version(older.task, older.key) == highest
                with pytest.raises(Reject) as caught:
                    store.admit_manifest(older.data, TRAINER.public, DOMAIN, expected=older.hash)
                assert caught.value.reason is Reason.ROLLBACK
                assert store.highest_version(older.task, older.key) == highest
                refused += 1
    assert refused >= 50


def test_w3_a_version_the_ledger_does_not_list_moves_nothing(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "policy", num_shards=1)
    listed = make_manifest(folder, version=1)
    with ShardStore(tmp_path / "a") as store:
        for bit in range(1, 32):
            ahead = make_manifest(folder, version=1 << bit)
            with pytest.raises(Reject) as caught:
                store.admit_manifest(ahead.data, TRAINER.public, DOMAIN, expected=listed.hash)
            assert caught.value.reason is Reason.MANIFEST
            assert store.highest_version(listed.task, listed.key) == -1
        store.admit_manifest(listed.data, TRAINER.public, DOMAIN, expected=listed.hash)
        # Version numbers end long before 2^63: nobody can push the ratchet out of reach.
        body = msgspec.structs.replace(listed.body, version=2**63)
        beyond = sign_manifest(body, TRAINER, DOMAIN)
        with pytest.raises(Reject) as caught:
            store.admit_manifest(beyond.data, TRAINER.public, DOMAIN, expected=beyond.hash)
        assert caught.value.reason is Reason.MALFORMED


@pytest.mark.parametrize("how", ["not here", "silent", "garbage", "wrong kind", "short bitmap"])
def test_w4_liar_who_claims_all_and_serves_none(tmp_path: Path, how: str) -> None:
    folder = make_folder(tmp_path / "policy")
    manifest = make_manifest(folder)
    claimed = bytes([255] * (-(-len(manifest.shards) // 8)))
    asked = 0

    async def lie(frames: list[bytes]) -> list[list[bytes]]:
        nonlocal asked
        request = wire.unpack(wire.REQUESTS, frames[0], len(frames) - 1)
        if isinstance(request, wire.Have):
            bits = b"\xff" if how == "short bitmap" else claimed
            return [[wire.pack(wire.Bitmap(request.id)), bits]]
        asked += 1
        return {
            "not here": [[wire.pack(wire.Failed(request.id, 4, 0, "no", "", "", ""))]],
            "silent": [],
            "garbage": [[b"\xff" * 50], [b""], [wire.pack(wire.Done(request.id)), b"x", b"y"]],
            "wrong kind": [[wire.pack(wire.Done(request.id))]],
        }[how]

    async def run() -> None:
        events = Events()
        with SlowStore(tmp_path / "honest", 0.01) as good, ShardStore(tmp_path / "node") as store:
            fill(good, manifest, folder)
            async with (
                raw_server(1, lie) as liar,
                make_peer(good, 2) as honest,
                make_peer(store, 3, on_event=events, request_timeout_s=0.3) as node,
            ):
                with pytest.raises(Fault, match=f"misses {len(manifest.shards)} of"):
                    await node.fetch(manifest, [liar], timeout_s=1.0)
                await node.fetch(manifest, [liar, honest.address])
                assert store.missing(manifest) == []
                contradicts_itself = how in ("wrong kind", "short bitmap")
                assert node.banned == ({liar.curve_key} if contradicts_itself else set())
                assert bool(events.named("strike")) != contradicts_itself, "silence is struck, not banned"
                assert bool(asked) == (how != "short bitmap")

    asyncio.run(run())


_HOSTILE_NAMES = [
    "../evil", "../../evil", "..", ".", "", "/etc/passwd", "/", "//x", "a/b", "a/../b", "./a", "a/", "a\\b", "..\\evil",
    "C:\\evil", "C:evil", "\0", "a\0b", "a\0.json", "~", "~root", "a\n", "\na", "a\r", "a b", " a", "a ", "a\t", "-rf",
    "--help", ".hidden", ".ssh", "...", "a..b", "a..", "$HOME", "`id`", "a;b", "a|b", "a&b", "a*b", "a?b", "a:b", "a'b",
    'a"b', "<a>", "é.json", "а.json", "\u202egpj.json", "\u2215etc", "\uff0e\uff0e", "x" * 65, "x" * 5000, "con\x7f", "%2e%2e",
    "a\u0000/../b", "a@b", "a#b", "a=b", "a,b", "a+b", "(a)", "[a]", "{a}", "a!b", "a^b",
]  # fmt: skip


def _named(manifest: Manifest, *names: str) -> Manifest:
    entry = manifest.body.files[0]
    files = tuple(FileEntry(name, entry.size, entry.sha256, entry.shards) for name in sorted(names))
    body = msgspec.structs.replace(manifest.body, files=files, root=content_hash(files))
    return sign_manifest(body, TRAINER, DOMAIN)


def test_w8_hostile_names_are_refused(tmp_path: Path) -> None:
    manifest = make_manifest(make_folder(tmp_path / "policy"))
    assert len(_HOSTILE_NAMES) >= 50
    for name in _HOSTILE_NAMES:
        with pytest.raises(Reject) as caught:
            verify_manifest(_named(manifest, name).data, TRAINER.public, DOMAIN)
        assert caught.value.reason is Reason.MANIFEST, name
        assert caught.value.what in ("file name is not allowed", "file name is too long"), name
    for names in (("a", "a"), ("a", "A"), ("Model.json", "model.json")):
        with pytest.raises(Reject, match="not unique"):
            verify_manifest(_named(manifest, *names).data, TRAINER.public, DOMAIN)
    data = _named(manifest, "model.pkl").data
    with pytest.raises(Reject, match="file type"):
        verify_manifest(data, TRAINER.public, DOMAIN, allowed_suffixes=(".json", ".safetensors"))
    verify_manifest(_named(manifest, "model-00001-of-2.json").data, TRAINER.public, DOMAIN)


def test_w8_links_in_the_way_are_not_followed(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "policy")
    manifest = make_manifest(folder)
    victim = make_folder(tmp_path / "victim", seed=9)
    before = {path.name: path.read_bytes() for path in victim.iterdir()}
    with ShardStore(tmp_path / "store") as store:
        fill(store, manifest, folder)
        for number, place in enumerate((victim, tmp_path / "nowhere", folder)):
            link = tmp_path / f"link{number}"
            link.symlink_to(place)
            with pytest.raises(Fault, match="in the way"):
                store.assemble(manifest, link)
        # A folder that holds the right bytes, but through a link that may change later.
        trap = tmp_path / "trap"
        trap.mkdir()
        (trap / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
        (trap / "config.json").symlink_to(folder / "config.json")
        with pytest.raises(Fault, match=r"config\.json"):
            store.assemble(manifest, trap)
        # A link among the shards is not a shard.
        digest = next(iter(manifest.shards))
    shard = tmp_path / "store" / "shards" / digest.hex()
    shard.rename(tmp_path / "elsewhere")
    shard.symlink_to(tmp_path / "elsewhere")
    with ShardStore(tmp_path / "store") as store:
        assert store.missing(manifest) == [digest]
    assert {path.name: path.read_bytes() for path in victim.iterdir()} == before


def test_folder_that_does_not_add_up_is_never_seen(tmp_path: Path) -> None:
    """A trainer that signs shards which are not its files: nothing appears under the target path."""
    folder = make_folder(tmp_path / "policy")
    honest = make_manifest(folder)
    config, model = honest.body.files
    files = (msgspec.structs.replace(config, sha256=b"\x01" * 32), model)
    body = msgspec.structs.replace(honest.body, files=files, root=content_hash(files))
    manifest = verify_manifest(sign_manifest(body, TRAINER, DOMAIN).data, TRAINER.public, DOMAIN)
    with ShardStore(tmp_path / "store") as store:
        store.add_folder(honest, folder)
        with pytest.raises(Fault, match="do not add up"):
            store.assemble(manifest, tmp_path / "out" / "v1")
    assert list((tmp_path / "out").iterdir()) == []


def test_full_disk_stops_a_fetch_without_blame_or_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_folder(tmp_path / "policy")
    manifest = make_manifest(folder)
    real_write = os.write

    async def run() -> None:
        with ShardStore(tmp_path / "a") as a, ShardStore(tmp_path / "b") as b:
            fill(a, manifest, folder)
            async with make_peer(a, 1) as origin, make_peer(b, 2) as node:
                writes = 0

                def write(fd: int, data: memoryview) -> int:
                    nonlocal writes
                    writes += 1
                    if writes > 5:
                        real_write(fd, data[: len(data) // 2])  # a torn write, then the error
                        raise OSError(errno.ENOSPC, "No space left on device")
                    return real_write(fd, data)

                monkeypatch.setattr(shardcast.files.os, "write", write)
                with pytest.raises(Fault, match="disk is full"):
                    await node.fetch(manifest, [origin.address])
                monkeypatch.undo()
                assert not node.banned
                # The other lane's write may still be under way in its thread.
                await until(lambda: len(manifest.shards) - len(b.missing(manifest)) == 5)
                await until(lambda: not list((tmp_path / "b" / "tmp").iterdir()))
                await node.fetch(manifest, [origin.address])
                assert b.missing(manifest) == []

    asyncio.run(run())


def test_manifest_bytes_of_every_kind_are_rejected_not_crashed_on(tmp_path: Path) -> None:
    manifest = make_manifest(make_folder(tmp_path / "policy", num_shards=2))
    rng = random.Random(1)
    for _ in range(300):
        forged = bytearray(manifest.data)
        for _ in range(rng.randint(1, 3)):
            forged[rng.randrange(len(forged))] ^= rng.randint(1, 255)
        cut = bytes(forged[: rng.choice((len(forged), rng.randrange(len(forged))))])
        with pytest.raises(Reject):
            verify_manifest(cut, TRAINER.public, DOMAIN)
    with pytest.raises(Reject):
        verify_manifest(bytes(5 << 20), TRAINER.public, DOMAIN)
    with pytest.raises(Reject):
        verify_manifest(manifest.data, TRAINER.public, msgspec.structs.replace(DOMAIN, chain_id=1))
    assert decode(type(manifest.body), msgspec.msgpack.encode(manifest.body), bytes_max=1 << 20) == manifest.body
    assert manifest.body.shard_size == SHARD
