"""Policies that are nearly the policy: each is what its name says, changes only what it should, and loads like any other."""

from __future__ import annotations

from itertools import islice

import pytest
import torch
from safetensors.torch import load_file, save_file

from environments.sort import SortEnvironment
from models.policy import load_model, read_tensors
from protocol.errors import ConfigError
from tests.support.adapters import make_adapter
from tests.support.scenario import make_model
from troth.calibrate.alternatives import (
    ALTERNATIVES,
    add_adapter,
    is_linear,
    make_alternatives,
    prune,
    round_to_fp8,
    round_to_int4,
    round_to_int8,
    shuffle,
)

WEIGHT = torch.randn(24, 100, generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("alternatives") / "base", 5)


@pytest.fixture(scope="module")
def made(base, tmp_path_factory):
    """Tensors of every alternative of a random model, by name."""
    work = tmp_path_factory.mktemp("made")
    return {name: load_file(folder / "model.safetensors") for name, folder in make_alternatives(base, work, None, 0)}


def test_int8_is_a_grid_of_255_levels_by_channel():
    rounded, scale = round_to_int8(WEIGHT), WEIGHT.abs().amax(dim=1, keepdim=True) / 127
    levels = rounded / scale
    assert torch.allclose(levels, levels.round(), atol=1e-4)
    assert levels.abs().max() <= 127.001
    assert ((rounded - WEIGHT).abs() <= scale * 0.5001).all()


def test_fp8_keeps_three_mantissa_bits():
    rounded = round_to_fp8(torch.tensor([[448.0, 17.0, 19.0, 0.4375, 0.45, -30.1, 2.0**-9, 0.0]]))
    assert rounded.tolist() == [[448.0, 16.0, 20.0, 0.4375, 0.4375, -30.0, 2.0**-9, 0.0]]
    assert (round_to_fp8(WEIGHT) - WEIGHT).abs().max() <= WEIGHT.abs().max() / 16


@pytest.mark.parametrize("group", [32, 128])
def test_int4_is_a_grid_of_16_levels_by_group(group):
    rounded = round_to_int4(WEIGHT, group)
    assert rounded.shape == WEIGHT.shape
    for part, source in zip(rounded.split(group, dim=1), WEIGHT.split(group, dim=1), strict=True):
        levels = part / (source.abs().amax(dim=1, keepdim=True) * 2 / 15)
        assert torch.allclose(levels, levels.round(), atol=1e-4)
        assert len(set(levels.round().flatten().tolist())) == 16
        assert -8 <= levels.round().min() <= levels.round().max() <= 7


@pytest.mark.parametrize("share", [0.1, 0.3])
def test_pruning_takes_the_smallest(share):
    pruned = prune(WEIGHT, share)
    gone = pruned == 0
    assert int(gone.sum()) == int(share * WEIGHT.numel())
    assert WEIGHT[gone].abs().max() <= WEIGHT[~gone].abs().min()
    assert torch.equal(pruned[~gone], WEIGHT[~gone])


def test_an_adapter_adds_a_matrix_of_rank_8():
    change = add_adapter(WEIGHT, torch.Generator().manual_seed(1)) - WEIGHT
    assert 1e-4 < change.std() < 1e-2
    singular = torch.linalg.svdvals(change.double())
    assert singular[7] > 100 * singular[8]


def test_a_shuffled_matrix_has_the_same_numbers():
    shuffled = shuffle(WEIGHT, torch.Generator().manual_seed(1))
    assert not torch.equal(shuffled, WEIGHT)
    assert torch.equal(shuffled.flatten().sort().values, WEIGHT.flatten().sort().values)


def test_every_alternative_is_made_and_loads(base, made, tmp_path):
    assert tuple(made) == ALTERNATIVES
    source = dict(read_tensors(base))
    for name, tensors in made.items():
        assert tensors.keys() == source.keys()
        assert any(not torch.equal(tensors[key].float(), source[key]) for key in source), name
        assert all(torch.isfinite(tensor.float()).all() for tensor in tensors.values()), name
    [(_, folder)] = make_alternatives(base, tmp_path, ["int4-32"], 0)
    assert torch.equal(load_model(folder).state_dict()["lm_head.weight"], source["lm_head.weight"])


@pytest.mark.parametrize("name", ["int8", "fp8", "int4-32", "int4-128", "pruned-10", "pruned-30", "lora"])
def test_formats_change_linear_layers_alone(base, made, name):
    changed = {key for key, tensor in read_tensors(base) if not torch.equal(made[name][key], tensor)}
    linear = {key for key, tensor in read_tensors(base) if is_linear(key, tensor)}
    assert changed == linear
    assert len(linear) == 14
    assert not any("embed" in key or "lm_head" in key or "norm" in key for key in linear)


@pytest.mark.parametrize(("name", "ratio"), [("noise-0.1", 1e-3), ("noise-1", 1e-2), ("noise-3", 3e-2)])
def test_noise_is_a_share_of_each_tensors_deviation(base, made, name, ratio):
    for key, tensor in read_tensors(base):
        change = (made[name][key] - tensor).std(correction=0) / tensor.std(correction=0).clamp(min=1e-9)
        assert abs(float(change) - (ratio if tensor.dim() > 1 else 0)) < 0.1 * ratio, key


@pytest.mark.parametrize("rate", ["1e-6", "1e-5", "1e-4"])
def test_stale_policies_are_steps_of_the_optimiser(base, made, rate):
    """AdamW's first step moves every weight that has a gradient by the learning rate; later ones add up."""
    source = dict(read_tensors(base))
    reached = []
    for steps in (1, 2, 5, 10):
        tensors = made[f"stale-{steps}@{rate}"]
        change = torch.cat([(tensors[key] - source[key]).flatten() for key in source if is_linear(key, source[key])])
        assert change.abs().max() <= 1.05 * steps * float(rate)
        reached.append(float(change.abs().mean()))
    assert reached == sorted(reached)
    assert reached[0] > 0.8 * float(rate)


def test_the_same_seed_gives_the_same_bytes(base, made, tmp_path):
    """Also when others are left out, and those of other seeds differ."""
    names = ["noise-1", "lora", "sibling", "stale-2@1e-5"]
    again = dict(make_alternatives(base, tmp_path / "again", names, 0))
    other = dict(make_alternatives(base, tmp_path / "other", names, 1))
    for name in names:
        tensors, others = (load_file(one[name] / "model.safetensors") for one in (again, other))
        assert all(torch.equal(tensors[key], made[name][key]) for key in tensors)
        assert any(not torch.equal(others[key], made[name][key]) for key in tensors)


def test_with_a_task_siblings_are_warmed_up_and_steps_learn_from_its_rewards(base, tmp_path):
    environment = SortEnvironment(1)
    made = dict(make_alternatives(base, tmp_path, ["sibling", "stale-1@1e-4"], 0, environment=environment))
    source, sibling = dict(read_tensors(base)), load_file(made["sibling"] / "model.safetensors")
    for key, tensor in source.items():
        assert tensor.shape == sibling[key].shape
        if tensor.dim() == 2:
            assert not torch.equal(tensor.flatten().sort().values, sibling[key].flatten().sort().values), key
    assert load_file(made["stale-1@1e-4"] / "model.safetensors").keys() == source.keys()


def test_a_bf16_policy_stays_bf16_where_it_is_published_so(base, tmp_path):
    narrow = tmp_path / "narrow"
    narrow.mkdir()
    (narrow / "config.json").write_bytes((base / "config.json").read_bytes())
    save_file({key: tensor.bfloat16() for key, tensor in read_tensors(base)}, narrow / "model.safetensors")
    made = dict(make_alternatives(narrow, tmp_path / "work", ["int8", "stale-1@1e-4"], 0))
    dtypes = {name: {t.dtype for _, t in read_tensors(folder)} for name, folder in made.items()}
    assert dtypes == {"int8": {torch.bfloat16, torch.float32}, "stale-1@1e-4": {torch.bfloat16}}
    with pytest.raises(ConfigError, match="bf16 leaves every weight"):
        list(make_alternatives(narrow, tmp_path / "named", ["bf16"], 0))
    first = [name for name, _ in islice(make_alternatives(narrow, tmp_path / "all", None, 0), 5)]
    assert first == ["int8", "fp8", "int4-32", "int4-128", "pruned-10"]


def test_alternatives_of_an_adapter_are_those_of_its_merged_weights(base, tmp_path):
    folder = make_adapter(tmp_path / "adapter", base, 1)
    merged = dict(read_tensors(folder))
    made = dict(make_alternatives(folder, tmp_path / "work", ["int8", "stale-1@1e-6"], 0))
    key = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.equal(merged[key], dict(read_tensors(base))[key])
    assert torch.equal(load_file(made["int8"] / "model.safetensors")[key], round_to_int8(merged[key]))
    assert (load_file(made["stale-1@1e-6"] / "model.safetensors")[key] - merged[key]).abs().max() <= 2e-6


def test_bad_names_and_folders_are_refused_before_anything_is_made(base, tmp_path):
    with pytest.raises(ConfigError, match="did you mean int8"):
        make_alternatives(base, tmp_path, ["int9"], 0)
    (tmp_path / "int8").mkdir()
    with pytest.raises(ConfigError, match="exists"):
        make_alternatives(base, tmp_path, ["fp8", "int8"], 0)
    assert not (tmp_path / "fp8").exists()
