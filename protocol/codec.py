"""The one canonical encoding of every Troth message, its bounds, and the bytes that signatures cover.

A message is a frozen `msgspec` struct encoded as a positional MessagePack array (no maps, so no duplicate or reordered
keys). `decode` checks the size before parsing, decodes strictly into the declared types, then re-encodes and compares:
two different byte strings can never mean the same message. Nothing else in Troth parses bytes from a stranger.
"""

from __future__ import annotations

import hashlib
from typing import TypeVar

import msgspec

from protocol.errors import Reason, Reject

#: The protocol version that is part of every signed domain.
PROTOCOL_VERSION = 1


class Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Base class of everything that crosses a wire or is signed. Fields are positional: only append, never reorder."""


M = TypeVar("M", bound=Message)

_encoder = msgspec.msgpack.Encoder()


def encode(message: Message) -> bytes:
    """Return the canonical bytes of `message`."""
    return _encoder.encode(message)


def decode(kind: type[M], data: bytes, *, bytes_max: int) -> M:
    """Parse canonical bytes into `kind`.

    Raises:
        Reject: `MALFORMED` when the data is longer than `bytes_max`, is not a `kind`, or is not in canonical form.
    """
    if len(data) > bytes_max:
        raise Reject(Reason.MALFORMED, f"{kind.__name__} is too long", observed=len(data), limit=bytes_max)
    try:
        message = msgspec.msgpack.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise Reject(Reason.MALFORMED, f"not a {kind.__name__}: {error}", observed=data[:16].hex()) from None
    if _encoder.encode(message) != data:
        raise Reject(Reason.MALFORMED, f"{kind.__name__} is not in canonical form", observed=data[:16].hex())
    return message


def tagged_hash(tag: str, *parts: bytes) -> bytes:
    """SHA-256 over length-prefixed parts under a domain tag: no two different inputs give the same preimage."""
    digest = hashlib.sha256()
    for part in (b"troth/" + tag.encode(), *parts):
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)
    return digest.digest()


class Domain(Message, frozen=True):
    """What a signature is good for, besides the message itself. See docs/protocol.md, "Signing".

    Attributes:
        chain_id: EVM chain id of the ledger.
        ledger: address of the task contract, 20 bytes.
        task: task id, 32 bytes; zeros for messages that belong to no task.
        kind: name of the message type.
        audience: network key of the one reader, or empty for anybody.
        expires_block: last block in which the signature is good; 0 means it does not expire.
    """

    chain_id: int
    ledger: bytes
    task: bytes
    kind: str
    audience: bytes = b""
    expires_block: int = 0


def signing_bytes(domain: Domain, body: bytes) -> bytes:
    """The exact bytes an Ed25519 signature covers."""
    return tagged_hash("sign", PROTOCOL_VERSION.to_bytes(2, "big"), encode(domain), body)
