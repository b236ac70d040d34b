"""What the tests of the vLLM engine share: requests, policies of several families, and a judge of near-ties."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from protocol.ports import Generation, SampleRequest
from verifier.scorer import TorchScorer

#: What PROFILE_FP32 tolerates, in logits / T.
TOLERANCE = 1e-3

#: Small shapes of the families that people run. Head width 32 is the smallest that vLLM's CPU attention takes.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 2},
    "llama-tied-gqa": {"num_key_value_heads": 1, "tie_word_embeddings": True},
    "qwen2": {"num_key_value_heads": 1, "tie_word_embeddings": True},
    "qwen3": {"num_key_value_heads": 1, "head_dim": 32},
}


def make_family(folder: Path, family: str, seed: int, *, vocab: int = 300, scale: float = 4.0) -> Path:
    """Write a policy folder with random weights, norms and biases included, and peaked distributions."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    config = AutoConfig.for_model(
        family.partition("-")[0],
        vocab_size=vocab,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=512,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=7,
        **FAMILIES[family],
    )
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(scale)
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))
    tensors = {
        name: tensor
        for name, tensor in model.state_dict().items()
        if not (config.tie_word_embeddings and name == "lm_head.weight")
    }
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    save_file(tensors, folder / "model.safetensors")
    return folder


def make_requests(seed: int, lengths: Sequence[int], *, vocab: int = 300, **fields: Any) -> list[SampleRequest]:
    """Requests with random prompts of the given lengths and random keys."""
    rng = np.random.default_rng(seed)
    return [
        SampleRequest(tuple(rng.integers(2, vocab, n).tolist()), int(rng.integers(0, 2**63)), **fields) for n in lengths
    ]


def run(engine: Any, requests: Sequence[SampleRequest], **changes: Any) -> list[Generation]:
    """Generate at temperature 1, at most 24 tokens, ended by token 1."""
    terms: dict[str, Any] = {"temperature": 1.0, "max_tokens": 24, "stop_tokens": (1,), **changes}
    made: list[Generation] = engine.generate(requests, **terms)
    return made


def require_replayable(
    folder: Path,
    requests: Sequence[SampleRequest],
    made: Sequence[Generation],
    *,
    temperature: float = 1.0,
    dtype: str = "float32",
    tolerance: float = TOLERANCE,
) -> int:
    """A verifier's prefill finds every token to be the one that sampling gives; returns how many there are."""
    scorer = TorchScorer(dtype=dtype)
    scorer.load(folder)
    scored = scorer.score(requests, [one.tokens for one in made], temperature=temperature)
    worst = max(float(one.gaps.max()) for one in scored)
    assert worst <= tolerance, f"gap {worst}"
    return sum(len(one.tokens) for one in made)


def require_same(ours: Sequence[Generation], theirs: Sequence[Generation]) -> int:
    """Two runs have the same tokens (none of these seeds sits on a near-tie) and states that differ by rounding."""
    assert [one.tokens for one in ours] == [one.tokens for one in theirs]
    for one, other in zip(ours, theirs, strict=True):
        assert one.hidden.shape == other.hidden.shape
        assert one.hidden.dtype == other.hidden.dtype == np.uint16
        a, b = (floats(bits) for bits in (one.hidden, other.hidden))
        np.testing.assert_allclose(a, b, rtol=2**-7, atol=2e-4)
    return sum(len(one.tokens) for one in ours)


def floats(bits: Any) -> Any:
    """bf16 bit patterns as float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)
