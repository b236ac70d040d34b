"""Time to build and to verify commitments, ours against the reference library's public functions, in one process.

One completion of 512 tokens, top 128, chunks of 32, at several hidden sizes and on one and two threads. Ours, the reference and
one plain read of the activations take turns, so that a change of the machine's speed meets all of them alike; reported are
medians, ratios are medians of the ratios within a turn. `floor_share` is the time of one read over ours. On one thread the CPU
time of the process counts, so that other load on the machine does not; on two threads, elapsed time. The process keeps to as
many CPUs as a case has threads, since the reference starts one thread per CPU. On two threads we are called from two threads,
with half of the chunks each. Needs the environment of `make venv-toploc`.

    python benchmarks/toploc.py --json
    python benchmarks/toploc.py --generation --json    (needs no reference: share of generation that commitments take)
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

sys.path.pop(0)  # this script's folder, where a file is called like the reference library
sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
from numpy.typing import NDArray

from protocol.kernels import kernels
from protocol.toploc import build_proofs, match_proofs

TOKENS, TOPK, CHUNK = 512, 128, 32
MODULUS_MIN = 32769
#: Hidden size and threads; the targets hold for the first one.
CASES = ((5120, 1), (64, 1), (1024, 1), (8192, 1), (5120, 2))
#: Lowest ratios for the first case, and the largest share of generation from the 3M shape up.
BUILD_RATIO_MIN, VERIFY_RATIO_MIN, SHARE_MAX = 10.0, 8.0, 0.02
#: Calls of each contender within a turn; their mean is one measurement.
CALLS = 3
#: Generation: sizes of generate_engines.py, completions at once, tokens of prompts and completions.
SIZES, BATCHES, PROMPT_TOKENS, COMPLETION_TOKENS = ("demo", "3m", "135m"), (1, 8), 16, 64


class Turns(NamedTuple):
    """Seconds of every turn, by contender."""

    build: list[float]
    reference_build: list[float]
    verify: list[float]
    reference_verify: list[float]
    read: list[float]


def make_activations(hidden: int) -> NDArray[np.uint16]:
    """Gaussian bit patterns [TOKENS, hidden] whose top entries are free of ties, so that bytes can be compared."""
    values = np.random.default_rng(hidden).standard_normal((TOKENS, hidden), dtype=np.float32)
    bits = (values.view(np.uint32) >> 16).astype(np.uint16)
    for flat in bits.reshape(-1, CHUNK * hidden):
        magnitudes = flat & 0x7FFF
        threshold = np.partition(magnitudes, len(flat) - TOPK)[len(flat) - TOPK]
        surplus = np.flatnonzero(magnitudes == threshold)[TOPK - int((magnitudes > threshold).sum()) :]
        flat[surplus] -= 1
    return bits


def make_ours(bits: NDArray[np.uint16], threads: int) -> tuple[Callable[[], Any], Callable[[list[bytes]], Any]]:
    """Our build and verify of one completion, on threads with as many chunks each."""
    parts, pool = np.split(bits, threads), ThreadPoolExecutor(threads)

    def build_part(part: NDArray[np.uint16]) -> tuple[bytes, ...]:
        [proofs] = build_proofs([part], topk=TOPK, chunk=CHUNK)
        return proofs

    def verify_part(part: NDArray[np.uint16], proofs: Sequence[bytes]) -> Any:
        [matches] = match_proofs([part], [proofs], topk=TOPK, chunk=CHUNK, modulus_min=MODULUS_MIN)
        return matches

    def build() -> list[bytes]:
        made = [build_part(bits)] if threads == 1 else pool.map(build_part, parts)
        return [proof for proofs in made for proof in proofs]

    def verify(proofs: list[bytes]) -> list[Any]:
        size = len(proofs) // threads
        shares = [proofs[start : start + size] for start in range(0, len(proofs), size)]
        made = [verify_part(bits, proofs)] if threads == 1 else pool.map(verify_part, parts, shares)
        return [match for matches in made for match in matches]

    return build, verify


def _seconds(call: Callable[[], Any], clock: Callable[[], float]) -> float:
    started = clock()
    for _ in range(CALLS):
        call()
    return (clock() - started) / CALLS


def run_case(hidden: int, threads: int, repeats: int) -> dict[str, Any]:
    """Times and ratios of one hidden size, and whether both sides made and found the same."""
    from benchmarks.toploc_reference import Reference

    bits = make_activations(hidden)
    reference = Reference(bits, topk=TOPK, chunk=CHUNK, threads=threads)
    build, verify = make_ours(bits, threads)
    proofs = build()
    identical = proofs == reference.build()
    results = [(one.exponent_mismatches, one.mantissa_mean, one.mantissa_median) for one in verify(proofs)]
    calls = (build, reference.build, lambda: verify(proofs), lambda: reference.verify(proofs), lambda: bits.max())
    clock = time.process_time if threads == 1 else time.perf_counter
    turns = [tuple(_seconds(call, clock) for call in calls) for _ in range(1 + repeats)][1:]
    times = Turns(*(list(column) for column in zip(*turns, strict=True)))
    return {
        "hidden": hidden,
        "threads": threads,
        "build_ratio": _ratio(times.reference_build, times.build),
        "verify_ratio": _ratio(times.reference_verify, times.verify),
        "bytes_identical": identical,
        "results_identical": results == reference.verify(proofs),
        **{f"{name}_ms": round(1000 * statistics.median(column), 4) for name, column in times._asdict().items()},
        "build_floor_share": _ratio(times.read, times.build),
        "verify_floor_share": _ratio(times.read, times.verify),
    }


def _ratio(over: list[float], under: list[float]) -> float:
    return round(statistics.median(a / b for a, b in zip(over, under, strict=True)), 3)


def run_cases(repeats: int) -> dict[str, Any]:
    """All cases, each on as many CPUs as it has threads."""
    cases, left_out = [], {}
    cpus = sorted(os.sched_getaffinity(0))
    for hidden, threads in CASES:
        if threads > len(cpus):
            left_out[f"{hidden} x {threads} threads"] = f"this process has {len(cpus)} CPU"
            continue
        os.sched_setaffinity(0, cpus[-threads:])
        cases.append(run_case(hidden, threads, repeats))
        os.sched_setaffinity(0, cpus)
        print(json.dumps(cases[-1]), file=sys.stderr)
    missed = [f"{case['hidden']}: bytes differ" for case in cases if not case["bytes_identical"]]
    missed += [f"{case['hidden']}: results differ" for case in cases if not case["results_identical"]]
    for name, least in (("build_ratio", BUILD_RATIO_MIN), ("verify_ratio", VERIFY_RATIO_MIN)):
        if cases[0][name] < least:
            missed.append(f"{name} {cases[0][name]} is below {least}")
    shape = {"tokens": TOKENS, "topk": TOPK, "chunk": CHUNK, "repeats": repeats, "calls": CALLS}
    return {**shape, "cases": cases, "left_out": left_out, "missed": missed}


def run_generation(sizes: Sequence[str], repeats: int) -> dict[str, Any]:
    """CPU time of commitments as a share of generation, commitments included, with the engine of a node."""
    from benchmarks import generate_engines as engines

    engines.prepare_process()
    from inference.engine import TorchEngine

    cases, missed = [], []
    with tempfile.TemporaryDirectory() as root:
        for size in sizes:
            folder = Path(root) / size
            engines.make_policy(engines.SIZES[size], folder)
            engine = TorchEngine()
            engine.load(folder)
            for batch in BATCHES:
                work = engines.make_workload(engines.SIZES[size], batch, (PROMPT_TOKENS,) * 2, COMPLETION_TOKENS)
                shares = [_commitment_share(engine, work) for _ in range(1 + repeats)][1:]
                share, milliseconds = (statistics.median(column) for column in zip(*shares, strict=True))
                cases.append(
                    {"size": size, "batch": batch, "share": round(share, 5), "build_ms": round(milliseconds, 4)}
                )
                print(json.dumps(cases[-1]), file=sys.stderr)
                if size != "demo" and share > SHARE_MAX:
                    missed.append(f"{size} x {batch}: commitments take {share:.3f}, at most {SHARE_MAX}")
    shape = {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": COMPLETION_TOKENS, "repeats": repeats}
    return {**shape, "cases": cases, "missed": missed}


def _commitment_share(engine: Any, work: Any) -> tuple[float, float]:
    """Share of one generation, and CPU milliseconds of its commitments."""
    started = time.process_time()
    made = engine.generate(work.requests, temperature=1.0, max_tokens=work.max_tokens, stop_tokens=())
    generated = time.process_time()
    build_proofs([one.hidden for one in made], topk=work.topk, chunk=CHUNK)
    done = time.process_time()
    return (done - generated) / (done - started), 1000 * (done - generated)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=21, help="turns that count")
    parser.add_argument("--generation", action="store_true", help="share of generation instead of the reference")
    parser.add_argument("--sizes", default=",".join(SIZES), help="for --generation, separated by commas")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a line a case")
    options = parser.parse_args()
    if unknown := [size for size in options.sizes.split(",") if size not in SIZES]:
        parser.error(f"--sizes: {unknown[0]!r} is none of {', '.join(SIZES)}")
    if options.repeats < 1:
        parser.error(f"--repeats: {options.repeats} is below 1")
    if not options.generation and importlib.util.find_spec("toploc") is None:
        parser.error(
            "the reference library is not installed here: run `make venv-toploc` and use .venv-toploc/bin/python"
        )
    if not kernels.load():
        print("without numba: the array form is measured", file=sys.stderr)
    if options.generation:
        result = run_generation(options.sizes.split(","), options.repeats)
    else:
        result = run_cases(options.repeats)
    if options.json:
        print(json.dumps(result, indent=1))
    else:
        for case in result["cases"]:
            print("  ".join(f"{name} {value}" for name, value in case.items()))
        print("\n".join(f"missed: {one}" for one in result["missed"]))


if __name__ == "__main__":
    main()
