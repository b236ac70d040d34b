"""Tokens per CPU-second of the engines against transformers and plain vLLM, and what commitments and replay cost.

Every contender completes the same prompts in one process on one thread; repeats are interleaved, so that a change of the
machine's speed meets all of them alike. Reported are medians; ratios and overheads are medians of the ratios within one
repeat. `overhead` = (cost on - cost off) / cost off, where off is the same engine with plain sampling, no captured states
and no commitments. What vLLM takes part in runs in a process of the interpreter given by --vllm-python.

    python benchmarks/generate.py --json --vllm-python .venv-vllm/bin/python
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))  # an environment with vLLM need not have the project installed

from generate_engines import (
    CONTENDERS,
    NEED_VLLM,
    SIZES,
    Contender,
    Workload,
    make_policy,
    make_workload,
    prepare_process,
)

#: CPU seconds of one measurement, at least; a short workload is repeated within it.
SECONDS_MIN = 0.4
#: Tokens of prompts (shortest, longest) and of completions.
PROMPT_TOKENS, MIXED_TOKENS, COMPLETION_TOKENS = (16, 16), (4, 64), 32
#: Name and batch of the case with prompts of mixed lengths.
MIXED, MIXED_BATCH = "mixed", 8
#: Highest overhead by size, and lowest ratio of the torch engine to transformers.
OVERHEAD_MAX = {"demo": 0.10, "3m": 0.10, "135m": 0.05}
RATIO_MIN = {"demo": 1.5, "3m": 1.0, "135m": 1.0}
VLLM_TIMEOUT_S = 3600


class Case(NamedTuple):
    """One workload of one size, by name."""

    size: str
    batch: int
    mixed: bool


def make_cases(sizes: list[str], batches: list[str]) -> list[Case]:
    """Every size with every batch: a number of equally long prompts, or `mixed` lengths."""
    return [
        Case(size, MIXED_BATCH if batch == MIXED else int(batch), batch == MIXED) for size in sizes for batch in batches
    ]


def measure(contenders: dict[str, Contender], workload: Workload, repeats: int) -> dict[str, list[float]]:
    """CPU seconds per token of every contender in every repeat; the first run of each is not counted."""
    loops = {}
    for name, run in contenders.items():
        loops[name], seconds = 0, 0.0
        while seconds < SECONDS_MIN:
            started = time.process_time()
            run(workload)
            seconds, loops[name] = seconds + time.process_time() - started, loops[name] + 1
    costs: dict[str, list[float]] = {name: [] for name in contenders}
    for repeat in range(repeats):
        names = list(contenders)
        for name in names[repeat % len(names) :] + names[: repeat % len(names)]:
            started, tokens = time.process_time(), 0
            for _ in range(loops[name]):
                tokens += contenders[name](workload)
            costs[name].append((time.process_time() - started) / tokens)
    return costs


def run_here(engines: list[str], cases: list[Case], repeats: int) -> list[dict[str, list[float]]]:
    """Costs of every case, for contenders that this interpreter can run."""
    prepare_process()
    results = []
    with tempfile.TemporaryDirectory() as root:
        contenders: dict[str, Contender] = {}
        for index, case in enumerate(cases):
            folder = Path(root) / case.size
            if not folder.exists():
                make_policy(SIZES[case.size], folder)
                contenders = {name: CONTENDERS[name][0](folder) for name in engines}
            prompt_tokens = MIXED_TOKENS if case.mixed else PROMPT_TOKENS
            workload = make_workload(SIZES[case.size], case.batch, prompt_tokens, COMPLETION_TOKENS)
            results.append(measure(contenders, workload, repeats))
            print(f"{index + 1}/{len(cases)} {json.dumps(summarise(case, results[-1]))}", file=sys.stderr)
    return results


def run_there(python: str, engines: list[str], options: argparse.Namespace) -> list[dict[str, list[float]]]:
    """The same in processes of another interpreter, one for each size: a process runs one vLLM of ours.

    Raises:
        subprocess.CalledProcessError: when one of them fails.
    """
    results: list[dict[str, list[float]]] = []
    for size in options.sizes:
        command = [python, __file__, "--raw", "--engines", ",".join(engines), "--repeats", str(options.repeats)]
        command += ["--sizes", size, "--batches", ",".join(options.batches)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=VLLM_TIMEOUT_S, check=True)
        results += json.loads(done.stdout.splitlines()[-1])
    return results


def _median_ratio(over: list[float], under: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(over, under, strict=True))


def summarise(case: Case, costs: dict[str, list[float]]) -> dict[str, Any]:
    """Medians and ratios of one case, and whether it meets its targets."""
    overhead = {
        name: round(_median_ratio(costs[name], costs[plain]) - 1, 4)
        for name, (_, plain) in CONTENDERS.items()
        if name in costs and plain in costs
    }
    against = {"torch": "transformers", "vllm": "vllm-plain"}
    ratio = {
        f"{name}/{other}": round(_median_ratio(costs[other], costs[name]), 3)
        for name, other in (*against.items(), ("vllm", "transformers"))
        if name in costs and other in costs
    }
    missed = [f"overhead of {name}" for name, value in overhead.items() if value > OVERHEAD_MAX[case.size]]
    missed += ["torch/transformers"] if ratio.get("torch/transformers", 9.0) < RATIO_MIN[case.size] else []
    return {
        **case._asdict(),
        "tokens_per_cpu_second": {name: round(1 / statistics.median(values), 1) for name, values in costs.items()},
        "overhead": overhead,
        "ratio": ratio,
        "missed": missed,
    }


def format_table(cases: list[dict[str, Any]]) -> str:
    """The cases as a Markdown table."""
    names = [name for name in CONTENDERS if any(name in case["tokens_per_cpu_second"] for case in cases)]
    ratios = sorted({key for case in cases for key in case["ratio"]})
    overheads = sorted({key for case in cases for key in case["overhead"]})
    header = ["size", "batch", *names, *ratios, *(f"overhead {name}" for name in overheads)]
    lines = ["| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
    for case in cases:
        cells = [case["size"], f"{case['batch']}{' mixed' if case['mixed'] else ''}"]
        cells += [f"{case['tokens_per_cpu_second'].get(name, float('nan')):,.0f}" for name in names]
        cells += [f"{case['ratio'].get(key, float('nan')):.2f}" for key in ratios]
        cells += [f"{100 * case['overhead'].get(key, float('nan')):.1f} %" for key in overheads]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _split(text: str) -> list[str]:
    return text.split(",")


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """Command line; lists are separated by commas."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default=list(SIZES), type=_split, help=f"of {','.join(SIZES)}")
    parser.add_argument("--batches", default=["1", "8", "64", MIXED], type=_split, help=f"numbers, and {MIXED}")
    parser.add_argument(
        "--engines",
        default=["torch", "torch-plain", "transformers", "vllm", "vllm-plain"],
        type=_split,
        help=f"of {','.join(CONTENDERS)}",
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--vllm-python", help="interpreter of an environment with vLLM")
    parser.add_argument("--json", action="store_true", help="print JSON, not a table")
    parser.add_argument("--raw", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    for name, known in (("sizes", SIZES), ("engines", CONTENDERS)):
        if unknown := [word for word in getattr(options, name) if word not in known]:
            parser.error(f"--{name}: {unknown[0]!r} is none of {', '.join(known)}")
    if unknown := [word for word in options.batches if word != MIXED and not (word.isdigit() and int(word))]:
        parser.error(f"--batches: {unknown[0]!r} is neither a number from 1 nor {MIXED}")
    return options


def main() -> None:
    """Measure and print."""
    options = parse_options()
    cases = make_cases(options.sizes, options.batches)
    if options.raw:
        costs = run_here(options.engines, cases, options.repeats)
        print()
        json.dump(costs, sys.stdout)
        return
    theirs = [name for name in options.engines if name in NEED_VLLM]
    here = [name for name in options.engines if name not in NEED_VLLM]
    left_out = {}
    if theirs and options.vllm_python is None and importlib.util.find_spec("vllm"):
        options.vllm_python = sys.executable
    if theirs and options.vllm_python is None:
        left_out = dict.fromkeys(
            theirs, "vllm is not installed here, and --vllm-python names no interpreter that has it"
        )
        theirs = []
    costs = run_here(here, cases, options.repeats) if here else [{} for _ in cases]
    if theirs:
        try:
            others = run_there(options.vllm_python, theirs, options)
            costs = [{**one, **other} for one, other in zip(costs, others, strict=True)]
        except subprocess.SubprocessError as error:  # what was measured here is worth printing all the same
            left_out = dict.fromkeys(theirs, f"{error}; its messages are on stderr")
    summaries = [summarise(case, one) for case, one in zip(cases, costs, strict=True)]
    result = {
        "threads": 1,
        "dtype": "float32",
        "temperature": 1.0,
        "repeats": options.repeats,
        "prompt_tokens": PROMPT_TOKENS[0],
        "mixed_prompt_tokens": MIXED_TOKENS,
        "completion_tokens": COMPLETION_TOKENS,
        "cases": summaries,
        "left_out": left_out,
        "targets": {"overhead_max": OVERHEAD_MAX, "torch_to_transformers_min": RATIO_MIN},
        "missed": [
            f"{one['size']} x {one['batch']}{' mixed' if one['mixed'] else ''}: {what}"
            for one in summaries
            for what in one["missed"]
        ],
    }
    print(json.dumps(result, indent=1) if options.json else format_table(summaries))


if __name__ == "__main__":
    main()
