"""One training step: the same bits again, also over small batches and after loading; bad numbers change nothing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import load_file, save_file

from environments.sort import SortEnvironment
from models.policy import load_model, read_hidden_size
from protocol.errors import Fault
from protocol.ports import SampleRequest
from tests.support.scenario import make_model
from trainer.batch import GroupKey, TrainingGroup, choose_batch
from trainer.config import TrainerConfig
from trainer.decode import generate, make_gumbel_pick
from trainer.evaluate import evaluate_policy
from trainer.packing import compute_logprobs, make_micro_batches
from trainer.policy import write_files, write_policy
from trainer.step import Learner
from verifier.scorer import TorchScorer

CONFIG = TrainerConfig(learning_rate=6e-4, warmup_steps=0, total_steps=10, minibatch_groups=0)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("models") / "base", 0, scale=2.0)


@pytest.fixture(scope="module")
def groups(base):
    """Groups of different prompt and completion lengths, scored by the verifier's prefill, rewards by token parity."""
    scorer = TorchScorer()
    scorer.load(base)
    model, made = load_model(base), []
    for slot in range(6):
        prompt = tuple(range(2, 5 + slot % 3))
        keys = np.arange(8, dtype=np.uint64) + np.uint64(100 * slot)
        pick = make_gumbel_pick(keys, temperature=1.0, vocab_size=32)
        lines = tuple(generate(model, [prompt] * 8, max_tokens=6, stop_tokens=(1, 7, 9, 12, 20), pick=pick))
        scored = scorer.score([SampleRequest(prompt, int(key)) for key in keys], lines, temperature=1.0)
        rewards = np.array([1_000_000 * (sum(line) % 2) for line in lines])
        logprobs = tuple(one.logprobs.astype(np.float32) for one in scored)
        made.append(TrainingGroup(GroupKey(0, b"n", slot), bytes([slot]) * 32, 0, prompt, lines, rewards, logprobs))
    assert len({len(line) for group in made for line in group.completions}) > 2
    return made


def weights_of(learner):
    return load_tensors(learner.encode_policy()["model.safetensors"])


def train(base, groups, config=CONFIG, steps=1, **extra):
    learner = Learner(config, base, temperature=1.0, **extra)
    reports = [learner.step(groups, version) for version in range(steps)]
    return learner, reports


def test_the_same_step_gives_the_same_bits(base, groups):
    first, second = (train(base, groups, steps=3)[0] for _ in range(2))
    assert first.encode_policy() == second.encode_policy()
    assert first.encode_optimizer() == second.encode_optimizer()
    assert first.encode_policy() != Learner(CONFIG, base, temperature=1.0).encode_policy()


def test_a_lineage_that_was_saved_and_loaded_goes_on_with_the_same_bits(base, groups, tmp_path):
    learner, _ = train(base, groups, steps=2)
    write_files(tmp_path / "policy", learner.encode_policy())
    loaded = Learner(CONFIG, tmp_path / "policy", temperature=1.0, optimizer=learner.encode_optimizer())
    for one in (learner, loaded):
        one.step(groups, 2)
    assert loaded.encode_policy() == learner.encode_policy()
    assert loaded.encode_optimizer() == learner.encode_optimizer()


def test_accumulation_over_small_batches_gives_the_same_step(base, groups):
    whole, (report,) = train(base, groups)
    parts, (report_parts,) = train(base, groups, replace(CONFIG, tokens_max=40))
    assert report_parts.loss == pytest.approx(report.loss, abs=1e-5)
    assert report_parts.grad_norm == pytest.approx(report.grad_norm, rel=1e-3)
    one, other = (
        weights_of(whole),
        weights_of(parts),
    )
    assert max(float((one[name] - other[name]).abs().max()) for name in one) < 2e-4


def test_minibatches_cover_the_batch_once_per_epoch(base, groups):
    learner, (report,) = train(base, groups, replace(CONFIG, minibatch_groups=4))
    state = load_tensors(learner.encode_optimizer())
    # Six groups make two minibatches of three.
    assert state["step.lm_head.weight"].item() == 2 * CONFIG.epochs
    assert report.tokens == sum(len(line) for group in groups for line in group.completions)


def test_on_policy_ratios_are_1(base, groups):
    """Our log-probabilities are those of the verifier's scorer, at every position and any padding."""
    learner = Learner(CONFIG, base, temperature=1.0)
    for part in make_micro_batches(groups, np.zeros((6, 8), dtype=np.float32), 100, "cpu"):
        with torch.no_grad():
            new, _ = compute_logprobs(learner.model, part, 1.0, with_entropy=False)
        assert float(((new - part.old) * part.mask).abs().max()) < 1e-4
        assert bool((part.old[part.mask] < 0).all())


def test_temperature_is_the_tasks(base, groups):
    """At another temperature than the rollouts' the ratios are not 1."""
    learner = Learner(CONFIG, base, temperature=0.5)
    part = next(make_micro_batches(groups, np.zeros((6, 8), dtype=np.float32), 10**6, "cpu"))
    with torch.no_grad():
        new, _ = compute_logprobs(learner.model, part, 0.5, with_entropy=False)
    assert float(((new - part.old) * part.mask).abs().max()) > 0.05


def test_rewarded_completions_become_likelier(base, groups):
    learner, reports = train(base, groups, replace(CONFIG, learning_rate=1e-3), steps=4)
    part = next(make_micro_batches(groups, np.ones((6, 8), dtype=np.float32), 10**6, "cpu"))
    with torch.no_grad():
        new, _ = compute_logprobs(learner.model, part, 1.0, with_entropy=False)
    gain = ((new - part.old) * part.mask).sum(dim=1).numpy()
    rows = sorted(
        (
            (len(g.prompt) + len(line), int(r))
            for g in groups
            for line, r in zip(g.completions, g.rewards_micro, strict=True)
        ),
        key=lambda row: row[0],
    )
    rewarded = np.array([reward > 0 for _, reward in rows])
    assert gain[rewarded].mean() > gain[~rewarded].mean() + 0.02
    assert all(report.updates_skipped == report.tokens_skipped == 0 for report in reports)


def test_groups_without_variance_are_reported_but_not_trained_on(base, groups):
    flat = replace(groups[0], key=GroupKey(0, b"n", 9), rewards_micro=np.zeros(8, dtype=np.int64))
    with_flat, (report,) = train(base, [*groups, flat])
    without, (alone,) = train(base, groups)
    assert (report.groups, report.informative) == (7, 6)
    assert report.reward_mean == pytest.approx(alone.reward_mean * 6 / 7)
    assert with_flat.encode_policy() == without.encode_policy()
    with pytest.raises(Fault, match="nothing to learn"):
        train(base, [flat])


def test_T3_a_gradient_that_is_not_finite_changes_nothing(base, groups, tmp_path):
    tensors = load_file(base / "model.safetensors")
    tensors["lm_head.weight"][3, 0] = float("nan")
    broken = tmp_path / "broken"
    write_policy(broken, (base / "config.json").read_bytes(), b"")
    save_file(tensors, broken / "model.safetensors")
    before = Learner(CONFIG, broken, temperature=1.0)
    after, (report,) = train(broken, groups)
    assert report.updates_skipped == CONFIG.epochs
    assert after.encode_policy() == before.encode_policy()
    assert after.encode_optimizer() == before.encode_optimizer()


def test_T3_impossible_old_logprobs_are_left_out(base, groups):
    lines = list(groups[0].logprobs)
    lines[0] = np.full_like(lines[0], -np.inf)
    lines[1] = lines[1] - 200
    learner, (report,) = train(base, [replace(groups[0], logprobs=tuple(lines)), *groups[1:]])
    assert report.tokens_skipped == len(lines[0]) * CONFIG.epochs
    assert report.updates_skipped == 0
    assert all(bool(torch.isfinite(tensor).all()) for tensor in weights_of(learner).values())


def test_kl_keeps_the_policy_near_its_reference(base, groups):
    free = replace(CONFIG, learning_rate=2e-3)
    bound = replace(CONFIG, learning_rate=2e-3, kl=20.0)

    def distance(config):
        learner, reports = train(base, groups, config, steps=4, reference=base)
        start = weights_of(Learner(config, base, temperature=1.0))
        end = weights_of(learner)
        part = next(make_micro_batches(groups, np.ones((6, 8), dtype=np.float32), 10**6, "cpu"))
        with torch.no_grad():
            new, _ = compute_logprobs(learner.model, part, 1.0, with_entropy=False)
        assert start.keys() == end.keys()
        return float(((new - part.old) * part.mask).abs().mean()), reports[-1].kl

    (far, _), (near, kl) = distance(free), distance(bound)
    assert near < far / 2
    assert 0 < kl < 0.1


def test_entropy_bonus_raises_entropy(base, groups):
    def entropy(coefficient):
        config = replace(CONFIG, learning_rate=2e-3, entropy=coefficient)
        return train(base, groups, config, steps=4)[1][-1].entropy

    assert entropy(2.0) > entropy(1e-9) + 0.02


def test_a_bf16_policy_keeps_float32_weights_in_the_optimiser_state(base, groups, tmp_path):
    narrow = tmp_path / "bf16"
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(base / "model.safetensors").items()}
    write_policy(narrow, (base / "config.json").read_bytes(), b"")
    save_file(tensors, narrow / "model.safetensors")
    learner, _ = train(narrow, groups)
    assert {tensor.dtype for tensor in weights_of(learner).values()} == {torch.bfloat16}
    next_folder = tmp_path / "next"
    write_files(next_folder, learner.encode_policy())
    loaded = Learner(CONFIG, next_folder, temperature=1.0, optimizer=learner.encode_optimizer())
    for one in (learner, loaded):
        one.step(groups, 1)
    assert loaded.encode_policy() == learner.encode_policy()


@pytest.mark.parametrize("tie", [False, True])
def test_policies_are_written_as_they_were_read(tmp_path, tie):
    folder = make_model(tmp_path / "model", 1, tie=tie)
    learner = Learner(CONFIG, folder, temperature=1.0)
    read, written = load_file(folder / "model.safetensors"), weights_of(learner)
    assert read.keys() == written.keys()
    assert all(torch.equal(read[name], written[name]) for name in read)
    assert read_hidden_size(folder) == 64


@pytest.mark.parametrize(
    ("damage", "error"),
    [("truncate", Fault), ("missing tensor", Fault), ("no json", Fault), ("no file", Fault)],
)
def test_a_damaged_policy_folder_is_named(tmp_path, damage, error):
    folder = make_model(tmp_path / "model", 1)
    weights = folder / "model.safetensors"
    if damage == "truncate":
        weights.write_bytes(weights.read_bytes()[:-5])
    elif damage == "missing tensor":
        tensors = load_file(weights)
        del tensors["lm_head.weight"]
        save_file(tensors, weights)
    elif damage == "no json":
        (folder / "config.json").write_text("[")
    else:
        weights.unlink()
    with pytest.raises(error, match=str(folder)):
        Learner(CONFIG, folder, temperature=1.0)


def test_an_optimiser_state_of_another_shape_is_a_fault(base, tmp_path):
    other = Learner(CONFIG, make_model(tmp_path / "other", 1, hidden=32), temperature=1.0)
    learner = Learner(CONFIG, base, temperature=1.0, optimizer=other.encode_optimizer())
    del learner
    with pytest.raises(Fault, match="optimiser state"):
        Learner(CONFIG, base, temperature=1.0, optimizer=b"\x08" + bytes(20))


def test_evaluation_is_repeatable_and_bounded(base):
    environment = SortEnvironment(1)
    arguments = {"num_samples": 3, "temperature": 1.0, "max_tokens": 4, "stop_tokens": (1,)}
    first = evaluate_policy(base, environment, range(6), **arguments)
    assert first == evaluate_policy(base, environment, range(6), **arguments)
    assert (first.num_prompts, first.num_samples) == (6, 3)
    assert 0 <= first.reward_mean <= 1
    assert 1 <= first.tokens_mean <= 4


def key(round_index, node, slot=0):
    return GroupKey(round_index, node.encode(), slot)


def waiting(*keys, version=0):
    flat = np.zeros(2, dtype=np.int64)
    return [TrainingGroup(k, bytes(32), version, (), (), flat, ()) for k in keys]


def choose(groups, *, version=0, groups_max=100, num_nodes=9, config=CONFIG):
    batch = choose_batch(config, groups, version=version, max_staleness=2, groups_max=groups_max, num_nodes=num_nodes)
    return [group.key for group in batch]


def test_batches_are_in_ledger_order_and_bounded_oldest_first():
    keys = [key(r, node, slot) for r in range(3) for node in "abc" for slot in range(2)]
    assert choose(waiting(*reversed(keys))) == keys
    assert choose(waiting(*keys), groups_max=4) == keys[:4]


def test_stale_groups_are_left_out():
    fresh, old = waiting(key(1, "a"), version=3), waiting(key(0, "b"), version=2)
    assert choose([*fresh, *old], version=5, num_nodes=1) == [key(1, "a")]


def test_T1_a_flooding_node_gets_at_most_its_share():
    flood = [key(0, "f", slot) for slot in range(50)]
    others = [key(0, node, 0) for node in "xyz"]
    batch = choose(waiting(*flood, *others))
    assert batch == [*flood[:3], *others]
    assert choose(waiting(*flood)) == []
    assert choose(waiting(*flood), num_nodes=1) == flood
    quarter = TrainerConfig(node_share_max_ppm=250_000)
    batch = choose(waiting(*flood, *[key(0, node, slot) for node in "wxyz" for slot in range(2)]), config=quarter)
    assert sum(k.account == b"f" for k in batch) * 4 <= len(batch)
