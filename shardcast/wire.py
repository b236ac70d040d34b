"""Messages between two peers, and the bounds on them.

A message is one header frame (kind byte, canonical message bytes) and at most one payload frame. Every transfer is paid
for by its receiver: a `Get` asks for one chunk, a `Want` asks for the next parts of a letter, so no side ever has more
bytes under way than the other side asked for. Requests carry a number that the answer repeats.

    client -> server   Get, Have, Put, Part + payload
    server -> client   Chunk + payload, Bitmap + payload, Want, Done, Failed
"""

from __future__ import annotations

from typing import Annotated, TypeVar

from msgspec import Meta

from protocol.codec import Message, decode, encode
from protocol.errors import Fault, Ignore, Reason, Reject, TrothError
from shardcast.content import NotFound
from shardcast.mailbox import LETTER_BYTES_MAX
from shardcast.manifest import SIZE_MAX, Digest

#: Bytes of payload in one message; every chunk but the last of a blob has exactly this size.
CHUNK_BYTES = 256 << 10
#: Longest frame a socket accepts; the connection of a peer that announces a longer one is closed by libzmq.
FRAME_BYTES_MAX = CHUNK_BYTES + (64 << 10)
HEADER_BYTES_MAX = 4096
#: Frames of a request at a server socket: routing id, header, payload.
SERVER_FRAMES_MAX = 3
#: Frames of an answer at a client socket: header, payload.
CLIENT_FRAMES_MAX = 2
#: Parts of a letter that may be under way at once.
PUT_CREDITS = 8
#: Largest blob, for example a manifest, that is fetched without a manifest that tells its size.
BLOB_BYTES_MAX = 64 << 20
_TEXT_LENGTH_MAX = 512

Number = Annotated[int, Meta(ge=0, lt=1 << 32)]
Offset = Annotated[int, Meta(ge=0, le=SIZE_MAX)]
Text = Annotated[str, Meta(max_length=_TEXT_LENGTH_MAX)]

#: `Get.space`: what the key is.
SPACE_CONTENT = 0
SPACE_MAIL = 1


class Get(Message, frozen=True):
    """Send me the chunk at `offset` of the blob with this hash (space 0) or the letter under this key (space 1)."""

    id: Number
    space: Annotated[int, Meta(ge=0, le=1)]
    key: Digest
    offset: Offset


class Have(Message, frozen=True):
    """Tell me which shards of this manifest (by its hash) you have."""

    id: Number
    manifest: Digest


class Put(Message, frozen=True):
    """I have a letter for you, of this size and SHA-256, under this key."""

    id: Number
    key: Digest
    digest: Digest
    size: Annotated[int, Meta(ge=0, le=LETTER_BYTES_MAX)]


class Part(Message, frozen=True):
    """Bytes of the letter of `Put` number `id`, from `offset`."""

    id: Number
    offset: Offset


class Chunk(Message, frozen=True):
    """Answer to `Get`: `size` is that of the whole blob."""

    id: Number
    size: Offset
    offset: Offset


class Bitmap(Message, frozen=True):
    """Answer to `Have`."""

    id: Number


class Want(Message, frozen=True):
    """Answer to `Put` and `Part`: send up to `credits` parts from `offset`."""

    id: Number
    offset: Offset
    credits: Annotated[int, Meta(ge=1, le=PUT_CREDITS)]


class Done(Message, frozen=True):
    """Answer to `Put` and `Part`: the letter is accepted and durable."""

    id: Number


class Failed(Message, frozen=True):
    """Answer to anything: why not. `kind` is the class of the error, the rest are the arguments of a `Reject`."""

    id: Number
    kind: Annotated[int, Meta(ge=0, le=255)]
    reason: Annotated[int, Meta(ge=0, le=65535)]
    what: Text
    observed: Text
    limit: Text
    todo: Text


class Busy(Fault):
    """The peer has too much to do: retry later or elsewhere."""


class PeerTimeout(Fault):
    """The peer did not answer in time."""


_KIND_REJECT, _KIND_IGNORE, _KIND_FAULT, _KIND_NOT_FOUND, _KIND_BUSY = range(1, 6)

Request = Get | Have | Put | Part
Answer = Chunk | Bitmap | Want | Done | Failed

REQUESTS: dict[int, type[Request]] = {1: Get, 2: Have, 3: Put, 4: Part}
ANSWERS: dict[int, type[Answer]] = {16: Chunk, 17: Bitmap, 18: Want, 19: Done, 20: Failed}
_KINDS: dict[type[Message], int] = {kind: number for table in (REQUESTS, ANSWERS) for number, kind in table.items()}
_WITH_PAYLOAD = (Part, Chunk, Bitmap)

M = TypeVar("M", bound=Message)


def pack(message: Request | Answer) -> bytes:
    """Header frame of a message."""
    return bytes([_KINDS[type(message)]]) + encode(message)


def unpack(table: dict[int, type[M]], header: bytes, num_payloads: int) -> M:
    """Parse a header frame from a stranger.

    Args:
        table: `REQUESTS` or `ANSWERS`.
        header: the frame.
        num_payloads: how many frames came after it.

    Raises:
        Reject: `MALFORMED`.
    """
    if not header or header[0] not in table:
        raise Reject(Reason.MALFORMED, "unknown kind of message", observed=header[:1].hex(), limit=sorted(table))
    message = decode(table[header[0]], header[1:], bytes_max=HEADER_BYTES_MAX)
    if num_payloads != isinstance(message, _WITH_PAYLOAD):
        raise Reject(Reason.MALFORMED, f"{type(message).__name__} with {num_payloads} payload frames")
    return message


def failed(request_id: int, error: TrothError) -> Failed:
    """The answer that explains `error` to the peer that caused it."""
    if isinstance(error, Reject):
        texts = [str(part)[:_TEXT_LENGTH_MAX] for part in (error.what, error.observed, error.limit, error.todo)]
        return Failed(request_id, _KIND_REJECT, error.reason, *texts)
    kind = _KIND_FAULT
    for candidate, number in ((Ignore, _KIND_IGNORE), (NotFound, _KIND_NOT_FOUND), (Busy, _KIND_BUSY)):
        if isinstance(error, candidate):
            kind = number
    return Failed(request_id, kind, 0, str(error)[:_TEXT_LENGTH_MAX], "", "", "")


def to_error(answer: Failed) -> TrothError:
    """The error that a peer reported. Its texts are the peer's claim, not evidence."""
    if answer.kind == _KIND_REJECT:
        try:
            reason = Reason(answer.reason)
        except ValueError:
            return Fault(f"peer rejected for unknown reason {answer.reason}: {answer.what}")
        return Reject(reason, answer.what, observed=answer.observed, limit=answer.limit, todo=answer.todo)
    kinds = {_KIND_IGNORE: Ignore, _KIND_NOT_FOUND: NotFound, _KIND_BUSY: Busy}
    return kinds.get(answer.kind, Fault)(f"peer says: {answer.what}")
