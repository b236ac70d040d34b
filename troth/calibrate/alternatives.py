"""Policies that are nearly, but not, the policy of a folder: what a cheap or careless node could run instead.

`make_alternatives` writes each as a policy folder of its own, a function of the source, the seed and the thread count.
Weights that formats for cheap inference leave alone (embeddings, output head, norms, biases) are left alone here too.
Results are stored in float32, so that nothing but the change itself is measured; "bf16" and stale policies keep the type
they are published in. Neighbours: troth.calibrate measures how well each is told apart, benchmarks/roc.py what the judge
makes of it, trainer.step is the optimiser behind the stale ones.
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inference.engine import TorchEngine
from models.adapter import Update, get_base, is_adapter, merge_update
from models.policy import CONFIG, read_config, read_tensors
from protocol.errors import ConfigError
from protocol.ports import Environment, SampleRequest
from trainer.batch import GroupKey, TrainingGroup
from trainer.config import TrainerConfig
from trainer.grpo import has_variance
from trainer.policy import encode_tensors, write_files, write_policy
from trainer.step import Learner
from trainer.warmup import Shape, SolvableEnvironment, make_base_policy
from troth.calibrate.prompts import RANDOM, make_requests
from verifier.scorer import TorchScorer

#: Optimiser steps and learning rates of the stale policies.
STALE_STEPS, STALE_RATES = (1, 2, 5, 10), ("1e-6", "1e-5", "1e-4")
#: Everything that can be made, from formats over damage to other and older policies.
ALTERNATIVES = (
    "int8",
    "fp8",
    "int4-32",
    "int4-128",
    "bf16",
    "pruned-10",
    "pruned-30",
    "noise-0.1",
    "noise-1",
    "noise-3",
    "lora",
    "sibling",
    *(f"stale-{steps}@{rate}" for rate in STALE_RATES for steps in STALE_STEPS),
)

#: Matrices that formats of quantised weights leave in their own type.
_KEPT = ("embed", "wte", "wpe", "lm_head", "output_layer")
_E4M3_MAX = 448.0
_LORA_RANK, _LORA_SCALE = 8, 2.0
#: Entries of B after some tens of AdamW steps at 1e-4, the usual rate for adapters; it starts at 0.
_LORA_B_STD = 2e-3
#: Base policies of at most so many weights are warmed up anew from another seed; larger ones are shuffled.
_SIBLING_WEIGHTS_MAX = 8_000_000
#: Batch of one training step of a stale policy. AdamW moves a weight by about the learning rate, whatever the batch.
_GROUPS, _GROUP_SIZE, _TOKENS_MAX = 4, 8, 16

Edit = Callable[[str, Tensor], Tensor]


def make_alternatives(
    folder: Path,
    work: Path,
    names: Sequence[str] | None,
    seed: int,
    *,
    environment: Environment | None = None,
) -> Iterator[tuple[str, Path]]:
    """Write policies that are not the one in `folder`, one after the other.

    Args:
        folder: policy folder, whole or an adapter (whose merged weights are taken).
        work: where they are written, one folder each by name; it may exist, the folders of these names must not.
        names: out of `ALTERNATIVES`, all when None.
        environment: the policy's task. Stale policies are then trained on its prompts and rewards, and a sibling is
            warmed up on its solutions. Without one, prompts are random tokens, rewards a hash of the completion.

    Yields:
        Name and folder. With `names` None those are left out that change nothing, as bf16 of a bf16 policy does.

    Raises:
        ConfigError: for an unknown name, a folder that exists, or a named alternative that changes nothing.
        Fault: the folder is no policy, or training it failed.
    """
    chosen = list(ALTERNATIVES) if names is None else list(names)
    for name in chosen:
        if name not in ALTERNATIVES:
            near = difflib.get_close_matches(name, ALTERNATIVES, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise ConfigError(f"no alternative is called {name!r}: {hint}there are {', '.join(ALTERNATIVES)}")
        if (work / name).exists():
            raise ConfigError(f"{work / name} exists: choose another folder or remove it")
    return _make(folder, work, chosen, seed, environment, is_named=names is not None)


def _make(
    folder: Path, work: Path, names: Sequence[str], seed: int, environment: Environment | None, *, is_named: bool
) -> Iterator[tuple[str, Path]]:
    work.mkdir(parents=True, exist_ok=True)
    stale = [name for name in names if name.startswith("stale-")]
    source, batches = folder, list[list[TrainingGroup]]()
    for name in names:
        target = work / name
        if name in stale:
            if not batches:
                source = _merge(folder, work)
                batches = _make_batches(source, seed, environment)
            if not target.exists():
                _make_stale(source, work, [one for one in stale if _rate(one) == _rate(name)], seed, batches)
            yield name, target
        elif name == "sibling":
            _make_sibling(folder, target, seed, environment)
            yield name, target
        elif _edit_policy(folder, target, _make_edit(name, seed)):
            yield name, target
        elif is_named:
            raise ConfigError(f"{name} leaves every weight of {folder} as it is: it is no alternative to it")


# Edited weights


def is_linear(name: str, tensor: Tensor) -> bool:
    """Whether a tensor is the matrix of a linear layer inside the blocks, which is what weight formats store narrower."""
    return tensor.dim() == 2 and tensor.is_floating_point() and not any(part in name for part in _KEPT)


def _edit_policy(folder: Path, target: Path, edit: Edit) -> bool:
    """Write a policy with every tensor edited, unless that changes none."""
    tensors, changed = {}, False
    for name, tensor in read_tensors(folder):
        tensors[name] = edit(name, tensor).contiguous()
        changed = changed or not torch.equal(tensors[name].double(), tensor.double())
    if changed:
        write_policy(target, (get_base(folder) / CONFIG).read_bytes(), encode_tensors(tensors))
    return changed


def _make_edit(name: str, seed: int) -> Edit:
    kind, _, value = name.partition("-")
    if kind == "noise":
        return lambda tensor_name, tensor: add_noise(tensor, float(value) / 100, _make_generator(seed, tensor_name))
    if kind == "bf16":
        return lambda _, tensor: tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
    edits: dict[str, Callable[[str, Tensor], Tensor]] = {
        "int8": lambda _, weight: round_to_int8(weight),
        "fp8": lambda _, weight: round_to_fp8(weight),
        "int4": lambda _, weight: round_to_int4(weight, int(value)),
        "pruned": lambda _, weight: prune(weight, int(value) / 100),
        "lora": lambda tensor_name, weight: add_adapter(weight, _make_generator(seed, tensor_name)),
        "sibling": lambda tensor_name, weight: shuffle(weight, _make_generator(seed, tensor_name)),
    }

    def edit(tensor_name: str, tensor: Tensor) -> Tensor:
        if is_linear(tensor_name, tensor) or (kind == "sibling" and tensor.dim() == 2):
            return edits[kind](tensor_name, tensor.float())
        return tensor

    return edit


def _make_generator(seed: int, name: str) -> torch.Generator:
    digest = hashlib.sha256(f"alternative/{seed}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def round_to_int8(weight: Tensor) -> Tensor:
    """Symmetric int8 by output channel: s = max|w| / 127, w' = s * clip(round(w / s), -127, 127).

    Scale quantisation of Wu et al., "Integer Quantization for Deep Learning Inference" (2020), section 3.1.2, per
    channel as its section 4 finds necessary for weights; LLM.int8() rounds weights the same way.
    """
    scale = weight.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / 127
    return (weight / scale).round().clamp(-127, 127) * scale


def round_to_fp8(weight: Tensor) -> Tensor:
    """float8 e4m3 (1 sign, 4 exponent, 3 mantissa bits, largest 448) with a scale by output channel that maps max|w| to 448.

    Micikevicius et al., "FP8 Formats for Deep Learning" (2022), table 1 and section 3; rounding is torch's, nearest even.
    """
    scale = weight.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / _E4M3_MAX
    return (weight / scale).to(torch.float8_e4m3fn).float() * scale


def round_to_int4(weight: Tensor, group: int) -> Tensor:
    """Symmetric int4 by groups of `group` inputs: s = 2 max|w| / 15, w' = s * clip(round(w / s), -8, 7).

    Round-to-nearest with the grid of GPTQ (Frantar et al., 2022) in its symmetric form, without its error feedback. A row
    that is no multiple of `group` ends in a shorter one.
    """
    rows, width = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -width % group)).reshape(rows, -1, group)
    scale = padded.abs().amax(dim=2, keepdim=True).clamp(min=1e-12) * 2 / 15
    return ((padded / scale).round().clamp(-8, 7) * scale).reshape(rows, -1)[:, :width]


def prune(weight: Tensor, share: float) -> Tensor:
    """The smallest magnitudes of a matrix set to 0.

    Layer-wise magnitude pruning without retraining: Han et al., "Learning both Weights and Connections" (2015).
    """
    flat = weight.flatten().clone()
    flat[flat.abs().argsort(stable=True)[: int(share * flat.numel())]] = 0
    return flat.reshape(weight.shape)


def add_noise(tensor: Tensor, ratio: float, generator: torch.Generator) -> Tensor:
    """Gaussian noise of `ratio` times the tensor's own standard deviation, on every kind of tensor."""
    if not tensor.is_floating_point():
        return tensor
    values = tensor.float()
    return values + torch.randn(values.shape, generator=generator) * (values.std(correction=0) * ratio)


def add_adapter(weight: Tensor, generator: torch.Generator) -> Tensor:
    """A merged LoRA adapter of rank 8 and alpha 16: W + 2 B A (Hu et al., 2021, section 4.1).

    A is uniform in +-1 / sqrt(in), as peft draws it; B, which starts at 0, is normal and of the size that it has after some
    tens of steps. A matrix that is narrower than the rank stays.
    """
    rows, width = weight.shape
    if min(rows, width) < _LORA_RANK:
        return weight
    a = (torch.rand(_LORA_RANK, width, generator=generator) * 2 - 1) / width**0.5
    b = torch.randn(rows, _LORA_RANK, generator=generator) * _LORA_B_STD
    merged: Tensor = merge_update(weight, Update(a.numpy(), b.numpy(), _LORA_SCALE))
    return merged


def shuffle(weight: Tensor, generator: torch.Generator) -> Tensor:
    """The same numbers in another order: another draw from the same distribution."""
    return weight.flatten()[torch.randperm(weight.numel(), generator=generator)].reshape(weight.shape)


def _make_sibling(folder: Path, target: Path, seed: int, environment: Environment | None) -> None:
    """A model of the same shape from another seed: warmed up on the same task where that is known and takes seconds, else
    one with every matrix shuffled, which is what another draw of the initial weights is to an untrained model."""
    config = read_config(folder)
    num_weights = sum(tensor.numel() for _, tensor in read_tensors(folder))
    can_train = isinstance(environment, SolvableEnvironment) and config["model_type"] == "llama"
    if environment is None or not can_train or num_weights > _SIBLING_WEIGHTS_MAX:
        _edit_policy(folder, target, _make_edit("sibling", seed))
        return
    shape = Shape(
        hidden=config["hidden_size"],
        layers=config["num_hidden_layers"],
        heads=config["num_attention_heads"],
        intermediate=config["intermediate_size"],
        positions=config["max_position_embeddings"],
    )
    make_base_policy(target, environment, seed=seed + 1, shape=shape)


# Stale policies


def _parse_stale(name: str) -> tuple[int, str]:
    """Steps and learning rate in the name of a stale policy."""
    steps, _, rate = name.removeprefix("stale-").partition("@")
    return int(steps), rate


def _rate(name: str) -> str:
    return _parse_stale(name)[1]


def _merge(folder: Path, work: Path) -> Path:
    """The folder of a whole policy with these weights."""
    if not is_adapter(folder):
        return folder
    merged = work / "merged"
    write_policy(merged, (get_base(folder) / CONFIG).read_bytes(), encode_tensors(dict(read_tensors(folder))))
    return merged


def _make_stale(
    folder: Path, work: Path, names: Sequence[str], seed: int, batches: Sequence[Sequence[TrainingGroup]]
) -> None:
    """Train on from the policy with the trainer's own optimiser and GRPO loss, and write what it is after so many steps.

    The true policy is then the one that is some steps *older*; what tells the two apart is their difference, which has no
    direction. All rollouts come from the policy itself, as in asynchronous training whose nodes have not reloaded yet.
    """
    wanted = {_parse_stale(name)[0]: name for name in names}
    config = TrainerConfig(
        learning_rate=float(_rate(names[0])),
        learning_rate_end=1.0,
        warmup_steps=0,
        epochs=1,
        minibatch_groups=0,
        seed=seed,
    )
    learner = Learner(config, folder, temperature=1.0)
    for step, batch in enumerate(batches[: max(wanted)], start=1):
        learner.step(batch, step - 1)
        if step in wanted:
            write_files(work / wanted[step], learner.encode_policy())


def _make_batches(folder: Path, seed: int, environment: Environment | None) -> list[list[TrainingGroup]]:
    """Rollouts of the policy itself with rewards, for as many optimiser steps as any stale policy has."""
    count = max(STALE_STEPS) * _GROUPS
    prompts, stops = _choose_prompts(read_config(folder), folder, count, seed, environment)
    keys = np.random.default_rng([seed, 1]).integers(2**64, size=count * _GROUP_SIZE, dtype=np.uint64).tolist()
    vocab = environment.vocab_size if environment else None
    requests = [SampleRequest(prompts[i // _GROUP_SIZE][1], key) for i, key in enumerate(keys)]
    engine, scorer = TorchEngine(vocab_size=vocab), TorchScorer(vocab_size=vocab)
    engine.load(folder)
    made = engine.generate(requests, temperature=1.0, max_tokens=_TOKENS_MAX, stop_tokens=stops)
    completions = [one.tokens for one in made]
    scorer.load(folder)
    scored = scorer.score(requests, completions, temperature=1.0)
    batches = []
    for start in range(0, count, _GROUPS):
        slots = range(start, start + _GROUPS)
        lines = [tuple(completions[slot * _GROUP_SIZE : (slot + 1) * _GROUP_SIZE]) for slot in slots]
        rewards = _reward([prompts[slot][0] for slot in slots], lines, environment)
        batch = []
        for slot, line, reward in zip(slots, lines, rewards, strict=True):
            rows = scored[slot * _GROUP_SIZE : (slot + 1) * _GROUP_SIZE]
            logprobs = tuple(row.logprobs.astype(np.float32) for row in rows)
            batch.append(
                TrainingGroup(GroupKey(0, bytes(20), slot), bytes(32), 0, prompts[slot][1], line, reward, logprobs)
            )
        batches.append(batch)
    return batches


def _reward(
    indices: Sequence[int], lines: Sequence[tuple[tuple[int, ...], ...]], environment: Environment | None
) -> NDArray[np.int64]:
    """Rewards of a batch, int64 [groups, group size]: the task's where they differ within some group, else 0 or 1 by a hash
    of the completion, which has nothing to do with the policy, so that there is a gradient at all."""
    if environment is not None:
        pairs = zip(indices, lines, strict=True)
        rewards = np.array([[environment.reward(index, one) for one in line] for index, line in pairs])
        if has_variance(rewards).any():
            return rewards
    drawn = [[hashlib.sha256(repr(one).encode()).digest()[0] & 1 for one in line] for line in lines]
    return 1_000_000 * np.array(drawn)


def _choose_prompts(
    config: dict[str, Any], folder: Path, count: int, seed: int, environment: Environment | None
) -> tuple[list[tuple[int, tuple[int, ...]]], tuple[int, ...]]:
    """Indices and tokens of prompts, and the stop tokens of completions."""
    stop = config.get("eos_token_id")
    stops = tuple(stop) if isinstance(stop, list) else (() if stop is None else (int(stop),))
    if environment is None:
        found = make_requests([RANDOM], count, vocab=config["vocab_size"], folder=folder, args="{}", seed=seed)
        return [(0, request.prompt) for request in found], stops
    indices = np.random.default_rng([seed, 0]).integers(environment.num_prompts, size=count).tolist()
    return [(index, environment.prompt(index)) for index in indices], stops
