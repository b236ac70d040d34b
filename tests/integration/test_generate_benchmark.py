"""The benchmark of generation runs, says what it left out, and computes its ratios from paired repeats."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("generate")


def test_overhead_and_ratio_are_medians_of_paired_repeats(benchmark):
    costs = {"torch": [1.1, 2.4, 3.3], "torch-plain": [1.0, 2.0, 3.0], "transformers": [1.1, 4.8, 3.3]}
    found = benchmark.summarise(benchmark.Case("135m", 8, False), costs)
    assert found["overhead"] == {"torch": 0.1}
    assert found["ratio"] == {"torch/transformers": 1.0}
    assert found["missed"] == ["overhead of torch"]
    assert benchmark.summarise(benchmark.Case("3m", 8, False), costs)["missed"] == []
    assert benchmark.summarise(benchmark.Case("demo", 8, False), costs)["missed"] == ["torch/transformers"]


@pytest.mark.slow
def test_it_runs_and_says_what_it_left_out():
    command = [sys.executable, "benchmarks/generate.py", "--json", "--sizes", "demo", "--batches", "1,mixed"]
    command += ["--engines", "torch,torch-plain,transformers,vllm", "--repeats", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, timeout=250)
    result = json.loads(done.stdout)
    assert [(case["batch"], case["mixed"]) for case in result["cases"]] == [(1, False), (8, True)]
    for case in result["cases"]:
        assert set(case["overhead"]) == {"torch"}
        assert all(value > 0 for name, value in case["tokens_per_cpu_second"].items() if not name.startswith("vllm"))
    if "vllm" in result["left_out"]:  # where the environment has no vllm
        assert "not installed" in result["left_out"]["vllm"]
