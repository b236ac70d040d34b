"""Harnesses of policy folders: configurations, weights, adapters, GGUF files, tokenizers, and data sets beside them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np

from environments import code, dataset
from environments.tokenizer import TokenizerCodec
from models.adapter import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    WEIGHTS,
    encode_adapter_config,
    get_base,
    read_adapter_config,
    read_adapter_tensors,
    read_shapes,
    validate_adapter_folder,
)
from models.policy import CONFIG, read_config, read_hidden_size
from protocol.adapter import Adapter
from protocol.errors import ConfigError, Fault
from tests.fuzz.kit import Harness, Target, attempt
from tests.fuzz.targets_messages import make_task_spec
from tests.support.adapters import BASE_POLICY, TERMS, make_adapter
from tests.support.tokenizer import make_tokenizer_json

#: A Llama shape of 1,304 weights.
CONFIG_FIELDS = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 16,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 10_000.0, "rope_type": "default"},
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
    "hidden_act": "silu",
}
_SHAPES = {
    "lm_head.weight": (16, 8),
    "model.embed_tokens.weight": (16, 8),
    "model.layers.0.input_layernorm.weight": (8,),
    "model.layers.0.mlp.down_proj.weight": (8, 16),
    "model.layers.0.mlp.gate_proj.weight": (16, 8),
    "model.layers.0.mlp.up_proj.weight": (16, 8),
    "model.layers.0.post_attention_layernorm.weight": (8,),
    "model.layers.0.self_attn.k_proj.weight": (8, 8),
    "model.layers.0.self_attn.o_proj.weight": (8, 8),
    "model.layers.0.self_attn.q_proj.weight": (8, 8),
    "model.layers.0.self_attn.v_proj.weight": (8, 8),
    "model.norm.weight": (8,),
}


def make_base(folder: Path) -> Path:
    """Write a policy folder; no torch is needed."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True)
    (folder / CONFIG).write_text(json.dumps(CONFIG_FIELDS))
    rng = np.random.default_rng(1)
    tensors = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in _SHAPES.items()}
    save_file(tensors, folder / WEIGHTS)
    return folder


def _adapter_config(scratch: Path) -> Target:
    folder = scratch / "adapter"
    folder.mkdir()
    path = folder / ADAPTER_CONFIG

    def fuzz(data: bytes) -> str:
        path.write_bytes(data)

        def work() -> None:
            assert encode_adapter_config(*read_adapter_config(folder)) == data

        return attempt(Fault, work)

    terms = (TERMS, Adapter(1, 1, ("up_proj",)))
    return Target(fuzz, [encode_adapter_config(one, BASE_POLICY) for one in terms])


def _adapter_weights(scratch: Path) -> Target:
    folder = make_adapter(scratch / "adapter", make_base(scratch / "base"), 1)
    path = folder / ADAPTER_WEIGHTS
    valid = path.read_bytes()

    def fuzz(data: bytes) -> str:
        path.write_bytes(data)

        def work() -> None:
            validate_adapter_folder(folder, TERMS, BASE_POLICY)
            assert len(data) == len(valid), "a file that is longer than its terms give"
            assert all(np.isfinite(tensor).all() for tensor in read_adapter_tensors(folder).values())

        return attempt(Fault, work)

    return Target(fuzz, [valid])


def _weights_head(scratch: Path) -> Target:
    """The head of a whole policy's file, which fixes what an adapter may be."""
    folder = make_base(scratch / "base")
    path = folder / WEIGHTS
    valid = path.read_bytes()

    def fuzz(data: bytes) -> str:
        path.write_bytes(data)

        def work() -> None:
            for shape in read_shapes(folder).values():
                assert all(isinstance(size, int) and size >= 0 for size in shape)

        return attempt(Fault, work)

    return Target(fuzz, [valid])


def _config(scratch: Path) -> Target:
    """config.json as every role reads it before anything is loaded, and the memory it implies."""
    from troth.fit import compute_need, parse_config

    folder, spec = make_base(scratch / "base"), make_task_spec(scratch)

    def fuzz(data: bytes) -> str:
        (folder / CONFIG).write_bytes(data)

        def work() -> None:
            assert get_base(folder) == folder
            read_config(folder)
            read_hidden_size(folder)
            assert compute_need(parse_config(data), spec, "float32", 4).total_bytes > 0

        return attempt((Fault, ConfigError), work)

    return Target(fuzz, [json.dumps(CONFIG_FIELDS).encode()])


def _load(scratch: Path) -> Target:
    """A whole policy folder into a model: even bytes are its config.json, odd ones its weights."""
    from models.policy import load_model

    good, folder = make_base(scratch / "good"), scratch / "policy"
    shutil.copytree(good, folder)
    config, weights = (good / CONFIG).read_bytes(), (good / WEIGHTS).read_bytes()

    def fuzz(data: bytes) -> str:
        on_config = not data or data[0] % 2 == 0
        (folder / CONFIG).write_bytes(data[1:] if on_config else config)
        (folder / WEIGHTS).write_bytes(weights if on_config else data[1:])
        return attempt(Fault, lambda: load_model(folder))

    return Target(fuzz, [b"\0" + config, b"\1" + weights])


def _gguf(scratch: Path) -> Target:
    import gguf

    from models.gguf import read_gguf

    path = scratch / "model.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(1)
    writer.add_context_length(32)
    writer.add_embedding_length(8)
    writer.add_feed_forward_length(16)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(4)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(["<e>", "a", "b", "ab"])
    writer.add_token_types([3, 1, 1, 1])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_pad_token_id(0)
    for name, shape in (("token_embd.weight", (4, 8)), ("blk.0.attn_q.weight", (8, 8)), ("output_norm.weight", (8,))):
        writer.add_tensor(name, np.ones(shape, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    valid = path.read_bytes()

    def fuzz(data: bytes) -> str:
        path.unlink()  # the old one may still be mapped
        path.write_bytes(data)
        return attempt(Fault, lambda: read_gguf(path))

    return Target(fuzz, [valid])


def _tokenizer(scratch: Path) -> Target:
    text = "What is 12 * 3?\n<|im_end|> é\u0301 x"

    def fuzz(data: bytes) -> str:
        def work() -> None:
            codec = TokenizerCodec(data)
            tokens = codec.encode(text)
            assert len(tokens) <= 64 * len(text)
            assert all(0 <= token < codec.vocab_size for token in tokens)
            codec.decode(tokens)
            codec.encode_between("a", text, "b", 8)

        try:
            return attempt(ConfigError, work)
        except BaseException as error:
            if type(error).__name__ != "PanicException":
                raise
            return "panic"  # the package's own; troth.environment_files refuses such a tokenizer before it is served

    small = json.loads(make_tokenizer_json())
    model = small["model"]
    kept = {token: at for token, at in model["vocab"].items() if at < 262}
    model["vocab"], model["merges"] = (
        kept,
        [m for m in model["merges"] if "".join(m) in kept and all(p in kept for p in m)],
    )
    seeds = [json.dumps(small).encode()]
    small["normalizer"] = {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Prepend", "prepend": "x"}]}
    small["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}]}
    return Target(fuzz, [*seeds, json.dumps(small).encode()])


def _rows(scratch: Path) -> Target:
    """A data set's lines: even first byte questions, odd ones programming tasks."""

    def fuzz(data: bytes) -> str:
        read = dataset.read_rows if not data or data[0] % 2 == 0 else code.read_rows
        return attempt(ConfigError, lambda: read(data[1:]))

    rows = {"prompt": "1 + 1?", "answer": "2", "info": {"level": [1, 2]}}
    task = {
        "prompt": "add",
        "tests": [[[1, 2], 3], [[0.5, []], None]],
        "function": "f",
        "solution": "f = max",
    }
    return Target(fuzz, [b"\0" + json.dumps(rows).encode(), b"\1" + json.dumps(task).encode()])


HARNESSES = {
    "adapter_config": Harness(_adapter_config, "json", share=20, bytes_max=9000),
    "adapter_weights": Harness(_adapter_weights, "safetensors", share=20),
    "weights_head": Harness(_weights_head, "safetensors", share=20, bytes_max=8000, rss_mb=1024),
    "policy_config": Harness(_config, "json", share=20, bytes_max=2000),
    "policy_load": Harness(_load, "tagged-json", share=1, bytes_max=8000, rss_mb=2048, examples=4),
    "gguf_file": Harness(_gguf, "bytes", share=4, bytes_max=3000, rss_mb=1024, examples=15),
    "tokenizer_json": Harness(_tokenizer, "json", share=10, bytes_max=16_000, examples=30),
    "data_rows": Harness(_rows, "tagged-json", share=30),
}
