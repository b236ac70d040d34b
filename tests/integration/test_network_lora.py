"""A LoRA task on a real network: the base goes to everybody once, adapters after it are used, verified, paid and re-run.

Real sockets, a real chain, the roles as the command line runs them; only the processes are one. The base is the demo's own
model for sorting two digits. Two nodes save themselves what an adapter costs: one never applies any, one stays with the
one before; both must be rejected as soon as it makes a difference.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from environments.sort import SortEnvironment
from inference.worker import NodeWorker
from models.adapter import ADAPTER_CONFIG, ADAPTER_WEIGHTS, BASE, read_adapter_config
from protocol.adapter import Adapter
from protocol.rounds import get_end_round, get_outcomes, get_round_policy
from protocol.verdict import Status
from shardcast.folder import hash_folder
from tests.support.network import start_network
from tests.support.trainer_kit import make_scorer
from trainer.audit import audit_policy
from trainer.config import TrainerConfig
from trainer.warmup import make_base_policy
from troth.cheats import CHEATS
from troth.commands import policy_describe, task_publish
from troth.network import LINKS, Reader
from troth.roles import run_role
from troth.settings import TrainerSettings

TERMS = Adapter(4, 8, ("down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"))
TRAINING = TrainerSettings(learning_rate=5e-3, warmup_steps=1, total_steps=20)
VERSIONS = 3
HONEST = ("node-a", "node-b")
TASK = """
name = "sort-2"
licence_data = "CC0-1.0"
licence_model = "Apache-2.0"
group_size = 8
groups_per_round = 12
slots_max = 4
max_staleness = 4
[environment]
entry = "sort"
args = { digits = 2 }
[sampling]
max_tokens = 4
stop_tokens = [1]
[escrow]
deposit = 1_000_000_000
[schedule]
start_delay_blocks = 40
round_blocks = 12
epoch_rounds = 16
num_epochs = 1
commit_blocks = 14
receipt_blocks = 8
verdict_commit_blocks = 16
verdict_reveal_blocks = 8
timeout_blocks = 40
[economics]
probation_groups = 1000
"""


class BaseOnly(NodeWorker):
    """Never applies an adapter: the base policy is here already."""

    def _policy_folder(self, task, assignment):
        self._prefetch.want(task, 0)
        return self._prefetch.get(0)

    def _verify(self, folder, assignment):
        """It knows."""


class AdapterBefore(NodeWorker):
    """Generates with the adapter before the round's."""

    def _policy_folder(self, task, assignment):
        version = max(0, assignment.policy_version - 1)
        self._prefetch.want(task, version)
        return self._prefetch.get(version)

    def _verify(self, folder, assignment):
        """It knows."""


def read_events(directory: Path, kind: str) -> list[dict]:
    lines = (directory / "events.jsonl").read_text().splitlines()
    return [fields for fields in map(json.loads, lines) if fields["kind"] == kind]


def check_downloads(directory: Path, base: Path, adapters: int) -> None:
    """The base's bytes were fetched once, and of an adapter nothing but its own two files."""
    whole = sum(path.stat().st_size for path in base.iterdir())
    by_version: dict[int, list[int]] = {}
    for event in read_events(directory, "fetched"):
        by_version.setdefault(event["version"], []).append(event["bytes"])
    assert by_version.pop(0) == [whole]
    assert len(by_version) >= adapters
    for fetched in by_version.values():
        assert len(fetched) == 1
        assert fetched[0] < whole / 4
    for folder in (directory / "policies").glob("*-00000[1-9]-*"):
        assert sorted(path.name for path in folder.iterdir()) == [ADAPTER_CONFIG, ADAPTER_WEIGHTS, BASE]
        assert read_adapter_config(folder) == (TERMS, hash_folder(base))


def find_outcomes(network, name: str) -> dict[int, list[Status]]:
    """Statuses of a node's judged rounds by the version of the round's policy."""
    state, task, account = network.ledger.state, network.task, network.keys[name].account
    found: dict[int, list[Status]] = {}
    for index in range(get_end_round(task)):
        outcome = get_outcomes(state, task, index).get(account)
        policy = get_round_policy(task, index)
        if outcome is not None and policy is not None:
            found.setdefault(policy.version, []).append(outcome.row.status)
    return found


async def publish(network, base: Path) -> None:
    settings = network.settings("initiator")
    described = await policy_describe(network.settings("trainer"), base, TERMS)
    terms = described.pop("adapter")
    head = [f'{name} = "{described[name]}"' for name in ("base_policy", "base_manifest", "trainer")]
    head.append(f"adapter = {{ rank = {terms['rank']}, alpha = {terms['alpha']}, modules = {terms['modules']} }}")
    file = network.directory / "task.toml"
    file.write_text("\n".join(head) + TASK)
    shown = await task_publish(settings, file, yes=True, base=base)
    assert shown["adapter"]["rank"] == TERMS.rank
    network.task_id = bytes.fromhex(shown["task"])
    await network.until(lambda: network.task_id in network.ledger.state.tasks)


async def audit_newest(network, scratch: Path):
    """Re-run the newest recorded step whose parent generation the (stopped) trainer still has."""
    network.roles["trainer"].cancel()
    await asyncio.gather(network.roles.pop("trainer"), return_exceptions=True)
    await network.ledger.poll()
    generations = network.directory / "trainer" / "generations" / network.task_id.hex()[:16]
    kept = {int(path.name) for path in generations.glob("*[0-9]")}
    version = max(v for v in range(1, len(network.task.policies)) if v - 1 in kept)
    async with Reader(network.ledger, scratch / "reader") as reader:
        return await audit_policy(
            network.ledger,
            network.task,
            version,
            blobs=reader.blobs,
            policies=reader.policies,
            environment=SortEnvironment(2),
            make_scorer=make_scorer,
            config=TrainerConfig(**TRAINING.model_dump(exclude={"base"})),
            optimizer=(generations / f"{version - 1:08d}" / "optimizer.safetensors").read_bytes(),
            hash_folder=lambda folder: hash_folder(folder, links=LINKS),
            scratch=scratch / "policy",
        )


@pytest.mark.slow
def test_adapters_are_trained_spread_used_verified_and_run_again(tmp_path, monkeypatch):
    base = tmp_path / "base"
    make_base_policy(base, SortEnvironment(2), seed=0, target=0.3)
    cheats = {"base-only": BaseOnly, "adapter-before": AdapterBefore}
    for name, kind in cheats.items():
        monkeypatch.setitem(CHEATS, name, kind)

    async def scenario():
        async with start_network(tmp_path, 0.4) as network:
            network.start("trainer", "trainer", trainer=TRAINING.model_copy(update={"base": str(base)}))
            for name in ("relay", "verifier"):
                network.start(name, name)
            for name in HONEST:
                network.start(name, "node", serves=False)
            for name in cheats:
                settings = network.settings(name, serves=False)
                network.roles[name] = asyncio.create_task(run_role("node", settings, yes=True, cheat=name), name=name)
            everybody = ("trainer", "relay", "verifier", *HONEST, *cheats)
            await network.until(lambda: network.registered(*everybody))
            await publish(network, base)

            def is_done():
                outcomes = [find_outcomes(network, name) for name in HONEST]
                return all(sum(version > 0 for version in found) >= VERSIONS for found in outcomes)

            await network.until(is_done, timeout_s=240)
            for name in HONEST:
                statuses = [status for line in find_outcomes(network, name).values() for status in line]
                assert set(statuses) == {Status.GOOD}, name
                check_downloads(tmp_path / name, base, VERSIONS)
            check_downloads(tmp_path / "verifier", base, VERSIONS)
            check_downloads(tmp_path / "relay", base, VERSIONS)
            for name in cheats:
                found = find_outcomes(network, name)
                assert set(found.get(0, [])) <= {Status.GOOD}, name
                assert Status.CHEAT in {status for version, line in found.items() for status in line if version}, name
            result = await audit_newest(network, tmp_path / "audit")
            result.require_equal()
            assert result.version >= VERSIONS

    asyncio.run(asyncio.wait_for(scenario(), 290))
