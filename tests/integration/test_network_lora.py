"""A LoRA task on a real network: the base goes to everybody once, adapters after it are used, verified, paid and re-run.

Real sockets, a real chain, the roles as the command line runs them; only the processes are one. The base is the demo's own
model for sorting two digits. Two nodes save themselves what an adapter costs: one never applies any, one stays with the
one before; both must be rejected as soon as it makes a difference.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from pathlib import Path

import pytest

from environments.sort import SortEnvironment
from inference.worker import NodeWorker
from models.adapter import ADAPTER_CONFIG, ADAPTER_WEIGHTS, BASE, read_adapter_config
from protocol.adapter import Adapter
from protocol.errors import Fault
from protocol.rounds import get_end_round, get_outcomes, get_round_policy
from protocol.verdict import Status
from shardcast.folder import hash_folder
from tests.support.network import PASSWORD, start_network
from tests.support.trainer_kit import make_scorer
from trainer.audit import audit_policy
from trainer.checkpoint import Generations
from trainer.config import TrainerConfig
from trainer.warmup import make_base_policy
from troth.cheats import CHEATS
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
num_epochs = 6
commit_blocks = 20
receipt_blocks = 10
verdict_commit_blocks = 20
verdict_reveal_blocks = 10
timeout_blocks = 40
[economics]
audit_ppm = 500_000
probation_groups = 0
"""


class BaseOnly(NodeWorker):
    """Never applies an adapter: the base policy is here already."""

    def _policy_folder(self, task, assignment):
        self._prefetch.want(task, 0)
        return self._prefetch.get(0)

    def _verify(self, folder, assignment):
        """It knows."""


class AdapterBefore(NodeWorker):
    """Generates with the adapter before the round's, once there is one."""

    def _policy_folder(self, task, assignment):
        version = assignment.policy_version - (assignment.policy_version > 1)
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


async def run_command(network, name: str, *arguments: object) -> tuple[str, str]:
    """`troth` as a process, with the directory of `name`; stdout and stderr."""
    settings = network.settings(name)
    words = [*map(str, arguments), "--directory", settings.directory, "--ledger.rpc", network.server.url]
    environment = {**os.environ, "TROTH_PASSWORD": PASSWORD, "OMP_NUM_THREADS": "1"}
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "troth", *words, stdout=pipe, stderr=pipe, env=environment
    )
    out, err = (data.decode() for data in await process.communicate())
    assert process.returncode == 0, err
    return out, err


async def publish(network, base: Path) -> None:
    """What an initiator types."""
    terms = ["--rank", TERMS.rank, "--modules", ",".join(reversed(TERMS.modules))]
    described, said = await run_command(network, "trainer", "policy", "describe", base, *terms)
    assert "% of the base's" in said
    file = network.directory / "task.toml"
    file.write_text(described + TASK)
    shown, _ = await run_command(network, "initiator", "task", "publish", file, "--base", base, "--yes", "--json")
    published = json.loads(shown)
    assert published["adapter"] == {"rank": TERMS.rank, "alpha": TERMS.alpha, "modules": list(TERMS.modules)}
    network.task_id = bytes.fromhex(published["task"])
    await network.until(lambda: network.task_id in network.ledger.state.tasks)


def keep_optimizers(network, kept: dict[int, bytes]) -> None:
    """Copy the optimiser states that an auditor would ask the trainer for: it has only the newest two itself."""
    generations = Generations(network.directory / "trainer" / "generations" / network.task_id.hex()[:16])
    for version in set(generations.list_versions()) - kept.keys():
        with contextlib.suppress(Fault):  # it was replaced meanwhile
            kept[version] = generations.load(version).read_optimizer()


async def audit_newest(network, optimizers: dict[int, bytes], scratch: Path):
    """Re-run the newest recorded step."""
    version = max(v for v in range(1, len(network.task.policies)) if v - 1 in optimizers)
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
            optimizer=optimizers[version - 1],
            hash_folder=lambda folder: hash_folder(folder, links=LINKS),
            scratch=scratch / "policy",
        )


@pytest.mark.slow
@pytest.mark.timeout(420)
def test_adapters_are_trained_spread_used_verified_and_run_again(tmp_path, monkeypatch):
    base = tmp_path / "base"
    make_base_policy(base, SortEnvironment(2), seed=0, target=0.3)
    # With the first version at which it makes a difference.
    cheats = {"base-only": (BaseOnly, 1), "adapter-before": (AdapterBefore, 2)}
    for name, (kind, _) in cheats.items():
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

            optimizers: dict[int, bytes] = {}

            def is_done():
                keep_optimizers(network, optimizers)
                outcomes = [find_outcomes(network, name) for name in HONEST]
                used = all(sum(version > 0 for version in found) >= VERSIONS for found in outcomes)
                return used and all(is_caught(name) for name in cheats)

            def is_caught(name):
                found = find_outcomes(network, name)
                return Status.CHEAT in {status for line in found.values() for status in line}

            await network.until(is_done, timeout_s=330)
            for name in HONEST:
                statuses = [status for line in find_outcomes(network, name).values() for status in line]
                assert set(statuses) == {Status.GOOD}, name
                check_downloads(tmp_path / name, base, VERSIONS)
            check_downloads(tmp_path / "verifier", base, VERSIONS)
            check_downloads(tmp_path / "relay", base, VERSIONS)
            for name, (_, first) in cheats.items():
                for version, statuses in find_outcomes(network, name).items():
                    assert Status.CHEAT not in statuses or version >= first, f"{name} was honest at version {version}"
            result = await audit_newest(network, optimizers, tmp_path / "audit")
            result.require_equal()
            assert result.version >= VERSIONS

    asyncio.run(asyncio.wait_for(scenario(), 400))
