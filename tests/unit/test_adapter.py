"""Adapter folders: merged as peft would, the same for every role, and refused when they are anything else."""

from __future__ import annotations

import json
import shutil
import tracemalloc
import warnings

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from inference.engine import TorchEngine
from models.adapter import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    BASE,
    compute_file_sizes,
    compute_layout,
    encode_adapter_config,
    link_base,
    read_adapter_config,
    read_adapter_tensors,
    read_shapes,
    validate_adapter_folder,
)
from models.policy import load_model, read_config, read_hidden_size, read_tensors
from protocol.adapter import Adapter
from protocol.errors import Fault
from protocol.ports import SampleRequest
from tests.support.adapters import BASE_POLICY, TERMS, make_adapter
from tests.support.scenario import make_model
from verifier.scorer import TorchScorer

PROMPTS = torch.tensor([[4, 9, 2, 17, 30, 8], [1, 1, 2, 3, 5, 8]])


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("models") / "base", 0)


@pytest.fixture(scope="module")
def adapter(base, tmp_path_factory):
    return make_adapter(tmp_path_factory.mktemp("adapters") / "one", base, 1)


def _logits(model):
    with torch.inference_mode():
        return model(input_ids=PROMPTS, use_cache=False).logits


def test_peft_loads_the_folder_and_gives_the_same_logits(base, adapter):
    from peft import PeftModel

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # peft does not know `base_policy`
        theirs = PeftModel.from_pretrained(load_model(base), str(adapter))
    ours = _logits(load_model(adapter))
    assert torch.allclose(ours, _logits(theirs), atol=1e-5, rtol=1e-5)
    assert (ours - _logits(load_model(base))).abs().max() > 0.1, "the adapter must change something"


def test_the_file_is_what_the_safetensors_library_writes(adapter):
    tensors = load_file(adapter / ADAPTER_WEIGHTS)
    assert save({name: tensors[name] for name in sorted(tensors)}) == (adapter / ADAPTER_WEIGHTS).read_bytes()


def test_sizes_are_known_before_anything_is_fetched(base, adapter):
    sizes = compute_file_sizes(TERMS, BASE_POLICY, base)
    assert sizes == {path.name: path.stat().st_size for path in adapter.iterdir() if path.name != BASE}


def test_merged_weights_are_rounded_once(base, adapter):
    before, after = load_file(base / "model.safetensors"), dict(read_tensors(adapter))
    raw = read_adapter_tensors(adapter)
    assert list(after) == sorted(before)
    for name, tensor in after.items():
        path = "base_model.model." + name.removesuffix(".weight")
        if path + ".lora_A.weight" not in raw:
            assert torch.equal(tensor, before[name])
            continue
        a, b = (raw[f"{path}.lora_{side}.weight"].astype(np.longdouble) for side in "AB")
        exact = before[name].numpy().astype(np.longdouble) + 2.0 * (b @ a)
        assert np.array_equal(tensor.numpy(), exact.astype(np.float32))
    assert sum(not torch.equal(after[name], before[name]) for name in before) == 4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_engine_and_verifier_hold_the_same_bits(adapter, dtype, monkeypatch):
    """What each takes its weights from, before it arranges them as it likes."""
    states = []

    def record(*args, **kwargs):
        model = load_model(*args, **kwargs)
        states.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
        return model

    monkeypatch.setattr("inference.engine.load_model", record)
    monkeypatch.setattr("verifier.scorer.load_model", record)
    TorchEngine(dtype=dtype).load(adapter)
    TorchScorer(dtype=dtype).load(adapter)
    ours, theirs = states
    assert ours.keys() == theirs.keys()
    merged = dict(read_tensors(adapter))
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name])
        assert torch.equal(tensor, merged[name].to(tensor.dtype))


def test_rollouts_replay_under_the_adapter_and_only_under_it(base, adapter, tmp_path):
    """A node that ignores the adapter, or kept the one before, is a node with other weights."""
    other = make_adapter(tmp_path / "other", base, 2)
    requests = [SampleRequest((4, 9, 2, 17), key) for key in range(6)]
    arguments = {"temperature": 1.0, "max_tokens": 24, "stop_tokens": [1]}
    scorer = TorchScorer()
    scorer.load(adapter)

    def worst_gap(folder):
        engine = TorchEngine()
        engine.load(folder)
        made = engine.generate(requests, **arguments)
        scored = scorer.score(requests, [one.tokens for one in made], temperature=1.0)
        return max(float(one.gaps.max()) for one in scored)

    assert worst_gap(adapter) < 1e-3
    assert worst_gap(base) > 0.1
    assert worst_gap(other) > 0.1


def test_the_configuration_is_the_base_policys(base, adapter):
    assert read_config(adapter) == read_config(base)
    assert read_hidden_size(adapter) == 64


def test_terms_are_checked_against_the_tasks(adapter):
    validate_adapter_folder(adapter, TERMS, BASE_POLICY)
    for terms, policy in ((Adapter(2, 8, TERMS.modules), BASE_POLICY), (TERMS, bytes(32))):
        with pytest.raises(Fault, match="expected rank"):
            validate_adapter_folder(adapter, terms, policy)


def test_modules_must_be_matrices_of_the_base(base):
    shapes = read_shapes(base)
    with pytest.raises(Fault, match="no module k_porj: its matrices are"):
        compute_layout(Adapter(4, 8, ("k_porj", "q_proj")), shapes)
    with pytest.raises(Fault, match="no module norm"):
        compute_layout(Adapter(4, 8, ("norm",)), {"model.norm.bias": (64,)})
    with pytest.raises(Fault, match="rank 65 needs a larger matrix"):
        compute_layout(Adapter(65, 8, ("q_proj",)), shapes)


def test_an_embedding_or_a_tied_head_cannot_be_adapted(base, tmp_path):
    with pytest.raises(Fault, match="belongs to a Embedding"):
        load_model(make_adapter(tmp_path / "embedding", base, 0, terms=Adapter(2, 2, ("embed_tokens",))))
    load_model(make_adapter(tmp_path / "head", base, 0, terms=Adapter(2, 2, ("lm_head",))))
    tied = make_model(tmp_path / "tied", 0, tie=True)
    with pytest.raises(Fault, match="no module lm_head"):
        make_adapter(tmp_path / "tied-head", tied, 0, terms=Adapter(2, 2, ("lm_head",)))
    tensors = load_file(tied / "model.safetensors")
    both = {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    save_file(both, tied / "model.safetensors")
    with pytest.raises(Fault, match="tied weights"):
        load_model(make_adapter(tmp_path / "both", tied, 0, terms=Adapter(2, 2, ("lm_head",))))


def test_the_base_link_is_corrected_and_never_followed_twice(base, adapter, tmp_path):
    folder = shutil.copytree(adapter, tmp_path / "copy", symlinks=True)
    (folder / BASE).unlink()
    with pytest.raises(Fault, match="without a base policy"):
        load_model(folder)
    (folder / BASE).symlink_to(tmp_path / "gone")
    link_base(folder, base)
    link_base(folder, base)
    load_model(folder)
    link_base(folder, adapter)
    with pytest.raises(Fault, match="is an adapter"):
        load_model(folder)
    (folder / BASE).unlink()
    (folder / BASE).mkdir()
    with pytest.raises(Fault, match="remove what is in the way"):
        link_base(folder, base)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "gpt2", "mistral", "gemma2", "phi3"])
def test_a_model_that_was_loaded_has_nothing_uninitialised(tmp_path, kind):
    """Parameters come from the file; what is computed instead (rotary frequencies, masks) is what the library computes."""
    sizes = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0}
    config = AutoConfig.for_model(kind, **sizes, **heads, max_position_embeddings=64)
    made = AutoModelForCausalLM.from_config(config).eval()
    config.save_pretrained(tmp_path)
    tied = set(getattr(made, "all_tied_weights_keys", None) or {})
    tensors = {name: tensor for name, tensor in made.state_dict().items() if name not in tied}
    save_file(tensors, tmp_path / "model.safetensors")
    loaded = load_model(tmp_path)
    ours, theirs = dict(loaded.named_buffers()), dict(made.named_buffers())
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert torch.equal(_logits(loaded), _logits(made))


# Hostile folders


def _refuse(folder):
    """Every way to read a hostile adapter says so with a `Fault`, and takes no more memory than an honest one."""
    tracemalloc.start()
    try:
        for read in (lambda: validate_adapter_folder(folder, TERMS, BASE_POLICY), lambda: dict(read_tensors(folder))):
            with pytest.raises(Fault):
                read()
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def _copy(adapter, tmp_path):
    return shutil.copytree(adapter, tmp_path / "copy", symlinks=True)


@pytest.mark.parametrize(
    "change",
    [
        {"r": 10**9},
        {"r": 4.0},
        {"r": True},
        {"r": -1},
        {"r": "4"},
        {"lora_alpha": 0},
        {"lora_alpha": 1e308},
        {"target_modules": []},
        {"target_modules": "q_proj"},
        {"target_modules": ["../q_proj", "v_proj"]},
        {"target_modules": [".*"]},
        {"target_modules": ["v_proj", "q_proj"]},
        {"target_modules": ["q_proj"] * 17},
        {"target_modules": [["q_proj"]]},
        {"base_policy": "zz"},
        {"base_policy": "ab"},
        {"base_policy": None},
        {"auto_mapping": {"base_model_class": "os"}},
        {"bias": "all"},
        {"use_dora": True},
        {"rank_pattern": {"q_proj": 64}},
    ],
)
def test_a_configuration_with_other_fields_is_refused(adapter, tmp_path, change):
    folder = _copy(adapter, tmp_path)
    fields = json.loads((folder / ADAPTER_CONFIG).read_bytes())
    (folder / ADAPTER_CONFIG).write_text(json.dumps({**fields, **change}, sort_keys=True, indent=1) + "\n")
    with pytest.raises(Fault):
        read_adapter_config(folder)
    _refuse(folder)


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"null", b"[" * 5000, b"\xff", b'{"r":' + b"9" * 5000 + b"}"])
def test_a_configuration_that_is_none_is_refused(adapter, tmp_path, data):
    folder = _copy(adapter, tmp_path)
    (folder / ADAPTER_CONFIG).write_bytes(data)
    _refuse(folder)


def _change_shapes(tensors):
    return {name: tensor.T.contiguous() for name, tensor in tensors.items()}


def _add(tensors):
    return {**tensors, "zzz": torch.zeros(1 << 22)}


def _drop(tensors):
    return dict(list(tensors.items())[1:])


def _narrow(tensors):
    return {name: tensor.bfloat16() for name, tensor in tensors.items()}


def _rename(tensors):
    return {name.replace("layers.0", "layers.7"): tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize("change", [_change_shapes, _add, _drop, _narrow, _rename])
def test_other_tensors_are_refused(adapter, tmp_path, change):
    folder = _copy(adapter, tmp_path)
    save_file(change(load_file(folder / ADAPTER_WEIGHTS)), folder / ADAPTER_WEIGHTS)
    _refuse(folder)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_numbers_must_be_finite(adapter, tmp_path, value):
    folder = _copy(adapter, tmp_path)
    tensors = load_file(folder / ADAPTER_WEIGHTS)
    list(tensors.values())[-1][-1, -1] = value
    save_file(tensors, folder / ADAPTER_WEIGHTS)
    _refuse(folder)


def test_a_sum_that_overflows_is_refused(base, tmp_path):
    folder = make_adapter(tmp_path / "large", base, 0, scale=1e30)
    with pytest.raises(Fault, match="numbers are too large"):
        load_model(folder)


def test_a_large_file_is_not_read(adapter, tmp_path):
    folder = _copy(adapter, tmp_path)
    with (folder / ADAPTER_WEIGHTS).open("r+b") as file:
        file.truncate(1 << 34)
    _refuse(folder)


def test_missing_and_unreadable_files_are_refused(adapter, tmp_path):
    folder = _copy(adapter, tmp_path)
    (folder / ADAPTER_WEIGHTS).unlink()
    _refuse(folder)
    (folder / ADAPTER_WEIGHTS).mkdir()
    _refuse(folder)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.data())
def test_no_damage_goes_unnoticed(adapter, tmp_path, data):
    """Cut, extend or change either file: whatever is still accepted is another adapter of exactly the same form."""
    name = data.draw(st.sampled_from([ADAPTER_CONFIG, ADAPTER_WEIGHTS]))
    original = (adapter / name).read_bytes()
    place = data.draw(st.integers(0, len(original) - 1))
    head = data.draw(st.sampled_from([place, min(place, 900)]))
    kind = data.draw(st.sampled_from(["cut", "insert", "replace"]))
    extra = data.draw(st.binary(min_size=1, max_size=16))
    tail = {"cut": b"", "insert": extra + original[head:], "replace": extra + original[head + len(extra) :]}[kind]
    changed = original[:head] + tail
    folder = tmp_path / "copy"
    if not folder.exists():
        shutil.copytree(adapter, folder, symlinks=True)
    for each in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        (folder / each).write_bytes(changed if each == name else (adapter / each).read_bytes())
    try:
        validate_adapter_folder(folder, TERMS, BASE_POLICY)
    except Fault:
        return
    start = len(original) - sum(4 * tensor.size for tensor in read_adapter_tensors(adapter).values())
    assert len(changed) == len(original)
    assert name == ADAPTER_WEIGHTS or changed == original
    assert changed[:start] == original[:start]
    assert all(np.isfinite(tensor).all() for tensor in read_adapter_tensors(folder).values())


@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 256),
    st.integers(1, 4096),
    st.binary(min_size=32, max_size=32),
    st.sets(st.sampled_from("abcdef"), min_size=1),
)
def test_terms_survive_their_file(tmp_path_factory, rank, alpha, policy, modules):
    folder = tmp_path_factory.mktemp("terms")
    terms = Adapter(rank, alpha, tuple(sorted(modules)))
    (folder / ADAPTER_CONFIG).write_bytes(encode_adapter_config(terms, policy))
    assert read_adapter_config(folder) == (terms, policy)
