"""What a verifier and its judging process say to each other: bounded frames of msgspec structs, never pickle.

A frame is 4 bytes of length, big-endian, and that many bytes. Requests come from the verifier and are trusted. Replies come
from a process that has read strangers' bytes: the reader names the longest reply it takes, and checks what is in it
(`verifier.isolated_judge`). A process that is gone shows as `EOFError` in the middle of a frame or before it.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Callable
from typing import Any

import msgspec

from protocol.errors import Fault
from protocol.task import Environment as EnvironmentSpec
from protocol.task import TaskSpec
from verifier.judge import Judgement, Submission

#: Bytes of a reply that carries a text alone, and characters of the text.
TEXT_REPLY_BYTES_MAX = 16_384
TEXT_CHARS_MAX = 2_000
REQUEST_BYTES_MAX = (1 << 32) - 1
#: Longest time between two looks at a process that is being waited for.
LOOK_MS = 100
_CHUNK = 1 << 16


class Wire(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """Base of all requests and replies."""


class Limits(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What one job may use.

    Attributes:
        memory_bytes: address space, and resident memory, beyond what the process had when the job began.
        cpu_s: CPU seconds.
        wall_s: seconds; the verifier kills the process after them.
    """

    memory_bytes: int
    cpu_s: float
    wall_s: float


class Setup(Wire, frozen=True):
    """Make environment and scorer."""

    environment: EnvironmentSpec
    folders: tuple[str, ...]
    device: str
    dtype: str
    threads: int


class Load(Wire, frozen=True):
    """Load the policy of a folder."""

    folder: str


class Inspect(Wire, frozen=True):
    """Can these bytes be held for or against the node?"""

    spec: TaskSpec
    submission: Submission


class Judge(Wire, frozen=True):
    """Judge submissions of one round under the loaded policy."""

    spec: TaskSpec
    submissions: tuple[Submission, ...]
    limits: Limits


class Done(Wire, frozen=True):
    """It is done. `text` is what there is to say: why an inspected submission will be rejected."""

    text: str = ""


class Judged(Wire, frozen=True):
    """What `Judge` gave, and the CPU seconds it took."""

    judgement: Judgement
    cpu_s: float


class Failed(Wire, frozen=True):
    """It failed. `kind` is "ignore" when an inspected submission proves nothing, else "fault"."""

    kind: str
    text: str


Request = Setup | Load | Inspect | Judge
Reply = Done | Judged | Failed

_decode_request = msgspec.msgpack.Decoder(Request)
_decode_reply = msgspec.msgpack.Decoder(Reply)


def send(link: socket.socket, message: Request | Reply, look: Callable[[], None] | None = None) -> None:
    """Write one frame. Raises `OSError` when the other side is gone, `Fault` for one that is too long, what `look` raises."""
    data = msgspec.msgpack.encode(message)
    if len(data) > REQUEST_BYTES_MAX:
        raise Fault(f"a message of {len(data)} bytes to the judging process, limit {REQUEST_BYTES_MAX}")
    frame = memoryview(len(data).to_bytes(4, "big") + data)
    poll = select.poll()
    poll.register(link, select.POLLOUT)
    while frame:
        if look is not None:
            look()
            if not poll.poll(LOOK_MS):
                continue
        frame = frame[link.send(frame[:_CHUNK]) :]


def receive_request(link: socket.socket) -> Request:
    """Read one request; blocks. Raises `EOFError` when the verifier is gone."""
    size = int.from_bytes(read(link, 4), "big")
    return _decode_request.decode(read(link, size))


def receive_reply(link: socket.socket, *, bytes_max: int, look: Callable[[], None]) -> Reply:
    """Read one reply.

    Args:
        bytes_max: longest reply that is taken; nothing longer is read.
        look: called at least ten times a second while waiting; what it raises ends the wait.

    Raises:
        EOFError: the process is gone.
        Fault: the reply is too long or is none.
    """
    size = int.from_bytes(read(link, 4, look), "big")
    if size > bytes_max:
        raise Fault(f"the judging process announced a reply of {size} bytes, limit {bytes_max}")
    data = read(link, size, look)
    try:
        return _decode_reply.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError, TypeError) as error:
        raise Fault(f"the judging process sent what is no reply: {str(error)[:200]}") from None


def read(link: socket.socket, size: int, look: Callable[[], None] | None = None) -> bytes:
    """Exactly `size` bytes. Raises `EOFError`; and whatever `look` raises."""
    data = bytearray()
    poll = select.poll()
    poll.register(link, select.POLLIN)
    while len(data) < size:
        if look is not None:
            look()
            if not poll.poll(LOOK_MS):
                continue
        chunk = link.recv(min(size - len(data), _CHUNK))
        if not chunk:
            raise EOFError("closed")
        data += chunk
    return bytes(data)


def clip(text: Any) -> str:
    """A text that fits into a reply."""
    return str(text)[:TEXT_CHARS_MAX]
