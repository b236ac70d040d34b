"""Calls, logs and revert data of the contracts in the words of `protocol.ledger`, for tests.

Built from the ABI in the artifacts alone, so that it checks the client's own codec and does not share its mistakes.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any

from eth_abi.abi import decode, encode
from eth_tester.exceptions import TransactionFailed
from eth_utils.abi import collapse_if_tuple, event_abi_to_log_topic, function_abi_to_4byte_selector

from contracts.artifacts import Artifact
from protocol.ledger import events
from protocol.ledger.events import Event


class RevertedError(Exception):
    """A transaction failed; `name` and `values` are the contract's error."""

    def __init__(self, name: str, values: tuple[Any, ...]) -> None:
        self.name, self.values = name, values
        super().__init__(f"{name}{values}")


def abi_types(entries: list[dict[str, Any]]) -> list[str]:
    return [collapse_if_tuple(entry) for entry in entries]


def _plain(value: Any, kind: str) -> Any:
    """Addresses as 20 bytes, lists as tuples. Structs are flat."""
    if kind == "address":
        return bytes.fromhex(value[2:])
    if kind.endswith("[]"):
        return tuple(_plain(item, kind[:-2]) for item in value)
    if kind.startswith("("):
        return tuple(_plain(item, part) for item, part in zip(value, kind[1:-1].split(","), strict=True))
    return value


def _decode(types: list[str], data: bytes) -> tuple[Any, ...]:
    return tuple(_plain(value, kind) for value, kind in zip(decode(types, data), types, strict=True))


class Codec:
    """Functions, events and errors of all contracts by name, topic and selector."""

    def __init__(self, artifacts: Sequence[Artifact]) -> None:
        self.functions = {
            (art.name, entry["name"]): entry for art in artifacts for entry in art.abi if entry["type"] == "function"
        }
        entries = [entry for art in artifacts for entry in art.abi]
        self.events = {event_abi_to_log_topic(e): e for e in entries if e["type"] == "event"}
        self.errors = {
            function_abi_to_4byte_selector({**e, "type": "function"}): e for e in entries if e["type"] == "error"
        }

    def call_data(self, contract: str, function: str, arguments: Sequence[Any]) -> bytes:
        """Selector and arguments."""
        entry = self.functions[contract, function]
        return function_abi_to_4byte_selector(entry) + encode(abi_types(entry["inputs"]), arguments)

    def result(self, contract: str, function: str, data: bytes) -> Any:
        """What a function returned; a tuple when it is more than one value."""
        values = _decode(abi_types(self.functions[contract, function]["outputs"]), data)
        return values[0] if len(values) == 1 else values

    def event(self, log: dict[str, Any]) -> Event | None:
        """The log as a protocol event; None for the token's own events."""
        entry = self.events[bytes.fromhex(log["topics"][0][2:])]
        kind = getattr(events, entry["name"], None)
        if kind is None:
            return None
        topics = iter(log["topics"][1:])
        plain = iter(
            _decode(abi_types([i for i in entry["inputs"] if not i["indexed"]]), bytes.fromhex(log["data"][2:]))
        )
        values = [
            _decode(abi_types([i]), bytes.fromhex(next(topics)[2:]))[0] if i["indexed"] else next(plain)
            for i in entry["inputs"]
        ]
        return kind(*values)

    def error(self, data: bytes) -> RevertedError:
        """The custom error in revert data."""
        entry = self.errors.get(data[:4])
        if entry is None:
            return RevertedError("unknown error", (data.hex(),))
        return RevertedError(entry["name"], _decode(abi_types(entry["inputs"]), data[4:]))


def revert_data(error: TransactionFailed) -> bytes:
    """eth-tester hands revert data over as the text of a bytes literal."""
    try:
        data = ast.literal_eval(str(error).removeprefix("execution reverted: "))
    except (SyntaxError, ValueError):
        return str(error).encode()
    return data if isinstance(data, bytes) else b""
