"""Base policies that are worth improving: a small Llama, trained on solutions until it is right now and then.

`make_base_policy` writes a policy folder. Reinforcement learning needs rewards that vary, so the warm-up stops as soon as
sampling at temperature 1 is right on `target` of the training prompts. The same seed and thread count give the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from protocol.errors import ConfigError, Fault
from protocol.ports import Environment
from trainer.decode import generate, make_gumbel_pick
from trainer.policy import collect_tensors, encode_config, encode_tensors, write_policy

#: Label of positions that do not count in the loss.
_IGNORED = -100


@runtime_checkable
class SolvableEnvironment(Environment, Protocol):
    """An environment that knows its answers."""

    def solution(self, index: int) -> tuple[int, ...]:
        """A completion with the highest reward, stop token included."""
        ...


@dataclass(frozen=True)
class Shape:
    """Size of a base policy; the default has 0.11 million parameters for a vocabulary of 32."""

    hidden: int = 64
    layers: int = 2
    heads: int = 2
    intermediate: int = 192
    positions: int = 512


def make_base_policy(
    folder: Path,
    environment: Environment,
    *,
    seed: int,
    target: float = 0.25,
    shape: Shape = Shape(),
    learning_rate: float = 1e-3,
    batch_size: int = 128,
    steps_max: int = 5_000,
) -> dict[str, Any]:
    """Train a base policy and write it to `folder`, which must not exist.

    Args:
        environment: must have `solution(index)`.
        target: mean sampled reward on training prompts at which to stop, 0 to 1.

    Returns:
        What was measured: reward, steps, parameters.

    Raises:
        ConfigError: when the environment has no solutions, or the folder exists.
        Fault: when the target is not reached in `steps_max` steps.
    """
    if not isinstance(environment, SolvableEnvironment):
        raise ConfigError(f"{type(environment).__name__} has no solution(index): bring a base policy of your own")
    if folder.exists():
        raise ConfigError(f"{folder} exists: choose another folder or remove it")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _make_model(environment, shape)
        rng = np.random.default_rng(seed)
        optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.99), weight_decay=0.0)
        reward = 0.0
        for step in range(1, steps_max + 1):
            _supervised_step(model, optimizer, environment, rng.integers(environment.num_prompts, size=batch_size))
            if step % 10 == 0:
                reward = _measure(model, environment, rng)
                if reward >= target:
                    break
        else:
            raise Fault(f"warm-up reached a reward of {reward:.3f} in {steps_max} steps, target {target}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    tensors = collect_tensors(model)
    write_policy(folder, encode_config(model.config), encode_tensors(tensors))
    return {"reward": reward, "steps": step, "parameters": sum(t.numel() for t in tensors.values())}


def _make_model(environment: SolvableEnvironment, shape: Shape) -> PreTrainedModel:
    config = LlamaConfig(
        vocab_size=environment.vocab_size,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        max_position_embeddings=shape.positions,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=environment.solution(0)[-1],
        pad_token_id=None,
        architectures=["LlamaForCausalLM"],
        dtype="float32",
    )
    return LlamaForCausalLM(config)  # type: ignore[no-untyped-call]


def _supervised_step(
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    environment: SolvableEnvironment,
    indices: NDArray[np.int64],
) -> None:
    """One step of next-token cross-entropy on the solutions of these prompts."""
    prompts = [environment.prompt(index) for index in indices.tolist()]
    solutions = [environment.solution(index) for index in indices.tolist()]
    width = max(len(p) + len(s) for p, s in zip(prompts, solutions, strict=True))
    inputs = torch.zeros((len(prompts), width), dtype=torch.long)
    labels = torch.full((len(prompts), width), _IGNORED, dtype=torch.long)
    for row, (prompt, solution) in enumerate(zip(prompts, solutions, strict=True)):
        end = len(prompt) + len(solution)
        inputs[row, :end] = torch.tensor(prompt + solution)
        labels[row, len(prompt) : end] = torch.tensor(solution)
    logits = model(input_ids=inputs, use_cache=False).logits
    loss = cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=_IGNORED)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def _measure(model: PreTrainedModel, environment: SolvableEnvironment, rng: np.random.Generator, n: int = 512) -> float:
    """Mean reward of one sample each of `n` random training prompts, 0 to 1."""
    indices: Sequence[int] = rng.integers(environment.num_prompts, size=n).tolist()
    solutions = [environment.solution(index) for index in indices]
    keys = rng.integers(2**64, size=n, dtype=np.uint64)
    completions = generate(
        model,
        [environment.prompt(index) for index in indices],
        max_tokens=max(len(solution) for solution in solutions) + 1,
        stop_tokens=sorted({solution[-1] for solution in solutions}),
        pick=make_gumbel_pick(keys, temperature=1.0, vocab_size=environment.vocab_size),
    )
    rewards = [environment.reward(index, line) for index, line in zip(indices, completions, strict=True)]
    return sum(rewards) / (n * 1_000_000)
