"""Beacons are recorded by whoever's turn it is: one at once, the others in time, nobody for nothing."""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace

from protocol.ledger import calls, events
from protocol.presets import MINIMAL
from protocol.rounds import get_times
from tests.support.scenario import Scenario, make_account, make_model, make_spec
from troth.duties import BeaconDuty, get_due_beacons, get_turn, get_wait_blocks

KEEPERS = ("relay", "trainer", "v0", "v1", "v2")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("models") / "base", 0, hidden=8, layers=1)


class Chores:
    """A chain on which nobody records beacons by himself, five keepers and a node."""

    def __init__(self, directory, base):
        # Rounds of five blocks: no round of this schedule starts in the audit block of another.
        self.world = Scenario(directory, make_spec(base, schedule=replace(MINIMAL.schedule, round_blocks=5)), base)
        self.world.chain.auto_beacons = False
        roles = {"relay": events.Role.RELAY, "trainer": events.Role.TRAINER, "node": events.Role.NODE}
        self.ledgers = {
            name: self.world.register(name, roles.get(name, events.Role.VERIFIER)) for name in (*KEEPERS, "node")
        }
        self.chain = self.world.chain

    def get_turns(self, block):
        return {name: get_turn(self.chain.state, make_account(name), block.to_bytes(8, "big")) for name in self.ledgers}

    def step(self, *names):
        async def all_of_them():
            for name in names:
                await self.ledgers[name].poll()
                await BeaconDuty(self.ledgers[name]).step()

        asyncio.run(all_of_them())

    def advance_to(self, block):
        self.chain.advance(block - self.chain.block_number)

    def recorded_by(self, name):
        return [call.block_number for _, call in self.ledgers[name].submitted if isinstance(call, calls.RecordBeacon)]


@pytest.fixture
def chores(tmp_path, base):
    return Chores(tmp_path, base)


def test_keepers_are_ranked_and_nodes_come_last(chores):
    turns = chores.get_turns(1234)
    assert sorted(turns[name] for name in KEEPERS) == [0, 1, 2, 3, 4]
    assert turns["node"] == 5


def test_another_label_is_another_order(chores):
    firsts = {min(chores.get_turns(block).items(), key=lambda item: item[1])[0] for block in range(64)}
    assert firsts == set(KEEPERS)


def test_a_keeper_without_stake_is_not_waited_for(chores):
    first = min(KEEPERS, key=lambda name: chores.get_turns(7)[name])
    chores.chain.emit(events.StakeChanged(make_account(first), 0, 0))
    turns = chores.get_turns(7)
    assert sorted(turns[name] for name in KEEPERS if name != first) == [0, 1, 2, 3]
    assert turns[first] == 4


def test_the_first_keeper_records_at_once_and_then_nobody_else(chores):
    start = chores.world.task.start_block
    chores.advance_to(start)
    chores.step(*chores.ledgers)
    turns = chores.get_turns(start)
    for name in chores.ledgers:
        assert chores.recorded_by(name) == ([start] if turns[name] == 0 else []), name
    chores.chain.advance()
    assert chores.chain.state.beacons[start] == chores.chain.block_hash(start)
    chores.chain.advance(3)
    chores.step(*chores.ledgers)
    assert sum(len(chores.recorded_by(name)) for name in chores.ledgers) == 1


@pytest.mark.parametrize("alive", [*KEEPERS, "node"])
def test_when_all_others_are_silent_ones_turn_comes_before_the_deadline(chores, alive):
    task = chores.world.task
    times = get_times(task, 0)
    acted_at = None
    for block in range(times.start, times.commit_deadline):
        chores.advance_to(block)
        chores.step(alive)
        if acted_at is None and times.start in chores.recorded_by(alive):
            acted_at = block
    turn = chores.get_turns(times.start)[alive]
    assert acted_at is not None, f"turn {turn} of {len(KEEPERS)} never came"
    assert (acted_at == times.start) == (turn == 0)
    chores.chain.advance()
    assert times.start in chores.chain.state.beacons


def test_waits_double_their_crowd():
    assert [get_wait_blocks(turn) for turn in range(8)] == [0, 2, 2, 4, 4, 4, 4, 6]


def test_audit_beacons_are_due_only_for_rounds_with_commitments(chores):
    task = chores.world.task
    times = get_times(task, 0)
    due = list(get_due_beacons(task, times.audit_block))
    assert times.audit_block not in due
    chores.chain.state.block_number = times.start + 1
    chores.chain.emit(events.RootCommitted(task.task, 0, make_account("node"), bytes(32), 1, task.policies[0].policy))
    assert times.audit_block in set(get_due_beacons(task, times.audit_block))
    assert times.audit_block not in set(get_due_beacons(task, times.verdict_commit_deadline))


def test_nothing_is_due_before_the_task_starts_or_after_its_last_deadline(chores):
    task = chores.world.task
    assert not list(get_due_beacons(task, task.start_block - 1))
    last = task.spec.schedule.epoch_rounds * task.spec.schedule.num_epochs - 1
    assert not list(get_due_beacons(task, get_times(task, last).verdict_reveal_deadline))


def test_a_closed_task_needs_no_beacons(chores):
    chores.advance_to(chores.world.task.start_block)
    chores.chain.emit(events.TaskClosed(chores.world.task_id, 0, 0))
    chores.step(*chores.ledgers)
    assert not any(chores.recorded_by(name) for name in chores.ledgers)
