"""What a task's policies may consist of, how large an adapter is beside its base, and hashing a policy again."""

from __future__ import annotations

import asyncio
import json
import shutil
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from models.adapter import ADAPTER_CONFIG, ADAPTER_WEIGHTS, BASE
from models.policy import load_model
from protocol.adapter import Adapter
from protocol.errors import ConfigError, Fault
from protocol.identity import NetworkKey
from shardcast.folder import build_manifest, hash_folder
from shardcast.manifest import manifest_domain
from shardcast.store import ShardStore
from tests.support.adapters import TERMS, make_adapter
from tests.support.scenario import make_model, make_spec
from troth.forms import measure_adapter, require_form, require_small
from troth.network import POLICIES_KEPT, SILENCE_S_MAX, MeshPolicies, get_silence_s_max, verify_policy


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("models") / "base", 0)


@pytest.fixture
def adapter(base, tmp_path):
    return make_adapter(tmp_path / "adapter", base, 1, base_policy=hash_folder(base))


def _files(folder):
    return {path.name: path.stat().st_size for path in folder.iterdir() if path.name != BASE}


def _write_shape(folder, layers, hidden, heads, kv_heads, inner, vocab, dtype_bytes=2):
    """The head of a Llama's weights; the numbers are a hole in the file."""
    kv = hidden // heads * kv_heads
    shapes = {"model.embed_tokens.weight": [vocab, hidden], "model.norm.weight": [hidden]}
    for layer in range(layers):
        path = f"model.layers.{layer}."
        shapes |= {
            path + "self_attn.q_proj.weight": [hidden, hidden],
            path + "self_attn.k_proj.weight": [kv, hidden],
            path + "self_attn.v_proj.weight": [kv, hidden],
            path + "self_attn.o_proj.weight": [hidden, hidden],
            path + "mlp.gate_proj.weight": [inner, hidden],
            path + "mlp.up_proj.weight": [inner, hidden],
            path + "mlp.down_proj.weight": [hidden, inner],
            path + "input_layernorm.weight": [hidden],
            path + "post_attention_layernorm.weight": [hidden],
        }
    header, end = {}, 0
    for name, shape in sorted(shapes.items()):
        count = shape[0] * (shape[1] if len(shape) > 1 else 1)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + dtype_bytes * count]}
        end += dtype_bytes * count
    text = json.dumps(header).encode()
    folder.mkdir()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return folder


def test_an_adapter_on_smollm2_135m_is_below_one_percent(tmp_path):
    base = _write_shape(tmp_path / "smollm2", 30, 576, 9, 3, 1536, 49152)
    size = measure_adapter(Adapter(8, 16, ("q_proj", "v_proj")), base)
    assert 268_000_000 < size.base_bytes < 271_000_000
    assert 4 * 460_800 < size.adapter_bytes < 4 * 460_800 + 20_000
    assert size.share_bps == 70
    require_small(size)
    for terms in (Adapter(16, 32, ("q_proj", "v_proj")), Adapter(8, 16, ("gate_proj", "up_proj"))):
        with pytest.raises(ConfigError, match=r"% of the base's .* limit 1 %: choose a lower adapter.rank"):
            require_small(measure_adapter(terms, base))


def test_the_adapter_of_a_tiny_base_may_be_any_size(base):
    size = measure_adapter(TERMS, base)
    assert size.share_bps > 100
    require_small(size)


def test_adapters_and_whole_policies_do_not_stand_in_for_each_other(base, adapter):
    whole = make_spec(base)
    lora = replace(whole, adapter=TERMS, base_policy=hash_folder(base))
    require_form(whole, 0, _files(base), None)
    require_form(whole, 3, _files(base), None)
    require_form(lora, 0, _files(base), None)
    require_form(lora, 3, _files(adapter), base)
    with pytest.raises(Fault, match="must be whole"):
        require_form(whole, 3, _files(adapter), None)
    with pytest.raises(Fault, match="must be whole"):
        require_form(lora, 0, _files(adapter), None)
    with pytest.raises(Fault, match=r"lists no model\.safetensors"):
        require_form(whole, 3, {"config.json": 3}, None)
    with pytest.raises(Fault, match="adapter of rank 4 consists of"):
        require_form(lora, 3, _files(base), base)


@pytest.mark.parametrize(
    "change", [{"notes.json": 3}, {ADAPTER_WEIGHTS: 1 << 39}, {ADAPTER_CONFIG: 0}, {"model.safetensors": 1}]
)
def test_a_manifest_with_other_files_or_sizes_is_refused_before_it_is_fetched(base, adapter, change):
    lora = replace(make_spec(base), adapter=TERMS, base_policy=hash_folder(base))
    with pytest.raises(Fault, match="it is not used"):
        require_form(lora, 1, {**_files(adapter), **change}, base)


def test_a_policy_is_hashed_again_with_its_base(base, adapter, tmp_path):
    policy = hash_folder(adapter, links=(BASE,))
    verify_policy(adapter, policy)
    verify_policy(base, hash_folder(base))
    with pytest.raises(Fault, match="a file changed on disk"):
        verify_policy(adapter, hash_folder(base))
    (adapter / "more.json").write_text("{}")
    with pytest.raises(Fault, match="a file changed on disk"):
        verify_policy(adapter, policy)
    (adapter / "more.json").unlink()
    other = shutil.copytree(base, tmp_path / "other")
    with (other / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x7f")
    (adapter / BASE).unlink()
    (adapter / BASE).symlink_to(other)
    with pytest.raises(Fault, match="base hashes to"):
        verify_policy(adapter, policy)


def test_only_the_named_link_is_left_out_of_a_manifest(base, adapter):
    key, domain = NetworkKey(bytes(32)), manifest_domain(1, bytes(20), bytes(32))
    manifest = build_manifest(adapter, key, domain, version=1, links=(BASE,))
    assert [entry.name for entry in manifest.body.files] == [ADAPTER_CONFIG, ADAPTER_WEIGHTS]
    with pytest.raises(ConfigError, match="is not a plain file"):
        build_manifest(adapter, key, domain, version=1)
    (adapter / "more").symlink_to(base)
    with pytest.raises(ConfigError, match="is not a plain file"):
        build_manifest(adapter, key, domain, version=1, links=(BASE,))
    (adapter / "more").unlink()
    (adapter / BASE).unlink()
    (adapter / BASE).mkdir()
    with pytest.raises(ConfigError, match="is not a plain file"):
        build_manifest(adapter, key, domain, version=1, links=(BASE,))


def test_larger_shards_may_take_longer(base):
    key, domain = NetworkKey(bytes(32)), manifest_domain(1, bytes(20), bytes(32))
    small = get_silence_s_max(build_manifest(base, key, domain, version=0, shard_size=1024))
    large = get_silence_s_max(build_manifest(base, key, domain, version=0, shard_size=1 << 20))
    assert SILENCE_S_MAX < small < large


def test_collecting_old_adapters_leaves_the_base_and_what_is_in_use(base, tmp_path):
    """Folders of adapters go, links and all; the base they point to stays, whichever version was asked for last."""
    task, newest = bytes(32), 3 * POLICIES_KEPT
    ledger = SimpleNamespace(state=SimpleNamespace(tasks={task: SimpleNamespace(policies=range(newest + 1))}))
    with ShardStore(tmp_path / "store") as store:
        policies = MeshPolicies(None, store, None, ledger, tmp_path / "policies", None, lambda kind, fields: None)
        kept_base = shutil.copytree(base, tmp_path / "policies" / "base")
        policies._ready = {(task, 0): kept_base}
        for version in range(1, newest + 1):
            policies._ready[task, version] = make_adapter(tmp_path / "policies" / str(version), kept_base, version)
        asyncio.run(policies._collect(task, newest))
        left = {version for _, version in policies._ready}
        assert left == {0, *range(newest - POLICIES_KEPT, newest + 1)}
        # An auditor asks for an old version: nodes of the same process keep the newest.
        policies._ready[task, 2] = make_adapter(tmp_path / "policies" / "again", kept_base, 2)
        asyncio.run(policies._collect(task, 2))
        assert {version for _, version in policies._ready} == {*left, 2}
    assert all(path.is_dir() for path in policies._ready.values())
    assert not (tmp_path / "policies" / "5").exists()
    load_model(policies._ready[task, newest])
