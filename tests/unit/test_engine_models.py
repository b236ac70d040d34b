"""The engine on the model families it names, by the short forward pass where it should and by the model's own elsewhere."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from inference.engine import TorchEngine
from inference.forward import ModuleForward
from inference.kv_pool import Feed, KvPool
from inference.llama import LlamaForward
from protocol.errors import Fault
from protocol.ports import SampleRequest
from protocol.sampling import replay_gaps, scores
from protocol.toploc import to_bf16_bits

SHAPE = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
#: Name, family, changes to the shape, forward pass.
MODELS = [
    ("smollm", "llama", {"tie_word_embeddings": True}, LlamaForward),
    ("llama", "llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 16}, LlamaForward),
    ("llama3", "llama", {"rope_parameters": LLAMA3_ROPE}, LlamaForward),
    ("mistral", "mistral", {"sliding_window": None}, LlamaForward),
    ("qwen2", "qwen2", {}, LlamaForward),
    ("qwen3", "qwen3", {"head_dim": 16, "tie_word_embeddings": True}, LlamaForward),
    ("window", "mistral", {"sliding_window": 6}, ModuleForward),
    ("mixed", "gemma2", {"sliding_window": 6, "head_dim": 8, "query_pre_attn_scalar": 8}, ModuleForward),
    ("experts", "qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40}, ModuleForward),
    ("gelu", "llama", {"hidden_act": "gelu"}, ModuleForward),
    (
        "dynamic",
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
        ModuleForward,
    ),
]
LIMITS = {"float32": 1e-3, "bfloat16": 0.6}


def write_policy(folder, family, changes, seed=0):
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **{**SHAPE, **changes})
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            # Biases and norms at random too, so that none can be left out unseen; wide matrices, so that draws are peaked.
            parameter.mul_(4.0) if parameter.dim() > 1 else parameter.add_(0.3 * torch.randn_like(parameter))
    folder.mkdir(parents=True)
    config.save_pretrained(folder)
    tied = config.tie_word_embeddings
    tensors = {name: tensor for name, tensor in model.state_dict().items() if not (tied and name == "lm_head.weight")}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def make_requests(seed, lengths, repeat=3):
    rng = np.random.default_rng(seed)
    prompts = [tuple(int(t) for t in rng.integers(3, 96, n)) for n in lengths]

    def respond(completion):
        return (5, 6, 7) if len(completion) < 8 else ()

    return [SampleRequest(prompt, int(rng.integers(0, 2**63)), respond) for prompt in prompts for _ in range(repeat)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("name", "family", "changes", "forward"), MODELS, ids=[row[0] for row in MODELS])
def test_families_decode_what_transformers_prefills(tmp_path, name, family, changes, forward, dtype):
    """Every sampled token has no gap under a full forward pass of the same model; states are the same up to rounding.

    Sliding windows are shorter than the sequences; there are answers, ragged prompts, and a budget of two rows.
    """
    folder = write_policy(tmp_path / name, family, changes)
    engine = TorchEngine(dtype=dtype, batch_tokens_max=2 * (13 + 14))
    engine.load(folder)
    assert type(engine._policy.forward) is forward
    requests = make_requests(1, (1, 9, 13))
    stops = tuple(range(1, 90, 4))
    made = engine.generate(requests, temperature=1.0, max_tokens=14, stop_tokens=stops)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    answered = 0
    for request, one in zip(requests, made, strict=True):
        sampled, position = [], 0
        while position < len(one.tokens):
            sampled.append(position)
            position += 1
            if one.tokens[position - 1] in stops:
                position += len(request.respond(one.tokens[:position])) if position + 3 < 14 else 0
        answered += len(one.tokens) - len(sampled)
        with torch.inference_mode():
            output = reference(
                torch.tensor([[*request.prompt, *one.tokens]]), output_hidden_states=True, use_cache=False
            )
        rows = len(request.prompt) - 1 + np.array(sampled)
        z = scores(
            output.logits[0, rows].float().numpy(),
            np.full(len(rows), request.key, np.uint64),
            np.array(sampled),
            temperature=1.0,
            vocab_size=96,
        )
        assert replay_gaps(z, np.array(one.tokens)[sampled]).max() < LIMITS[dtype]
        hidden = output.hidden_states[-1][0, rows].float().numpy()
        ours = (one.hidden.astype(np.uint32) << 16).view(np.float32)
        scale = 2.0**-7 if dtype == "float32" else 0.15
        assert np.allclose(ours, hidden, rtol=scale, atol=scale * np.abs(hidden).mean())
    assert answered > 0


def test_captured_bits_are_those_of_to_bf16_bits():
    values = torch.randn(4096, 3, dtype=torch.float32) * torch.logspace(-30, 30, 3)
    values[0] = torch.tensor([0.0, -0.0, 1.0 + 2.0**-8])  # a tie of the rounding
    values[1] = torch.tensor([1.0 + 3 * 2.0**-8, 3e38, -3.4e38])
    bits = values.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    assert (bits == to_bf16_bits(values.numpy())).all()


def test_fused_weights_are_held_once(tmp_path):
    engine = TorchEngine()
    engine.load(write_policy(tmp_path / "p", "qwen2", {}))
    attention = engine._policy.model.model.layers[1].self_attn
    fused = engine._policy.forward._layers[1].qkv
    for module in (attention.q_proj, attention.k_proj, attention.v_proj):
        assert module.weight.untyped_storage().data_ptr() == fused.weight.untyped_storage().data_ptr()
        assert module.bias.untyped_storage().data_ptr() == fused.bias.untyped_storage().data_ptr()


def test_a_short_pass_that_disagrees_is_not_used(tmp_path, monkeypatch, caplog):
    """The comparison at load: a model that transformers computes differently is run as transformers runs it."""
    folder = write_policy(tmp_path / "p", "llama", {})
    monkeypatch.setattr(LlamaForward, "_rotate", lambda self, heads, cos, sin: None)
    engine = TorchEngine()
    engine.load(folder)
    assert type(engine._policy.forward) is ModuleForward
    assert "off by" in caplog.text
    monkeypatch.undo()
    sound = TorchEngine()
    sound.load(folder)
    requests = make_requests(2, (4, 6))
    options = {"temperature": 1.0, "max_tokens": 9, "stop_tokens": (1,)}
    assert [one.tokens for one in engine.generate(requests, **options)] == [
        one.tokens for one in sound.generate(requests, **options)
    ]


def test_layers_with_another_state_are_refused(tmp_path):
    config = AutoConfig.for_model("qwen3", **SHAPE, head_dim=8)
    model = AutoModelForCausalLM.from_config(config)
    model.config.layer_types = ["full_attention", "linear_attention", "full_attention"]
    with pytest.raises(Fault, match="linear_attention keep a state"):
        ModuleForward(model)


@pytest.mark.parametrize("make", [LlamaForward.of, ModuleForward], ids=["short", "own"])
def test_a_prompt_in_pieces_gives_the_states_of_one_pass(tmp_path, make, monkeypatch):
    """Long prompts are fed in several passes; padding and what a row held before do not matter."""
    folder = write_policy(tmp_path / "p", "qwen3", {"head_dim": 8})
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    forward, pool = make(model), KvPool(3, 24, "cpu")
    tokens = np.random.default_rng(3).integers(3, 96, (2, 20))
    slots, zeros = np.array([2, 0]), np.zeros(2, dtype=np.int64)
    with torch.inference_mode():
        whole = forward(pool, Feed(slots, tokens, np.array([20, 20]), zeros))
        forward(pool, Feed(slots, tokens[:, :7], np.array([7, 5]), zeros))
        counts = np.array([13, 15])
        rest = np.stack([np.pad(tokens[0, 7:], (0, 2)), tokens[1, 5:]])
        pieces = forward(pool, Feed(slots, rest, counts, np.array([7, 5])))
    assert torch.allclose(whole.logits, pieces.logits, atol=1e-4)
    assert torch.allclose(whole.hidden, pieces.hidden, atol=1e-4)


def test_long_prompts_are_cut_into_passes(tmp_path, monkeypatch):
    folder = write_policy(tmp_path / "p", "llama", {})
    requests = make_requests(4, (60, 61, 3), repeat=2)
    options = {"temperature": 1.0, "max_tokens": 9, "stop_tokens": (1, 4)}
    engine = TorchEngine()
    engine.load(folder)
    whole = engine.generate(requests, **options)
    monkeypatch.setattr("inference.decode.FORWARD_TOKENS_MAX", 16)
    widths = []
    policy = engine._policy
    monkeypatch.setattr(
        engine,
        "_policy",
        policy._replace(forward=lambda pool, feed: widths.append(feed.tokens.size) or policy.forward(pool, feed)),
    )
    assert [one.tokens for one in engine.generate(requests, **options)] == [one.tokens for one in whole]
    assert max(widths) <= 16


def test_ids_beyond_the_vocabulary_are_a_fault(tmp_path):
    engine = TorchEngine()
    engine.load(write_policy(tmp_path / "p", "llama", {}))
    for prompt in ((3, 96), (-1, 3)):
        with pytest.raises(Fault, match="the policy's go from 0 to 95"):
            engine.generate([SampleRequest(prompt, 1)], temperature=1.0, max_tokens=2, stop_tokens=())
    with pytest.raises(Fault, match="temperature 0"):
        engine.generate([SampleRequest((3,), 1)], temperature=0, max_tokens=2, stop_tokens=())


def test_the_plain_engine_measures_without_replay(tmp_path):
    folder = write_policy(tmp_path / "p", "llama", {})
    plain = TorchEngine(replayable=False, vocab_size=50)
    plain.load(folder)
    made = plain.generate(make_requests(5, (4, 9), 40), temperature=2.0, max_tokens=7, stop_tokens=())
    assert {len(one.tokens) for one in made} == {7}
    assert all(one.hidden.size == 0 for one in made)
    assert {token for one in made for token in one.tokens} <= set(range(50))
    assert len({one.tokens for one in made}) > 70
