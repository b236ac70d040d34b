"""What `generate.py` compares: policies of random weights, workloads, and one contender per engine and mode.

A contender is a function that completes a workload from token ids to token ids and says how many tokens it made. All run in
this process, on one thread, in float32, at temperature 1, and none can stop early, so all make the same number of tokens.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from protocol.kernels import kernels
from protocol.ports import Engine, SampleRequest
from protocol.toploc import build_proofs

#: Tokens of a commitment's chunk.
CHUNK = 32
#: Longest prompt and completion of any workload.
POSITIONS = 256

Contender = Callable[["Workload"], int]


class Size(NamedTuple):
    """A Llama shape with random weights; `topk` is what a task with such a policy commits to."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocab: int
    tied: bool
    topk: int


SIZES = {
    "demo": Size(64, 2, 2, 2, 128, 32, False, 32),
    "3m": Size(256, 4, 4, 4, 688, 4096, True, 128),
    "135m": Size(576, 30, 9, 3, 1536, 49_152, True, 128),
}


class Workload(NamedTuple):
    """Requests with one completion length.

    Attributes:
        requests: distinct prompts, so that no engine shares a prefill.
        max_tokens: tokens of every completion.
        topk: entries per chunk of the commitments.
    """

    requests: list[SampleRequest]
    max_tokens: int
    topk: int


def make_workload(size: Size, batch: int, prompt_tokens: tuple[int, int], max_tokens: int) -> Workload:
    """Random prompts whose lengths lie between the two bounds, both included."""
    rng = np.random.default_rng(batch)
    low, high = prompt_tokens
    lengths = rng.integers(low, high + 1, batch)
    requests = [
        SampleRequest(tuple(rng.integers(0, size.vocab, length).tolist()), int(rng.integers(0, 2**63)))
        for length in lengths
    ]
    return Workload(requests, max_tokens, size.topk)


def make_policy(size: Size, folder: Path) -> int:
    """Write a policy folder with random weights; returns the number of parameters."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=size.vocab,
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=size.tied,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def _ours(engine: Engine, *, commit: bool) -> Contender:
    """An engine behind the port, with commitments where a node would make them."""

    def run(workload: Workload) -> int:
        made = engine.generate(workload.requests, temperature=1.0, max_tokens=workload.max_tokens, stop_tokens=())
        if commit:
            build_proofs([one.hidden for one in made], topk=workload.topk, chunk=CHUNK)
        return sum(len(one.tokens) for one in made)

    return run


def make_torch(folder: Path) -> Contender:
    """Our torch engine as a node runs it."""
    from inference.engine import TorchEngine

    engine = TorchEngine()
    engine.load(folder)
    return _ours(engine, commit=True)


def make_torch_plain(folder: Path) -> Contender:
    """Our torch engine with torch's own sampling, no states kept and no commitments."""
    from inference.engine import TorchEngine

    engine = TorchEngine(replayable=False)
    engine.load(folder)
    return _ours(engine, commit=False)


def make_transformers(folder: Path) -> Contender:
    """`generate` of transformers."""
    import torch
    from transformers import GenerationConfig

    from models.policy import load_model

    torch.set_num_threads(1)
    model = load_model(folder)

    def run(workload: Workload) -> int:
        config = GenerationConfig(
            do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=workload.max_tokens, pad_token_id=0
        )
        width = max(len(request.prompt) for request in workload.requests)
        tokens = torch.zeros((len(workload.requests), width), dtype=torch.long)
        mask = torch.zeros_like(tokens)
        for row, request in enumerate(workload.requests):
            tokens[row, width - len(request.prompt) :] = torch.tensor(request.prompt)
            mask[row, width - len(request.prompt) :] = 1
        with torch.inference_mode():
            made = model.generate(tokens, attention_mask=mask, generation_config=config)
        return int(made[:, width:].numel())

    return run


def make_vllm(folder: Path) -> Contender:
    """Our vLLM engine as a node runs it."""
    from inference.vllm_engine import VllmEngine
    from inference.vllm_options import VllmOptions

    engine = VllmEngine(options=VllmOptions(max_num_seqs=64, max_model_len=POSITIONS))
    engine.load(folder)
    return _ours(engine, commit=True)


def make_vllm_plain(folder: Path) -> Contender:
    """vLLM by itself: its own weights loader and sampler, no extension of ours."""
    from inference.vllm_options import require_vllm

    require_vllm("cpu")  # the environment variables that both need
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=str(folder),
        dtype="float32",
        skip_tokenizer_init=True,
        generation_config="vllm",
        enforce_eager=True,
        max_num_seqs=64,
        max_model_len=POSITIONS,
        kv_cache_memory_bytes=1 << 30,
        disable_log_stats=True,
    )

    def run(workload: Workload) -> int:
        params = SamplingParams(temperature=1.0, max_tokens=workload.max_tokens, ignore_eos=True, detokenize=False)
        prompts: list[Any] = [{"prompt_token_ids": list(request.prompt)} for request in workload.requests]
        llm.reset_prefix_cache()
        made = llm.generate(prompts, params, use_tqdm=False)
        return sum(len(one.outputs[0].token_ids) for one in made)

    return run


#: Name of a contender: what makes it, and the same engine without what trustlessness adds.
CONTENDERS: dict[str, tuple[Callable[[Path], Contender], str | None]] = {
    "torch": (make_torch, "torch-plain"),
    "torch-plain": (make_torch_plain, None),
    "transformers": (make_transformers, None),
    "vllm": (make_vllm, "vllm-plain"),
    "vllm-plain": (make_vllm_plain, None),
}
#: Those that need an environment with vLLM.
NEED_VLLM = ("vllm", "vllm-plain")


def prepare_process() -> None:
    """One thread, before torch is imported; compiled kernels, as in a node that has run for a while."""
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    kernels.load()
