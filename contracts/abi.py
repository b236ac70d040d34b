"""Calls, events and errors of the contracts as bytes, by the ABI in the committed artifacts.

`LedgerAbi` is built once per process. Names in `protocol.ledger` are those of the contracts modulo snake and camel case,
and fields stand in the same order, so this module holds one table (which contract takes which call) and no signatures.
Logs are decoded only when their topic is known and their data is at most `LOG_DATA_BYTES_MAX` long.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec
from eth_abi.abi import decode as abi_decode
from eth_abi.abi import encode as abi_encode
from eth_abi.exceptions import DecodingError, InsufficientDataBytes
from eth_abi.grammar import parse as parse_abi_type
from eth_utils.crypto import keccak

from contracts.artifacts import load_artifact
from protocol.errors import ConfigError, Fault, Reject
from protocol.ledger import calls, events
from protocol.task import compute_terms, decode_spec

#: Longest log data that is decoded; the longest honest one is a verdict of 32 KiB.
LOG_DATA_BYTES_MAX = 64 * 1024

#: The contracts by their name in `Deployment`, in the order of `contracts.artifacts.DEPLOY_ORDER`.
CONTRACTS = {
    "token": "DevToken",
    "beacons": "Beacons",
    "registry": "StakeRegistry",
    "court": "Court",
    "book": "TaskBook",
    "canaries": "Canaries",
}

#: Which contract takes a call, and its function.
FUNCTIONS: dict[type[calls.Call], tuple[str, str]] = {
    calls.Register: ("registry", "register"),
    calls.SetRecord: ("registry", "setRecord"),
    calls.AddStake: ("registry", "addStake"),
    calls.StartUnbond: ("registry", "startUnbond"),
    calls.WithdrawStake: ("registry", "withdraw"),
    calls.RecordBeacon: ("beacons", "record"),
    calls.Publish: ("book", "publish"),
    calls.TopUp: ("book", "topUp"),
    calls.Join: ("book", "join"),
    calls.Leave: ("book", "leave"),
    calls.CommitRoot: ("book", "commit"),
    calls.ReceiptBundles: ("book", "receipt"),
    calls.RecordPolicy: ("book", "recordPolicy"),
    calls.AttestPolicy: ("book", "attestPolicy"),
    calls.Claim: ("book", "claim"),
    calls.ClaimMany: ("book", "claimMany"),
    calls.Cancel: ("book", "cancel"),
    calls.Close: ("book", "close"),
    calls.CommitVerdict: ("court", "commitVerdict"),
    calls.RevealVerdict: ("court", "revealVerdict"),
    calls.VoteSettlement: ("court", "voteSettlement"),
    calls.Challenge: ("court", "challenge"),
    calls.VoteChallenge: ("court", "voteChallenge"),
    calls.WithdrawBond: ("court", "withdrawBond"),
    calls.Finalize: ("court", "finalize"),
    calls.SealCanary: ("canaries", "seal"),
    calls.OpenCanary: ("canaries", "open"),
    calls.ConfirmCanary: ("canaries", "confirm"),
    calls.WithdrawCanaryBond: ("canaries", "withdraw"),
}


class Function(NamedTuple):
    """A contract function: selector, and types of arguments and results."""

    selector: bytes
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


class EventCodec(NamedTuple):
    """A contract event: the struct it becomes, and per field its type and whether it is a topic."""

    kind: type[events.Event]
    types: tuple[str, ...]
    indexed: tuple[bool, ...]


class ErrorCodec(NamedTuple):
    """A custom error: name, and per argument its name and type."""

    name: str
    arguments: tuple[tuple[str, str], ...]


def _type(entry: dict[str, Any]) -> str:
    """Canonical ABI type of a parameter; tuples are written out."""
    if not entry["type"].startswith("tuple"):
        return str(entry["type"])
    return f"({','.join(_type(part) for part in entry['components'])}){entry['type'][5:]}"


def _types(entries: list[dict[str, Any]]) -> tuple[str, ...]:
    return tuple(_type(entry) for entry in entries)


def _signature_hash(name: str, types: tuple[str, ...]) -> bytes:
    return bytes(keccak(f"{name}({','.join(types)})".encode()))


def _normal(value: Any, kind: str) -> Any:
    """A decoded value in the form of `protocol.ledger`: addresses are 20 bytes, lists are tuples."""
    if kind == "address":
        return bytes.fromhex(value[2:])
    if kind.endswith("]"):
        inner = kind[: kind.rindex("[")]
        return tuple(_normal(item, inner) for item in value)
    if kind.startswith("("):
        parts = [part.to_type_str() for part in parse_abi_type(kind).components]
        return tuple(_normal(item, part) for item, part in zip(value, parts, strict=True))
    return value


def _ledger_events() -> dict[str, type[events.Event]]:
    return {kind.__name__: kind for kind in events.Event.__subclasses__()}


class LedgerAbi:
    """Encoder and decoder for all contracts of the ledger."""

    def __init__(self) -> None:
        self._functions: dict[tuple[str, str], Function] = {}
        self._events: dict[bytes, EventCodec] = {}
        self._errors: dict[bytes, ErrorCodec] = {
            _signature_hash("Error", ("string",))[:4]: ErrorCodec("Error", (("message", "string"),)),
            _signature_hash("Panic", ("uint256",))[:4]: ErrorCodec("Panic", (("code", "uint256"),)),
        }
        kinds = _ledger_events()
        for contract, artifact in CONTRACTS.items():
            for entry in load_artifact(artifact).abi:
                self._add(contract, entry, kinds)

    def _add(self, contract: str, entry: dict[str, Any], kinds: dict[str, type[events.Event]]) -> None:
        inputs = _types(entry.get("inputs", []))
        if entry["type"] == "function":
            selector = _signature_hash(entry["name"], inputs)[:4]
            self._functions[contract, entry["name"]] = Function(selector, inputs, _types(entry["outputs"]))
        elif entry["type"] == "error":
            arguments = tuple((part["name"], kind) for part, kind in zip(entry["inputs"], inputs, strict=True))
            self._errors[_signature_hash(entry["name"], inputs)[:4]] = ErrorCodec(entry["name"], arguments)
        elif entry["type"] == "event" and entry["name"] in kinds:
            kind = kinds[entry["name"]]
            if len(kind.__struct_fields__) != len(inputs):
                raise ConfigError(
                    f"event {entry['name']} of the artifacts has other fields than protocol.ledger.events"
                )
            indexed = tuple(bool(part["indexed"]) for part in entry["inputs"])
            self._events[_signature_hash(entry["name"], inputs)] = EventCodec(kind, inputs, indexed)

    # -- calls

    def encode(self, contract: str, function: str, *arguments: Any) -> bytes:
        """Calldata of any function of any contract."""
        codec = self._functions[contract, function]
        return codec.selector + abi_encode(codec.inputs, arguments)

    def encode_call(self, call: calls.Call) -> tuple[str, bytes]:
        """The contract that takes `call`, and its calldata.

        Raises:
            ConfigError: when a field is out of the range the contract can take, or a task's spec breaks a rule.
        """
        contract, function = FUNCTIONS[type(call)]
        arguments = tuple(getattr(call, field) for field in call.__struct_fields__)
        if isinstance(call, calls.Publish):
            try:
                arguments = (tuple(compute_terms(decode_spec(call.spec))), *arguments)
            except Reject as error:
                raise ConfigError(f"the task cannot be published: {error}") from None
        try:
            return contract, self.encode(contract, function, *arguments)
        except Exception as error:  # eth_abi raises several unrelated kinds
            raise ConfigError(f"{type(call).__name__} does not fit the contract: {error}") from None

    def decode_result(self, contract: str, function: str, data: bytes) -> tuple[Any, ...]:
        """Results of a view.

        Raises:
            Fault: when the node's answer does not decode.
        """
        outputs = self._functions[contract, function].outputs
        try:
            values = abi_decode(outputs, data)
        except (DecodingError, InsufficientDataBytes, OverflowError, ValueError) as error:
            raise Fault(f"{contract}.{function} returned bytes that do not decode: {error}") from None
        return tuple(_normal(value, kind) for value, kind in zip(values, outputs, strict=True))

    # -- events

    def decode_event(self, topics: list[bytes], data: bytes) -> events.Event | None:
        """The event of a log of one of the contracts; None when its topic is not ours (an ERC-20 transfer, say).

        Raises:
            Fault: when a known event does not decode, which no honest node can show.
        """
        codec = self._events.get(topics[0]) if topics else None
        if codec is None:
            return None
        if len(data) > LOG_DATA_BYTES_MAX or len(topics) != 1 + sum(codec.indexed):
            raise Fault(f"a {codec.kind.__name__} log has {len(topics)} topics and {len(data)} bytes of data")
        pairs = list(zip(codec.types, codec.indexed, strict=True))
        try:
            plain = iter(abi_decode([kind for kind, topic in pairs if not topic], data))
            values = []
            rest = iter(topics[1:])
            for kind, topic in pairs:
                value = abi_decode([kind], next(rest))[0] if topic else next(plain)
                values.append(_normal(value, kind))
            return codec.kind(*values)
        except (DecodingError, InsufficientDataBytes, OverflowError, ValueError, msgspec.ValidationError) as error:
            raise Fault(f"a {codec.kind.__name__} log does not decode: {error}") from None

    # -- errors

    def describe_error(self, data: bytes) -> str:
        """A revert in words: the error's name with its values, for example `TooLate(blockNumber=9, lastBlock=8)`."""
        codec = self._errors.get(data[:4])
        if codec is None:
            return f"reverted with 0x{data[:36].hex()}" if data else "reverted without a reason"
        try:
            values = abi_decode([kind for _, kind in codec.arguments], data[4:])
        except (DecodingError, InsufficientDataBytes, OverflowError, ValueError):
            return codec.name
        shown = ", ".join(f"{name}={_show(value)}" for (name, _), value in zip(codec.arguments, values, strict=True))
        return f"{codec.name}({shown})"


def _show(value: Any) -> str:
    return "0x" + value.hex() if isinstance(value, bytes) else str(value)[:200]
