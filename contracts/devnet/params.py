"""Parameters of JSON-RPC methods: strict, bounded parsing of what strangers send. A fault is an `RpcError` (-32602)."""

from __future__ import annotations

import re
from typing import Any

from contracts.jsonrpc import RpcError

CALL_DATA_BYTES_MAX = 256 * 1024
LOG_ADDRESSES_MAX = 16
TOPIC_ALTERNATIVES_MAX = 64

_QUANTITY = re.compile(r"0x[0-9a-fA-F]{1,64}")


def parse_bytes(value: Any, name: str, size: int | None = None, size_max: int = CALL_DATA_BYTES_MAX) -> bytes:
    """Bytes from 0x hex; `size` asks for an exact length."""
    if not isinstance(value, str) or not value.startswith("0x"):
        raise RpcError(-32602, f"invalid {name}: expected 0x hex")
    if len(value) > 2 + 2 * size_max:
        raise RpcError(-32602, f"invalid {name}: longer than {size_max} bytes")
    try:
        raw = bytes.fromhex(value[2:])
    except ValueError:
        raise RpcError(-32602, f"invalid {name}: not hex") from None
    if size is not None and len(raw) != size:
        raise RpcError(-32602, f"invalid {name}: has {len(raw)} bytes, expected {size}")
    return raw


def parse_quantity(value: Any, name: str) -> int:
    """A number below 2^256 from 0x hex."""
    if isinstance(value, str) and _QUANTITY.fullmatch(value):
        return int(value, 16)
    raise RpcError(-32602, f"invalid {name}: expected a 0x hex quantity of at most 256 bits")


def parse_addresses(value: Any) -> frozenset[bytes]:
    """The `address` of a log filter: none, one or several; empty means any."""
    values = value if isinstance(value, list) else [] if value is None else [value]
    if len(values) > LOG_ADDRESSES_MAX:
        raise RpcError(-32602, f"invalid filter: more than {LOG_ADDRESSES_MAX} addresses")
    return frozenset(parse_bytes(address, "address", 20) for address in values)


def parse_topics(value: Any) -> list[frozenset[bytes] | None]:
    """The `topics` of a log filter: per position a set of alternatives, or None for any."""
    if value is None:
        return []
    if not isinstance(value, list) or len(value) > 4:
        raise RpcError(-32602, "invalid topics: expected a list of at most 4")
    parsed: list[frozenset[bytes] | None] = []
    for wanted in value:
        options = wanted if isinstance(wanted, list) else [wanted]
        if len(options) > TOPIC_ALTERNATIVES_MAX:
            raise RpcError(-32602, f"invalid topics: more than {TOPIC_ALTERNATIVES_MAX} alternatives")
        parsed.append(
            None if wanted is None or not options else frozenset(parse_bytes(topic, "topic", 32) for topic in options)
        )
    return parsed


def matches(topics: tuple[bytes, ...], wanted: list[frozenset[bytes] | None]) -> bool:
    """Whether a log's topics satisfy `parse_topics`."""
    if len(wanted) > len(topics):
        return False
    return all(options is None or topic in options for topic, options in zip(topics, wanted, strict=False))
