"""The ledger's node goes away while a role runs and comes back: the role waits, goes on, and loses nothing.

A TCP proxy stands between the role's process and the devnet, whose chain goes on meanwhile. The role is a relay and the only
one who records beacons, so a round whose beacon is missing afterwards would be its loss.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys

from devnet_support import small_task

from contracts.outbox import Outbox
from protocol.ledger.calls import RecordBeacon
from protocol.ledger.events import Role
from protocol.rounds import get_open_round, get_times
from protocol.task import compute_epoch_pay_max
from tests.support.network import PASSWORD, STAKE, Wire, start_network

BLOCK_SECONDS = 0.1
CUT_SECONDS = 2.5
#: A beacon may be recorded until the commit deadline, which is later than the longest pause of a client after a cut.
SCHEDULE = {"round_blocks": 20, "epoch_rounds": 4, "num_epochs": 4, "commit_blocks": 150}


async def start_relay(network, wire):
    """`troth relay run` as a process whose ledger is behind the wire."""
    settings = network.settings("relay", rpc=wire.url)
    command = ["relay", "run", "--yes", "--directory", settings.directory, "--stake", str(STAKE)]
    command += ["--ledger.rpc", wire.url, "--ledger.poll_seconds", "0.1", "--network.bind", settings.network.bind]
    environment = {**os.environ, "TROTH_PASSWORD": PASSWORD, "OMP_NUM_THREADS": "1"}
    with (network.directory / "relay" / "log.txt").open("wb") as log:
        return await asyncio.create_subprocess_exec(
            sys.executable, "-m", "troth", *command, stdout=log, stderr=log, env=environment
        )


def find_missing_beacons(network):
    """Rounds that have started and whose start block has no beacon."""
    newest = get_open_round(network.task, network.ledger.state.block_number - 5)
    rounds = range(0 if newest is None else newest + 1)
    return [r for r in rounds if get_times(network.task, r).start not in network.ledger.state.beacons]


def is_quiet(network, after):
    """The middle of a round later than `after`: its beacon is recorded and final, the next is not due."""
    newest = get_open_round(network.task, network.ledger.state.block_number)
    since = network.ledger.state.block_number - get_times(network.task, newest).start
    return newest > after and 10 <= since <= 14 and not find_missing_beacons(network)


async def scenario(network, wire):
    relay = await start_relay(network, wire)
    log = network.directory / "relay" / "log.txt"
    try:
        await network.until(lambda: network.registered("relay"))
        spec = small_task(network.keys["relay"].account, network.deployment.token, **SCHEDULE)
        await network.publish(spec, 4 * compute_epoch_pay_max(spec))
        await network.until(lambda: network.ledger.state.beacons)
        for _ in range(2):
            await wire.cut()
            await asyncio.sleep(CUT_SECONDS)
            assert relay.returncode is None, log.read_text()
            await network.ledger.poll()
            assert find_missing_beacons(network), "a round began while the relay could see nothing"
            await wire.mend()
            await network.until(lambda: not find_missing_beacons(network), 30)
        mended_in = get_open_round(network.task, network.ledger.state.block_number)
        await network.until(lambda: is_quiet(network, mended_in))
        relay.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(relay.wait(), 20) == 0, log.read_text()
    finally:
        if relay.returncode is None:
            relay.kill()
            await relay.wait()
    participant = network.ledger.state.participants[network.keys["relay"].account]
    assert (participant.role, participant.stakes[-1][1], len(participant.stakes)) == (Role.RELAY, STAKE, 1)
    return log.read_text()


def test_a_role_survives_its_ledger_node_being_away_and_loses_nothing(tmp_path):
    async def main():
        async with start_network(tmp_path, BLOCK_SECONDS) as network, Wire("127.0.0.1", network.server.port) as wire:
            return await scenario(network, wire)

    said = asyncio.run(asyncio.wait_for(main(), 120))
    assert "Traceback" not in said
    assert said.count("cannot be reached") == said.count("is back after") >= 2
    outbox = Outbox(tmp_path / "relay" / "outbox.sqlite")
    assert outbox.active() == [], "every intent is final"
    outbox.close()
    events = [json.loads(line) for line in (tmp_path / "relay" / "events.jsonl").read_text().splitlines()]
    assert [event["kind"] for event in events if event["kind"] in ("started", "stopped")] == ["started", "stopped"]


def test_only_a_submission_since_the_last_poll_asks_for_another_poll(tmp_path):
    async def main():
        async with start_network(tmp_path, BLOCK_SECONDS) as network:
            ledger = await network.connect("somebody")
            seen = [ledger.unsent]
            await ledger.submit("beacon/1", RecordBeacon(1))
            seen.append(ledger.unsent)
            await ledger.poll()
            seen.append(ledger.unsent)
            await ledger.submit("beacon/1", RecordBeacon(1))
            return [*seen, ledger.unsent]

    assert asyncio.run(asyncio.wait_for(main(), 60)) == [False, True, False, False]
