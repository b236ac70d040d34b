"""The ledger as a file: the events that a task's rules read, in one canonical encoding, and back into a replica.

Two people who saw the same ledger up to the same block write the same bytes, so a case made by a stranger can be compared with
one's own ledger (`troth replay --case DIR --compare`). Read back, nothing is believed but the form: sizes, types, order and
rounds are bounded before the events are folded, and events that no ledger emits are a `Reject`, never a crash.
Neighbours: troth.case keeps the bytes with the rest of a case, protocol.ledger.state folds.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec

from protocol.codec import PROTOCOL_VERSION, Message, decode, encode
from protocol.errors import ConfigError, Reason, Reject
from protocol.ledger import events as ev
from protocol.ledger.state import LedgerState, Task, apply

#: Longest file of facts.
FACTS_BYTES_MAX = 64 << 20
#: The ledger's rules walk over rounds one by one.
ROUNDS_MAX = 1 << 20
BLOCK_MAX = 1 << 48

KINDS: dict[str, type[ev.Event]] = {kind.__name__: kind for kind in ev.Event.__subclasses__()}


class Fact(Message, frozen=True):
    """One event: its place, its type's name and its fields in declared order."""

    block_number: int
    log_index: int
    kind: str
    fields: tuple[Any, ...]


class Facts(Message, frozen=True):
    """What the ledger said of a task up to a block.

    Attributes:
        ledger: address of the task contract, 20 bytes.
        block_number: the last block that was read.
    """

    version: int
    chain_id: int
    ledger: bytes
    task: bytes
    block_number: int
    events: tuple[Fact, ...]


class Replica(NamedTuple):
    """Facts as the rules read them."""

    facts: Facts
    state: LedgerState
    task: Task


def encode_facts(events: Iterable[ev.Logged], *, chain_id: int, ledger: bytes, task: bytes, block_number: int) -> bytes:
    """Canonical bytes of the events that concern a task, up to and including a block.

    Args:
        events: everything the ledger emitted, in its order.

    Raises:
        ConfigError: when there are too many of them for a file.
    """
    kept = []
    for logged in events:
        own = getattr(logged.event, "task", task) == task or isinstance(logged.event, ev.Slashed)
        if own and logged.block_number <= block_number:
            fields = msgspec.structs.astuple(logged.event)
            kept.append(Fact(logged.block_number, logged.log_index, type(logged.event).__name__, fields))
    data = encode(Facts(PROTOCOL_VERSION, chain_id, ledger, task, block_number, tuple(kept)))
    if len(data) > FACTS_BYTES_MAX:
        raise ConfigError(f"the ledger's events for this task take {len(data)} bytes, limit {FACTS_BYTES_MAX}")
    return data


def open_facts(data: bytes) -> Replica:
    """Parse facts and fold them.

    Raises:
        Reject: `MALFORMED`, when they are not canonical, out of order or bounds, or do not form a ledger.
    """
    facts = decode(Facts, data, bytes_max=FACTS_BYTES_MAX)
    _require(facts.version == PROTOCOL_VERSION, "version", facts.version, PROTOCOL_VERSION)
    _require((len(facts.ledger), len(facts.task)) == (20, 32), "ledger and task", "other lengths", "20 and 32 bytes")
    _require(0 <= facts.block_number <= BLOCK_MAX, "block number", facts.block_number, f"0 to {BLOCK_MAX}")
    _require(0 <= facts.chain_id < 1 << 64, "chain id", facts.chain_id, "64 bits")
    state, place = LedgerState(), (0, -1)
    for fact in facts.events:
        here = (fact.block_number, fact.log_index)
        _require(place <= here <= (facts.block_number, BLOCK_MAX), "order of events", here, f"{place} or later")
        place = here
        event = _read_event(fact)
        _require(getattr(event, "round", 0) <= ROUNDS_MAX, "round", getattr(event, "round", 0), ROUNDS_MAX)
        if isinstance(event, ev.NodeJoined):  # the contract takes nobody else, and the rules look every member up
            _require(event.account in state.participants, "member", event.account.hex(), "a registered account")
        try:
            apply(state, ev.Logged(fact.block_number, fact.log_index, event))
        except (LookupError, ValueError, TypeError, AttributeError) as error:
            raise Reject(
                Reason.MALFORMED,
                f"facts do not form a ledger: {fact.kind} in block {fact.block_number} cannot follow what is before it",
                observed=f"{type(error).__name__}: {error}"[:200],
            ) from None
    state.block_number = facts.block_number
    if facts.task not in state.tasks:
        why = state.invalid_tasks.get(facts.task, "it was never published")
        raise Reject(Reason.MALFORMED, f"facts do not hold task {facts.task.hex()[:16]}: {why}")
    return Replica(facts, state, state.tasks[facts.task])


def _read_event(fact: Fact) -> ev.Event:
    kind = KINDS.get(fact.kind)
    if kind is None:
        raise Reject(Reason.MALFORMED, "facts hold an event that no ledger emits", observed=fact.kind[:64])
    fields = msgspec.structs.fields(kind)
    _require(len(fields) == len(fact.fields), f"fields of {fact.kind}", len(fact.fields), len(fields))
    try:
        values = [msgspec.convert(value, field.type) for field, value in zip(fields, fact.fields, strict=True)]
    except msgspec.ValidationError as error:
        raise Reject(Reason.MALFORMED, f"facts hold a malformed {fact.kind}: {error}") from None
    for field, value in zip(fields, values, strict=True):
        if isinstance(value, int):
            _require(value >= 0, f"{field.name} of {fact.kind}", value, "not negative")
    return kind(*values)


def _require(condition: bool, what: str, observed: object, limit: object) -> None:
    if not condition:
        raise Reject(Reason.MALFORMED, f"facts: {what}", observed=observed, limit=limit)
