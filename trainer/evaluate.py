"""How good a policy is: mean reward of sampled completions on given prompts, with its standard error.

Sampling uses the protocol's noise under keys that follow from a seed, so the same policy and seed give the same number.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from models.policy import load_model
from protocol.assignment import compute_sample_key
from protocol.codec import tagged_hash
from protocol.ports import Environment
from trainer.decode import generate_turns, make_gumbel_pick


@dataclass(frozen=True)
class Evaluation:
    """Attributes:
    reward_mean: 0 to 1.
    reward_error: standard error of the mean over prompts.
    tokens_mean: completion length, what the environment appended included.
    """

    reward_mean: float
    reward_error: float
    tokens_mean: float
    num_prompts: int
    num_samples: int


def evaluate_policy(
    folder: Path,
    environment: Environment,
    indices: Sequence[int],
    *,
    num_samples: int = 1,
    temperature: float,
    max_tokens: int,
    stop_tokens: Sequence[int],
    seed: int = 0,
    device: str = "cpu",
    threads: int = 1,
) -> Evaluation:
    """Sample `num_samples` completions of every prompt and reward them.

    Args:
        indices: prompt indices of `environment`, at least one; held-out prompts are another environment's.

    Raises:
        Fault: the folder is not a policy.
    """
    torch.set_num_threads(threads)
    model = load_model(folder, device=device)
    rows = [(index, number) for index in indices for number in range(num_samples)]
    seeds = {index: tagged_hash("evaluate", seed.to_bytes(8, "big"), index.to_bytes(8, "big")) for index in indices}
    keys = np.array([compute_sample_key(seeds[index], number) for index, number in rows], dtype=np.uint64)
    completions = generate_turns(
        model,
        [environment.prompt(index) for index, _ in rows],
        lambda row, completion: environment.respond(rows[row][0], completion),
        max_tokens=max_tokens,
        stop_tokens=stop_tokens,
        pick=make_gumbel_pick(keys, temperature=temperature, vocab_size=environment.vocab_size),
    )
    rewards = [environment.reward(index, line) / 1e6 for (index, _), line in zip(rows, completions, strict=True)]
    means = np.array(rewards).reshape(len(indices), num_samples).mean(axis=1)
    return Evaluation(
        reward_mean=float(means.mean()),
        reward_error=float(means.std(ddof=1) / np.sqrt(len(means))) if len(means) > 1 else 0.0,
        tokens_mean=statistics.fmean(len(line) for line in completions),
        num_prompts=len(indices),
        num_samples=num_samples,
    )
