"""vLLM beside the compiled kernels: a node that has sampled for a while has loaded numba before it builds a vLLM again."""

from __future__ import annotations

import builtins

import pytest

from inference.engine import TorchEngine
from protocol.errors import Fault
from protocol.kernels import kernels
from tests.vllm.kit import make_family, make_requests, require_same, run


def test_vllm_is_built_in_a_process_that_has_loaded_numba(make_engine, tmp_path, monkeypatch):
    from vllm.triton_utils import dispatcher

    assert kernels.load()
    folder, requests = make_family(tmp_path, "llama", 80), make_requests(80, [5, 9, 14])
    torch_engine = TorchEngine()
    torch_engine.load(folder)
    engine = make_engine()
    engine.load(folder)
    require_same(run(engine, requests), run(torch_engine, requests))
    engine.close()
    monkeypatch.setattr(dispatcher, "vars", builtins.vars)  # as vLLM has it
    with pytest.raises(Fault, match="building the engine"):
        engine.load(folder)
