"""A node whose policy folder rots on disk, running or stopped: nothing is made with it, and it mends itself."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.integration.test_operator_fit import publish
from tests.support.network import start_network
from tests.support.scenario import make_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


def events_of(folder, kind):
    path = folder / "events.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [event for event in map(json.loads, lines) if event["kind"] == kind]


def rot(folder):
    """Flip the lowest bit of one weight."""
    [weights] = (folder / "policies").glob("*/model.safetensors")
    good = weights.read_bytes()
    bad = good[:-4] + bytes([good[-4] ^ 1]) + good[-3:]
    write(weights, bad)
    return weights, good, bad


def write(path, data):
    path.chmod(0o600)
    path.write_bytes(data)


def test_a_rotten_policy_folder_is_made_again(tmp_path):
    async def scenario():
        async with start_network(tmp_path, 0.4) as network:
            network.start("node", "node")
            await publish(network, make_model(tmp_path / "base", 0))
            folder, account = tmp_path / "node", network.keys["node"].account

            def rounds():
                return sum(account in roots for roots in network.task.commitments.values())

            await network.until(lambda: bool(list((folder / "policies").glob("*/model.safetensors"))))
            weights, good, bad = rot(folder)  # after the fetch; before or after the first load
            await network.until(lambda: rounds() >= 1 or bool(events_of(folder, "fault")))
            network.roles["node"].cancel()
            await asyncio.gather(network.roles.pop("node"), return_exceptions=True)
            if weights.exists():
                write(weights, bad)
            network.start("node", "node")
            before = rounds()
            await network.until(lambda: rounds() > before, 90)
            assert weights.read_bytes() == good
            assert not network.ledger.state.participants[account].slashed

    asyncio.run(scenario())
