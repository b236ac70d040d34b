"""Strangers who publish tasks, records and policies must not stop or silence anybody, nor have the honest slashed."""

from __future__ import annotations

import json
import shutil

import msgspec
import pytest

from models.policy import load_model
from protocol.codec import encode
from protocol.errors import ConfigError, Fault, Reject
from protocol.ledger import events as ev
from protocol.ledger.state import LedgerState, apply
from protocol.messages import NodeRecord, compute_bundle_key, make_domain, seal
from protocol.task import decode_spec, validate_spec
from tests.support.scenario import make_account, make_key, make_model, make_spec
from troth.directory import Directory
from troth.duties import get_due_beacons


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("policy") / "model", 1)


FREE = {"reward_base": 0, "reward_token": 0, "verifier_fee": 0}


def test_a_task_that_pays_nothing_is_nobodys(folder):
    """Its epochs cost nothing, so their number would divide by zero in everybody's rules."""
    spec = make_spec(folder)
    free = msgspec.structs.replace(spec, economics=msgspec.structs.replace(spec.economics, **FREE))
    with pytest.raises(Reject, match="nobody would be paid"):
        decode_spec(encode(free))
    state = LedgerState(block_number=100)
    apply(state, ev.Logged(1, 0, ev.TaskPublished(b"\x01" * 32, make_account("stranger"), 2, 1, encode(free))))
    assert not state.tasks
    assert state.invalid_tasks
    assert [list(get_due_beacons(task, 100)) for task in state.tasks.values()] == []


@pytest.mark.parametrize(
    "limits",
    [
        {"replay_tolerance_micro": -5},
        {"replay_tolerance_micro": 0, "replay_severe_micro": 0},
        {"replay_tolerance_micro": 499},
        {"replay_severe_micro": 1_000},
        {"mantissa_mean_milli_max": 0},
        {"mantissa_median_max": -1},
        {"near_ties_per_1k_max": 0},
    ],
)
def test_limits_that_the_honest_would_fail_are_refused(folder, limits):
    spec = make_spec(folder)
    with pytest.raises(ConfigError, match="profile"):
        validate_spec(msgspec.structs.replace(spec, profile=msgspec.structs.replace(spec.profile, **limits)))


@pytest.mark.parametrize(
    "change",
    [
        {"num_attention_heads": 0},
        {"hidden_act": "no such"},
        {"vocab_size": -1},
        {"pad_token_id": 10**9},
        {"model_type": "t5"},
        {"model_type": "no such"},
        {"hidden_size": "wide"},
        {"num_hidden_layers": 10**6},
        {"hidden_size": 10**6, "num_attention_heads": 10},
        {"rope_parameters": 7},
    ],
    ids=str,
)
def test_a_hostile_config_is_a_fault(folder, tmp_path, change):
    copy = shutil.copytree(folder, tmp_path / "policy")
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(Fault):
        load_model(copy)


class _Ledger:
    """As much of a ledger as a directory reads."""

    chain_id, address, account = 7, bytes(20), make_account("relay")

    def __init__(self) -> None:
        self.state = LedgerState()

    def register(self, name: str, role: ev.Role, curve: bytes) -> None:
        key = make_key(name)
        record = NodeRecord(1, make_account(name), curve, "", 1)
        sealed = seal(key, make_domain(self.chain_id, self.address, bytes(32), NodeRecord), record)
        event = ev.ParticipantRegistered(make_account(name), int(role), key.public, sealed, 0)
        apply(self.state, ev.Logged(1, 0, event))


def test_naming_anothers_curve_key_does_not_hide_its_owner():
    """Records do not prove that a CURVE key is one's own, so both contacts count, whoever came first."""
    ledger, curve = _Ledger(), b"\x05" * 32
    ledger.register("thief", ev.Role.NODE, curve)
    ledger.register("owner", ev.Role.NODE, curve)
    found = {contact.account for contact in Directory(ledger).find_curve(curve)}
    assert found == {make_account("thief"), make_account("owner")}


def test_a_relay_takes_the_owners_bundle_whoever_else_names_its_key(folder, monkeypatch):
    from troth.relay import RelayWorker

    ledger, curve, task_id = _Ledger(), b"\x05" * 32, b"\x01" * 32
    ledger.register("thief", ev.Role.NODE, curve)
    ledger.register("owner", ev.Role.NODE, curve)
    spec = make_spec(folder)
    apply(ledger.state, ev.Logged(1, 1, ev.TaskPublished(task_id, make_account("i"), 1, 10**12, encode(spec))))
    committed = ev.RootCommitted(task_id, 0, make_account("owner"), b"\x02" * 32, 1, spec.base_policy)
    apply(ledger.state, ev.Logged(2, 0, committed))
    ledger.state.block_number = 2
    opened = []
    monkeypatch.setattr("troth.relay.get_assignment", lambda *args, **kwargs: None)
    monkeypatch.setattr("troth.relay.open_bundle", lambda *args: opened.append(args))
    relay = RelayWorker(
        ledger=ledger, directory=Directory(ledger), has_blob=lambda key: False, policies=None, events=lambda k, f: None
    )
    relay.accept(curve, compute_bundle_key(task_id, 0, make_account("owner")), b"bundle")
    assert len(opened) == 1
