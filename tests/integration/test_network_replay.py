"""`troth replay` on a live network and from the case that it saved: the same verdict, with the network gone.

Real sockets, a real chain, the roles as the command line runs them; the commands are processes of their own.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys

import pytest
from msgspec.structs import replace

from protocol.rounds import get_times
from protocol.task import compute_epoch_pay_max
from tests.integration.test_network_reasoning_gym import GROUPS, TOKENIZER, make_task
from tests.support.network import start_network
from tests.support.scenario import make_model

VOCAB = 400


async def run_command(code: int, *arguments: object) -> dict:
    """`troth` as a process; what it printed as JSON."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "troth",
        *map(str, arguments),
        stdout=pipe,
        stderr=pipe,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    out, err = (data.decode() for data in await process.communicate())
    failed = [check for check in json.loads(out)["checks"] if check["passed"] is False] if out else []
    assert process.returncode == code, f"{err} {failed}"
    assert "Traceback" not in err, err
    return json.loads(out) if out else {"error": err}


@pytest.mark.slow
def test_a_verdict_is_replayed_live_and_from_its_case_alone(tmp_path):
    """The environment's tokenizer comes with the base policy, so the case has to hold that too."""
    base = make_model(tmp_path / "base", 0, vocab=VOCAB)
    (base / "tokenizer.json").write_bytes(TOKENIZER)
    case, offline = tmp_path / "case", ["--directory", tmp_path / "third-party", "--ledger.rpc", "http://127.0.0.1:1"]

    async def scenario() -> dict:
        async with start_network(tmp_path, 0.4) as network:
            policy, manifest = await network.shelve("trainer", base)
            for name in ("relay", "verifier", "node"):
                network.start(name, name)
            await network.until(lambda: network.registered("trainer", "relay", "verifier", "node"))
            spec = make_task("tokenizer", policy, manifest, network.keys["trainer"].account, network.deployment.token)
            # Time to join before the only epoch begins, on a busy machine too.
            spec = replace(spec, schedule=replace(spec.schedule, start_delay_blocks=80))
            await network.publish(spec, compute_epoch_pay_max(spec))
            times, node = get_times(network.task, 0), network.keys["node"].account
            await network.until(lambda: node in network.task.members)
            assert network.task.members[node][0].from_epoch == 0
            await network.until(lambda: network.ledger.state.block_number > times.opening_deadline)
            rollout = f"{network.task_id.hex()}/0/0x{node.hex()}/1/2"
            online = ["--directory", tmp_path / "reader", "--ledger.rpc", network.server.url, "--json"]
            live = await run_command(0, "replay", rollout, "--save", case, *online)
            compared = await run_command(0, "replay", "--case", case, "--compare", *online)
            assert compared == live
            return live

    live = asyncio.run(asyncio.wait_for(scenario(), 200))
    assert live["agrees"] is True
    assert (live["verdict"]["status"], live["verdict"]["groups"]) == ("good", GROUPS)
    assert live["tokens"]
    assert all(token["token"] == token["winner"] for token in live["tokens"])
    assert asyncio.run(run_command(0, "replay", "--case", case, "--json", *offline)) == live
    tokens = case / "bundle.bin"
    data = tokens.read_bytes()
    tokens.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    said = asyncio.run(run_command(3, "replay", "--case", case, "--json", *offline))["error"]
    assert "bundle.bin is not the one this case was made with" in said
