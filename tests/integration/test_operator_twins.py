"""One keystore on two machines, on a real chain: two whole node processes' worth of code, sockets, outboxes, records.

The one that works goes on; the other refuses, says why, and has sent nothing: no root, no node record, no new nonce that
would stand in the first one's way. Then the first ends, the other takes over after a watched round, and claims the record.
"""

from __future__ import annotations

import asyncio
import json
import shutil

import pytest

from protocol.errors import ConfigError
from protocol.messages import open_record
from tests.support.network import start_network
from tests.support.scenario import make_model, make_spec
from troth.lock import is_running
from troth.roles import run_role

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
DEPOSIT = 10**10


def status_of(folder):
    path = folder / "status.json"
    return json.loads(path.read_text()) if path.exists() else {"state": "", "reason": ""}


def kinds_of(folder):
    path = folder / "events.jsonl"
    return [json.loads(line)["kind"] for line in path.read_text().splitlines()] if path.exists() else []


def record_of(network, name):
    participant = network.ledger.state.participants[network.keys[name].account]
    return open_record(
        participant.record,
        account=participant.account,
        network_key=participant.network_key,
        chain_id=network.ledger.chain_id,
        ledger=network.ledger.address,
    )


def move_in(network, name, twin):
    """A second machine: the same keystore in a directory of its own, serving at another port."""
    settings = network.settings(name)
    folder = network.directory / twin
    folder.mkdir()
    shutil.copy(network.directory / name / "keystore.json", folder / "keystore.json")
    return settings.model_copy(update={"directory": str(folder)}), folder


def test_the_second_machine_refuses_then_takes_over(tmp_path):
    async def scenario():
        async with start_network(tmp_path, 0.4) as network:
            network.start("relay", "relay")
            await network.until(lambda: network.registered("relay"))
            folder = make_model(tmp_path / "base", 0)
            policy, digest = await network.shelve("trainer", folder)
            spec = make_spec(
                folder,
                base_policy=policy,
                base_manifest=digest,
                trainer=network.keys["trainer"].account,
                token=network.deployment.token,
            )
            network.start("node", "node")
            await network.until(lambda: network.registered("node"))
            await network.publish(spec, DEPOSIT)
            account = network.keys["node"].account

            def rounds():
                return sorted(index for index, roots in network.task.commitments.items() if account in roots)

            await network.until(lambda: len(rounds()) >= 1)
            before = record_of(network, "node")
            with pytest.raises(ConfigError, match="is in use by process"):
                await run_role("node", network.settings("node"), yes=True)

            settings, twin = move_in(network, "node", "twin")
            network.roles["twin"] = asyncio.create_task(run_role("node", settings, yes=True), name="twin")
            await network.until(lambda: status_of(twin)["state"] == "refused", 90)
            assert "by another machine" in status_of(twin)["reason"]
            seen = len(rounds())
            await network.until(lambda: len(rounds()) >= seen + 2)  # the first goes on meanwhile
            assert "round_made" not in kinds_of(twin)
            assert record_of(network, "node") == before  # no record was overwritten
            assert status_of(tmp_path / "node")["state"] in ("working", "committed", "idle")
            for name in ("twin", "node"):
                network.roles[name].cancel()
                await asyncio.gather(network.roles.pop(name), return_exceptions=True)
            assert not is_running(twin)

            network.roles["twin"] = asyncio.create_task(run_role("node", settings, yes=True), name="twin")
            await network.until(lambda: "round_made" in kinds_of(twin), 90)
            await network.until(lambda: record_of(network, "node").sequence > before.sequence, 60)
            participant = network.ledger.state.participants[account]
            assert participant.slashed == 0

    asyncio.run(scenario())
