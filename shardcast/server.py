"""The serving side of a peer: answers chunks, bitmaps and letters, and survives whatever is sent to it.

Order of checks, cheap to costly: frame count, admitted key, token bucket, shape, queue space, then disk. A message that
fails one is counted, answered when its sender can still be told, and forgotten. All queues are bounded; one sender has at
most `INFLIGHT_MAX` requests waiting and one letter under way. Nothing is served that the store did not verify.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import zmq

from protocol.errors import Fault, Reason, Reject, TrothError
from shardcast import wire
from shardcast.content import sha256
from shardcast.manifest import Manifest
from shardcast.sockets import Pump, sender_key
from shardcast.store import ShardStore
from shardcast.watch import ConnectionWatch

#: Called with (sender's CURVE key, key, data) before a letter is stored; raises Reject or Ignore to refuse it.
Accept = Callable[[bytes, bytes, bytes], Awaitable[None] | None]
#: Called with the name of an event and its fields.
EventSink = Callable[[str, dict[str, Any]], None]

QUEUE_MAX = 1024
#: Requests of one sender that may wait; a client keeps far fewer.
INFLIGHT_MAX = 128
#: Letters being received or judged; with LETTER_BYTES_MAX this bounds the memory of all of them.
UPLOADS_MAX = 16
UPLOAD_IDLE_S_MAX = 30.0
SENDERS_MAX = 4096
_WORKERS = 4


class TokenBucket:
    """`rate` tokens a second, at most `burst` saved up."""

    def __init__(self, rate: float, burst: float, now: float) -> None:
        self._rate, self._burst = rate, burst
        self._tokens, self._then = burst, now

    def take(self, now: float) -> bool:
        """Take one token; False when there is none."""
        self._tokens = min(self._burst, self._tokens + (now - self._then) * self._rate)
        self._then = now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True


@dataclass
class _Upload:
    routing_id: bytes
    put: wire.Put
    data: bytearray = field(default_factory=bytearray)
    granted: int = 0
    touched: float = 0.0

    @property
    def complete(self) -> bool:
        return len(self.data) == self.put.size


@dataclass(frozen=True)
class _Job:
    sender: bytes
    routing_id: bytes
    request: wire.Get | wire.Have | _Upload

    @property
    def id(self) -> int:
        return self.request.put.id if isinstance(self.request, _Upload) else self.request.id


class Server:
    """Serves `store` on a socket until closed.

    Args:
        socket: a bound socket from `shardcast.sockets.open_server`.
        store: what to serve.
        watch: told of every whole message.
        accept: decides about letters; None refuses all.
        metrics: counters to add to.
        on_event: event sink.
        rate_per_s, burst: token bucket of each sender, in messages.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        store: ShardStore,
        *,
        watch: ConnectionWatch,
        accept: Accept | None,
        metrics: Counter[str],
        on_event: EventSink,
        rate_per_s: float,
        burst: float,
    ) -> None:
        self._store = store
        self._watch = watch
        self._accept = accept
        self._metrics = metrics
        self._on_event = on_event
        self._rate_per_s, self._burst = rate_per_s, burst
        self._buckets: dict[bytes, TokenBucket] = {}
        self._inflight: Counter[bytes] = Counter()
        self._uploads: dict[bytes, _Upload] = {}
        self._queue: asyncio.Queue[_Job] = asyncio.Queue(QUEUE_MAX)
        self._pump = Pump(
            socket,
            self._on_message,
            frames_max=wire.SERVER_FRAMES_MAX,
            on_overlong=lambda frames: self._drop("overlong"),
        )
        self._workers = [asyncio.create_task(self._work()) for _ in range(_WORKERS)]

    async def close(self) -> None:
        """Stop serving."""
        self._pump.close()
        for worker in self._workers:
            worker.cancel()
        await asyncio.gather(*self._workers, return_exceptions=True)

    # On the loop, per message: no disk, no waiting

    def _drop(self, why: str) -> None:
        self._metrics["dropped"] += 1
        self._metrics[f"dropped_{why}"] += 1

    def _on_message(self, frames: list[zmq.Frame]) -> None:
        self._watch.delivered(frames[-1])
        sender = sender_key(frames[-1])
        if not sender or len(frames) < 2:
            self._drop("malformed")
            return
        now = time.monotonic()
        if not self._bucket(sender, now).take(now):
            self._drop("flood")
            return
        routing_id, header, payloads = bytes(frames[0].buffer), frames[1], frames[2:]
        try:
            if len(header.buffer) > wire.HEADER_BYTES_MAX:
                raise Reject(Reason.MALFORMED, "header is too long", limit=wire.HEADER_BYTES_MAX)
            request = wire.unpack(wire.REQUESTS, bytes(header.buffer), len(payloads))
        except Reject as error:
            self._drop("malformed")
            self._answer(routing_id, wire.failed(0, error))
            return
        try:
            self._dispatch(sender, routing_id, request, payloads, now)
        except TrothError as error:
            self._refuse(routing_id, request.id, error)

    def _bucket(self, sender: bytes, now: float) -> TokenBucket:
        bucket = self._buckets.get(sender)
        if bucket is None:
            if len(self._buckets) >= SENDERS_MAX:
                self._buckets.pop(next(iter(self._buckets)))
            bucket = self._buckets[sender] = TokenBucket(self._rate_per_s, self._burst, now)
        return bucket

    def _dispatch(
        self, sender: bytes, routing_id: bytes, request: wire.Request, payloads: list[zmq.Frame], now: float
    ) -> None:
        if isinstance(request, wire.Put):
            self._start_upload(sender, routing_id, request, now)
        elif isinstance(request, wire.Part):
            self._continue_upload(sender, routing_id, request, payloads[0], now)
        else:
            self._enqueue(_Job(sender, routing_id, request))

    def _enqueue(self, job: _Job) -> None:
        if self._inflight[job.sender] >= INFLIGHT_MAX or self._queue.full():
            raise wire.Busy(f"{self._inflight[job.sender]} of your requests are waiting: retry later or elsewhere")
        self._inflight[job.sender] += 1
        self._queue.put_nowait(job)

    def _start_upload(self, sender: bytes, routing_id: bytes, put: wire.Put, now: float) -> None:
        if self._accept is None:
            raise Reject(Reason.QUOTA, "this peer takes no letters", todo="use a relay")
        if self._store.mail.check(sender, put.key, put.digest, put.size):
            self._answer(routing_id, wire.Done(put.id))
            return
        known = self._uploads.get(sender)
        if known is not None and known.complete:
            raise wire.Busy("your previous letter is still being judged: retry later or elsewhere")
        for key, upload in list(self._uploads.items()):
            if not upload.complete and now - upload.touched > UPLOAD_IDLE_S_MAX:
                del self._uploads[key]
        self._uploads.pop(sender, None)  # an upload that its sender gave up
        if len(self._uploads) >= UPLOADS_MAX:
            raise wire.Busy(f"{UPLOADS_MAX} uploads are under way: retry later or elsewhere")
        upload = self._uploads[sender] = _Upload(routing_id, put, touched=now)
        if upload.complete:
            self._enqueue_upload(sender, upload)
        else:
            self._grant(upload)

    def _enqueue_upload(self, sender: bytes, upload: _Upload) -> None:
        try:
            self._enqueue(_Job(sender, upload.routing_id, upload))
        except wire.Busy:
            del self._uploads[sender]
            raise

    def _grant(self, upload: _Upload) -> None:
        upload.granted = min(upload.put.size, len(upload.data) + wire.PUT_CREDITS * wire.CHUNK_BYTES)
        credits = -(-(upload.granted - len(upload.data)) // wire.CHUNK_BYTES)
        self._answer(upload.routing_id, wire.Want(upload.put.id, len(upload.data), credits))

    def _continue_upload(
        self, sender: bytes, routing_id: bytes, part: wire.Part, payload: zmq.Frame, now: float
    ) -> None:
        upload = self._uploads.get(sender)
        if upload is None or upload.complete or upload.put.id != part.id or upload.routing_id != routing_id:
            raise Reject(Reason.MALFORMED, "no such upload is under way", observed=part.id, todo="start it again")
        data = payload.buffer
        expected = min(wire.CHUNK_BYTES, upload.put.size - len(upload.data))
        if part.offset != len(upload.data) or len(data) != expected or part.offset + expected > upload.granted:
            del self._uploads[sender]
            raise Reject(
                Reason.MALFORMED,
                "part is not the one that was asked for",
                observed=f"offset {part.offset}, {len(data)} bytes",
                limit=f"offset {len(upload.data)}, {expected} bytes",
            )
        upload.data += data
        upload.touched = now
        if upload.complete:
            self._enqueue_upload(sender, upload)
        elif len(upload.data) == upload.granted:
            self._grant(upload)

    # In workers: disk and the caller's accept

    async def _work(self) -> None:
        while True:
            job = await self._queue.get()
            try:
                await self._serve(job)
            except TrothError as error:
                self._refuse(job.routing_id, job.id, error)
            except Exception as error:  # a bug here or in the caller's accept must not stop the service
                self._on_event("internal_error", {"error": repr(error), "peer": job.sender.hex()})
                self._metrics["internal_errors"] += 1
                self._answer(job.routing_id, wire.failed(job.id, Fault("internal error at this peer: use another")))
            finally:
                self._inflight[job.sender] -= 1
                if not self._inflight[job.sender]:
                    del self._inflight[job.sender]

    async def _serve(self, job: _Job) -> None:
        request = job.request
        if isinstance(request, wire.Get):
            source = self._store.mail if request.space == wire.SPACE_MAIL else self._store
            size, data = await asyncio.to_thread(source.read, request.key, request.offset, wire.CHUNK_BYTES)
            if self._answer(job.routing_id, wire.Chunk(request.id, size, request.offset), data):
                self._metrics["bytes_served"] += len(data)
        elif isinstance(request, wire.Have):
            manifest: Manifest = self._store.manifest(request.manifest)
            self._answer(job.routing_id, wire.Bitmap(request.id), self._store.bitmap(manifest))
        else:
            try:
                await self._finish_upload(job.sender, request)
            finally:
                del self._uploads[job.sender]

    async def _finish_upload(self, sender: bytes, upload: _Upload) -> None:
        put, data = upload.put, bytes(upload.data)
        if sha256(data) != put.digest:
            raise Reject(Reason.SHARD, "letter does not match its announced hash", limit=put.digest.hex()[:16])
        assert self._accept is not None  # checked when the upload began
        verdict = self._accept(sender, put.key, data)
        if inspect.isawaitable(verdict):
            await verdict
        await asyncio.to_thread(self._store.mail.put, sender, put.key, data)
        self._metrics["letters_accepted"] += 1
        self._on_event("letter", {"peer": sender.hex(), "key": put.key.hex(), "size": put.size})
        self._answer(upload.routing_id, wire.Done(put.id))

    def _refuse(self, routing_id: bytes, request_id: int, error: TrothError) -> None:
        self._metrics["refused"] += 1
        self._answer(routing_id, wire.failed(request_id, error))

    def _answer(self, routing_id: bytes, answer: wire.Answer, payload: bytes | None = None) -> bool:
        frames: list[bytes | memoryview] = [routing_id, wire.pack(answer)]
        if payload is not None:
            frames.append(payload)
        if self._pump.send(frames):
            return True
        self._metrics["answers_dropped"] += 1
        return False
