"""Peers over real sockets and real processes: policies travel, letters arrive, whoever dies is not missed."""

from __future__ import annotations

import asyncio
import random
import signal
from pathlib import Path

import pytest

from protocol.errors import Fault, Ignore, Reason, Reject
from shardcast.peer import Address
from shardcast.store import ShardStore
from shardcast.wire import CHUNK_BYTES, PUT_CREDITS
from tests.support.shardcast_kit import (
    DOMAIN,
    SHARD,
    TRAINER,
    Events,
    SlowStore,
    curve_secret,
    fill,
    make_folder,
    make_manifest,
    make_peer,
    next_line,
    spawn,
    spawn_server,
    until,
)


def test_policy_travels_from_folder_to_folder(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "policy")
    manifest = make_manifest(folder)

    async def run() -> None:
        with ShardStore(tmp_path / "a") as a, ShardStore(tmp_path / "b") as b, ShardStore(tmp_path / "c") as c:
            fill(a, manifest, folder)
            async with make_peer(a, 1) as origin, make_peer(b, 2) as relay, make_peer(c, 3, listen=False) as node:
                got = await relay.fetch_manifest(manifest.hash, [origin.address], TRAINER.public, DOMAIN)
                await relay.fetch(got, [origin.address])
                # A relay serves what it fetched, manifest included, without the origin.
                got = await node.fetch_manifest(manifest.hash, [relay.address], TRAINER.public, DOMAIN)
                await node.fetch(got, [relay.address])
                target = c.assemble(got, tmp_path / "out" / "v1")
                assert node.bytes_from[relay.public_key] > (folder / "model.safetensors").stat().st_size
                assert node.bytes_from[origin.public_key] == 0
        for path in folder.iterdir():
            assert (target / path.name).read_bytes() == path.read_bytes()

    asyncio.run(run())


def test_shard_larger_than_a_message_arrives_in_chunks(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "policy")
    (folder / "big.safetensors").write_bytes(random.Random(5).randbytes(5 * CHUNK_BYTES + 17))

    async def run() -> None:
        from shardcast.folder import build_manifest

        manifest = build_manifest(folder, TRAINER, DOMAIN, version=3, shard_size=3 * CHUNK_BYTES + 5)
        with ShardStore(tmp_path / "a") as a, ShardStore(tmp_path / "b") as b:
            fill(a, manifest, folder)
            async with make_peer(a, 1) as origin, make_peer(b, 2) as node:
                await node.fetch(manifest, [origin.address])
                assert b.missing(manifest) == []

    asyncio.run(run())


def test_fetch_from_three_processes_survives_the_death_of_one(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "policy", num_shards=60)
    manifest = make_manifest(folder)
    for index in (1, 2, 3):
        with ShardStore(tmp_path / str(index)) as store:
            fill(store, manifest, folder)
    servers = [spawn_server(tmp_path / str(index), index, 0.02) for index in (1, 2, 3)]

    async def run() -> None:
        with ShardStore(tmp_path / "node") as store:
            async with make_peer(store, 9, listen=False, request_timeout_s=2.0) as node:
                addresses = [address for _, address in servers]
                job = asyncio.create_task(node.fetch(manifest, addresses))
                await until(lambda: node.bytes_from[addresses[0].curve_key] > 2 * SHARD)
                servers[0][0].send_signal(signal.SIGKILL)
                assert store.missing(manifest), "the peer was killed before the fetch was over"
                await job
                assert store.missing(manifest) == []
                assert not node.banned, "dying is not lying"
                assert all(node.bytes_from[address.curve_key] > SHARD for address in addresses)

    try:
        asyncio.run(run())
    finally:
        for process, _ in servers:
            process.kill()
            process.wait()


def test_killed_fetch_resumes_with_what_is_missing(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "policy", num_shards=60)
    manifest = make_manifest(folder)
    with ShardStore(tmp_path / "origin") as store:
        fill(store, manifest, folder)
    server, address = spawn_server(tmp_path / "origin", 1, 0.02)
    fetch = ("fetch", tmp_path / "node", 2, manifest.hash.hex(), address.endpoint, address.curve_key.hex())
    try:
        first = spawn(*fetch)
        while next_line(first)["held"] < 5:
            pass
        first.kill()
        first.wait()
        with ShardStore(tmp_path / "node") as store:
            held = len(manifest.shards) - len(store.missing(manifest))
            assert 5 <= held < len(manifest.shards)
            assert store.highest_version(manifest.task, manifest.key) == 1
            assert list((tmp_path / "node" / "tmp").iterdir()) == []
        second = spawn(*fetch)
        assert next_line(second)["held"] >= held, "nothing that was held is fetched again"
        second.communicate()
        assert second.returncode == 0
        with ShardStore(tmp_path / "node") as store:
            assert store.missing(manifest) == []
    finally:
        server.kill()
        server.wait()


def test_newer_version_stops_the_older_fetch(tmp_path: Path) -> None:
    folders = [make_folder(tmp_path / f"p{version}", seed=version) for version in (1, 2)]
    manifests = [make_manifest(folder, version=version) for version, folder in enumerate(folders, start=1)]

    async def run() -> None:
        with SlowStore(tmp_path / "a", 0.05) as a, ShardStore(tmp_path / "b") as b:
            for manifest, folder in zip(manifests, folders, strict=True):
                fill(a, manifest, folder)
            async with make_peer(a, 1) as origin, make_peer(b, 2) as node:
                older = asyncio.create_task(node.fetch(manifests[0], [origin.address]))
                await until(lambda: node.metrics["shards_fetched"] > 0)
                newer = asyncio.create_task(node.fetch(manifests[1], [origin.address]))
                with pytest.raises(Ignore, match="version 2"):
                    await older
                with pytest.raises(Ignore, match="version 2 is being fetched"):
                    await node.fetch(manifests[0], [origin.address])
                await newer
                assert b.missing(manifests[1]) == []
                # On purpose is another matter: a verifier judges an earlier round.
                await node.fetch(manifests[0], [origin.address], historic=True)
                assert b.missing(manifests[0]) == []

    asyncio.run(run())


def test_fetch_says_what_is_missing_and_why(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "policy")
    manifest = make_manifest(folder)

    async def run() -> None:
        with ShardStore(tmp_path / "a") as a, ShardStore(tmp_path / "b") as b:
            fill(a, manifest, folder)
            lost = list(manifest.shards)[3]
            a.collect(set(manifest.shards) - {lost})
            dead = Address("tcp://127.0.0.1:1", b"\x33" * 32)
            async with make_peer(a, 1) as origin, make_peer(b, 2, request_timeout_s=0.2) as node:
                with pytest.raises(Fault) as caught:
                    await node.fetch(manifest, [origin.address, dead], timeout_s=1.0)
                assert lost.hex()[:16] in str(caught.value)
                assert f"misses 1 of {len(manifest.shards)} shards" in str(caught.value)
                assert dead.endpoint in str(caught.value)

    asyncio.run(run())


def test_letters_arrive_and_are_explained(tmp_path: Path) -> None:
    letters = {bytes([i]) * 32: random.Random(i).randbytes(size) for i, size in enumerate((0, 1, 70_000))}
    letters[b"\x09" * 32] = random.Random(9).randbytes((PUT_CREDITS * 2 + 1) * CHUNK_BYTES + 5)
    senders: list[bytes] = []

    async def accept(sender: bytes, key: bytes, data: bytes) -> None:
        await asyncio.sleep(0)
        senders.append(sender)
        if data == b"bad":
            raise Reject(Reason.REWARD, "reward is wrong", observed=3, limit=1, todo="recompute it")
        if data == b"old":
            raise Ignore("round 3 was void")
        if data == b"bug":
            raise ZeroDivisionError

    def refuse(data: bytes) -> None:
        raise Reject(Reason.SIGNATURE, "not what I wanted")

    async def run() -> None:
        with ShardStore(tmp_path / "a", mail_sender_bytes_max=8 << 20) as a, ShardStore(tmp_path / "b") as b:
            async with make_peer(a, 1, accept=accept) as relay, make_peer(b, 2, listen=False) as node:
                for key, data in letters.items():
                    await node.put(relay.address, key, data)
                    await node.put(relay.address, key, data)  # repeating is harmless
                    assert await node.get(key, [relay.address], verify=lambda data: None) == data
                assert senders == [node.public_key] * len(letters), "the sender is whom CURVE proved"
                with pytest.raises(Reject) as caught:
                    await node.put(relay.address, b"\x20" * 32, b"bad")
                assert caught.value.reason is Reason.REWARD
                assert str(caught.value) == "reward: reward is wrong; observed 3; limit 1; recompute it"
                with pytest.raises(Ignore, match="round 3 was void"):
                    await node.put(relay.address, b"\x20" * 32, b"old")
                with pytest.raises(Fault, match="internal error"):
                    await node.put(relay.address, b"\x20" * 32, b"bug")
                with pytest.raises(Reject) as caught:
                    await node.put(relay.address, b"\x00" * 32, b"other")
                assert caught.value.reason is Reason.DUPLICATE
                with pytest.raises(Reject) as caught:
                    await node.put(relay.address, b"\x21" * 32, bytes(5 << 20))
                assert caught.value.reason is Reason.QUOTA
                with pytest.raises(Fault, match="no letter"):
                    await node.get(b"\x20" * 32, [relay.address], verify=lambda data: None)
                with pytest.raises(Fault, match="not what I wanted"):
                    await node.get(b"\x01" * 32, [relay.address], verify=refuse)
        with ShardStore(tmp_path / "a") as again:
            assert {key: again.mail.get(key) for key in again.mail.keys()} == letters  # noqa: SIM118
            assert again.mail.collect(lambda key: key == b"\x01" * 32) == len(letters) - 1
            assert again.mail.keys() == [b"\x01" * 32]

    asyncio.run(run())


def test_a_request_to_a_peer_that_dies_ends_with_the_connection(tmp_path: Path) -> None:
    """A relay that is killed with a letter in its hands must not hold up the next letters until the deadline."""
    (tmp_path / "1").mkdir()
    process, address = spawn_server(tmp_path / "1", 1)

    async def run() -> None:
        with ShardStore(tmp_path / "node") as store:
            async with make_peer(store, 9, listen=False, request_timeout_s=300.0) as node:
                await node.put(address, b"k" * 32, b"letter")
                process.send_signal(signal.SIGSTOP)
                jobs = [asyncio.create_task(node.put(address, bytes([i]) * 32, b"letter")) for i in range(2)]
                await asyncio.sleep(0.2)
                assert not any(job.done() for job in jobs)
                process.kill()
                async with asyncio.timeout(30):
                    said = await asyncio.gather(*jobs, return_exceptions=True)
                assert all(isinstance(error, Fault) for error in said)
                assert "closed the connection before it answered" in str(said[0])

    try:
        asyncio.run(run())
    finally:
        process.kill()
        process.wait()


def test_peer_without_a_mailbox_says_so(tmp_path: Path) -> None:
    async def run() -> None:
        with ShardStore(tmp_path / "a") as a, ShardStore(tmp_path / "b") as b:
            async with make_peer(a, 1) as deaf, make_peer(b, 2) as node:
                with pytest.raises(Reject, match="takes no letters"):
                    await node.put(deaf.address, b"\x01" * 32, b"x")

    asyncio.run(run())


def test_peer_that_is_not_admitted_is_told_so(tmp_path: Path) -> None:
    async def run() -> None:
        events = Events()
        with ShardStore(tmp_path / "a") as a, ShardStore(tmp_path / "b") as b:
            async with (
                make_peer(a, 1, admit=lambda key: False, on_event=events) as relay,
                make_peer(b, 2, request_timeout_s=1.0) as node,
            ):
                with pytest.raises(Fault, match="does not admit our key"):
                    await node.get_blob(b"\x01" * 32, [relay.address])
                assert events.named("refused")[0]["peer"] == node.public_key.hex()
                assert curve_secret(2) != node.public_key

    asyncio.run(run())
