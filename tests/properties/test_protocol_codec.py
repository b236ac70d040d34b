"""The codec: every message has one byte string, every byte string one message or a `Reject`."""

from __future__ import annotations

from typing import get_args, get_origin, get_type_hints

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from protocol.codec import Domain, Message, decode, encode, signing_bytes, tagged_hash
from protocol.errors import Reason, Reject
from protocol.identity import NetworkKey, verify_signature
from protocol.messages import Bundle, Finding, Group, Lineage, NodeRecord, Report, Sample, Signed, seal, unseal_body
from protocol.task import TaskSpec
from tests.support.scenario import make_key

KINDS = [Domain, Signed, NodeRecord, Sample, Group, Bundle, Finding, Report, Lineage, TaskSpec]
BYTES_MAX = 1 << 20
INTEGERS = st.integers(-(2**63), 2**64 - 1)


def values(kind):
    """Any value of a field's type."""
    if kind is int:
        return INTEGERS
    if kind is bytes:
        return st.binary(max_size=40)
    if kind is str:
        return st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
    if get_origin(kind) is tuple:
        return st.lists(values(get_args(kind)[0]), max_size=3).map(tuple)
    hints = get_type_hints(kind)
    return st.builds(kind, **{name: values(hints[name]) for name in kind.__struct_fields__})


@st.composite
def messages(draw):
    return draw(values(draw(st.sampled_from(KINDS))))


@given(messages())
def test_round_trip(message):
    data = encode(message)
    assert decode(type(message), data, bytes_max=len(data)) == message
    assert encode(decode(type(message), data, bytes_max=BYTES_MAX)) == data


@given(messages())
def test_one_byte_more_than_allowed_is_refused_before_it_is_parsed(message):
    data = encode(message)
    with pytest.raises(Reject) as caught:
        decode(type(message), data, bytes_max=len(data) - 1)
    assert caught.value.reason is Reason.MALFORMED
    assert caught.value.limit == len(data) - 1


@given(st.sampled_from(KINDS), st.binary(max_size=200))
def test_strangers_bytes_are_a_message_in_canonical_form_or_a_reject(kind, data):
    try:
        message = decode(kind, data, bytes_max=BYTES_MAX)
    except Reject:
        return
    assert encode(message) == data


@given(messages(), st.data())
def test_changed_bytes_are_another_message_or_a_reject(message, data):
    original = encode(message)
    at = data.draw(st.integers(0, len(original) - 1))
    changed = original[:at] + bytes([original[at] ^ data.draw(st.integers(1, 255))]) + original[at + 1 :]
    try:
        other = decode(type(message), changed, bytes_max=BYTES_MAX)
    except Reject:
        return
    assert encode(other) == changed
    assert encode(other) != original


def widen(value):
    """MessagePack of a nested list in which every small whole number is written in nine bytes."""
    if isinstance(value, bool) or value is None:
        return msgspec.msgpack.encode(value)
    if isinstance(value, int) and 0 <= value < 2**64:
        return b"\xcf" + value.to_bytes(8, "big")
    if isinstance(value, list):
        return b"\xdd" + len(value).to_bytes(4, "big") + b"".join(widen(one) for one in value)
    return msgspec.msgpack.encode(value)


@given(messages())
def test_longer_forms_of_the_same_message_are_refused(message):
    wide = widen(msgspec.to_builtins(message, builtin_types=(bytes,)))
    assume(wide != encode(message))
    with pytest.raises(Reject) as caught:
        decode(type(message), wide, bytes_max=BYTES_MAX)
    assert caught.value.reason is Reason.MALFORMED


@given(messages(), st.one_of(INTEGERS, st.binary(max_size=4), st.none(), st.floats()))
def test_a_field_too_many_or_too_few_is_refused(message, extra):
    fields = msgspec.to_builtins(message, builtin_types=(bytes,))
    for changed in ([*fields, extra], fields[:-1]):
        if isinstance(message, Domain) and len(changed) < len(fields):
            continue  # its last fields have defaults; a shorter form is refused as not canonical, below
        with pytest.raises(Reject):
            decode(type(message), msgspec.msgpack.encode(changed), bytes_max=BYTES_MAX)


def test_defaults_left_out_are_not_canonical():
    with pytest.raises(Reject, match="canonical"):
        decode(Domain, msgspec.msgpack.encode([1, b"", b"", "Bundle"]), bytes_max=100)


@given(st.lists(st.binary(max_size=12), max_size=5), st.lists(st.binary(max_size=12), max_size=5))
def test_tagged_hash_separates_its_parts(a, b):
    assert (tagged_hash("x", *a) == tagged_hash("x", *b)) == (a == b)
    assert tagged_hash("x", *a) != tagged_hash("y", *a)


DOMAINS = st.builds(
    Domain,
    chain_id=st.integers(0, 3),
    ledger=st.sampled_from([bytes(20), b"\1" * 20]),
    task=st.sampled_from([bytes(32), b"\1" * 32]),
    kind=st.sampled_from(["Bundle", "Report"]),
    audience=st.sampled_from([b"", b"\1" * 32]),
    expires_block=st.integers(0, 2),
)


@given(DOMAINS, DOMAINS, st.binary(max_size=20), st.binary(max_size=20))
def test_a_signature_is_good_for_one_domain_and_one_body(mine, theirs, body, other):
    key = make_key("signer")
    signature = key.sign(mine, body)
    verify_signature(key.public, mine, body, signature)
    assert (signing_bytes(mine, body) == signing_bytes(theirs, other)) == (mine == theirs and body == other)
    if (mine, body) != (theirs, other):
        with pytest.raises(Reject) as caught:
            verify_signature(key.public, theirs, other, signature)
        assert caught.value.reason is Reason.SIGNATURE


@given(st.binary(max_size=70), st.binary(max_size=40))
def test_no_other_bytes_are_a_signature_or_a_key(signature, public):
    key, domain = make_key("signer"), Domain(1, bytes(20), bytes(32), "Bundle")
    with pytest.raises(Reject):
        verify_signature(key.public, domain, b"body", signature)
    assume(public != key.public)
    with pytest.raises(Reject):
        verify_signature(public, domain, b"body", key.sign(domain, b"body"))


@given(values(Finding))
def test_sealed_messages_open_for_their_signer_alone(message):
    key, other = NetworkKey(b"\1" * 32), NetworkKey(b"\2" * 32)
    domain = Domain(1, bytes(20), bytes(32), "Finding")
    sealed = seal(key, domain, message)
    assert unseal_body(sealed, domain, key.public, bytes_max=BYTES_MAX) == encode(message)
    with pytest.raises(Reject):
        unseal_body(sealed, domain, other.public, bytes_max=BYTES_MAX)


def test_every_message_is_covered():
    """A message type that is added to the protocol must be added here."""

    def leaves(kind):
        found = set(kind.__subclasses__())
        return found | {one for sub in found for one in leaves(sub)}

    parts = {get_type_hints(TaskSpec)[n] for n in ("environment", "sampling", "profile", "schedule", "economics")}
    ours = {
        one for one in leaves(Message) if one.__module__ in ("protocol.codec", "protocol.messages", "protocol.task")
    }
    assert ours == set(KINDS) | parts
