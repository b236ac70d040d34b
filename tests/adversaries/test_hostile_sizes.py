"""V5 and V6 before every parser: a few bytes that claim very many values, and pickles. Neither costs memory, neither runs.

The judge's own process is attacked in tests/adversaries/test_verifier_process.py; here it is every harness of tests/fuzz.
"""

from __future__ import annotations

import ast
import pickle
import struct
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from models.policy import CONFIG, WEIGHTS, read_tensors
from protocol.errors import Fault
from tests.fuzz.harnesses import HARNESSES
from tests.fuzz.targets_models import make_base

ROOT = Path(__file__).parents[2]
#: Builds a model for every input; its parts are tried alone, below.
NAMES = sorted(set(HARNESSES) - {"policy_load"})
#: What refusing may cost, in Python's own memory and in seconds (a machine that is busy included).
REFUSAL_BYTES_MAX, REFUSAL_S_MAX = 32 << 20, 10.0
THOUSAND_MILLION = (10**9).to_bytes(4, "big")
HEADS = [b"\xdd", b"\xc6", b"\xdb", b"\xdf", b"\xc9"]


def claims():
    """Inputs of at most 300 bytes that claim 10^9 values, of every form some parser here reads."""
    for head in HEADS:
        yield head + THOUSAND_MILLION
        yield b"\x96\x01" + head + THOUSAND_MILLION + bytes(200)
        yield bytes([0]) + b"\x94" + head + THOUSAND_MILLION  # behind a byte that says which kind
    yield b"\x91" * 300
    yield b"[" * 300
    yield b'{"data_offsets":[0,4000000000],"shape":[1000000000],"dtype":"F32"}'.join([b'{"a":', b"}"])
    header = b'{"model.norm.weight":{"dtype":"F32","shape":[1000000000],"data_offsets":[0,4000000000]}}'
    yield len(header).to_bytes(8, "little") + header
    yield (10**9).to_bytes(8, "little") + b"{"
    yield b"GGUF" + struct.pack("<IQQ", 3, 10**9, 10**9) + bytes(200)
    word = (10**9).to_bytes(32, "big")
    yield (32).to_bytes(32, "big") + word + bytes(200)
    yield word * 9
    yield b"SQLite format 3\0" + b"\xff" * 84
    yield b"x = [" + b"[" * 280


@pytest.mark.parametrize("name", NAMES)
def test_v5_a_few_bytes_that_claim_very_many_values(name, tmp_path):
    target = HARNESSES[name].make(tmp_path)
    target.fuzz(target.seeds[0])
    inputs = list(claims())
    assert max(map(len, inputs)) <= 300
    tracemalloc.start()
    try:
        for data in inputs:
            started = time.monotonic()
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            target.fuzz(data)
            assert tracemalloc.get_traced_memory()[1] - before < REFUSAL_BYTES_MAX, data[:40]
            assert time.monotonic() - started < REFUSAL_S_MAX, data[:40]
    finally:
        tracemalloc.stop()


class Bomb:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.write_text, (self.path, "unpickled")


def make_pickles(canary):
    """Pickles in every protocol, and as numpy and torch would carry them."""
    plain = [pickle.dumps(Bomb(canary), protocol) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)]
    array = np.array([Bomb(canary)], dtype=object).dumps()
    return [*plain, array, *(b"\0" + data for data in plain), b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19." + plain[2]]


@pytest.fixture
def canary(tmp_path):
    path = tmp_path / "canary"
    pickle.loads(make_pickles(path)[2])  # the control: it does go off where it is unpickled
    assert path.read_text() == "unpickled"
    path.unlink()
    return path


@pytest.mark.parametrize("name", NAMES)
def test_v6_a_pickle_is_never_loaded(name, tmp_path, canary):
    (tmp_path / "files").mkdir()
    target = HARNESSES[name].make(tmp_path / "files")
    for data in make_pickles(canary):
        target.fuzz(data)
    assert not canary.exists()


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
def test_v6_a_pickle_in_a_policy_folder_is_never_loaded(name, tmp_path, canary):
    folder = make_base(tmp_path / "policy")
    for data in make_pickles(canary):
        (folder / name).write_bytes(data)
        if name == WEIGHTS:
            with pytest.raises(Fault):
                list(read_tensors(folder))
    assert not canary.exists()


def test_v6_nothing_that_ships_can_unpickle():
    """No module imports a reader of pickles, or of formats that carry code or claim their own sizes."""
    banned = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "pyarrow", "pandas"}
    calls = {("torch", "load"), ("np", "load"), ("numpy", "load")}
    seen = 0
    for package in ("protocol", "inference", "verifier", "trainer", "shardcast", "contracts", "models", "troth"):
        for path in (ROOT / package).rglob("*.py"):
            if "node_modules" in path.parts:
                continue
            seen += 1
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Import | ast.ImportFrom):
                    names = (
                        [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
                    )
                    assert not banned & {name.split(".")[0] for name in names}, path
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                    owner = node.func.value
                    assert not (isinstance(owner, ast.Name) and (owner.id, node.func.attr) in calls), path
    assert seen > 100
