"""Changes of valid inputs that keep most of their form, so that they get past the first check.

MessagePack and JSON are taken apart, changed at one place and put together again; ABI data is changed word by word, TOML
line by line, a safetensors file in its header; bodies within envelopes are changed like the envelopes. Now and then plain
bytes are flipped, cut, doubled or inserted. All randomness is the caller's: Hypothesis in the default suite, a counter under
atheris.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import msgspec

INTEGERS = (
    *(0, 1, -1, 2, 31, 32, 127, 128, 255, 256, 65_497, 65_535),
    *(2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**64 - 1, -(2**63)),
)
LENGTHS = (0, 1, 19, 20, 31, 32, 33, 64, 258)
TEXTS = ("", "\0", "../x", "é\u202e", "a" * 300, "0x", "-1", "1e400", "sort", "{}", "q_proj", "nan")
FLOATS = (0.0, -0.0, 0.5, 1e308, 1e-300, float("nan"), float("inf"), -float("inf"))
TOML_VALUES = (
    "-1",
    "0",
    "1e400",
    "nan",
    "inf",
    '""',
    "[]",
    "[[1]]",
    "{}",
    "true",
    "9" * 40,
    "1979-05-27",
    '"\\u0000"',
    "0.1",
)
#: MessagePack and JSON heads that claim or nest far more than follows.
BOMBS = (
    *(head + b"\xff" * 4 for head in (b"\xdd", b"\xc6", b"\xdb", b"\xdf", b"\xc9")),
    *(b"\x91" * 2000, b"[" * 2000, b'{"a":' * 2000, b"\xff" * 64, b"\xc1", bytes(64)),
)


def _bytes(rng: random.Random, length: int) -> bytes:
    return bytes(rng.randrange(256) for _ in range(length))


def mutate_bytes(data: bytes, rng: random.Random) -> bytes:
    """Flip, cut, double, remove, insert, or put a bomb somewhere."""
    made, kind = bytearray(data), rng.randrange(7)
    at = rng.randrange(len(made) + 1)
    if kind <= 1 and made:
        for _ in range(rng.randrange(1, 5)):
            made[rng.randrange(len(made))] = rng.randrange(256)
    elif kind == 2:
        del made[at:]
    elif kind == 3:
        made += made[at:]
    elif kind == 4:
        del made[at : at + rng.randrange(1, 9)]
    elif kind == 5:
        made[at:at] = _bytes(rng, rng.randrange(1, 9))
    else:
        made[at:at] = rng.choice(BOMBS)
    return bytes(made)


# Trees


def _scalar(value: Any, rng: random.Random) -> Any:
    """Another value in place of a leaf, mostly of its own type."""
    if rng.randrange(12) == 0:
        return rng.choice((None, True, [], {}, "x", b"x", 7, 0.5, [[[]]]))
    if isinstance(value, bool) or value is None:
        return rng.choice((True, False, None, 0, 1))
    if isinstance(value, int):
        return rng.choice((value + 1, value - 1, -value, value * 2, rng.choice(INTEGERS), rng.randrange(256)))
    if isinstance(value, float):
        return rng.choice(FLOATS)
    if isinstance(value, str):
        return rng.choice((rng.choice(TEXTS), value + rng.choice(TEXTS), value[: len(value) // 2], value.upper()))
    if isinstance(value, bytes):
        nested = _nested(value, rng)
        return rng.choice(
            (nested, nested, mutate_bytes(value, rng), _bytes(rng, rng.choice(LENGTHS)), bytes(len(value)))
        )
    return value


def _nested(value: bytes, rng: random.Random) -> bytes:
    """Bytes that are a message themselves, changed as one."""
    try:
        inner = msgspec.msgpack.decode(value)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError):
        return mutate_bytes(value, rng)
    return _pack(_change(inner, rng)) if isinstance(inner, list) and inner else mutate_bytes(value, rng)


def _change(tree: Any, rng: random.Random, depth: int = 0) -> Any:
    """A copy of a tree with one thing changed."""
    if isinstance(tree, dict) and tree and depth < 40:
        made: dict[Any, Any] = dict(tree)
        key, kind = rng.choice(list(made)), rng.randrange(8)
        if kind == 0:
            del made[key]
        elif kind == 1:
            made[rng.choice(TEXTS) if rng.randrange(2) else f"{key}x"] = made[key]
        elif kind == 2:
            made[key] = made[rng.choice(list(made))]
        else:
            made[key] = _change(made[key], rng, depth + 1)
        return made
    if isinstance(tree, list) and tree and depth < 40:
        row, at, kind = list(tree), rng.randrange(len(tree)), rng.randrange(12)
        if kind == 0:
            del row[at]
        elif kind == 1:
            row.insert(at, row[rng.randrange(len(row))])
        elif kind == 2:
            row[at] = row[rng.randrange(len(row))]
        elif kind == 3 and len(row) <= 64:
            row += row
        else:
            row[at] = _change(row[at], rng, depth + 1)
        return row
    return _scalar(tree, rng)


def _pack(tree: Any) -> bytes:
    try:
        return msgspec.msgpack.encode(tree)
    except (OverflowError, msgspec.EncodeError, TypeError, UnicodeEncodeError):
        return b"\xcf" + b"\xff" * 8


def mutate_msgpack(data: bytes, rng: random.Random) -> bytes:
    """A message with one field changed; the bytes themselves when it is none."""
    try:
        tree = msgspec.msgpack.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError):
        return mutate_bytes(data, rng)
    return _pack(_change(tree, rng))


def mutate_tagged(data: bytes, rng: random.Random) -> bytes:
    """One byte that says which kind of message, then the message."""
    head = data[:1] if rng.randrange(8) else _bytes(rng, 1)
    return head + mutate_msgpack(data[1:], rng)


def mutate_frame(data: bytes, rng: random.Random) -> bytes:
    """Four bytes of length, then a message; the length is set right, mostly."""
    body = mutate_msgpack(data[4:], rng)
    size = len(body) if rng.randrange(8) else rng.choice((0, 1, 4096, 4097, 2**31, 2**32 - 1))
    return size.to_bytes(4, "big") + body


def mutate_json(data: bytes, rng: random.Random) -> bytes:
    """JSON with one value changed; the bytes themselves when it is none."""
    try:
        tree = json.loads(data)
        return json.dumps(
            _change(tree, rng), default=lambda value: str(value), indent=1 if b"\n" in data else None
        ).encode()
    except (ValueError, RecursionError, TypeError):
        return mutate_bytes(data, rng)


def mutate_tagged_json(data: bytes, rng: random.Random) -> bytes:
    """One byte that says which kind, then JSON."""
    head = data[:1] if rng.randrange(8) else _bytes(rng, 1)
    return head + mutate_json(data[1:], rng)


def mutate_words(data: bytes, rng: random.Random) -> bytes:
    """ABI data: one 32-byte word replaced, doubled or removed. The head of the input may be of another length."""
    lead = len(data) % 32
    words = [data[i : i + 32] for i in range(lead, len(data), 32)]
    if not words:
        return mutate_bytes(data, rng)
    at, kind = rng.randrange(len(words)), rng.randrange(6)
    if kind <= 2:
        number = rng.choice((rng.randrange(0, 1024, 32), rng.choice(INTEGERS), 2**256 - 1, 2**255, 2**160))
        words[at] = (number % 2**256).to_bytes(32, "big")
    elif kind == 3:
        words[at] = words[rng.randrange(len(words))]
    elif kind == 4:
        words.insert(at, words[at])
    else:
        del words[at]
    return data[:lead] + b"".join(words)


def mutate_text(data: bytes, rng: random.Random) -> bytes:
    """Lines of TOML: one removed, doubled, moved, or given another value or name."""
    lines = data.split(b"\n")
    at, kind = rng.randrange(len(lines)), rng.randrange(6)
    name, equals, _ = lines[at].partition(b"=")
    if kind == 0:
        del lines[at]
    elif kind == 1:
        lines.insert(rng.randrange(len(lines)), lines[at])
    elif kind <= 4 and equals:
        lines[at] = name + b"= " + rng.choice(TOML_VALUES).encode()
    else:
        lines[at] = mutate_bytes(lines[at], rng)
    return b"\n".join(lines)


def mutate_safetensors(data: bytes, rng: random.Random) -> bytes:
    """A safetensors file: its JSON header changed (and its length set right, mostly), or its numbers."""
    size = int.from_bytes(data[:8], "little")
    if size > len(data) - 8 or rng.randrange(4) == 0:
        return mutate_bytes(data, rng)
    head = mutate_json(data[8 : 8 + size].rstrip(b" "), rng)
    length = len(head) if rng.randrange(6) else rng.choice((0, 1, 2**31, 2**63, 2**64 - 1, len(head) + 8))
    return length.to_bytes(8, "little") + head + data[8 + size :]


_SHAPES: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "bytes": mutate_bytes,
    "msgpack": mutate_msgpack,
    "tagged": mutate_tagged,
    "frame": mutate_frame,
    "json": mutate_json,
    "tagged-json": mutate_tagged_json,
    "words": mutate_words,
    "text": mutate_text,
    "safetensors": mutate_safetensors,
}


def mutate(data: bytes, rng: random.Random, shape: str, bytes_max: int) -> bytes:
    """`data` changed one to three times as its shape allows, now and then as plain bytes; at most `bytes_max` long."""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        data = (mutate_bytes if rng.randrange(10) == 0 else _SHAPES[shape])(data, rng)[:bytes_max]
    return data
