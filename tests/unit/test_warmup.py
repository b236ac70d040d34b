"""Base policies: right now and then, the same bytes for the same seed, and honest about what cannot be done."""

from __future__ import annotations

import hashlib
import json

import pytest
from safetensors.torch import load_file

from environments.sort import EOS, SortEnvironment
from protocol.errors import ConfigError, Fault
from trainer.evaluate import evaluate_policy
from trainer.warmup import Shape, make_base_policy

SMALL = Shape(hidden=64, layers=1, heads=2, intermediate=128)


def digest(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def make(folder, seed=0, **extra):
    return make_base_policy(folder, SortEnvironment(1), seed=seed, target=0.2, shape=SMALL, learning_rate=3e-3, **extra)


def test_the_same_seed_gives_the_same_bytes_and_another_seed_others(tmp_path):
    made = [make(tmp_path / "0"), make(tmp_path / "1"), make(tmp_path / "2", seed=1)]
    assert made[0] == made[1]
    assert digest(tmp_path / "0") == digest(tmp_path / "1")
    assert digest(tmp_path / "0")["config.json"] == digest(tmp_path / "2")["config.json"]
    assert digest(tmp_path / "0")["model.safetensors"] != digest(tmp_path / "2")["model.safetensors"]


def test_a_folder_holds_two_plain_files_without_traces_of_when_or_where(tmp_path):
    made = make(tmp_path / "base")
    assert sorted(digest(tmp_path / "base")) == ["config.json", "model.safetensors"]
    config = json.loads((tmp_path / "base" / "config.json").read_text())
    assert "transformers_version" not in config
    assert (config["vocab_size"], config["tie_word_embeddings"], config["eos_token_id"]) == (32, False, EOS)
    tensors = load_file(tmp_path / "base" / "model.safetensors")
    assert sum(tensor.numel() for tensor in tensors.values()) == made["parameters"]
    header = (tmp_path / "base" / "model.safetensors").read_bytes()[:4096]
    assert b"__metadata__" not in header


def test_rewards_vary_at_the_target(tmp_path):
    made = make(tmp_path / "base")
    assert made["reward"] >= 0.2
    environment = SortEnvironment(1)
    found = evaluate_policy(
        tmp_path / "base",
        environment,
        range(environment.num_prompts),
        num_samples=64,
        temperature=1.0,
        max_tokens=3,
        stop_tokens=(EOS,),
    )
    assert 0.1 < found.reward_mean < 0.9


def test_an_environment_without_solutions_is_refused(tmp_path):
    class Mute:
        num_prompts, vocab_size = 1, 4

        def prompt(self, index):
            return (1,)

        def reward(self, index, completion):
            return 0

    with pytest.raises(ConfigError, match="solution"):
        make_base_policy(tmp_path / "base", Mute(), seed=0)


def test_an_existing_folder_is_left_alone(tmp_path):
    (tmp_path / "base").mkdir()
    with pytest.raises(ConfigError, match="exists"):
        make(tmp_path / "base")


def test_a_target_out_of_reach_is_a_fault_and_writes_nothing(tmp_path):
    with pytest.raises(Fault, match=r"target 0\.2"):
        make(tmp_path / "base", steps_max=1)
    assert not (tmp_path / "base").exists()
