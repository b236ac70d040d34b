"""kill -9 of one of each role in the middle of its work: the run settles as if nothing had happened.

A small network of real processes. Each victim is killed at the moment when it has just made something durable and nobody
else has it yet: a node's bundle before its root is on the ledger, a verifier's verdict before its commitment, a trainer's
generation before its policy is recorded, a relay's bundle before its receipt. It is started again at once with the same
settings, and from then on it is judged like everybody else.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sqlite3
import time
from collections import Counter
from dataclasses import replace
from typing import NamedTuple

import pytest

from protocol.ledger import events
from protocol.rounds import get_end_round, get_num_epochs, get_outcomes, get_times
from protocol.verdict import Status
from troth.commands import escrow_of
from troth.demo import main as demo
from troth.demo.launch import Launcher
from troth.demo.plan import WARM_UP_SECONDS, WARM_UP_SECONDS_MAX, make_plan
from troth.demo.watch import Screen
from troth.views import count_rollouts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]

EPOCHS = 2
SETTLE_SECONDS_MAX = 150.0
#: Victim -> the event on which it is killed, and the how manieth.
DEATHS = {"node0": ("round_made", 3), "relay": ("bundle", 9), "trainer": ("step", 3), "verifier0": ("verdict", 5)}


class Finished(NamedTuple):
    """What is left of the run: the observer's ledger state and what the processes wrote."""

    state: object
    task: object
    log: list
    launcher: Launcher
    deaths: dict
    escrow: dict
    names: dict


def read_events(launcher, name):
    path = launcher.root / name / "events.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def kill_and_restart(launcher, name):
    """SIGKILL, no goodbye; then the same command line as before. Returns the exit code."""
    process = launcher.running[name]
    process.send_signal(signal.SIGKILL)
    code = process.wait(10)
    role = name.rstrip("0123456789")
    config = launcher.root / name / "troth.toml"
    launcher.start(name, role, "run", "--yes", "--config", str(config), forked=role != "relay")
    return code


async def watch(launcher, ledger, task_id):
    """Follow the ledger until every epoch is settled; kill on the way. All new events of the ledger, and the deaths."""
    log, deaths, pending = [], {}, dict(DEATHS)
    deadline = None
    while True:
        log += await ledger.poll()
        for name, (kind, count) in list(pending.items()):
            seen = [event for event in read_events(launcher, name) if event["kind"] == kind]
            if len(seen) >= count:
                deaths[name] = (await asyncio.to_thread(kill_and_restart, launcher, name), ledger.state.block_number)
                del pending[name]
        dead = launcher.find_dead()
        assert not dead, f"{dead[0]} ended by itself: {launcher.read_log(dead[0])}"
        task = ledger.state.tasks[task_id]
        if task.final is not None and task.final.epoch + 1 >= get_num_epochs(task):
            return log, deaths
        if deadline is None and ledger.state.block_number > get_times(task, get_end_round(task) - 1).receipt_deadline:
            deadline = time.monotonic() + SETTLE_SECONDS_MAX
        assert deadline is None or time.monotonic() < deadline, f"not settled: {task.final}"
        await asyncio.sleep(0.1)


async def run(root):
    launcher = Launcher(root)
    plan = replace(make_plan(0, 2, "none", 1.0), num_epochs=EPOCHS)
    nursery = launcher.open_nursery()
    try:
        launcher.make_keys(plan.participants)
        warm_up = await asyncio.to_thread(nursery.wait_ready)
        if warm_up > WARM_UP_SECONDS_MAX:
            plan = replace(plan, block_seconds=plan.block_seconds * min(2.0, warm_up / WARM_UP_SECONDS))
        names = {launcher.keys[name].account: name for name in plan.participants}
        with Screen(names) as screen:
            ledger = await demo.start_chain(plan, launcher)
            try:
                await demo.start_roles(plan, launcher, ledger, screen)
                task_id = await demo.publish(plan, launcher, ledger, screen)
                log, deaths = await watch(launcher, ledger, task_id)
                escrow = await escrow_of(ledger, task_id)
                escrow["held"] = await ledger.token_balance(ledger.address)
                return Finished(ledger.state, ledger.state.tasks[task_id], log, launcher, deaths, escrow, names)
            finally:
                await ledger.close()
    finally:
        await asyncio.to_thread(launcher.close)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return asyncio.run(run(tmp_path_factory.mktemp("restart")))


def read_outbox(finished, name):
    """(intent, state, error) of everything a process ever wanted of the ledger."""
    path = finished.launcher.root / name / "outbox.sqlite"
    with sqlite3.connect(path) as database:
        return database.execute("SELECT intent, state, error FROM intents").fetchall()


def account_of(finished, name):
    return finished.launcher.keys[name].account


def test_each_victim_was_killed_at_work_and_came_back(finished):
    assert set(finished.deaths) == set(DEATHS)
    for name, (code, _) in finished.deaths.items():
        assert code == -signal.SIGKILL, name
        kinds = Counter(event["kind"] for event in read_events(finished.launcher, name))
        assert kinds["started"] == 2, f"{name}: {kinds}"
        work, count = DEATHS[name]
        assert kinds[work] > count, f"{name} did no {work} after its restart: {kinds}"
        assert "Traceback" not in finished.launcher.read_log(name)


def test_every_epoch_is_settled_by_all_verifiers_alike(finished):
    assert {epoch for epoch, settled in finished.task.settlements.items() if settled.final} == set(range(EPOCHS))
    assert not finished.task.voids
    assert not any(settled.challenged for settled in finished.task.settlements.values())


def test_nobody_is_slashed(finished):
    assert all(not settled.slashed for settled in finished.task.settlements.values())
    assert {finished.names[p.account]: p.slashed for p in finished.state.participants.values() if p.slashed} == {}


def test_no_honest_rollout_is_judged_bad_and_the_killed_node_is_paid_again(finished):
    died_in = finished.deaths["node0"][1]
    good = Counter()
    for round_index in range(get_end_round(finished.task)):
        for account, outcome in get_outcomes(finished.state, finished.task, round_index).items():
            name = finished.names[account]
            assert outcome.row.status in (Status.GOOD, Status.SHORT), (round_index, name, outcome.row)
            later = get_times(finished.task, round_index).start > died_in
            good[name, later] += outcome.row.status == Status.GOOD
    assert good["node0", True] > 0
    assert good["node1", True] > 0
    assert count_rollouts(finished.state, finished.task)["rejected"] == {}


def test_the_bundle_made_before_the_kill_is_the_one_that_counts(finished):
    """The killed node's last root was durable before it was sent: the round is committed, with that root and no other."""
    made = [e for e in read_events(finished.launcher, "node0") if e["kind"] == "round_made"][DEATHS["node0"][1] - 1]
    assert account_of(finished, "node0") in finished.task.commitments[made["round"]]
    again = [
        e for e in read_events(finished.launcher, "node0") if e["kind"] == "round_made" and e["round"] == made["round"]
    ]
    assert len(again) == 1, "made once, not again after the restart"


def test_there_is_no_second_root_no_second_policy_and_nothing_was_refused(finished):
    roots = Counter((e.event.round, e.event.account) for e in finished.log if isinstance(e.event, events.RootCommitted))
    assert roots
    assert max(roots.values()) == 1
    for name in ("node0", "node1", "trainer"):
        assert [row for row in read_outbox(finished, name) if row[1] == "reverted"] == [], name
    kinds = Counter(event["kind"] for event in read_events(finished.launcher, "node0"))
    assert not kinds["other_root"]


def test_policy_versions_have_no_gap_and_go_on_after_the_kill(finished):
    policies = finished.task.policies
    assert [policy.version for policy in policies] == list(range(len(policies)))
    assert policies[-1].block_number > finished.deaths["trainer"][1]
    assert len({policy.policy for policy in policies}) == len(policies)
    kinds = Counter(event["kind"] for event in read_events(finished.launcher, "trainer"))
    assert kinds["resumed"] == 1, "the generation on disk was taken up"
    assert not kinds["diverged"]


def test_the_killed_verifier_reveals_what_it_committed(finished):
    verifier = account_of(finished, "verifier0")
    died_in = finished.deaths["verifier0"][1]
    committed = {r for r, said in finished.task.verdict_commits.items() if verifier in said}
    revealed = {r for r, said in finished.task.reveals.items() if verifier in said}
    assert any(get_times(finished.task, r).start > died_in for r in revealed)
    # A reveal window is shorter than a slow machine's restart may be: at most the rounds that were open then may lack one.
    lost = committed - revealed
    assert all(
        get_times(finished.task, r).start <= died_in <= get_times(finished.task, r).verdict_reveal_deadline
        for r in lost
    )


def test_the_relay_serves_what_it_had_stored(finished):
    """Every bundle that the relay took got its receipt, also those that lay on the shelf when it was killed."""
    died_in = finished.deaths["relay"][1]
    taken = {
        (event["round"], bytes.fromhex(event["account"].removeprefix("0x")))
        for event in read_events(finished.launcher, "relay")
        if event["kind"] == "bundle"
    }
    for round_index, commitments in finished.task.commitments.items():
        times = get_times(finished.task, round_index)
        if times.start <= died_in <= times.receipt_deadline:
            continue  # uploads of these rounds may have met a dead relay
        receipted = set(finished.task.receipts.get(round_index, {}))
        late = set(commitments) - receipted
        assert not {account for account in late if (round_index, account) in taken}, round_index
    assert len(taken) >= DEATHS["relay"][1]
    assert sum(map(len, finished.task.receipts.values())) >= 0.9 * sum(map(len, finished.task.commitments.values()))


def test_the_escrow_is_conserved(finished):
    escrow = finished.escrow
    assert escrow["conserved"]
    assert escrow["held"] == escrow["remaining"]
