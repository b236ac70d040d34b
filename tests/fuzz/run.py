"""The long run: every harness under atheris, coverage-guided, one process each.

    python -m tests.fuzz.run --runs 1000000           # all harnesses, by their shares
    python -m tests.fuzz.run --runs 20000 --only bundle --only abi_log
    python -m tests.fuzz.run --replay bundle crash-... # one input again

Seeds are made by the project's own writers, inputs by tests.fuzz.mutate or by libFuzzer, each half of the time. A process
ends with its first crash, after more than a minute over one input, or above its harness's memory; the input is then in
`run/fuzz/`. The last line of standard output sums up; the exit status is 1 when anything was found.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FOUND = ROOT / "run" / "fuzz"
TIMEOUT_S = 60
PACKAGES = ["protocol", "inference", "verifier", "trainer", "shardcast", "contracts", "environments", "models", "troth"]


def _scratch() -> Path:
    """A folder in memory, where there is one: harnesses of files write one an input."""
    memory = Path("/dev/shm")
    return Path(tempfile.mkdtemp(prefix="troth-fuzz-", dir=memory if memory.is_dir() else None))


def fuzz_one(name: str, runs: int, seed: int, report: Path) -> None:
    """Fuzz one harness in this process, which libFuzzer ends. Outcomes are counted into `report` as it goes."""
    import atheris  # not of the usual environment

    with atheris.instrument_imports(include=PACKAGES):
        from tests.fuzz.harnesses import HARNESSES
    from tests.fuzz.mutate import mutate

    harness, scratch = HARNESSES[name], _scratch()
    (scratch / "files").mkdir()
    (scratch / "corpus").mkdir()
    target = harness.make(scratch / "files")
    for at, valid in enumerate(target.seeds):
        (scratch / "corpus" / str(at)).write_bytes(valid)
    outcomes: Counter[str] = Counter()
    count, every = 0, max(1, runs // 50)

    def test_one(data: bytes) -> None:
        nonlocal count
        outcomes[target.fuzz(data)] += 1
        count += 1
        if count % every == 0 or count >= runs:
            report.write_text(json.dumps({"runs": count, "outcomes": dict(outcomes)}))

    def change(data: bytes, max_size: int, number: int) -> bytes:
        rng = random.Random(number)
        if rng.randrange(2):
            return bytes(atheris.Mutate(data, len(data)))[:max_size] if data else b"\0"
        base = data if rng.randrange(4) else rng.choice(target.seeds)
        return mutate(base, rng, harness.shape, min(max_size, harness.bytes_max))

    options = [
        sys.argv[0],
        str(scratch / "corpus"),
        f"-runs={runs}",
        f"-seed={seed}",
        f"-max_len={harness.bytes_max}",
        f"-rss_limit_mb={harness.rss_mb}",
        f"-timeout={TIMEOUT_S}",
        f"-artifact_prefix={FOUND}/{name}-",
        "-len_control=0",
        "-print_final_stats=1",
    ]
    atheris.Setup(options, test_one, custom_mutator=change)
    atheris.Fuzz()


def run_child(name: str, runs: int, seed: int) -> dict[str, Any]:
    """Fuzz one harness in a process of its own; what came of it."""
    report, log = FOUND / f"{name}.json", FOUND / f"{name}.log"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "tests.fuzz.run", "--child", name, "--runs", str(runs), "--seed", str(seed)]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", "RUST_BACKTRACE": "0"}
    started = time.monotonic()
    with log.open("wb") as out:
        descriptor = out.fileno()
        actions = [(os.POSIX_SPAWN_DUP2, descriptor, 1), (os.POSIX_SPAWN_DUP2, descriptor, 2)]
        pid = os.posix_spawn(sys.executable, command, variables, file_actions=actions)
        _, status, usage = os.wait4(pid, 0)
    seen = json.loads(report.read_text()) if report.exists() else {"runs": 0, "outcomes": {}}
    return {
        "harness": name,
        "runs": seen["runs"],
        "seconds": round(time.monotonic() - started, 1),
        "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 1),
        "peak_rss_mb": usage.ru_maxrss // 1024,
        "exit": os.waitstatus_to_exitcode(status),
        "outcomes": dict(sorted(seen["outcomes"].items(), key=lambda item: -item[1])),
    }


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description="Fuzz every parser.")
    parser.add_argument("--runs", type=int, default=1_000_000, help="inputs in all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1, help="harnesses at a time")
    parser.add_argument("--only", action="append", default=[], help="a harness; all when not given")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--replay", nargs=2, metavar=("HARNESS", "FILE"), help="run one input again")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    args = parser.parse_args()
    FOUND.mkdir(parents=True, exist_ok=True)
    if args.child:
        fuzz_one(args.child, args.runs, args.seed, FOUND / f"{args.child}.json")
    from tests.fuzz.harnesses import HARNESSES, split_runs

    if args.replay:
        name, path = args.replay
        scratch = _scratch()
        try:
            print(HARNESSES[name].make(scratch).fuzz(Path(path).read_bytes()))
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        return 0
    if unknown := set(args.only) - set(HARNESSES):
        parser.error(f"no harness {', '.join(sorted(unknown))}: known are {', '.join(HARNESSES)}")
    runs = split_runs(args.runs, args.only)
    results = []

    def work(name: str) -> None:
        one = run_child(name, runs[name], args.seed)
        results.append(one)
        top = ", ".join(f"{kind} {number}" for kind, number in list(one["outcomes"].items())[:4])
        line = (
            f"{name:24} {one['runs']:7} runs {one['seconds']:7} s {one['peak_rss_mb']:5} MB  exit {one['exit']}  {top}"
        )
        print(json.dumps(one) if args.json else line, flush=True)

    started = time.monotonic()
    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(work, runs))
    for folder in Path("/dev/shm").glob("troth-fuzz-*"):
        shutil.rmtree(folder, ignore_errors=True)
    found = [one["harness"] for one in results if one["exit"] != 0 or one["runs"] < runs[one["harness"]]]
    total = {
        "harnesses": len(results),
        "runs": sum(one["runs"] for one in results),
        "seconds": round(time.monotonic() - started, 1),
        "cpu_seconds": round(sum(one["cpu_seconds"] for one in results), 1),
        "peak_rss_mb": max(one["peak_rss_mb"] for one in results),
        "found": found,
    }
    print(json.dumps(total))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
