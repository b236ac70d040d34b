"""The same keys on two machines: noticed, refused, never slashed. Real workers on one ledger."""

from __future__ import annotations

from collections import Counter

import pytest

from protocol.codec import PROTOCOL_VERSION
from protocol.errors import ConfigError
from protocol.ledger import calls, events
from protocol.messages import NodeRecord, make_domain, seal
from protocol.ports import IntentStatus
from protocol.rounds import get_times
from tests.support.node_kit import Node, run
from tests.support.scenario import Scenario, make_account, make_key, make_model, make_spec
from troth.lock import DirectoryLock, is_running


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("models") / "base", 0)


@pytest.fixture
def world(tmp_path, base):
    return Scenario(tmp_path, make_spec(base), base)


def roots(world):
    """How often each (round, account) has a root on the ledger."""
    logged = [log.event for log in world.chain.logs if isinstance(log.event, events.RootCommitted)]
    return Counter((event.round, event.account) for event in logged)


def signed(node):
    """Rounds whose root this machine sent."""
    return {call.round for _, call in node.ledger.submitted if isinstance(call, calls.CommitRoot)}


async def run_both(world, first, second, block):
    while world.chain.block_number < block:
        await first.step()
        await second.step()
        world.chain.advance()


def test_a_twin_refuses_to_sign_while_the_first_goes_on(world):
    async def scenario():
        first = Node(world)
        await first.run_until(get_times(world.task, 1).start)
        twin = Node(world, directory=world.directory / "twin", outbox={})
        await run_both(world, first, twin, get_times(world.task, 5).start)
        assert signed(twin) == set()
        assert signed(first) >= {1, 2, 3, 4}
        assert set(roots(world).values()) == {1}
        assert twin.status["state"] == "refused"
        assert "by another machine" in twin.status["reason"]
        assert "keys of its own" in twin.status["reason"]
        assert first.status["state"] in ("committed", "working", "idle")
        assert not any(isinstance(log.event, events.Slashed) for log in world.chain.logs)

    run(scenario())


def test_twins_that_start_together_before_the_first_round_make_one_root_each_round(world):
    """Neither has a past: the ledger takes one root, and whoever sees the other's root stops there."""

    async def scenario():
        first = Node(world)
        twin = Node(world, directory=world.directory / "twin", outbox={})
        await run_both(world, first, twin, get_times(world.task, 4).start)
        assert set(roots(world).values()) == {1}
        assert sorted(node.status["state"] == "refused" for node in (first, twin)) == [False, True]
        rounds = [index for index, _ in roots(world)]
        assert rounds[-2:] == [2, 3]  # the one that is left goes on

    run(scenario())


def test_a_machine_that_is_gone_costs_one_round(world):
    async def scenario():
        first = Node(world)
        await first.run_until(get_times(world.task, 1).start + 3)
        heir = Node(world, directory=world.directory / "heir", outbox={})
        await heir.run_until(get_times(world.task, 4).start)
        assert "may be running with these keys" in heir.texts("idle")[0]["reason"]
        assert signed(heir) == {3}  # round 2, the first that it saw begin, was watched
        again = Node(world, directory=world.directory / "heir", outbox=heir.ledger.intents)
        await again.run_until(get_times(world.task, 4).start + 4)
        assert signed(again) == {4}  # its own past is known: no more waiting

    run(scenario())


def test_the_first_machine_that_comes_back_sees_the_other_and_refuses(world):
    async def scenario():
        first = Node(world)
        await first.run_until(get_times(world.task, 1).start + 3)
        heir = Node(world, directory=world.directory / "heir", outbox={})
        await heir.run_until(get_times(world.task, 4).start)
        back = Node(world)
        await run_both(world, heir, back, get_times(world.task, 7).start)
        assert signed(back) == set()
        assert back.status["state"] == "refused"
        assert set(roots(world).values()) == {1}

    run(scenario())


def test_a_restored_backup_waits_although_its_journal_is_there(world):
    """Directory and outbox are those of an earlier day; the ledger has a root since then."""

    async def scenario():
        first = Node(world, outbox={})
        await first.run_until(get_times(world.task, 0).start + 3)
        backup = dict(first.ledger.intents)
        await first.run_until(get_times(world.task, 1).start + 3)
        restored = Node(world, outbox=backup)
        await restored.run_until(get_times(world.task, 4).start)
        assert any("round 1 was not sent from this directory" in f["reason"] for f in restored.texts("idle"))
        assert signed(restored) == {3}

    run(scenario())


def _record(world, name, sequence, endpoint):
    record = NodeRecord(PROTOCOL_VERSION, make_account(name), bytes(32), endpoint, sequence)
    domain = make_domain(world.chain.chain_id, world.chain.address, bytes(32), NodeRecord)
    return seal(make_key(name), domain, record)


def test_a_bundle_that_was_never_sent_waits_too_when_its_directory_is_moved(world):
    """Killed between bundle and root: the machine that goes on with the directory may not be the only one."""

    async def scenario():
        first = Node(world)
        await first.run_until(get_times(world.task, 1).start)

        async def die(task, record):
            return None

        first.worker._delivery.commit = die
        while 2 not in first.worker._journal.records:
            await first.step()
            world.chain.advance()
        moved = Node(world, directory=first.directory, outbox={})
        await moved.step()
        assert 2 in moved.worker._journal.records
        assert moved.worker._journal.first_round > 2
        await moved.run_until(get_times(world.task, 5).start)
        assert 2 not in signed(moved)
        assert signed(moved)
        assert set(roots(world).values()) == {1}
        assert [fields["round"] for fields in moved.texts("commit_refused")] == [2]

    run(scenario())


def test_a_node_record_of_another_machine_stops_signing_at_once(world):
    async def scenario():
        node = Node(world)
        await node.run_until(get_times(world.task, 1).start)
        world.call("node", calls.SetRecord(_record(world, "node", 7, "tcp://192.0.2.9:7000")))
        before = signed(node)
        await node.run_until(get_times(world.task, 3).start)
        assert signed(node) == before
        assert node.status["state"] == "refused"
        assert "node record 7 (tcp://192.0.2.9:7000) was sent by another machine" in node.status["reason"]

    run(scenario())


def test_taking_an_account_over_claims_its_record(world):
    async def scenario():
        node = Node(world)
        await node.step()
        world.call("node", calls.SetRecord(_record(world, "node", 7, "tcp://192.0.2.9:7000")))
        claims = []

        async def claim():
            claims.append(world.chain.block_number)
            await heir.ledger.submit("record/8", calls.SetRecord(_record(world, "node", 8, "tcp://192.0.2.10:7000")))

        heir = Node(world, directory=world.directory / "heir", outbox={}, claim=claim)
        await heir.run_until(get_times(world.task, 3).start)
        assert signed(heir) == {1, 2}  # round 0 was watched
        assert len(claims) == 1
        old = Node(world)
        await old.run_until(get_times(world.task, 3).start + 4)
        assert "node record 8 (tcp://192.0.2.10:7000) was not sent from here" in old.texts("idle")[0]["reason"]

    run(scenario())


def test_a_record_and_a_root_of_ones_own_are_no_twins(world):
    async def scenario():
        node = Node(world)
        await node.ledger.submit("record/1", calls.SetRecord(_record(world, "node", 1, "")))
        await node.run_until(get_times(world.task, 2).start + 3)
        assert signed(node) == {0, 1, 2}
        assert node.status["state"] == "committed"

    run(scenario())


def test_one_process_per_directory(tmp_path):
    lock = DirectoryLock(tmp_path)
    assert is_running(tmp_path)
    with pytest.raises(ConfigError, match=r"is in use by process [0-9]+: two processes with the same keys"):
        DirectoryLock(tmp_path)
    lock.close()
    assert not is_running(tmp_path)
    DirectoryLock(tmp_path).close()
    assert not is_running(tmp_path / "nowhere")


def test_one_refused_call_with_an_equal_root_is_no_proof_and_two_are(world):
    """A ledger node that lost our transaction makes the outbox send it again, and the contract refuses the second."""

    async def scenario():
        node = Node(world)

        def forget(index):
            name = f"commit/{world.task_id.hex()}/{index}"
            node.ledger.intents[name] = IntentStatus("reverted", world.chain.block_number, "AlreadyCommitted()")

        await node.run_until(get_times(world.task, 0).start + 3)
        forget(0)
        await node.run_until(get_times(world.task, 1).start + 3)
        assert signed(node) == {0, 1}
        assert node.status["state"] == "committed"
        forget(1)
        await node.step()
        assert node.status["state"] == "refused"

    run(scenario())
