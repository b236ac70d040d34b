"""ZeroMQ sockets on an asyncio loop: bounded reads, CURVE always, admission by ZAP.

`Pump` reads a socket frame by frame, so that a message of a million frames is thrown away without ever being a list.
It owns the edge-triggered file descriptor of its socket: after every send the socket is looked at again, which
zmq.asyncio cannot do for sends made elsewhere. `Admission` answers libzmq's question whether a CURVE key may connect;
with `zap_enforce_domain` set, a socket without an answer lets nobody in.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

import zmq
from zmq.utils import z85

from protocol.errors import ConfigError
from shardcast.wire import FRAME_BYTES_MAX

#: Messages handled before other tasks get a turn.
_BATCH = 64
#: Frames of an overlong message thrown away before other tasks get a turn.
_DISCARD_BATCH = 4096
#: Messages queued per connection in each direction; with FRAME_BYTES_MAX this bounds the memory a peer can hold.
QUEUE_MESSAGES_MAX = 32
#: Requests that may wait for a connection; they are our own and small.
CLIENT_QUEUE_MESSAGES_MAX = 1024
HANDSHAKE_MS_MAX = 5_000
HEARTBEAT_MS = 5_000
HEARTBEAT_TIMEOUT_MS = 15_000
BACKLOG = 256
_ZAP_ENDPOINT = "inproc://zeromq.zap.01"
_ZAP_FRAMES_MAX = 16


def curve_public(secret: bytes) -> bytes:
    """The 32-byte CURVE public key of a 32-byte secret key."""
    if len(secret) != 32:
        raise ConfigError(f"CURVE secret key has {len(secret)} bytes: it needs 32")
    public: bytes = z85.decode(zmq.curve_public(z85.encode(secret)))
    return public


def _harden(socket: zmq.Socket[bytes], secret: bytes) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, FRAME_BYTES_MAX)
    socket.setsockopt(zmq.SNDHWM, QUEUE_MESSAGES_MAX)
    socket.setsockopt(zmq.RCVHWM, QUEUE_MESSAGES_MAX)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS_MAX)
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
    socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, curve_public(secret))


def open_server(context: zmq.Context[zmq.Socket[bytes]], secret: bytes, endpoint: str) -> zmq.Socket[bytes]:
    """A bound ROUTER socket that speaks CURVE only and asks ZAP about every key."""
    socket = context.socket(zmq.ROUTER)
    try:
        _harden(socket, secret)
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.ZAP_DOMAIN, b"shardcast")
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.BACKLOG, BACKLOG)
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        socket.close(0)
        raise ConfigError(f"cannot listen on {endpoint}: {error}; choose another address") from error
    return socket


def open_client(
    context: zmq.Context[zmq.Socket[bytes]], secret: bytes, endpoint: str, server_key: bytes
) -> zmq.Socket[bytes]:
    """A DEALER socket that connects to the holder of `server_key` and to nobody else."""
    socket = context.socket(zmq.DEALER)
    try:
        _harden(socket, secret)
        socket.setsockopt(zmq.CURVE_SERVERKEY, server_key)
        socket.setsockopt(zmq.SNDHWM, CLIENT_QUEUE_MESSAGES_MAX)
        socket.setsockopt(zmq.RECONNECT_IVL, 100)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2_000)
        socket.connect(endpoint)
    except zmq.ZMQError as error:
        socket.close(0)
        raise ConfigError(f"cannot connect to {endpoint}: {error}") from error
    return socket


class Pump:
    """Reads `socket` on the running loop and hands over whole messages.

    Args:
        socket: owned from now on; closed by `close`.
        on_message: called with the frames of each message; must not raise.
        frames_max: messages with more frames are thrown away.
        on_overlong: called once for each message thrown away, with its first frames.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        on_message: Callable[[list[zmq.Frame]], None],
        *,
        frames_max: int,
        on_overlong: Callable[[list[zmq.Frame]], None] = lambda frames: None,
    ) -> None:
        self.socket = socket
        self._on_message = on_message
        self._on_overlong = on_overlong
        self._frames_max = frames_max
        self._discarding = False
        self._scheduled = False
        self._loop = asyncio.get_running_loop()
        self._fd: int = socket.getsockopt(zmq.FD)  # type: ignore[assignment]
        self._loop.add_reader(self._fd, self._drain)
        self._schedule()

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._drain_later)

    def _drain_later(self) -> None:
        self._scheduled = False
        self._drain()

    def _drain(self) -> None:
        try:
            for _ in range(_BATCH):
                if self.socket.closed:
                    return
                if self._discarding:
                    self._discard()
                    break
                self._read()
        except zmq.Again:
            return
        except BaseException:
            self._schedule()  # the descriptor is edge-triggered: whatever happened, look again
            raise
        self._schedule()

    def _read(self) -> None:
        """Hand over the next message, or start to throw it away. Raises `zmq.Again`."""
        frames = [self.socket.recv(zmq.NOBLOCK, copy=False)]
        while frames[-1].more and len(frames) < self._frames_max:
            frames.append(self.socket.recv(zmq.NOBLOCK, copy=False))
        if frames[-1].more:
            self._discarding = True
            self._on_overlong(frames)
        else:
            self._on_message(frames)

    def _discard(self) -> None:
        for _ in range(_DISCARD_BATCH):
            if not self.socket.recv(zmq.NOBLOCK, copy=False).more:
                self._discarding = False
                return

    def send(self, frames: list[bytes | memoryview]) -> bool:
        """Send without waiting. False when the peer is gone or its queue is full: the message is dropped."""
        # A send can consume the wake-up of a message that came meanwhile.
        self._schedule()
        try:
            self.socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
        except zmq.ZMQError:
            return False
        return True

    def close(self) -> None:
        """Stop reading and close the socket."""
        if not self.socket.closed:
            self._loop.remove_reader(self._fd)
            self.socket.close(0)


class Admission:
    """The ZAP handler of one context (RFC 27): CURVE keys that `admit` accepts, nobody else.

    Args:
        context: the context whose server sockets it guards.
        admit: called with a CURVE public key; an exception counts as no.
        on_refused: called with the key, or with what the peer sent instead of one.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        admit: Callable[[bytes], bool],
        on_refused: Callable[[bytes, str], None],
    ) -> None:
        self._admit = admit
        self._on_refused = on_refused
        socket = context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(_ZAP_ENDPOINT)
        self._pump = Pump(socket, self._on_message, frames_max=_ZAP_FRAMES_MAX)

    def _on_message(self, frames: list[zmq.Frame]) -> None:
        # routing id, empty, version, request id, domain, address, identity, mechanism, credentials...
        parts = [bytes(frame.buffer) for frame in frames]
        if len(parts) < 8:
            return
        mechanism, credentials = parts[7], parts[8:]
        key = credentials[0] if len(credentials) == 1 else b""
        if mechanism != b"CURVE" or len(key) != 32:
            self._refuse(parts, key, "not CURVE")
            return
        try:
            admitted = self._admit(key)
        except Exception as error:  # the caller's code: whatever fails there must not open the door
            self._refuse(parts, key, f"admission failed: {error!r}")
            return
        if admitted:
            self._reply(parts, b"200", b"OK", key.hex().encode())
        else:
            self._refuse(parts, key, "not admitted")

    def _refuse(self, parts: list[bytes], key: bytes, why: str) -> None:
        self._reply(parts, b"400", b"not admitted", b"")
        self._on_refused(key, why)

    def _reply(self, parts: list[bytes], status: bytes, text: bytes, user_id: bytes) -> None:
        self._pump.send([parts[0], b"", b"1.0", parts[3], status, text, user_id, b""])

    def close(self) -> None:
        """Stop answering; server sockets then admit nobody."""
        self._pump.close()


def sender_key(frame: zmq.Frame) -> bytes:
    """CURVE public key of the peer that sent this frame: what ZAP admitted, never what the peer says of itself."""
    with suppress(zmq.ZMQError, ValueError, KeyError):
        return bytes.fromhex(str(frame.get("User-Id")))
    return b""
