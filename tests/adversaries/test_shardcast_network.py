"""Hostile connections, N1 to N5 and W6: whatever is sent, an honest peer is served meanwhile and memory stays bounded."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import pytest
import zmq

from protocol.errors import Fault, Reject
from shardcast import sockets, watch, wire
from shardcast.content import sha256
from shardcast.peer import Peer
from shardcast.server import INFLIGHT_MAX
from shardcast.sockets import curve_public, open_client
from shardcast.store import ShardStore
from tests.support.shardcast_kit import (
    Events,
    SlowStore,
    curve_secret,
    fill,
    make_folder,
    make_manifest,
    make_peer,
    raw_client,
    raw_server,
    receive,
    until,
)

Attack = Callable[[Peer], Awaitable[None]]


def _attack_while_serving(tmp_path: Path, attack: Attack, *, rounds: int = 3, **server_options: object) -> None:
    """Run `attack` against a server; an honest peer fetches a policy before, during and after."""
    folder = make_folder(tmp_path / "policy")
    manifest = make_manifest(folder)

    async def serve_honest(server: Peer, number: int) -> None:
        with ShardStore(tmp_path / f"node{number}") as store:
            async with make_peer(store, 100 + number, listen=False) as node:
                await node.fetch(manifest, [server.address])
                assert store.missing(manifest) == []

    async def run() -> None:
        with ShardStore(tmp_path / "server") as store:
            fill(store, manifest, folder)
            async with make_peer(store, 1, **server_options) as server:
                await serve_honest(server, 0)
                async with asyncio.TaskGroup() as group:
                    group.create_task(attack(server))
                    for number in range(1, rounds):
                        await serve_honest(server, number)
                await serve_honest(server, rounds)
                assert server.metrics["internal_errors"] == 0

    asyncio.run(run())


def _tcp(server: Peer) -> tuple[str, int]:
    host, port = server.address.endpoint.removeprefix("tcp://").rsplit(":", 1)
    return host, int(port)


#: ZMTP 3.1 greetings: signature, version, mechanism, as-server, filler.
def _greeting(mechanism: bytes) -> bytes:
    return b"\xff" + bytes(8) + b"\x7f\x03\x01" + mechanism.ljust(20, b"\0") + b"\0" + bytes(31)


def test_n1_plain_tcp_bytes(tmp_path: Path) -> None:
    rng = random.Random(3)
    payloads = [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\x16\x03\x01" + bytes(200), b"\n" * 100, bytes(500), b"\xff" * 500,
        _greeting(b"NULL"), _greeting(b"NULL") + b"\x04\x26\x05READY\x0bSocket-Type\0\0\0\x06DEALER",
        _greeting(b"PLAIN") + b"\x04\x0a\x05HELLO\x01a\x01b", _greeting(b"CURVE"), _greeting(b"CURVE") + bytes(300),
        _greeting(b"CURVE") + b"\x04\xc8\x05HELLO" + bytes(194),
        *(rng.randbytes(rng.randint(1, 400)) for _ in range(50)),
        *(_greeting(b"CURVE") + rng.randbytes(rng.randint(1, 400)) for _ in range(50)),
    ]  # fmt: skip

    async def attack(server: Peer) -> None:
        for payload in payloads:
            reader, writer = await asyncio.open_connection(*_tcp(server))
            writer.write(payload)
            await writer.drain()
            writer.close()
            assert reader is not None

    _attack_while_serving(tmp_path, attack)


@pytest.mark.parametrize("mechanism", ["null", "plain", "curve with a wrong server key", "curve without admission"])
def test_n1_connections_without_an_admitted_curve_key_are_refused(tmp_path: Path, mechanism: str) -> None:
    stranger = curve_public(curve_secret(66))

    async def attack(server: Peer) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        before = server.metrics["failed_handshakes"]
        try:
            if mechanism.startswith("curve"):
                wrong = "wrong" in mechanism
                key = curve_public(curve_secret(67)) if wrong else server.public_key
                dealer = open_client(context, curve_secret(66), server.address.endpoint, key)
            else:
                dealer = context.socket(zmq.DEALER)
                dealer.setsockopt(zmq.LINGER, 0)
                if mechanism == "plain":
                    dealer.setsockopt(zmq.PLAIN_USERNAME, b"a")
                    dealer.setsockopt(zmq.PLAIN_PASSWORD, b"b")
                dealer.connect(server.address.endpoint)
            dealer.send(wire.pack(wire.Have(1, b"\x01" * 32)))
            await until(lambda: server.metrics["failed_handshakes"] > before)
            assert not dealer.poll(0), "nothing was answered"
        finally:
            context.destroy(linger=0)
        assert server.metrics["refused"] == 0, "nothing reached the service"

    _attack_while_serving(tmp_path, attack, admit=lambda key: key != stranger)


def test_n1_an_admission_that_fails_admits_nobody(tmp_path: Path) -> None:
    def admit(key: bytes) -> bool:
        raise ZeroDivisionError

    async def run() -> None:
        events = Events()
        with ShardStore(tmp_path / "a") as a, ShardStore(tmp_path / "b") as b:
            async with (
                make_peer(a, 1, admit=admit, on_event=events) as server,
                make_peer(b, 2, request_timeout_s=1.0) as node,
            ):
                with pytest.raises(Fault, match="does not admit"):
                    await node.get_blob(b"\x01" * 32, [server.address])
                assert "ZeroDivisionError" in events.named("refused")[0]["why"]

    asyncio.run(run())


def test_n2_a_routing_id_is_no_identity(tmp_path: Path) -> None:
    senders: list[bytes] = []

    async def run() -> None:
        with ShardStore(tmp_path / "a") as store, ShardStore(tmp_path / "b") as b:
            async with (
                make_peer(store, 1, accept=lambda sender, key, data: senders.append(sender)) as server,
                make_peer(b, 2, listen=False) as victim,
            ):
                context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
                forger = context.socket(zmq.DEALER)
                try:
                    # The forger names itself by the victim's key.
                    forger.setsockopt(zmq.ROUTING_ID, victim.public_key)
                    forger.setsockopt(zmq.CURVE_SECRETKEY, curve_secret(6))
                    forger.setsockopt(zmq.CURVE_PUBLICKEY, curve_public(curve_secret(6)))
                    forger.setsockopt(zmq.CURVE_SERVERKEY, server.public_key)
                    forger.connect(server.address.endpoint)
                    put = wire.Put(1, b"\x01" * 32, sha256(b"x"), 1)
                    forger.send(wire.pack(put))
                    await receive(forger)
                    forger.send_multipart([wire.pack(wire.Part(1, 0)), b"x"])
                    await receive(forger)
                    await victim.put(server.address, b"\x02" * 32, b"y")
                finally:
                    context.destroy(linger=0)
                assert senders == [curve_public(curve_secret(6)), victim.public_key]

    asyncio.run(run())


def test_n2_nobody_continues_the_upload_of_another(tmp_path: Path) -> None:
    async def run() -> None:
        with ShardStore(tmp_path / "a") as store:
            async with (
                make_peer(store, 1, accept=lambda sender, key, data: None) as server,
                raw_client(server, 5) as one,
                raw_client(server, 6) as other,
            ):
                one.send(wire.pack(wire.Put(1, b"\x01" * 32, b"\x02" * 32, 1)))
                await receive(one)
                other.send_multipart([wire.pack(wire.Part(1, 0)), b"x"])
                answer = wire.unpack(wire.ANSWERS, (await receive(other))[0], 0)
                assert isinstance(answer, wire.Failed)
                assert "no such upload" in answer.what

    asyncio.run(run())


def test_n3_a_flood_is_dropped_at_the_door(tmp_path: Path) -> None:
    async def attack(server: Peer) -> None:
        async with raw_client(server, 66) as dealer:
            sent = 0
            while server.metrics["dropped_flood"] < 5_000:
                try:
                    dealer.send(wire.pack(wire.Have(1, b"\x01" * 32)), zmq.NOBLOCK)
                    sent += 1
                except zmq.Again:
                    await asyncio.sleep(0)
                if sent % 64 == 0:
                    await asyncio.sleep(0)
        assert server.metrics["refused"] <= sent - 5_000

    _attack_while_serving(tmp_path, attack, rate_per_s=300.0, burst=600.0)


def test_n3_one_sender_cannot_fill_the_queue(tmp_path: Path) -> None:
    """Requests beyond INFLIGHT_MAX are answered with `Busy`; every one of them is answered."""
    count = 4 * INFLIGHT_MAX
    folder = make_folder(tmp_path / "policy")
    manifest = make_manifest(folder)
    digest = next(iter(manifest.shards))

    async def run() -> None:
        with SlowStore(tmp_path / "server", 0.005) as store:
            fill(store, manifest, folder)
            async with make_peer(store, 1) as server, raw_client(server, 5) as dealer:
                busy = served = 0
                for number in range(count):
                    dealer.send(wire.pack(wire.Get(number, wire.SPACE_CONTENT, digest, 0)))
                while busy + served + server.metrics["answers_dropped"] < count:
                    header = (await receive(dealer))[0]
                    if isinstance(wire.unpack(wire.ANSWERS, header, header[0] == 16), wire.Failed):
                        busy += 1
                    else:
                        served += 1
                assert busy > 0
                assert served >= INFLIGHT_MAX / 2

    asyncio.run(run())


def test_n4_oversized_frames_close_their_connection(tmp_path: Path) -> None:
    async def attack(server: Peer) -> None:
        async with raw_client(server, 66) as dealer:
            monitor = dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            dealer.send(wire.pack(wire.Have(1, b"\x01" * 32)))
            await receive(dealer)
            dealer.send_multipart([wire.pack(wire.Part(1, 0)), bytes(wire.FRAME_BYTES_MAX + 1)])
            await until(lambda: bool(monitor.poll(0)))
            assert server.metrics["refused"] == 1, "the oversized message was not read"
            monitor.close(0)

    _attack_while_serving(tmp_path, attack)


def test_n4_a_header_of_two_gigabytes_closes_its_connection(tmp_path: Path) -> None:
    async def attack(server: Peer) -> None:
        reader, writer = await asyncio.open_connection(*_tcp(server))
        writer.write(_greeting(b"CURVE") + b"\x06" + (2 << 30).to_bytes(8, "big"))
        await writer.drain()
        received = await reader.read()  # ends only when the server closes
        assert len(received) <= 200
        writer.close()

    _attack_while_serving(tmp_path, attack)


def test_n4_a_message_of_very_many_frames_is_thrown_away(tmp_path: Path) -> None:
    async def attack(server: Peer) -> None:
        async with raw_client(server, 66) as dealer:
            for number in range(100_000):
                dealer.send(b"", zmq.SNDMORE)
                if number % 1000 == 0:
                    await asyncio.sleep(0)
            dealer.send(b"")
            await until(lambda: server.metrics["dropped_overlong"] == 1)
            # The connection is as good as before.
            dealer.send(wire.pack(wire.Have(77, b"\x01" * 32)))
            answer = wire.unpack(wire.ANSWERS, (await receive(dealer))[0], 0)
            assert answer.id == 77

    _attack_while_serving(tmp_path, attack)


def test_n4_a_message_that_never_ends_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """libzmq keeps every frame until the last has come: the connection is shut down long before."""
    monkeypatch.setattr(watch, "UNREAD_BYTES_MAX", 4 << 20)
    monkeypatch.setattr(watch, "INTERVAL_S", 0.001)
    forwarded = 0

    async def attack(server: Peer) -> None:
        async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            """Pass bytes on slowly enough for the server to look between two pieces."""
            nonlocal forwarded
            there, back = await asyncio.open_connection(*_tcp(server))

            async def answers() -> None:
                while data := await there.read(65536):
                    writer.write(data)

            answering = asyncio.create_task(answers())
            with suppress(ConnectionError):
                while data := await reader.read(256 << 10):
                    back.write(data)
                    await back.drain()
                    forwarded += len(data)
                    await asyncio.sleep(0.002)
            answering.cancel()
            back.close()
            writer.close()

        proxy = await asyncio.start_server(forward, "127.0.0.1", 0)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            endpoint = f"tcp://127.0.0.1:{proxy.sockets[0].getsockname()[1]}"
            dealer = open_client(context, curve_secret(66), endpoint, server.public_key)
            for _ in range(200):
                dealer.send(bytes(wire.CHUNK_BYTES), zmq.SNDMORE)
            dealer.send(b"the last frame, after 50 MiB")
            await until(lambda: server.metrics["hoarders_cut"] == 1)
            assert forwarded < 200 * wire.CHUNK_BYTES
            assert server.metrics["dropped_overlong"] == 0
        finally:
            context.destroy(linger=0)
            proxy.close()

    _attack_while_serving(tmp_path, attack)


def _mutants(count: int) -> list[list[bytes]]:
    """Random bytes, random MessagePack-like bytes, and valid requests with a few bytes changed or cut."""
    rng = random.Random(11)
    valid = [
        wire.pack(wire.Get(1, 0, b"\x01" * 32, 0)),
        wire.pack(wire.Have(1, b"\x01" * 32)),
        wire.pack(wire.Put(1, b"\x01" * 32, b"\x02" * 32, 10)),
        wire.pack(wire.Part(1, 0)),
    ]
    messages: list[list[bytes]] = [
        [b""], [b"", b""], [b"\x01"], [b"\x01" + b"\x91" * 5000], [b"\x01\xdd\xff\xff\xff\xff"], [b"\x02\xdf\xff\xff\xff\xff"],
        [b"\x01" + bytes(100_000)], [valid[0], b"payload"], [valid[3]], [b"\x10" + valid[0][1:]],
        [bytes([1]) + b"\x94\x01\x00\xc4\x20" + b"\x01" * 32 + b"\xcb" + bytes(8)],
    ]  # fmt: skip
    while len(messages) < count:
        if rng.random() < 0.3:
            header = rng.randbytes(rng.randint(0, 200))
        else:
            forged = bytearray(rng.choice(valid))
            for _ in range(rng.randint(1, 4)):
                forged[rng.randrange(len(forged))] = rng.randrange(256)
            header = bytes(forged[: rng.choice((len(forged), rng.randrange(len(forged) + 1)))])
        messages.append([header, *([rng.randbytes(20)] if rng.random() < 0.2 else [])])
    return messages


def test_n5_malformed_requests(tmp_path: Path) -> None:
    messages = _mutants(400)

    async def attack(server: Peer) -> None:
        async with raw_client(server, 66) as dealer:
            for message in messages:
                dealer.send_multipart(message)
                answer = wire.unpack(wire.ANSWERS, (await receive(dealer))[0], 0)
                assert isinstance(answer, wire.Failed | wire.Want), "each is answered, none is served"
        assert server.metrics["dropped_malformed"] > 200

    _attack_while_serving(tmp_path, attack, accept=lambda sender, key, data: None)


def test_n5_malformed_answers(tmp_path: Path) -> None:
    """A server that answers with anything: the asking side gets a typed error each time and goes on."""
    rng = random.Random(12)
    valid = [
        wire.pack(wire.Chunk(1, 10, 0)), wire.pack(wire.Bitmap(1)), wire.pack(wire.Want(1, 0, 1)), wire.pack(wire.Done(1)),
        wire.pack(wire.Failed(1, 1, 9999, "what", "", "", "")), wire.pack(wire.Failed(1, 200, 0, "what", "", "", "")),
    ]  # fmt: skip

    async def answer(frames: list[bytes]) -> list[list[bytes]]:
        request = wire.unpack(wire.REQUESTS, frames[0], len(frames) - 1)
        header = bytearray(rng.choice(valid))
        for _ in range(rng.randint(0, 3)):
            header[rng.randrange(len(header))] = rng.randrange(256)
        body = [bytes(header), *([rng.randbytes(rng.choice((0, 5, 10)))] if rng.random() < 0.5 else [])]
        last = wire.pack(wire.Chunk(request.id, 1 << 40, 0)) if rng.random() < 0.5 else wire.pack(wire.Done(request.id))
        return [body, [last, b"x"], [last], [wire.pack(wire.Done(request.id))]]

    async def run() -> None:
        with ShardStore(tmp_path / "a") as store:
            async with raw_server(1, answer) as liar, make_peer(store, 2, listen=False) as node:
                for number in range(200):
                    with pytest.raises((Fault, Reject)):
                        await node.get(bytes([number]) * 32, [liar], verify=_nothing_is_right)
                assert node.metrics["malformed_answers"] > 0

    asyncio.run(run())


def test_n5_a_letter_that_claims_to_be_a_terabyte(tmp_path: Path) -> None:
    async def answer(frames: list[bytes]) -> list[list[bytes]]:
        request = wire.unpack(wire.REQUESTS, frames[0], len(frames) - 1)
        return [[wire.pack(wire.Chunk(request.id, 1 << 40, 0)), bytes(wire.CHUNK_BYTES)]]

    async def run() -> None:
        with ShardStore(tmp_path / "a") as store:
            async with raw_server(1, answer) as liar, make_peer(store, 2, listen=False) as node:
                with pytest.raises(Fault, match="wrong size"):
                    await node.get(b"\x01" * 32, [liar], verify=_nothing_is_right)

    asyncio.run(run())


def test_w4_a_silent_peer_is_given_up(tmp_path: Path) -> None:
    async def answer(frames: list[bytes]) -> list[list[bytes]]:
        return []

    async def run() -> None:
        with ShardStore(tmp_path / "a") as store:
            async with (
                raw_server(1, answer) as silent,
                make_peer(store, 2, listen=False, request_timeout_s=0.2) as node,
            ):
                with pytest.raises(Fault, match="did not answer within"):
                    await node.get(b"\x01" * 32, [silent], verify=_nothing_is_right)
                with pytest.raises(Fault, match="did not answer within"):
                    await node.get_blob(b"\x01" * 32, [silent])
                with pytest.raises(Fault, match="did not answer within"):
                    await node.put(silent, b"\x01" * 32, b"letter")
                assert node.metrics["timeouts"] == 3

    asyncio.run(run())


def _nothing_is_right(data: bytes) -> None:
    raise AssertionError("no answer was a whole letter")


def test_w6_two_hundred_connections_that_say_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A handshake that does not go on is ended by the server, so silence cannot use up its descriptors."""
    monkeypatch.setattr(sockets, "HANDSHAKE_MS_MAX", 500)

    async def attack(server: Peer) -> None:
        connections = []
        for number in range(200):
            reader, writer = await asyncio.open_connection(*_tcp(server))
            writer.write(_greeting(b"CURVE")[: number % 64])
            connections.append((reader, writer))
        for reader, writer in connections:
            with suppress(ConnectionError):
                await reader.read()  # ends only when the server closes
            writer.close()

    _attack_while_serving(tmp_path, attack, rounds=5)


def test_w6_an_upload_that_does_not_go_on_holds_nothing_up(tmp_path: Path) -> None:
    async def attack(server: Peer) -> None:
        async with raw_client(server, 66) as dealer:
            for number in range(100):
                dealer.send(wire.pack(wire.Put(number, bytes([number]) * 32, b"\x02" * 32, 16 << 20)))
                assert isinstance(wire.unpack(wire.ANSWERS, (await receive(dealer))[0], 0), wire.Want)
            with ShardStore(Path(server.store.root).parent / "writer") as store:
                async with make_peer(store, 5, listen=False) as node:
                    await node.put(server.address, b"\xee" * 32, b"a letter")

    _attack_while_serving(tmp_path, attack, accept=lambda sender, key, data: None)
