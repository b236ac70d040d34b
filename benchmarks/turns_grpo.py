"""Does a small policy learn a task of several turns? GRPO on `guess` in one process, from random weights.

As bare_grpo, with completions in which the environment answers; only sampled tokens are trained. Halving what is
left, `reward_halving`, is the best there is but for luck.

    python benchmarks/turns_grpo.py --steps 80 --groups 24 --seed 0 --json
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from environments.guess import STOP_TOKENS, GuessEnvironment
from models.policy import load_model
from trainer.batch import GroupKey, TrainingGroup
from trainer.config import TrainerConfig
from trainer.decode import Pick, generate_turns
from trainer.evaluate import evaluate_policy
from trainer.policy import encode_config, encode_tensors, write_files, write_policy
from trainer.step import Learner

MAX_TOKENS = 22
WIDTH, LAYERS = 64, 2


def run(steps: int, groups: int, group_size: int, seed: int) -> dict[str, Any]:
    """Train for `steps` steps of `groups` x `group_size` rollouts.

    Returns:
        cpu_seconds, rollouts, reward_first and reward_last (means over all prompts, 8 samples each), reward_halving (what
        halving is worth), rewards (training mean of every step).
    """
    torch.set_num_threads(1)
    environment = GuessEnvironment()
    with tempfile.TemporaryDirectory() as scratch:
        first, last = Path(scratch) / "first", Path(scratch) / "last"
        _write_random_policy(first, environment.vocab_size, seed)
        learner = Learner(TrainerConfig(total_steps=steps), first, temperature=1.0)
        sampler = load_model(first)
        rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
        rewards, started = [], time.process_time()
        for version in range(steps):
            sampler.load_state_dict(learner.model.state_dict())
            batch = _roll_out(sampler, environment, rng, generator, groups, group_size, version)
            rewards.append(learner.step(batch, version).reward_mean)
        cpu_seconds = time.process_time() - started
        write_files(last, learner.encode_policy())
        reward_first, reward_last = (_evaluate(folder, environment) for folder in (first, last))
    indices = range(environment.num_prompts)
    halving = float(np.mean([environment.reward(i, environment.solution(i)) for i in indices])) / 1e6
    return {
        "cpu_seconds": cpu_seconds,
        "rollouts": steps * groups * group_size,
        "reward_first": reward_first,
        "reward_last": reward_last,
        "reward_halving": halving,
        "rewards": rewards,
    }


def _write_random_policy(folder: Path, vocab_size: int, seed: int) -> None:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=WIDTH,
        intermediate_size=4 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=None,
        architectures=["LlamaForCausalLM"],
        dtype="float32",
    )
    model = LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
    write_policy(folder, encode_config(model.config), encode_tensors(dict(model.state_dict())))


def _evaluate(folder: Path, environment: GuessEnvironment) -> float:
    return evaluate_policy(
        folder,
        environment,
        range(environment.num_prompts),
        num_samples=8,
        temperature=1.0,
        max_tokens=MAX_TOKENS,
        stop_tokens=STOP_TOKENS,
    ).reward_mean


def _roll_out(
    model: Any,
    environment: GuessEnvironment,
    rng: np.random.Generator,
    generator: torch.Generator,
    groups: int,
    group_size: int,
    version: int,
) -> list[TrainingGroup]:
    """Sample a batch and keep the log-probabilities of what was drawn."""
    indices = rng.integers(environment.num_prompts, size=groups).tolist()
    owner = [index for index in indices for _ in range(group_size)]
    drawn = np.full((len(owner), 2 * MAX_TOKENS), np.nan, dtype=np.float32)
    starts: list[list[int]] = [[] for _ in owner]

    def respond(row: int, completion: tuple[int, ...]) -> tuple[int, ...]:
        answer = environment.respond(owner[row], completion)
        if answer and len(completion) + len(answer) < MAX_TOKENS:
            starts[row] += range(len(completion), len(completion) + len(answer))
        return answer

    completions = generate_turns(
        model,
        [environment.prompt(index) for index in owner],
        respond,
        max_tokens=MAX_TOKENS,
        stop_tokens=STOP_TOKENS,
        pick=_make_recording_pick(generator, environment.vocab_size, drawn),
    )
    sampled = [
        np.array(sorted(set(range(len(line))) - set(own)), dtype=np.int64)
        for line, own in zip(completions, starts, strict=True)
    ]
    batch = []
    for slot, index in enumerate(indices):
        rows = range(slot * group_size, (slot + 1) * group_size)
        batch.append(
            TrainingGroup(
                key=GroupKey(version, b"", slot),
                leaf=b"",
                policy_version=version,
                prompt=environment.prompt(index),
                completions=tuple(completions[row] for row in rows),
                rewards_micro=np.array([environment.reward(index, completions[row]) for row in rows], dtype=np.int64),
                logprobs=tuple(drawn[row, sampled[row]] for row in rows),
                sampled=tuple(sampled[row] for row in rows),
            )
        )
    return batch


def _make_recording_pick(generator: torch.Generator, vocab_size: int, drawn: NDArray[np.float32]) -> Pick:
    def pick(logits: Tensor, rows: NDArray[np.int64], position: int | NDArray[np.int64]) -> Tensor:
        spread = torch.log_softmax(logits[:, :vocab_size], dim=-1)
        tokens = torch.multinomial(spread.exp(), 1, generator=generator)
        drawn[rows, position] = spread.gather(1, tokens)[:, 0].numpy()
        return tokens[:, 0]

    return pick


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--groups", type=int, default=24)
    parser.add_argument("--group-size", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    result = run(args.steps, args.groups, args.group_size, args.seed)
    if args.json:
        json.dump(result, sys.stdout)
        sys.stdout.write("\n")
    else:
        for name, value in result.items():
            sys.stdout.write(f"{name:<16}{value}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
