"""What replayable noise costs: milliseconds per sampled token over a large vocabulary, on one core.

Ways to draw a token from the same logits, interleaved, CPU time, medians over repetitions: the compiled kernel that nodes and
verifiers use, its array form (the definition), the torch form for logits on an accelerator (here on the CPU), and what torch
itself offers without replay: softmax with multinomial, and exponential noise with argmax (as vLLM samples). The first two
are also compared: a difference in any token is an error.

Logits are drawn: `flat` is N(0, 1); `peaked` has a body of N(-4, 2.2) and 200 tokens from 4 to 22, as a trained model's.

    python benchmarks/noise.py --json
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from models import gumbel
from protocol import sampling
from protocol.kernels import kernels

VOCAB = 152_064
TEMPERATURES = (0.6, 1.0)


def make_logits(shape: str, rows: int, vocab: int, seed: int = 0) -> Any:
    """float32 [rows, vocab]."""
    rng = np.random.default_rng(seed)
    if shape == "flat":
        return rng.normal(size=(rows, vocab)).astype(np.float32)
    logits = (rng.normal(size=(rows, vocab)) * 2.2 - 4).astype(np.float32)
    for row in logits:
        row[rng.choice(vocab, 200, replace=False)] = np.linspace(4, 22, 200, dtype=np.float32)
    return logits


def make_ways(logits: Any, keys: Any, temperature: float) -> dict[str, Callable[[], Any]]:
    """Ways to draw one token a row."""
    positions, vocab, tensor = np.arange(len(keys)), logits.shape[1], torch.from_numpy(logits)
    options: dict[str, Any] = {"temperature": temperature, "vocab_size": vocab}

    def multinomial() -> Any:
        return torch.multinomial(torch.softmax(tensor / temperature, -1), 1)

    def exponential() -> Any:
        probabilities = torch.softmax(tensor / temperature, -1)
        return (probabilities / torch.empty_like(probabilities).exponential_()).argmax(-1)

    return {
        "kernel": lambda: sampling.sample_tokens(logits, keys, positions, **options),
        "array": lambda: sampling.choose(sampling.scores(logits, keys, positions, **options)),
        "torch_form": lambda: gumbel.sample_tokens(tensor, keys, positions, **options),
        "torch_multinomial": multinomial,
        "torch_exponential": exponential,
    }


def measure(shape: str, temperature: float, *, rows: int, repeats: int, vocab: int) -> dict[str, Any]:
    """Median milliseconds per token of every way, for one kind of logits."""
    logits = make_logits(shape, rows, vocab)
    keys = np.random.default_rng(1).integers(0, 2**64, rows, dtype=np.uint64)
    ways = make_ways(logits, keys, temperature)
    if (ways["kernel"]() != ways["array"]()).any():
        raise SystemExit("the kernel and the array form give different tokens")
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, way in ways.items():
            started = time.process_time()
            way()
            times[name].append((time.process_time() - started) / rows * 1e3)
    medians = {name: round(statistics.median(found), 4) for name, found in times.items()}
    least = {name: round(min(found), 4) for name, found in times.items()}
    return {"logits": shape, "temperature": temperature, "ms_per_token": medians, "ms_per_token_least": least}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="print JSON on stdout")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--vocab", type=int, default=VOCAB)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if not kernels.load():
        raise SystemExit("no compiled kernels: there is nothing to compare")
    found = [
        measure(shape, temperature, rows=options.rows, repeats=options.repeats, vocab=options.vocab)
        for shape in ("peaked", "flat")
        for temperature in TEMPERATURES
    ]
    if options.json:
        shown = {"vocab": options.vocab, "rows": options.rows, "repeats": options.repeats, "threads": 1, "cases": found}
        print(json.dumps(shown, indent=1))
        return
    for one in found:
        print(one["logits"], one["temperature"], *(f"{name} {ms:.3f}" for name, ms in one["ms_per_token"].items()))


if __name__ == "__main__":
    main()
