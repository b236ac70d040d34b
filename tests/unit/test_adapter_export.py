"""`troth policy merge`: an adapter as plain weights that any software loads; and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from models.adapter import BASE
from models.policy import load_model
from protocol.adapter import Adapter
from protocol.errors import ConfigError, Fault
from tests.support.adapters import TERMS, make_adapter
from tests.support.scenario import make_model, make_spec
from tests.support.twins import hash_policy
from trainer.export import merge_policy
from troth.commands import check_adapter

PROMPTS = torch.tensor([[4, 9, 2, 17, 30, 8]])


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = make_model(tmp_path_factory.mktemp("models") / "base", 0)
    (folder / "tokenizer.json").write_text('{"version": "1.0"}\n')
    return folder


@pytest.fixture
def adapter(base, tmp_path):
    return make_adapter(tmp_path / "adapter", base, 1)


def _logits(model):
    with torch.inference_mode():
        return model(input_ids=PROMPTS, use_cache=False).logits


def test_the_command_writes_a_folder_that_transformers_loads(adapter, tmp_path):
    out = tmp_path / "whole"
    command = [sys.executable, "-m", "troth", "policy", "merge", str(adapter), str(out), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    shown = json.loads(done.stdout)
    assert (shown["changed"], shown["bytes"]) == (4, (out / "model.safetensors").stat().st_size)
    theirs = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    assert torch.equal(_logits(theirs), _logits(load_model(adapter)))
    assert torch.equal(_logits(load_model(out)), _logits(load_model(adapter)))
    assert (out / "tokenizer.json").read_text() == '{"version": "1.0"}\n'
    assert not (out / BASE).exists()


def test_weights_keep_the_bases_type_unless_another_is_asked_for(base, tmp_path):
    narrow = make_model(tmp_path / "narrow", 0)
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(narrow / "model.safetensors").items()}
    save_file(tensors, narrow / "model.safetensors")
    folder = make_adapter(tmp_path / "adapter", narrow, 1)
    (folder / BASE).unlink()
    with pytest.raises(Fault, match="without a base policy"):
        merge_policy(folder, tmp_path / "one")
    merge_policy(folder, tmp_path / "one", base=narrow)
    merge_policy(folder, tmp_path / "two", dtype="float32")
    kinds = [{t.dtype for t in load_file(tmp_path / name / "model.safetensors").values()} for name in ("one", "two")]
    assert kinds == [{torch.bfloat16}, {torch.float32}]
    assert torch.equal(_logits(load_model(tmp_path / "two")), _logits(load_model(folder)))
    assert torch.allclose(_logits(load_model(tmp_path / "one")), _logits(load_model(folder)), atol=0.5)


def test_what_cannot_be_merged_is_named(base, adapter, tmp_path):
    with pytest.raises(ConfigError, match="holds no adapter"):
        merge_policy(base, tmp_path / "out")
    with pytest.raises(ConfigError, match="exists"):
        merge_policy(adapter, base)
    with pytest.raises(ConfigError, match="dtype is 'int8'"):
        merge_policy(adapter, tmp_path / "out", dtype="int8")
    assert not (tmp_path / "out").exists()


def test_a_task_with_an_adapter_is_checked_against_its_base_before_it_is_paid_for(base, tmp_path):
    from shardcast.folder import hash_folder

    check_adapter(make_spec(base), None)
    good = make_spec(base, adapter=TERMS, base_policy=hash_folder(base))
    check_adapter(good, base)
    with pytest.raises(ConfigError, match="give --base FOLDER"):
        check_adapter(good, None)
    with pytest.raises(ConfigError, match=r"do not go together: .* hashes to"):
        check_adapter(make_spec(base, adapter=TERMS, base_policy=hash_policy(base)), base)
    with pytest.raises(ConfigError, match=r"does not fit its base policy .* has no module c_attn"):
        check_adapter(make_spec(base, adapter=Adapter(2, 4, ("c_attn",)), base_policy=hash_folder(base)), base)
    with pytest.raises(ConfigError, match="do not go together"):
        check_adapter(good, tmp_path / "absent")
