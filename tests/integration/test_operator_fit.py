"""A task on a real network, seen by somebody who is not in it yet: `troth doctor --task`, `node selftest`, `node run`.

The policy of the second task claims sizes that no machine here has. It must be refused by everybody who would have to hold
it, and before its weights are asked for.
"""

from __future__ import annotations

import asyncio
import json

import pytest

from protocol.errors import ConfigError
from shardcast.manifest import Manifest
from tests.support.network import Network, run_troth, start_network
from tests.support.scenario import make_model, make_spec
from troth.lock import is_running

DEPOSIT = 10**10


async def publish(network: Network, folder) -> Manifest:
    """A relay, a trainer that serves `folder`, and a task over it; returns the base policy's manifest."""
    network.start("relay", "relay")
    await network.until(lambda: network.registered("relay"))
    policy, digest = await network.shelve("trainer", folder)
    spec = make_spec(
        folder,
        base_policy=policy,
        base_manifest=digest,
        trainer=network.keys["trainer"].account,
        token=network.deployment.token,
    )
    await network.publish(spec, DEPOSIT)
    store = network.directory / "relay" / "store" / "manifests"
    await network.until(lambda: any(store.rglob(digest.hex() + "*")))
    return digest


async def command(*words, **options):
    return await asyncio.to_thread(run_troth, *words, **options)


def own(network, name):
    """The command line of a participant whose keys were made."""
    settings = network.settings(name)
    return ("--directory", settings.directory, "--ledger.rpc", network.server.url)


def test_a_task_that_fits(tmp_path):
    async def scenario():
        async with start_network(tmp_path, 0.3) as network:
            await publish(network, make_model(tmp_path / "base", 0))
            task = network.task_id.hex()[:12]
            done = await command("doctor", "--task", task, "--json", *own(network, "guest"))
            shown = json.loads(done.stdout)
            lines = {line["name"]: line for line in shown["task"]["lines"]}
            assert done.returncode == 0, (shown["task"], done.stderr)
            assert shown["task"]["fit"]
            assert {name for name, line in lines.items() if line["level"] == "fail"} == set()
            assert {"memory", "disk", "link", "engine", "environment", "stake", "gas", "quota", "speed"} <= set(lines)
            assert "MiB/s" in lines["link"]["observed"]
            assert shown["task"]["rollouts_per_hour"] > 0
            assert shown["task"]["reward_per_hour"] > 0
            assert any("synthetic model" in text for text in shown["task"]["assumptions"])
            slow = await command("doctor", "--task", task, "--tokens-per-second", "0.1", *own(network, "guest"))
            assert slow.returncode == 1
            assert "not one group is done in time" in slow.stdout
            tested = await command("node", "selftest", "--task", task, "--json", *own(network, "guest"))
            assert tested.returncode == 0, tested.stderr
            assert json.loads(tested.stdout)["accepted"]
            told = await command(
                "node", "selftest", "--task", task, "--compute.dtype", "bfloat16", *own(network, "guest")
            )
            assert told.returncode == 3
            assert "would be accepted: no" in told.stdout
            assert "set compute.dtype" in told.stdout
            assert network.keys["guest"].account not in network.ledger.state.participants  # nothing was sent

    asyncio.run(scenario())


def make_giant(folder):
    """A policy whose config.json asks for hundreds of gigabytes; its weights are small, and must not be fetched."""
    make_model(folder, 0)
    table = json.loads((folder / "config.json").read_text())
    table |= {"hidden_size": 65_536, "intermediate_size": 262_144, "num_hidden_layers": 96, "num_attention_heads": 512}
    table |= {"num_key_value_heads": 512, "head_dim": 128}
    (folder / "config.json").write_text(json.dumps(table))
    return folder


def test_a_policy_that_cannot_fit_is_refused_before_the_download(tmp_path):
    """Public symptom: out of memory on a model that cannot fit, seen only after the download."""

    async def scenario():
        async with start_network(tmp_path, 0.3) as network:
            digest = await publish(network, make_giant(tmp_path / "giant"))
            task = network.task_id.hex()[:12]
            done = await command("doctor", "--task", task, *own(network, "guest"))
            assert done.returncode == 1
            assert "FAIL memory" in done.stdout
            assert not list((tmp_path / "guest").rglob("*.safetensors"))
            network.start("node", "node", task=task)
            with pytest.raises(ConfigError, match=r"policy 0 does not fit: in float32 it needs .* GiB of memory"):
                await asyncio.wait_for(network.roles["node"], 60)
            network.roles.clear()
            folder = tmp_path / "node"
            status = json.loads((folder / "status.json").read_text())
            assert status["state"] == "stopped"
            assert "does not fit" in status["reason"]
            assert not is_running(folder)
            assert not list((folder / "policies").iterdir())
            held = {path.name for path in (folder / "store" / "shards").rglob("*") if path.is_file()}
            assert held == set(), f"shards of {digest.hex()[:12]} were fetched"

    asyncio.run(scenario())


def test_a_task_file_is_judged_without_a_ledger(tmp_path):
    base = "ab" * 32
    file = tmp_path / "task.toml"
    file.write_text(
        f'name = "t"\nbase_policy = "{base}"\nbase_manifest = "{base}"\ntrainer = "0x{"cd" * 20}"\n'
        'licence_data = "CC0-1.0"\nlicence_model = "CC0-1.0"\n[environment]\nentry = "sort"\nargs = {digits = 4}\n'
        "[sampling]\nmax_tokens = 6\nstop_tokens = [1]\n[escrow]\ndeposit = 100000000000\n"
    )
    done = run_troth("doctor", "--task", file, "--ledger.rpc", "http://127.0.0.1:1", "--directory", tmp_path / "run")
    assert done.returncode == 1
    assert "FAIL ledger" in done.stdout
    assert "ok   environment: sort" in done.stdout
    assert "publish it to know more" in done.stdout
