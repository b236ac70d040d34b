"""How much memory a policy takes: counted from its config.json like transformers counts it, bounded, and refused in time."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from inference.memory import (
    compute_kv_bytes,
    count_parameters,
    estimate_memory,
    read_free_bytes,
    require_free,
)
from protocol.errors import ConfigError, Fault

SHAPE = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
}
SMOLLM2 = {
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
}


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"head_dim": 16}),
        ("mistral", {}),
        ("qwen2", {}),
        ("qwen3", {"head_dim": 16}),
        ("qwen3_moe", {"head_dim": 8, "num_experts": 4, "moe_intermediate_size": 40}),
    ],
)
def test_weights_are_counted_as_transformers_makes_them(family, changes):
    fields = {**SHAPE, "tie_word_embeddings": False, **changes}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **fields))
    assert count_parameters({"model_type": family, **fields}) == model.num_parameters()


def test_smollm2_135m_takes_what_its_card_says():
    need = estimate_memory(SMOLLM2, dtype="bfloat16", batch_tokens=1000)
    assert need.weights_bytes == 2 * 134_515_008
    assert need.kv_bytes == 1000 * 2 * 30 * 3 * 64 * 2
    assert need.total_bytes == need.weights_bytes + need.kv_bytes + need.activations_bytes
    assert need.swap_bytes == need.total_bytes + need.weights_bytes


def test_dtype_and_budget_scale_the_need():
    narrow, wide = (estimate_memory(SMOLLM2, dtype=name, batch_tokens=4096) for name in ("bfloat16", "float32"))
    assert wide.weights_bytes == 2 * narrow.weights_bytes
    assert wide.kv_bytes == 2 * narrow.kv_bytes
    assert compute_kv_bytes(SMOLLM2, dtype="float32", tokens=8192) == 2 * wide.kv_bytes
    more = estimate_memory(SMOLLM2, dtype="float32", batch_tokens=1 << 20)
    assert more.activations_bytes == wide.activations_bytes  # bounded by the engine, not by the budget


@pytest.mark.parametrize("field", ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"])
@pytest.mark.parametrize("value", [None, 0, -4, "64", 1.5, True, 1 << 60])
def test_a_config_without_sizes_is_a_fault(field, value):
    with pytest.raises(Fault, match=field):
        estimate_memory({**SMOLLM2, field: value}, dtype="float32", batch_tokens=64)


def test_an_unknown_dtype_is_the_users_error():
    with pytest.raises(ConfigError, match="float33"):
        estimate_memory(SMOLLM2, dtype="float33", batch_tokens=64)


def test_what_does_not_fit_is_refused_with_both_numbers():
    require_free(100, 100, "policy", "")
    require_free(1 << 60, None, "policy", "")  # unknown refuses nothing
    with pytest.raises(Fault, match=r"policy needs 3\.0 MiB of memory, 2\.0 MiB are free: take a smaller one"):
        require_free(3 << 20, 2 << 20, "policy", "take a smaller one")


def test_free_memory_is_the_lower_of_machine_and_control_group(tmp_path):
    assert read_free_bytes(tmp_path) is None
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 90 kB\nMemAvailable:   64 kB\n")
    assert read_free_bytes(tmp_path) == 64 * 1024
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("max\n")
    (group / "memory.current").write_text("1000\n")
    assert read_free_bytes(tmp_path) == 64 * 1024
    (group / "memory.max").write_text("5000\n")
    assert read_free_bytes(tmp_path) == 4000


def test_the_estimate_loads_no_torch():
    code = "import sys, inference.memory; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
