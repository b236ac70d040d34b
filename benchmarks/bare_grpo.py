"""The floor that the protocol's overhead is measured against: the same model, batch and steps in one process.

Generation with a KV cache, GRPO with the trainer's own step, nothing else: no commitments, no verification, no ledger, no
network. `run` gives CPU seconds and rewards; `--lag` trains on rollouts of older policies, as a network does.

    python benchmarks/bare_grpo.py --steps 40 --groups 32 --seed 0 --json
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from environments.sort import EOS, SortEnvironment
from models.policy import load_model
from trainer.batch import GroupKey, TrainingGroup
from trainer.config import TrainerConfig
from trainer.decode import Pick, generate
from trainer.evaluate import evaluate_policy
from trainer.policy import write_files
from trainer.step import Learner
from trainer.warmup import make_base_policy

MAX_TOKENS = 6
TEMPERATURE = 1.0


def run(
    steps: int,
    groups: int,
    group_size: int,
    seed: int,
    *,
    lag: int = 0,
    config: TrainerConfig | None = None,
    base: Path | None = None,
) -> dict[str, Any]:
    """Train for `steps` steps of `groups` x `group_size` rollouts.

    Args:
        lag: policy versions between the rollouts and the trainer.
        config: optimiser settings; by default the trainer's, with a schedule of `steps` steps.
        base: policy folder to start from; made with `seed` when absent (not counted).

    Returns:
        cpu_seconds (whole loop), rollouts, cpu_ms_per_rollout, reward_first and reward_last (means on held-out prompts),
        rewards (training mean of every step).
    """
    torch.set_num_threads(1)
    environment = SortEnvironment(4)
    with tempfile.TemporaryDirectory() as scratch:
        folder = base or Path(scratch) / "base"
        if base is None:
            make_base_policy(folder, environment, seed=seed)
        learner = Learner(config or TrainerConfig(total_steps=steps), folder, temperature=TEMPERATURE)
        sampler = load_model(folder)
        weights = deque([_copy(learner)], maxlen=lag + 1)
        rng = np.random.default_rng(seed)
        generator = torch.Generator().manual_seed(seed)
        rewards, started = [], time.process_time()
        for version in range(steps):
            sampler.load_state_dict(weights[0])
            batch = _roll_out(sampler, environment, rng, generator, groups, group_size, version)
            rewards.append(learner.step(batch, version).reward_mean)
            weights.append(_copy(learner))
        cpu_seconds = time.process_time() - started
        last = Path(scratch) / "last"
        write_files(last, learner.encode_policy())
        reward_first, reward_last = (_evaluate(path, environment) for path in (folder, last))
    rollouts = steps * groups * group_size
    return {
        "cpu_seconds": cpu_seconds,
        "rollouts": rollouts,
        "cpu_ms_per_rollout": 1000 * cpu_seconds / rollouts,
        "reward_first": reward_first,
        "reward_last": reward_last,
        "rewards": rewards,
    }


def _copy(learner: Learner) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in learner.model.state_dict().items()}


def _evaluate(folder: Path, environment: SortEnvironment) -> float:
    held_out = environment.held_out()
    return evaluate_policy(
        folder,
        held_out,
        range(held_out.num_prompts),
        num_samples=2,
        temperature=TEMPERATURE,
        max_tokens=MAX_TOKENS,
        stop_tokens=(EOS,),
    ).reward_mean


def _roll_out(
    model: Any,
    environment: SortEnvironment,
    rng: np.random.Generator,
    generator: torch.Generator,
    groups: int,
    group_size: int,
    version: int,
) -> list[TrainingGroup]:
    """Sample a batch and keep the log-probabilities of what was drawn."""
    indices = rng.integers(environment.num_prompts, size=groups).tolist()
    prompts = [environment.prompt(index) for index in indices for _ in range(group_size)]
    logprobs = np.zeros((len(prompts), MAX_TOKENS), dtype=np.float32)
    pick = _make_recording_pick(generator, environment.vocab_size, logprobs)
    completions = generate(model, prompts, max_tokens=MAX_TOKENS, stop_tokens=(EOS,), pick=pick)
    batch = []
    for slot, index in enumerate(indices):
        rows = range(slot * group_size, (slot + 1) * group_size)
        lines = tuple(completions[row] for row in rows)
        batch.append(
            TrainingGroup(
                key=GroupKey(version, b"", slot),
                leaf=b"",
                policy_version=version,
                prompt=prompts[rows[0]],
                completions=lines,
                rewards_micro=np.array([environment.reward(index, line) for line in lines], dtype=np.int64),
                logprobs=tuple(logprobs[row, : len(completions[row])] for row in rows),
            )
        )
    return batch


def _make_recording_pick(generator: torch.Generator, vocab_size: int, logprobs: NDArray[np.float32]) -> Pick:
    def pick(logits: Tensor, rows: NDArray[np.int64], position: int) -> Tensor:
        spread = torch.log_softmax(logits[:, :vocab_size] / TEMPERATURE, dim=-1)
        tokens = torch.multinomial(spread.exp(), 1, generator=generator)
        logprobs[rows, position] = spread.gather(1, tokens)[:, 0].numpy()
        return tokens[:, 0]

    return pick


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--group-size", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lag", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    result = run(args.steps, args.groups, args.group_size, args.seed, lag=args.lag)
    if args.json:
        sys.stdout.write(json.dumps(result) + "\n")
    else:
        sys.stdout.write(
            f"reward {result['reward_first']:.3f} -> {result['reward_last']:.3f} on held-out prompts, "
            f"{result['rollouts']} rollouts, {result['cpu_seconds']:.1f} CPU s, "
            f"{result['cpu_ms_per_rollout']:.2f} ms per rollout\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
