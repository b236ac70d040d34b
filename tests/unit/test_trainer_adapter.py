"""Training an adapter: only A and B move, what is published is what was trained, and a lineage survives and can be re-run."""

from __future__ import annotations

import asyncio
import hashlib
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.numpy import load as load_arrays

from environments.sort import SortEnvironment
from models.adapter import ADAPTER_CONFIG, ADAPTER_WEIGHTS, BASE, link_base, read_adapter_config
from models.policy import load_model
from protocol.adapter import Adapter
from protocol.errors import Fault, Reject
from protocol.ports import SampleRequest
from tests.support.adapters import BASE_POLICY, TERMS, make_adapter
from tests.support.scenario import make_model
from tests.support.trainer_kit import TrainerNetwork, make_scorer
from tests.support.twins import hash_policy
from trainer.audit import audit_policy
from trainer.batch import GroupKey, TrainingGroup
from trainer.config import TrainerConfig
from trainer.decode import generate, make_gumbel_pick
from trainer.packing import compute_logprobs, make_micro_batches
from trainer.policy import write_files
from trainer.step import LOGITS_MAX, Learner
from trainer.warmup import make_base_policy
from verifier.scorer import TorchScorer

CONFIG = TrainerConfig(learning_rate=5e-3, warmup_steps=0, total_steps=10, minibatch_groups=0)
ALL = Adapter(4, 8, ("down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"))


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("models") / "base", 0, scale=2.0)


@pytest.fixture(scope="module")
def groups(base):
    """Groups sampled from the base, scored by the verifier's prefill, rewards by token parity."""
    scorer = TorchScorer()
    scorer.load(base)
    model, made = load_model(base), []
    for slot in range(4):
        prompt = tuple(range(2, 5 + slot % 3))
        keys = np.arange(8, dtype=np.uint64) + np.uint64(100 * slot)
        pick = make_gumbel_pick(keys, temperature=1.0, vocab_size=32)
        lines = tuple(generate(model, [prompt] * 8, max_tokens=6, stop_tokens=(1, 7), pick=pick))
        scored = scorer.score([SampleRequest(prompt, int(key)) for key in keys], lines, temperature=1.0)
        rewards = np.array([1_000_000 * (sum(line) % 2) for line in lines])
        logprobs = tuple(one.logprobs.astype(np.float32) for one in scored)
        made.append(TrainingGroup(GroupKey(0, b"n", slot), bytes([slot]) * 32, 0, prompt, lines, rewards, logprobs))
    return made


def make_learner(folder, config=CONFIG, **extra):
    return Learner(config, folder, temperature=1.0, **{"adapter": TERMS, "base_policy": BASE_POLICY, **extra})


def publish(learner, folder, base):
    write_files(folder, learner.encode_policy())
    link_base(folder, base)
    return folder


def part_of(groups):
    return next(make_micro_batches(groups, np.ones((len(groups), 8), dtype=np.float32), 10**6, "cpu"))


def logprobs_of(model, groups):
    with torch.no_grad():
        return compute_logprobs(model, part_of(groups), 1.0, with_entropy=False)[0]


def test_version_0_is_the_base_itself(base, groups, tmp_path):
    folder = publish(make_learner(base), tmp_path / "zero", base)
    for name, tensor in load_model(folder).state_dict().items():
        assert torch.equal(tensor, load_model(base).state_dict()[name])
    arrays = load_arrays((folder / ADAPTER_WEIGHTS).read_bytes())
    drawn = np.concatenate([array.ravel() for name, array in arrays.items() if ".lora_A." in name])
    assert 0.9 < np.abs(drawn).max() * 8 <= 1  # +-1 / sqrt(64)
    assert abs(drawn.mean()) < 0.01
    assert make_learner(base).encode_policy() == make_learner(base).encode_policy()
    assert make_learner(base, replace(CONFIG, seed=1)).encode_policy() != make_learner(base).encode_policy()


def test_only_the_adapter_moves_and_it_is_published_as_it_is(base, groups, tmp_path):
    learner = make_learner(base)
    before = {name: tensor.clone() for name, tensor in learner.model.state_dict().items() if ".lora_" not in name}
    for version in range(3):
        learner.step(groups, version)
    after = learner.model.state_dict()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    arrays = load_arrays(learner.encode_policy()[ADAPTER_WEIGHTS])
    for name, array in arrays.items():
        kept = after[name.replace(".weight", ".default.weight")]
        assert torch.equal(kept, torch.from_numpy(array.copy()))
        assert kept.abs().sum() > 0
    names = {name.partition(".")[2] for name in load_arrays(learner.encode_optimizer())}
    assert names == set(arrays)
    folder = publish(learner, tmp_path / "policy", base)
    trained, published = logprobs_of(learner.model, groups), logprobs_of(load_model(folder), groups)
    assert torch.allclose(trained, published, atol=1e-5)
    assert (published - logprobs_of(load_model(base), groups)).abs().max() > 0.05


def test_the_reward_grows(base, groups):
    """The likelihood of the rewarded completions against the others, after a few steps on them."""
    learner = make_learner(base, adapter=ALL)
    part = part_of(groups)
    rewards = torch.tensor([line % 2 for group in groups for line in map(sum, group.completions)])
    rows = sorted(range(len(rewards)), key=lambda row: part_lengths(groups)[row])
    good = rewards[rows].bool()

    def gap():
        sums = (logprobs_of(learner.model, groups) * part.mask).sum(dim=1)
        return float(sums[good].mean() - sums[~good].mean())

    start = gap()
    for version in range(6):
        learner.step(groups, version)
    assert gap() > start + 0.5


def part_lengths(groups):
    return [len(group.prompt) + len(line) for group in groups for line in group.completions]


def test_a_lineage_that_was_saved_and_loaded_goes_on_with_the_same_bits(base, groups, tmp_path):
    learner = make_learner(base)
    for version in range(2):
        learner.step(groups, version)
    folder = publish(learner, tmp_path / "policy", base)
    loaded = make_learner(folder, optimizer=learner.encode_optimizer())
    assert loaded.encode_policy() == learner.encode_policy()
    for one in (learner, loaded):
        one.step(groups, 2)
    assert loaded.encode_policy() == learner.encode_policy()
    assert loaded.encode_optimizer() == learner.encode_optimizer()


def test_the_reference_is_the_base_under_the_adapter(base, groups):
    bound, free = (replace(CONFIG, kl=kl) for kl in (20.0, 0.0))

    def distance(config):
        learner = make_learner(base, config)
        for version in range(4):
            report = learner.step(groups, version)
        moved = (logprobs_of(learner.model, groups) - logprobs_of(load_model(base), groups)).abs().mean()
        return float(moved), report.kl, learner

    moved_free, _, _ = distance(free)
    moved_bound, kl, learner = distance(bound)
    assert moved_bound < moved_free / 2
    assert kl > 0
    with learner._weights.reference() as model:
        assert torch.equal(logprobs_of(model, groups), logprobs_of(load_model(base), groups))
    # Outside of the reference the adapter counts again, and is trained again.
    before = learner.encode_policy()
    learner.step(groups, 4)
    assert learner.encode_policy() != before


def test_accumulation_gives_the_same_step_and_is_bounded_by_the_vocabulary(base, groups, monkeypatch):
    whole, parts = make_learner(base), make_learner(base)
    report = whole.step(groups, 0)
    monkeypatch.setattr("trainer.step.LOGITS_MAX", 32 * 40)
    seen = []
    real = compute_logprobs

    def watch(model, part, *args, **kwargs):
        seen.append(part.inputs.numel())
        return real(model, part, *args, **kwargs)

    monkeypatch.setattr("trainer.step.compute_logprobs", watch)
    report_parts = parts.step(groups, 0)
    assert max(seen) <= 40 < sum(seen)
    assert report_parts.loss == pytest.approx(report.loss, abs=1e-5)
    assert report_parts.grad_norm == pytest.approx(report.grad_norm, rel=1e-3)
    assert LOGITS_MAX // 49_152 > 1024, "a real vocabulary still allows whole rollouts"


def test_what_is_not_the_tasks_kind_of_policy_is_refused(base, tmp_path):
    folder = make_adapter(tmp_path / "adapter", base, 0)
    with pytest.raises(Fault, match="policies of this task are whole"):
        Learner(CONFIG, folder, temperature=1.0)
    with pytest.raises(Fault, match="expected rank 2"):
        make_learner(folder, adapter=Adapter(2, 8, TERMS.modules))
    with pytest.raises(Fault, match="no module c_attn"):
        make_learner(base, adapter=Adapter(2, 8, ("c_attn",)))
    with pytest.raises(Fault, match="belongs to a Embedding"):
        make_learner(base, adapter=Adapter(2, 8, ("embed_tokens",)))
    whole = Learner(CONFIG, base, temperature=1.0).encode_optimizer()
    with pytest.raises(Fault, match="optimiser state does not fit"):
        make_learner(folder, optimizer=whole)


# A task


@pytest.fixture(scope="module")
def sort_base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "base"
    make_base_policy(folder, SortEnvironment(2), seed=0, target=0.3)
    return folder


def make_network(directory, base):
    config = TrainerConfig(total_steps=20, warmup_steps=2, learning_rate=3e-3)
    return TrainerNetwork(directory, base, config=config, adapter=ALL)


def generations_of(network):
    return network.world.directory / "trainer" / "generations" / network.world.task_id.hex()[:16]


@pytest.fixture(scope="module")
def run(sort_base, tmp_path_factory):
    """A short run and its kept optimiser states by version of the policy they belong to."""
    network = make_network(tmp_path_factory.mktemp("run"), sort_base)
    kept = {}

    async def scenario():
        for version in (1, 2, 3):
            await network.run(80, until=network.has_version(version))
            for folder in generations_of(network).glob("*[0-9]"):
                kept[int(folder.name)] = (folder / "optimizer.safetensors").read_bytes()
        await network.run(20, until=network.has_version(4))

    asyncio.run(scenario())
    return network, kept


def audit(run, version, scratch):
    network, kept = run
    world = network.world
    return asyncio.run(
        audit_policy(
            network.trainer_ledger,
            world.task,
            version,
            blobs=world.blobs,
            policies=world.policies,
            environment=world.environment,
            make_scorer=make_scorer,
            config=network.config,
            optimizer=kept[version - 1],
            hash_folder=hash_policy,
            scratch=scratch,
        )
    )


def test_nodes_use_the_adapters_that_the_trainer_makes(run, sort_base):
    network, _ = run
    task, policies = network.world.task, network.world.policies
    assert len(task.policies) >= 4
    for version in range(1, 4):
        folder = policies.folders[task.task, version]
        assert sorted(path.name for path in folder.iterdir()) == [ADAPTER_CONFIG, ADAPTER_WEIGHTS, BASE]
        assert read_adapter_config(folder) == (ALL, hash_policy(sort_base))
    assert max(step["version"] - 1 - step["staleness_max"] for step in network.steps) >= 1, "adapters were sampled from"
    assert network.count("dropped") == network.count("fault") == network.count("fetch_failed") == 0


@pytest.mark.parametrize("version", [1, 3])
def test_a_step_can_be_run_again(run, tmp_path, version):
    result = audit(run, version, tmp_path / "policy")
    result.require_equal()
    assert result.distance == 0


def test_an_adapter_that_was_not_trained_is_found(run, tmp_path):
    network, _ = run
    task, policies = network.world.task, network.world.policies
    kept = policies.folders[task.task, 3]
    forged = shutil.copytree(kept, tmp_path / "forged", symlinks=True)
    data = bytearray((forged / ADAPTER_WEIGHTS).read_bytes())
    last = np.frombuffer(bytes(data[-4:]), "<f4") + np.float32(0.125)
    data[-4:] = last.astype("<f4").tobytes()
    (forged / ADAPTER_WEIGHTS).write_bytes(data)
    policies.folders[task.task, 3] = forged
    recorded, task.policies[3].policy = task.policies[3].policy, hash_policy(forged)
    try:
        with pytest.raises(Reject, match="policy of the lineage"):
            audit(run, 3, tmp_path / "policy")
    finally:
        policies.folders[task.task, 3], task.policies[3].policy = kept, recorded


def test_a_trainer_that_was_killed_goes_on_from_its_generation(sort_base, tmp_path):
    network = make_network(tmp_path, sort_base)

    async def scenario():
        await network.run(60, until=network.has_version(1))
        newest = sorted(generations_of(network).glob("*[0-9]"))[-1]
        digest = hashlib.sha256((newest / "policy" / ADAPTER_WEIGHTS).read_bytes()).hexdigest()
        (newest / "policy" / BASE).unlink()
        (newest / "policy" / BASE).symlink_to(tmp_path / "moved")
        await network.restart()
        await network.step_trainer()
        assert (newest / "policy" / BASE).resolve() == sort_base.resolve()
        assert hashlib.sha256((newest / "policy" / ADAPTER_WEIGHTS).read_bytes()).hexdigest() == digest
        await network.run(60, until=network.has_version(3))

    asyncio.run(scenario())
    assert network.count("resumed") == 1
    assert len(network.world.task.policies) > 3


def test_a_trainer_that_lost_its_disk_adopts_the_ledgers_adapter(sort_base, tmp_path):
    network = make_network(tmp_path, sort_base)

    async def scenario():
        await network.run(60, until=network.has_version(2))
        await network.restart(tmp_path / "elsewhere")
        await network.run(60, until=network.has_version(4))

    asyncio.run(scenario())
    assert network.count("adopted") == 2
    assert len(network.world.task.policies) > 4
