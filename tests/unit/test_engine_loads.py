"""Loading and memory: a policy replaces another wholly or not at all, nothing outlives its use, what cannot fit is refused."""

from __future__ import annotations

import gc
import json
import weakref
from pathlib import Path

import pytest
import torch

from inference.engine import TorchEngine
from inference.forward import ModuleForward
from inference.kv_pool import KvPool
from inference.llama import LlamaForward
from inference.memory import compute_kv_bytes, estimate_memory
from models.policy import load_model, read_config
from protocol.errors import Fault
from protocol.ports import SampleRequest
from tests.support.scenario import make_model

REQUESTS = [SampleRequest((5, 6, 7), key) for key in range(4)]
OPTIONS = {"temperature": 1.0, "max_tokens": 6, "stop_tokens": (1,)}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("loads")
    return [make_model(root / str(seed), seed) for seed in range(3)]


def set_free(monkeypatch, free_bytes):
    monkeypatch.setattr("inference.engine.read_free_bytes", lambda: free_bytes)


def generate(engine):
    return [one.tokens for one in engine.generate(REQUESTS, **OPTIONS)]


def test_a_new_policy_replaces_the_old_one_wholly(folders):
    engine, fresh = TorchEngine(), TorchEngine()
    engine.load(folders[0])
    old = generate(engine)
    engine.load(folders[1])
    fresh.load(folders[1])
    assert generate(engine) == generate(fresh) != old


def test_a_policy_that_cannot_fit_is_refused_before_it_is_read(folders, monkeypatch):
    """Public symptom: out of memory on a model that cannot fit. The fault names both numbers, and the old policy stays."""
    engine = TorchEngine()
    engine.load(folders[0])
    before = generate(engine)
    need = estimate_memory(read_config(folders[1]), dtype="float32", batch_tokens=1).weights_bytes
    set_free(monkeypatch, need - 1)
    monkeypatch.setattr("inference.engine.load_model", lambda *a, **k: pytest.fail("read although it cannot fit"))
    mib = f"{need / 2**20:,.1f} MiB"
    with pytest.raises(Fault, match=f"policy in float32 needs {mib} of memory, {mib} are free: use a narrower dtype"):
        engine.load(folders[1])
    set_free(monkeypatch, None)
    assert generate(engine) == before


def test_a_batch_that_cannot_fit_is_refused_before_it_is_allocated(folders, monkeypatch):
    engine = TorchEngine()
    engine.load(folders[0])
    need = estimate_memory(read_config(folders[0]), dtype="float32", batch_tokens=4 * 9)
    assert need.kv_bytes == compute_kv_bytes(read_config(folders[0]), dtype="float32", tokens=4 * 9)
    set_free(monkeypatch, need.kv_bytes + need.activations_bytes - 1)
    monkeypatch.setattr("inference.engine.KvPool", lambda *a: pytest.fail("allocated although it cannot fit"))
    with pytest.raises(
        Fault, match=r"generation with 4 rows of 9 tokens needs .* MiB are free: lower compute.batch_tokens_max"
    ):
        generate(engine)
    monkeypatch.undo()
    set_free(monkeypatch, need.kv_bytes + need.activations_bytes)
    assert len(generate(engine)) == 4


@pytest.mark.parametrize("stage", ["inference.engine.load_model", "inference.engine.ModuleForward", "probe"])
def test_a_load_that_fails_at_any_stage_leaves_the_old_policy(folders, monkeypatch, stage):
    def fail(*args, **kwargs):
        raise torch.OutOfMemoryError("tried to allocate 2 GiB")

    engine = TorchEngine()
    with pytest.raises(Fault, match="no policy is loaded"):
        generate(engine)
    engine.load(folders[0])
    before = generate(engine)
    if stage == "probe":
        monkeypatch.setattr(LlamaForward, "__call__", fail)
    else:
        monkeypatch.setattr(stage, fail)
    with pytest.raises(Fault, match="cannot be run on cpu: tried to allocate"):
        engine.load(folders[1])
    monkeypatch.undo()
    assert generate(engine) == before


@pytest.mark.parametrize("forward", [LlamaForward.of, ModuleForward], ids=["short", "own"])
def test_nothing_outlives_its_use(folders, monkeypatch, forward):
    """A replaced policy and a used pool are freed at once, not when the collector comes by: two policies at most are held."""
    monkeypatch.setattr("inference.engine._make_forward", lambda model, device: forward(model))
    pools = []

    class Watched(KvPool):
        def __init__(self, *size):
            super().__init__(*size)
            pools.append(self)

        def add_plane(self, *shape):
            plane = super().add_plane(*shape)
            planes.append(weakref.ref(plane))
            return plane

    planes = []
    monkeypatch.setattr("inference.engine.KvPool", Watched)
    engine = TorchEngine()
    gc.collect()
    gc.disable()
    try:
        engine.load(folders[0])
        weights = weakref.ref(engine._policy.model.get_input_embeddings().weight)
        generate(engine)
        pools.clear()
        assert planes
        assert not [plane for plane in planes if plane() is not None]
        engine.load(folders[1])
        assert weights() is None
    finally:
        gc.enable()


def test_no_two_pools_are_held_at_once(folders, monkeypatch):
    """Requests of very mixed lengths take several pools under a short budget, one after the other."""
    alive = weakref.WeakSet()
    most = []

    class Watched(KvPool):
        def __init__(self, *size):
            super().__init__(*size)
            alive.add(self)
            most.append(len(alive))

    engine = TorchEngine(batch_tokens_max=120)
    engine.load(folders[0])
    monkeypatch.setattr("inference.engine.KvPool", Watched)
    requests = [SampleRequest(tuple(range(2, 2 + n)) * (1 + n // 20), key) for n in (2, 3, 8, 29) for key in range(9)]
    gc.disable()
    try:
        assert len(engine.generate(requests, **OPTIONS)) == len(requests)
    finally:
        gc.enable()
    assert len(most) > 1
    assert set(most) == {1}


def _anonymous_bytes():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024


def test_reloading_does_not_pile_up_weights(tmp_path):
    big = make_model(tmp_path / "big", 1, vocab=65_536, hidden=256)
    size = (big / "model.safetensors").stat().st_size
    engine = TorchEngine()
    engine.load(big)
    once = _anonymous_bytes()
    for _ in range(3):
        engine.load(big)
    assert _anonymous_bytes() - once < 0.5 * size


def test_a_policy_of_endless_layers_is_refused_before_they_are_built(folders, tmp_path, monkeypatch):
    """A quarter of a million layers of width 1 have few weights, and take minutes and gigabytes to build."""
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((folders[0] / name).read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    sizes = {"hidden_size": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "num_hidden_layers": 250_000}
    (tmp_path / "config.json").write_text(json.dumps(config | sizes))
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_config", lambda *a, **k: pytest.fail("built"))
    with pytest.raises(Fault, match=r"config\.json has 250000 layers, limit 1024"):
        load_model(tmp_path)
