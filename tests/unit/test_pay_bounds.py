"""A settlement never costs more than its epochs' reserve, whatever nodes commit and verifiers say."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest

from protocol.codec import encode
from protocol.ledger import events as ev
from protocol.ledger.state import LedgerState, apply
from protocol.rounds import get_times
from protocol.settlement import SLASHED_MAX, compute_settlement
from protocol.task import compute_epoch_pay_max
from protocol.verdict import Row, Status, pack_rows
from tests.support.scenario import make_account, make_spec

TASK = b"\x07" * 32
VERIFIERS = [make_account(f"verifier-{i}") for i in range(3)]


def _state(tmp_path, num_nodes: int, status: Status | None, *, epochs: int = 1) -> LedgerState:
    """Nodes that commit far more leaves than their quota in every round; verifiers that call it all `status`."""
    (tmp_path / "config.json").write_text("{}")
    spec = make_spec(tmp_path, groups_per_round=8, slots_max=8)
    schedule = msgspec.structs.replace(spec.schedule, epoch_rounds=2, num_epochs=epochs, start_delay_blocks=1)
    spec = msgspec.structs.replace(spec, schedule=schedule)
    state = LedgerState()

    def log(block: int, event: ev.Event) -> None:
        apply(state, ev.Logged(block, 0, event))

    nodes = [make_account(f"node-{i}") for i in range(num_nodes)]
    for account, role in [(a, ev.Role.NODE) for a in nodes] + [(a, ev.Role.VERIFIER) for a in VERIFIERS]:
        log(1, ev.ParticipantRegistered(account, int(role), bytes(32), b"", 10**12))
    log(2, ev.TaskPublished(TASK, make_account("initiator"), 3, compute_epoch_pay_max(spec) * epochs, encode(spec)))
    log(2, ev.PolicyRecorded(TASK, 0, spec.base_policy, spec.base_manifest, bytes(32), bytes(32)))
    for account in nodes:
        log(2, ev.NodeJoined(TASK, account, 8, 0))
    task = state.tasks[TASK]
    for round_index in range(2 * epochs):
        times = get_times(task, round_index)
        log(times.start + 1, ev.BeaconRecorded(times.start, round_index.to_bytes(32, "big")))
        for account in nodes:
            log(times.start + 2, ev.RootCommitted(TASK, round_index, account, b"\x01" * 32, 8, spec.base_policy))
        log(times.start + 3, ev.BundlesReceipted(TASK, round_index, make_account("relay"), tuple(nodes)))
        log(times.audit_block + 1, ev.BeaconRecorded(times.audit_block, bytes(31) + b"\x01"))
        if status is not None:
            rows = pack_rows([Row(a, status, 1, 60_000, 2**32 - 1, 1) for a in nodes])
            for verifier in VERIFIERS:
                log(times.verdict_reveal_deadline, ev.VerdictRevealed(TASK, round_index, verifier, rows, bytes(32)))
    state.block_number = get_times(task, 2 * epochs - 1).confirm_deadline + 1
    return state


@pytest.mark.parametrize("num_nodes", [1, 3, 8, 20])
@pytest.mark.parametrize("status", [None, Status.GOOD, Status.UNPAID])
def test_an_epoch_never_costs_more_than_its_reserve(tmp_path, num_nodes, status):
    state = _state(tmp_path, num_nodes, status)
    task = state.tasks[TASK]
    result = compute_settlement(state, task, 0)
    assert result.paid_total + result.burned_total <= compute_epoch_pay_max(task.spec) <= task.deposit
    if status is None:
        assert result.burned_total > 0
    if status is Status.GOOD:
        assert result.paid_total > 0


def test_cheats_beyond_one_settlement_are_slashed_by_the_next(tmp_path):
    state = _state(tmp_path, SLASHED_MAX + 5, Status.CHEAT, epochs=2)
    task = state.tasks[TASK]
    first, second = (compute_settlement(state, task, epoch).slashed for epoch in (0, 1))
    assert (len(first), len(second)) == (SLASHED_MAX, 5)
    assert not set(first) & set(second)


def test_the_replica_is_not_changed_by_reading_it(tmp_path):
    state = _state(tmp_path, 3, Status.GOOD)
    before = {f.name: str(getattr(state.tasks[TASK], f.name)) for f in dataclasses.fields(state.tasks[TASK])}
    for derived in ("outcomes", "trials", "quotas", "judged", "judged_rounds"):
        before.pop(derived)
    compute_settlement(state, state.tasks[TASK], 0)
    after = {name: str(getattr(state.tasks[TASK], name)) for name in before}
    assert after == before
