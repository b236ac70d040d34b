"""GGUF conversion: a model written as GGUF comes back as the same function, and what is not understood is refused."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel
from transformers import LlamaConfig, LlamaForCausalLM

from models import gguf as ours
from models.policy import load_model
from protocol.errors import ConfigError, Fault
from trainer.policy import encode_tensors, write_files

HIDDEN, HEADS, KV_HEADS, LAYERS, MIDDLE = 64, 4, 2, 2, 96
ALPHABET = sorted(ByteLevel.alphabet())
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *ALPHABET, "he", "ll", "hell"]
MERGES = ["h e", "l l", "he ll"]
NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def permute(values: np.ndarray, heads: int) -> np.ndarray:
    """What a converter to GGUF does to rotary projections."""
    rows, width = values.shape
    return values.reshape(heads, 2, rows // heads // 2, width).swapaxes(1, 2).reshape(rows, width)


def make_llama(tied: bool) -> LlamaForCausalLM:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=len(TOKENS), hidden_size=HIDDEN, intermediate_size=MIDDLE, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, max_position_embeddings=128, rms_norm_eps=1e-5,
        rope_parameters={"rope_theta": 100000.0, "rope_type": "default"}, tie_word_embeddings=tied,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def gguf_name(name: str) -> str:
    flat = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    stem = name.removesuffix(".weight")
    if stem in flat:
        return flat[stem] + ".weight"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{NAMES[rest]}.weight"


def write_gguf(path, model, *, kind=None, architecture="llama", pre="smollm", extra=None, leave_out=()):
    """Write `model` as GGUF, quantised as `kind` when given."""
    config = model.config
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(MIDDLE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3] + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(MERGES)
    if "bos" not in leave_out:
        writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    tensors = {name: tensor.detach().numpy() for name, tensor in model.named_parameters()}
    for name, values in tensors.items():
        for end, heads in (("q_proj.weight", HEADS), ("k_proj.weight", KV_HEADS)):
            if name.endswith(end):
                values = permute(values, heads)
        values = np.ascontiguousarray(values)
        if kind is not None and values.ndim == 2:
            writer.add_tensor(gguf_name(name), gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(gguf_name(name), values)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def load(folder, converted):
    import json

    tensors = {name: torch.from_numpy(values) for name, values in converted.weights.items()}
    config = json.dumps(converted.config).encode()
    write_files(folder, {"config.json": config, "model.safetensors": encode_tensors(tensors)})
    return load_model(folder)


@pytest.mark.parametrize("tied", [True, False])
def test_a_converted_model_computes_what_the_original_does(tmp_path, tied):
    model = make_llama(tied)
    write_gguf(tmp_path / "m.gguf", model)
    converted = ours.read_gguf(tmp_path / "m.gguf")
    assert ("lm_head.weight" in converted.weights) is not tied
    loaded = load(tmp_path / "policy", converted)
    tokens = torch.randint(len(TOKENS), (3, 17), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=tokens).logits, model(input_ids=tokens).logits)


def test_quantised_blocks_are_expanded(tmp_path):
    model = make_llama(True)
    write_gguf(tmp_path / "m.gguf", model, kind=gguf.GGMLQuantizationType.Q8_0)
    converted = ours.read_gguf(tmp_path / "m.gguf")
    wanted = dict(model.named_parameters())
    assert set(converted.weights) == set(wanted)
    for name, values in converted.weights.items():
        original = wanted[name].detach().numpy()
        assert values.dtype == np.float32
        # Eight bits per weight: half a step of each block's largest value over 127, and the step's own half precision.
        assert np.abs(values - original).max() <= np.abs(original).max() / 127, name
    assert not np.array_equal(
        converted.weights["model.embed_tokens.weight"], wanted["model.embed_tokens.weight"].detach().numpy()
    )


def test_one_file_gives_one_policy(tmp_path):
    write_gguf(tmp_path / "m.gguf", make_llama(True))
    first, second = (ours.read_gguf(tmp_path / "m.gguf") for _ in range(2))
    assert first.config == second.config
    assert first.tokenizer == second.tokenizer
    assert all(np.array_equal(first.weights[name], second.weights[name]) for name in first.weights)
    assert first.config["rms_norm_eps"] == 1e-5  # not the nearest float32 of it


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("smollm", "hell 12", ["hell", "Ġ", "1", "2"]),
        ("gpt-2", "hell 12", ["hell", "Ġ", "1", "2"]),
        ("smollm", "<|im_start|>hell<|im_end|>", ["<|im_start|>", "hell", "<|im_end|>"]),
    ],
)
def test_the_tokenizer_splits_as_the_file_says(tmp_path, pre, text, expected):
    write_gguf(tmp_path / "m.gguf", make_llama(True), pre=pre)
    tokenizer = Tokenizer.from_str(ours.read_gguf(tmp_path / "m.gguf").tokenizer)
    encoding = tokenizer.encode(text)
    assert encoding.tokens == expected
    assert tokenizer.decode(encoding.ids, skip_special_tokens=False) == text


def test_digits_are_split_only_where_the_file_says_so():
    merged = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": [*ALPHABET, "12"],
        "tokenizer.ggml.token_type": [1] * 257,
        "tokenizer.ggml.merges": ["1 2"],
    }
    for pre, expected in (("smollm", ["1", "2"]), ("gpt-2", ["12"])):
        tokenizer = Tokenizer.from_str(ours.make_tokenizer({**merged, "tokenizer.ggml.pre": pre}))
        assert tokenizer.encode("12").tokens == expected


@given(st.text(max_size=60))
def test_every_text_survives_the_tokenizer(text):
    fields = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": [*ALPHABET, "he", "ll", "hell"],
        "tokenizer.ggml.token_type": [1] * 259,
        "tokenizer.ggml.merges": MERGES,
    }
    tokenizer = Tokenizer.from_str(ours.make_tokenizer(fields))
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 16))
def test_rotary_rows_are_put_back(heads, half, width):
    values = np.arange(heads * half * 2 * width, dtype=np.float32).reshape(heads * half * 2, width)
    assert np.array_equal(ours.unpermute(permute(values, heads), heads), values)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"architecture": "qwen2"}, "qwen2"),
        ({"pre": "llama-bpe"}, "llama-bpe"),
        ({"extra": {"blk.0.attn_q.bias": np.zeros(4, np.float32)}}, "attn_q.bias"),
        ({"extra": {"blk.0.attn_qkv.weight": np.zeros((4, 4), np.float32)}}, "attn_qkv"),
        ({"leave_out": ("bos",)}, "bos_token_id"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(tmp_path, changes, text):
    write_gguf(tmp_path / "m.gguf", make_llama(True), **changes)
    with pytest.raises(Fault, match=text):
        ours.read_gguf(tmp_path / "m.gguf")


def test_a_damaged_file_is_a_fault(tmp_path):
    write_gguf(tmp_path / "m.gguf", make_llama(True))
    data = (tmp_path / "m.gguf").read_bytes()
    for name, bad in (("cut", data[: len(data) // 2]), ("text", b"not a model"), ("empty", b"")):
        (tmp_path / name).write_bytes(bad)
        with pytest.raises(Fault):
            ours.read_gguf(tmp_path / name)


def test_without_the_package_it_says_what_to_install(tmp_path, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ConfigError, match="pip install"):
        ours.read_gguf(tmp_path / "m.gguf")
