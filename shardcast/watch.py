"""Watches the TCP connections of a server socket for what libzmq does not bound or report.

libzmq limits the length of a frame and the number of queued messages, but a message may have any number of frames, and
all of them are kept until the last one has come: one admitted peer could fill our memory with a message that never ends.
So every connection is looked at a few times a second: when more bytes have arrived since its last whole message than an
honest connection can have queued, it is shut down. Failed handshakes are reported as well.

Needs TCP_INFO with `tcpi_bytes_received` (Linux 4.1); elsewhere only the handshakes are watched.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Callable
from contextlib import suppress

import zmq
from zmq.utils.monitor import parse_monitor_message

from shardcast.sockets import QUEUE_MESSAGES_MAX, Pump
from shardcast.wire import FRAME_BYTES_MAX

#: Twice what libzmq may queue for one connection, plus what the kernel may hold.
UNREAD_BYTES_MAX = 2 * QUEUE_MESSAGES_MAX * FRAME_BYTES_MAX + (16 << 20)
INTERVAL_S = 0.25

_FAILED_HANDSHAKE = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | _FAILED_HANDSHAKE
#: struct tcp_info of linux/tcp.h: tcpi_state is its first byte, tcpi_bytes_received the u64 at 128.
_TCP_INFO_BYTES, _RECEIVED_AT, _ESTABLISHED = 136, 128, 1


class _Connection:
    def __init__(self, fd: int) -> None:
        # A duplicate, so that the number cannot come to mean another connection while we look at it.
        self.socket = socket.socket(fileno=os.dup(fd))
        self.mark = 0

    def received(self) -> int | None:
        """Bytes received since the connection began; None when it has ended or the system does not say."""
        info = self.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        if len(info) < _TCP_INFO_BYTES or info[0] != _ESTABLISHED:
            return None
        (received,) = struct.unpack_from("=Q", info, _RECEIVED_AT)
        return int(received)


class ConnectionWatch:
    """Watches a bound socket until closed.

    Args:
        server: the socket; `close` this watch before it.
        on_failed_handshake: called with libzmq's event number and value.
        on_hoarder: called after a connection was shut down for an endless message.
    """

    def __init__(
        self,
        server: zmq.Socket[bytes],
        *,
        on_failed_handshake: Callable[[int, int], None],
        on_hoarder: Callable[[], None],
    ) -> None:
        self._server = server
        self._on_failed_handshake = on_failed_handshake
        self._on_hoarder = on_hoarder
        self._connections: dict[int, _Connection] = {}
        self._delivered: set[int] = set()
        self._pump = Pump(server.get_monitor_socket(_EVENTS), self._on_event, frames_max=2)
        self._task = asyncio.create_task(self._look())

    def delivered(self, frame: zmq.Frame) -> None:
        """Note that a whole message came in on the connection of this frame."""
        with suppress(zmq.ZMQError):
            self._delivered.add(int(frame.get(zmq.SRCFD)))

    def _on_event(self, frames: list[zmq.Frame]) -> None:
        event = parse_monitor_message([bytes(frame.buffer) for frame in frames])
        number, value = int(event["event"]), int(event["value"])
        if number & _FAILED_HANDSHAKE:
            self._on_failed_handshake(number, value)
        elif number == zmq.EVENT_DISCONNECTED:
            self._forget(value)
        elif hasattr(socket, "TCP_INFO"):
            self._forget(value)
            with suppress(OSError):  # it may be gone already, or not be a TCP connection
                self._connections[value] = _Connection(value)

    def _forget(self, fd: int) -> None:
        connection = self._connections.pop(fd, None)
        if connection is not None:
            connection.socket.close()

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(INTERVAL_S)
            delivered, self._delivered = self._delivered, set()
            for fd, connection in list(self._connections.items()):
                self._check(fd, connection, fd in delivered)

    def _check(self, fd: int, connection: _Connection, delivered: bool) -> None:
        try:
            received = connection.received()
        except OSError:
            received = None
        if received is None:
            self._forget(fd)
        elif delivered:
            connection.mark = received
        elif received - connection.mark > UNREAD_BYTES_MAX:
            with suppress(OSError):
                connection.socket.shutdown(socket.SHUT_RDWR)
            self._forget(fd)
            self._on_hoarder()

    async def close(self) -> None:
        """Stop watching."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        for fd in list(self._connections):
            self._forget(fd)
        if not self._server.closed:
            self._server.disable_monitor()
        self._pump.close()
