"""Policies load beside other work of the same process: a node fetches one while a verifier or a trainer builds another.

transformers' own way to skip initialisation swaps functions of `torch.nn.init` for every thread, and two uses that
overlap leave them swapped: models drawn at random afterwards, a fresh adapter among them, were uninitialised memory.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import PreTrainedModel

from models.policy import load_model
from tests.support.scenario import make_model


@pytest.fixture
def folders(tmp_path):
    return [make_model(tmp_path / str(seed), seed) for seed in range(2)]


@pytest.mark.parametrize("first_out", [0, 1])
def test_two_loads_that_overlap_leave_initialisation_as_it_was(folders, monkeypatch, first_out):
    before = (torch.nn.init.normal_, torch.nn.init.kaiming_uniform_, PreTrainedModel.init_weights)
    build = AutoModelForCausalLM.from_config
    inside = [threading.Event(), threading.Event()]
    release = [threading.Event(), threading.Event()]
    order = iter(range(2))
    drawn = []

    def slowly(config, **more):
        turn = next(order)
        inside[turn].set()
        assert release[turn].wait(30)
        return build(config, **more)

    monkeypatch.setattr(AutoModelForCausalLM, "from_config", slowly)
    with ThreadPoolExecutor(2) as pool:
        loads = []
        for turn in range(2):  # the second enters while the first is inside
            loads.append(pool.submit(load_model, folders[turn], dtype=("float32", "bfloat16")[turn]))
            assert inside[turn].wait(30)
        weights = torch.full((64, 64), torch.nan)
        torch.nn.init.kaiming_uniform_(weights)
        drawn.append(weights)
        assert torch.get_default_dtype() is torch.float32
        for turn in (first_out, 1 - first_out):
            release[turn].set()
            loads[turn].result(30)
    assert before == (torch.nn.init.normal_, torch.nn.init.kaiming_uniform_, PreTrainedModel.init_weights)
    assert torch.get_default_dtype() is torch.float32
    assert drawn[0].isfinite().all()
    assert drawn[0].std() > 0.01
    again = torch.nn.Linear(64, 64, bias=False).weight
    assert again.isfinite().all()
    assert again.std() > 0.01


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_parameters_have_the_type_asked_for_and_tables_of_positions_stay_float32(folders, dtype):
    model = load_model(folders[0], dtype=dtype)
    assert {p.dtype for p in model.parameters()} == {getattr(torch, dtype)}
    assert model.model.rotary_emb.inv_freq.dtype is torch.float32
    exact = 1.0 / model.config.rope_parameters["rope_theta"] ** (torch.arange(0, 32, 2) / 32)
    assert torch.equal(model.model.rotary_emb.inv_freq, exact)
