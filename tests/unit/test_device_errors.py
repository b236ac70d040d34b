"""What torch raises by itself (out of memory, a lost device) is our fault: no verdict, no commitment, no crash."""

from __future__ import annotations

import pytest
import torch

from inference.engine import TorchEngine
from protocol.errors import Fault
from protocol.ports import SampleRequest
from tests.support.scenario import make_model
from verifier.scorer import TorchScorer

REQUESTS = [SampleRequest((2, 3, 4), 7)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("policy") / "model", 1)


def _out_of_memory(*args, **kwargs):
    raise torch.OutOfMemoryError("tried to allocate 2 GiB")


def test_a_prefill_that_runs_out_of_memory_is_a_fault(folder, monkeypatch):
    scorer = TorchScorer()
    scorer.load(folder)
    assert len(scorer.score(REQUESTS, [(5, 1)], temperature=1.0)) == 1
    monkeypatch.setattr(type(scorer._model.base_model), "forward", _out_of_memory)
    with pytest.raises(Fault, match="prefill of 1 rollouts failed: tried to allocate"):
        scorer.score(REQUESTS, [(5, 1)], temperature=1.0)


def test_a_generation_that_runs_out_of_memory_is_a_fault(folder, monkeypatch):
    engine = TorchEngine()
    engine.load(folder)
    monkeypatch.setattr(engine, "_policy", engine._policy._replace(forward=_out_of_memory))
    with pytest.raises(Fault, match="generation of 1 rollouts failed: tried to allocate"):
        engine.generate(REQUESTS, temperature=1.0, max_tokens=4, stop_tokens=[1])
