"""The asking side of a peer: one DEALER connection per address, requests matched to answers by number.

Every wait has a deadline. An answer that is not what was asked for is a `Reject` against its sender; an answer that came
too late is counted as wasted and dropped. A connection that missed a deadline is not used again: the next request opens
a new one, so nothing queued for a dead peer is sent to its successor. A connection that is lost while an answer is awaited
counts as a missed deadline at once: a peer that was restarted costs its clients a moment, not the whole deadline.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import NamedTuple, TypeVar

import zmq
from zmq.utils.monitor import parse_monitor_message

from protocol.errors import Fault, Reason, Reject
from shardcast import wire
from shardcast.content import sha256
from shardcast.sockets import Pump, open_client

#: Chunks of one blob asked for at once.
WINDOW = 8
#: Chunks asked for at once on one connection: the credits we issue. A server queues a little more than that.
CREDITS = 24
#: Answers that may wait for one request.
_ANSWERS_MAX = 2

_MONITORED = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_DISCONNECTED
)
#: How often somebody who waits looks whether the connection is lost, in seconds.
_LOOK_S = 0.5

A = TypeVar("A", bound=wire.Answer)


class Address(NamedTuple):
    """Where a peer listens and the CURVE public key it must prove."""

    endpoint: str
    curve_key: bytes


class Traffic(NamedTuple):
    """Counters that connections share: named ones, and bytes received by CURVE key of the sender."""

    metrics: Counter[str]
    bytes_from: defaultdict[bytes, int]


class Connection:
    """A connection to one peer. Created and used on one loop."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        secret: bytes,
        address: Address,
        traffic: Traffic,
        *,
        timeout_s: float,
    ) -> None:
        self.address = address
        self.stale = False
        self._traffic = traffic
        self._timeout_s = timeout_s
        self._ids = itertools.count(1)
        self._pending: dict[int, asyncio.Queue[tuple[wire.Answer, zmq.Frame | None]]] = {}
        self._put_lock = asyncio.Lock()
        self._credits = asyncio.Semaphore(CREDITS)
        socket = open_client(context, secret, address.endpoint, address.curve_key)
        self._monitor = socket.get_monitor_socket(_MONITORED)
        self._said = 0
        self._connected = False
        self._losses = 0
        self._pump = Pump(
            socket, self._on_message, frames_max=wire.CLIENT_FRAMES_MAX, on_overlong=lambda frames: self._malformed()
        )
        self._socket = socket

    @property
    def idle(self) -> bool:
        """Whether nothing is waiting for an answer."""
        return not self._pending

    def close(self) -> None:
        """Close the connection; whoever waits runs into its deadline."""
        if not self._socket.closed:
            self._socket.disable_monitor()
            self._monitor.close(0)
        self._pump.close()

    def _malformed(self) -> None:
        self._traffic.metrics["malformed_answers"] += 1

    def _on_message(self, frames: list[zmq.Frame]) -> None:
        size = sum(len(frame.buffer) for frame in frames)
        self._traffic.bytes_from[self.address.curve_key] += size
        self._traffic.metrics["bytes_received"] += size
        try:
            answer = wire.unpack(wire.ANSWERS, bytes(frames[0].buffer[: wire.HEADER_BYTES_MAX + 2]), len(frames) - 1)
        except Reject:
            self._malformed()
            return
        queue = self._pending.get(answer.id)
        if queue is None or queue.full():
            self._traffic.metrics["bytes_wasted"] += size
            return
        queue.put_nowait((answer, frames[1] if len(frames) > 1 else None))

    # One request

    @asynccontextmanager
    async def _request(self) -> AsyncIterator[int]:
        request_id = next(self._ids)
        self._pending[request_id] = asyncio.Queue(_ANSWERS_MAX)
        try:
            yield request_id
        finally:
            del self._pending[request_id]

    def _send(self, message: wire.Request, payload: memoryview | None = None) -> None:
        frames: list[bytes | memoryview] = [wire.pack(message)]
        if payload is not None:
            frames.append(payload)
        if not self._pump.send(frames):
            self.stale = True
            raise wire.PeerTimeout(f"{self.address.endpoint} takes no more messages{self._diagnosis()}")

    async def _receive(self, request_id: int) -> tuple[wire.Answer, zmq.Frame | None]:
        self._look()
        losses = self._losses
        try:
            async with asyncio.timeout(self._timeout_s):
                answer, payload = await self._await_answer(request_id, losses)
        except TimeoutError:
            raise self._give_up(f"did not answer within {self._timeout_s} s") from None
        if isinstance(answer, wire.Failed):
            raise wire.to_error(answer)
        return answer, payload

    async def _await_answer(self, request_id: int, losses: int) -> tuple[wire.Answer, zmq.Frame | None]:
        """The next answer, waited for until the connection is lost more often than `losses` times."""
        queue = self._pending[request_id]
        while True:
            try:
                async with asyncio.timeout(_LOOK_S):
                    return await queue.get()
            except TimeoutError:
                self._look()
                if self._losses > losses:
                    raise self._give_up("closed the connection before it answered") from None

    def _give_up(self, what: str) -> wire.PeerTimeout:
        self.stale = True
        self._traffic.metrics["timeouts"] += 1
        return wire.PeerTimeout(f"{self.address.endpoint} {what}{self._diagnosis()}")

    async def _ask(self, message: wire.Request, kind: type[A]) -> tuple[A, zmq.Frame | None]:
        self._send(message)
        answer, payload = await self._receive(message.id)
        if not isinstance(answer, kind):
            raise self._lie(f"answered {type(message).__name__} with {type(answer).__name__}")
        return answer, payload

    def _lie(self, what: str, *, observed: object = "", limit: object = "") -> Reject:
        return Reject(Reason.SHARD, f"{self.address.endpoint} {what}", observed=observed, limit=limit)

    def _look(self) -> None:
        """Take in what libzmq says about the connection. One that never stood is not lost: libzmq goes on trying."""
        while not self._socket.closed and self._monitor.poll(0):
            event = int(parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))["event"])
            if event != zmq.EVENT_DISCONNECTED:
                self._said, self._connected = event, event == zmq.EVENT_HANDSHAKE_SUCCEEDED
            elif self._connected:
                self._connected = False
                self._losses += 1

    def _diagnosis(self) -> str:
        """What libzmq last said about the handshake."""
        self._look()
        if self._said == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            return ": it does not admit our key; register, or ask its operator"
        if self._said in (zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL):
            return ": handshake failed; check that the address and the CURVE key belong together"
        return ""

    # Transfers

    async def bitmap(self, manifest_hash: bytes, num_shards: int) -> bytes:
        """Which shards the peer says it has. Raises `NotFound`, `PeerTimeout`, or `Reject` for a bad answer."""
        async with self._request() as request_id:
            _, payload = await self._ask(wire.Have(request_id, manifest_hash), wire.Bitmap)
        bits = b"" if payload is None else bytes(payload.buffer)
        if len(bits) != -(-num_shards // 8):
            raise self._lie("sent a bitmap of the wrong length", observed=len(bits), limit=-(-num_shards // 8))
        return bits

    async def _chunk(self, space: int, key: bytes, offset: int) -> tuple[int, memoryview]:
        async with self._credits, self._request() as request_id:
            answer, payload = await self._ask(wire.Get(request_id, space, key, offset), wire.Chunk)
        data = memoryview(b"") if payload is None else payload.buffer
        if answer.offset != offset or len(data) != max(0, min(wire.CHUNK_BYTES, answer.size - offset)):
            raise self._lie(
                "sent another chunk than was asked for", observed=f"offset {answer.offset}, {len(data)} bytes"
            )
        return answer.size, data

    async def download(self, space: int, key: bytes, *, size: int | None = None, size_max: int) -> bytearray:
        """A whole blob, not yet verified.

        Args:
            space: `wire.SPACE_CONTENT` or `wire.SPACE_MAIL`.
            key: hash or letter key.
            size: exact size, when known.
            size_max: largest size to accept.

        Raises:
            NotFound, Busy, PeerTimeout, Fault: the peer cannot serve it.
            Reject: the peer's answers contradict themselves or `size`.
        """
        total, first = await self._chunk(space, key, 0)
        if total > size_max or (size is not None and total != size):
            raise self._lie("serves a blob of the wrong size", observed=total, limit=size_max if size is None else size)
        buffer = bytearray(total)
        buffer[: len(first)] = first
        offsets = iter(range(wire.CHUNK_BYTES, total, wire.CHUNK_BYTES))
        lanes = min(WINDOW, -(-total // wire.CHUNK_BYTES) - 1)
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(lanes):
                    group.create_task(self._lane(space, key, offsets, buffer))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return buffer

    async def _lane(self, space: int, key: bytes, offsets: Iterator[int], buffer: bytearray) -> None:
        for offset in offsets:
            total, data = await self._chunk(space, key, offset)
            if total != len(buffer):
                raise self._lie("changed the size of a blob", observed=total, limit=len(buffer))
            buffer[offset : offset + len(data)] = data

    async def put(self, key: bytes, data: bytes) -> None:
        """Leave a letter. Returns when it is durable at the peer.

        Raises:
            Reject, Ignore: the peer's reasons.
            Fault: the peer is full, broken, busy or silent.
        """
        view = memoryview(data)
        async with self._put_lock, self._request() as request_id:
            if self.stale:  # while we waited for our turn: the next attempt gets a connection of its own
                raise self._give_up("answered nobody on this connection any more")
            self._send(wire.Put(request_id, key, sha256(data), len(data)))
            sent = 0
            while True:
                answer, _ = await self._receive(request_id)
                if isinstance(answer, wire.Done):
                    return
                if not isinstance(answer, wire.Want) or answer.offset != sent or sent >= len(data):
                    raise Fault(f"{self.address.endpoint} answered a letter with {type(answer).__name__}")
                for _ in range(answer.credits):
                    part = view[sent : sent + wire.CHUNK_BYTES]
                    if not part:
                        break
                    self._send(wire.Part(request_id, sent), part)
                    sent += len(part)
