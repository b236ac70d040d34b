"""What an audit costs: against one plain prefill of the same tokens, and against the generation that it checks.

Rollouts are made by the torch engine with random weights (no time depends on their values) and audited as a verifier does it:
prefill, top entries against the commitments, replay of every token, log-probabilities. `plain` is the forward pass of
transformers over the same padded batches, logits of all positions included; `bare` is the same pass without logits. CPU
seconds of one thread; audit, plain and bare take turns, and ratios are medians of the ratios within one turn.

`cost_ratio` is CPU seconds per token of generation at a decode batch over those of the audit. On a CPU decoding in large
batches is bound by arithmetic, as a prefill is, so the ratio falls towards 1; nothing here says anything about a GPU.

    python benchmarks/verification.py --json
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from generate_engines import CHUNK, SIZES, Size, make_policy, make_workload, prepare_process

#: Rollouts of an audit, tokens of their prompts (shortest, longest) and of their completions.
ROLLOUTS, PROMPT_TOKENS, COMPLETION_TOKENS = 64, (8, 24), 32
DECODE_BATCHES = (1, 8, 64)
#: CPU seconds of one measurement, at least.
SECONDS_MIN = 0.5
OVERHEAD_MAX = 1.15
#: Sizes that `OVERHEAD_MAX` is for; below, fixed costs of a few milliseconds are most of an audit.
FROM_3M = ("3m", "135m")


def time_of(work: Callable[[], object], loops: int) -> float:
    """CPU seconds of one run."""
    started = time.process_time()
    for _ in range(loops):
        work()
    return (time.process_time() - started) / loops


def count_loops(work: Callable[[], object]) -> int:
    """Runs that take `SECONDS_MIN`; also the first, uncounted runs."""
    work()
    seconds = time_of(work, 1)
    return max(1, round(SECONDS_MIN / max(seconds, 1e-6)))


def measure_memory(work: Callable[[], object], tokens: int) -> float:
    """Peak resident MiB per 1,000 padded tokens, in a fork that has not done the work before."""
    import os

    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
        before = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
        work()
        peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
        os.write(writing, str(int(peak.split()[1]) * 1024 - before).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        grown = int(pipe.read())
    os.waitpid(pid, 0)
    return grown / (1 << 20) / tokens * 1000


def measure(name: str, size: Size, repeats: int) -> dict[str, Any]:
    """All figures of one size."""
    import numpy as np
    import torch

    from inference.engine import TorchEngine
    from protocol.toploc import build_proofs, match_proofs
    from verifier.scorer import TorchScorer

    with tempfile.TemporaryDirectory() as folder:
        parameters = make_policy(size, Path(folder))
        engine, scorer = TorchEngine(), TorchScorer()
        engine.load(Path(folder))
        scorer.load(Path(folder))
    workload = make_workload(size, ROLLOUTS, PROMPT_TOKENS, COMPLETION_TOKENS)
    requests = workload.requests

    def generate(batch: int) -> list[Any]:
        made = []
        for start in range(0, max(batch, 1), batch):
            part = requests[start : start + batch]
            made += engine.generate(part, temperature=1.0, max_tokens=COMPLETION_TOKENS, stop_tokens=())
        return made

    made = generate(ROLLOUTS)
    completions = [one.tokens for one in made]
    proofs = build_proofs([one.hidden for one in made], topk=size.topk, chunk=CHUNK)
    batches = []
    for batch in scorer._batches(requests, completions):
        sequences = [requests[i].prompt + completions[i][:-1] for i in batch]
        inputs = np.zeros((len(batch), max(map(len, sequences))), dtype=np.int64)
        for row, sequence in enumerate(sequences):
            inputs[row, : len(sequence)] = sequence
        batches.append(torch.from_numpy(inputs))
    padded, used = sum(one.numel() for one in batches), sum(len(r.prompt) + COMPLETION_TOKENS - 1 for r in requests)

    def audit() -> None:
        scored = scorer.score(requests, completions, temperature=1.0)
        match_proofs([one.hidden for one in scored], proofs, topk=size.topk, chunk=CHUNK, modulus_min=32_768)

    @torch.inference_mode()
    def plain() -> None:
        for inputs in batches:
            scorer._model(input_ids=inputs, use_cache=False).logits  # noqa: B018

    @torch.inference_mode()
    def bare() -> None:
        for inputs in batches:
            scorer._model.base_model(input_ids=inputs, use_cache=False).last_hidden_state  # noqa: B018

    memory = {"audit": measure_memory(audit, padded), "plain": measure_memory(plain, padded)}
    works: dict[str, Callable[[], object]] = {"audit": audit, "plain": plain, "bare": bare}
    works |= {f"decode_{batch}": lambda batch=batch: generate(batch) for batch in DECODE_BATCHES}
    loops = {key: count_loops(work) for key, work in works.items()}
    turns = [{key: time_of(works[key], loops[key]) for key in works} for _ in range(repeats)]
    tokens = ROLLOUTS * COMPLETION_TOKENS

    def median(value: Callable[[dict[str, float]], float]) -> float:
        return round(statistics.median(value(turn) for turn in turns), 3)

    return {
        "parameters": parameters,
        "prefill_overhead": median(lambda turn: turn["audit"] / turn["plain"]),
        "over_bare": median(lambda turn: turn["audit"] / turn["bare"]),
        "cost_ratio": {
            str(batch): median(
                lambda turn, batch=batch: (
                    turn[f"decode_{batch}"] / (batch * COMPLETION_TOKENS) / (turn["audit"] / tokens)
                )
            )
            for batch in DECODE_BATCHES
        },
        "audit_ms_per_token": median(lambda turn: turn["audit"] / tokens * 1000),
        "padding": round(padded / used, 3),
        "mib_per_1k_tokens": {key: round(value, 1) for key, value in memory.items()},
        "overhead_max": OVERHEAD_MAX if name in FROM_3M else None,
    }


def main() -> None:
    """Measure and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", nargs="+", choices=sorted(SIZES), default=[*SIZES])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print JSON only (always the case)")
    options = parser.parse_args()
    prepare_process()
    result = {name: measure(name, SIZES[name], options.repeats) for name in options.sizes}
    shape = {"rollouts": ROLLOUTS, "prompt_tokens": PROMPT_TOKENS, "completion_tokens": COMPLETION_TOKENS}
    json.dump({"sizes": result, "workload": shape, "repeats": options.repeats}, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
