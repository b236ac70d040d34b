"""Re-running real steps of a real run: equal hashes for an honest trainer, and what a dishonest one cannot hide."""

from __future__ import annotations

import asyncio
import hashlib
import shutil

import pytest
from msgspec.structs import replace
from safetensors.torch import load_file, save_file

from environments.sort import SortEnvironment
from protocol.codec import decode
from protocol.errors import Fault, Reject
from protocol.messages import LINEAGE_BYTES_MAX, Lineage, Signed, compute_lineage_key, make_domain, seal
from tests.support.scenario import make_key
from tests.support.trainer_kit import TrainerNetwork, make_scorer
from tests.support.twins import hash_policy
from trainer.audit import audit_policy
from trainer.config import TrainerConfig
from trainer.warmup import make_base_policy

VERSION = 2


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A short run, and the parent generation of policy 2 as the trainer left it."""
    directory = tmp_path_factory.mktemp("audit")
    make_base_policy(directory / "base", SortEnvironment(2), seed=0, target=0.3)
    network = TrainerNetwork(directory, directory / "base")
    asyncio.run(network.run(80, until=network.has_version(VERSION)))
    generations = directory / "trainer" / "generations" / network.world.task_id.hex()[:16]
    optimizer = (generations / f"{VERSION - 1:08d}" / "optimizer.safetensors").read_bytes()
    return network, optimizer


def audit(run, scratch, *, config=None, optimizer=None):
    network, kept = run
    world = network.world
    return asyncio.run(
        audit_policy(
            network.trainer_ledger,
            world.task,
            VERSION,
            blobs=world.blobs,
            policies=world.policies,
            environment=world.environment,
            make_scorer=make_scorer,
            config=config or network.config,
            optimizer=optimizer or kept,
            hash_folder=hash_policy,
            scratch=scratch,
        )
    )


def test_an_honest_step_gives_the_recorded_policy(run, tmp_path):
    result = audit(run, tmp_path / "policy")
    result.require_equal()
    assert result.computed == run[0].world.task.policies[VERSION].policy
    assert result.distance == 0
    step = run[0].steps[VERSION - 1]
    assert (result.report.loss, result.report.grad_norm) == (step["loss"], step["grad_norm"])


@pytest.mark.parametrize("field", ["learning_rate", "epochs"])
def test_other_settings_than_recorded_are_refused(run, tmp_path, field):
    config = TrainerConfig(**{"total_steps": 20, "warmup_steps": 2, field: 1e-5 if field == "learning_rate" else 5})
    with pytest.raises(Reject, match="settings"):
        audit(run, tmp_path / "policy", config=config)


def test_another_optimiser_state_is_refused(run, tmp_path):
    with pytest.raises(Reject, match="optimiser state"):
        audit(run, tmp_path / "policy", optimizer=run[1][:-4] + bytes(4))


@pytest.fixture
def forged(run, tmp_path):
    """The trainer records a policy with one changed weight, and signs a lineage record for it."""
    network, _ = run
    world, task = network.world, network.world.task
    policies, policy, key = world.policies, task.policies[VERSION], compute_lineage_key(task.task, VERSION)
    kept = (policies.folders[task.task, VERSION], policy.policy, policy.lineage, world.blobs.blobs[key])
    folder = tmp_path / "forged"
    shutil.copytree(kept[0], folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"][0, 0] += 0.125
    save_file(tensors, folder / "model.safetensors")
    body = decode(Signed, kept[3], bytes_max=LINEAGE_BYTES_MAX).body
    lineage = replace(decode(Lineage, body, bytes_max=LINEAGE_BYTES_MAX), policy=hash_policy(folder))
    domain = make_domain(world.chain.chain_id, world.chain.address, task.task, Lineage)
    sealed = seal(make_key("trainer"), domain, lineage)
    policies.folders[task.task, VERSION], policy.policy = folder, lineage.policy
    policy.lineage, world.blobs.blobs[key] = hashlib.sha256(sealed).digest(), sealed
    yield lineage
    policies.folders[task.task, VERSION], policy.policy, policy.lineage, world.blobs.blobs[key] = kept


def test_weights_that_were_not_trained_are_found(run, forged, tmp_path):
    result = audit(run, tmp_path / "policy")
    assert result.recorded == forged.policy != result.computed
    assert result.distance == pytest.approx(0.125, rel=1e-3)
    with pytest.raises(Reject, match="not what its lineage gives"):
        result.require_equal()


def test_a_lineage_of_another_policy_than_recorded_is_refused(run, forged, tmp_path):
    run[0].world.task.policies[VERSION].policy = bytes(32)
    with pytest.raises(Reject, match="policy of the lineage"):
        audit(run, tmp_path / "policy")


def test_a_served_lineage_that_is_not_the_recorded_one_is_our_fault_to_find_elsewhere(run, forged, tmp_path):
    run[0].world.task.policies[VERSION].lineage = bytes(32)
    with pytest.raises(Fault, match="not the recorded one"):
        audit(run, tmp_path / "policy")


def test_leaves_that_no_submission_has_are_found(run, tmp_path):
    network, _ = run
    task = network.world.task
    kept = {index: dict(receipts) for index, receipts in task.receipts.items()}
    for receipts in task.receipts.values():
        del receipts[min(receipts)]
    try:
        with pytest.raises(Reject, match="no good, fresh submission"):
            audit(run, tmp_path / "policy")
    finally:
        task.receipts.clear()
        task.receipts.update(kept)
