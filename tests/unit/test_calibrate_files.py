"""Profile files: what is written is what is read, tasks find them by name and are hashed with them, mistakes are named."""

from __future__ import annotations

import tomllib

import msgspec
import pytest

from protocol.errors import ConfigError
from protocol.presets import PROFILE_FP32
from protocol.task import ProofProfile, compute_spec_hash, decode_spec, encode, validate_spec
from tests.unit.test_settings import TASK, _load
from troth.calibrate.files import find_shipped, format_profile, load_profile, read_profile
from troth.calibrate.tables import format_tables
from troth.fit import require_dtype
from troth.settings import ComputeSettings

SHIPPED = find_shipped()
MEASURED = {
    "command": 'troth calibrate "a b" --tokens 8',
    "tokens": 12,
    "prompts": ["random", "sort"],
    "model": {"family": "llama", "hidden": 64},
    "pairs": [{"name": "batch-32", "accepted": True, "share": [0.0, 0.5, 1e-7]}, {"name": "é", "gap": [0.25]}],
}


def make_file(folder, **changes):
    path = folder / "mine.toml"
    path.write_text(format_profile(msgspec.structs.replace(PROFILE_FP32, **changes), MEASURED))
    return path


def test_a_profile_file_gives_back_what_was_written(tmp_path):
    profile, measured = read_profile(make_file(tmp_path, name="mine", topk=64))
    assert (profile.name, profile.topk) == ("mine", 64)
    assert measured == MEASURED


def test_the_preset_is_the_shipped_profile_of_the_demo_model():
    assert load_profile("torch-fp32", SHIPPED["torch-fp32"].parent) == PROFILE_FP32


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_profile_may_stand_in_a_task(tmp_path, name):
    spec, _ = _load(tmp_path, f'profile = "{name}"\n{TASK}')
    validate_spec(spec)
    assert spec.profile.name == name
    assert decode_spec(encode(spec)).profile == spec.profile


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_profile_says_what_it_rests_on(name):
    profile, measured = read_profile(SHIPPED[name])
    accepted = [pair for pair in measured["pairs"] if pair["accepted"]]
    assert measured["rows"] == sum(pair["rollouts"] for pair in accepted) >= 1_000
    assert measured["tokens"] == sum(pair["tokens"] for pair in accepted)
    assert not [word for word in measured["command"].split() if word.startswith("/")], "a path of one machine"
    for pair in accepted:
        assert profile.replay_tolerance_micro >= 2e6 * pair["gap"][-1]
        assert profile.mantissa_mean_milli_max >= 2e3 * pair["mantissa_mean"][-1]
        assert profile.share_null_ppm >= 1.5e6 * pair["share_average"]
    assert name in format_tables([read_profile(SHIPPED[name])])


def test_honest_work_on_the_small_models_was_measured_often_enough():
    for name in ("torch-fp32", "3m-fp32"):
        assert read_profile(SHIPPED[name]).measured["rows"] >= 30_000


def test_a_task_takes_a_file_of_its_own_folder_and_is_hashed_with_it(tmp_path):
    make_file(tmp_path, name="mine", topk=64)
    mine, _ = _load(tmp_path, f'profile = "mine.toml"\n{TASK}')
    plain, _ = _load(tmp_path, TASK)
    assert (mine.profile.topk, plain.profile) == (64, PROFILE_FP32)
    assert compute_spec_hash(mine) != compute_spec_hash(plain)
    based, _ = _load(tmp_path, TASK.replace("[escrow]", '[profile]\nbase = "mine.toml"\nchunk = 16\n[escrow]'))
    assert based.profile == msgspec.structs.replace(mine.profile, chunk=16)
    hashes = {
        compute_spec_hash(msgspec.structs.replace(plain, profile=changed))
        for field in ProofProfile.__struct_fields__
        for value in [getattr(PROFILE_FP32, field)]
        for changed in [
            msgspec.structs.replace(PROFILE_FP32, **{field: value + ("x" if isinstance(value, str) else 1)})
        ]
    }
    assert len(hashes - {compute_spec_hash(plain)}) == len(ProofProfile.__struct_fields__)


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ('profile = "torch-fp23"', "unknown profile 'torch-fp23': did you mean torch-fp32?"),
        ('profile = "xyz"', "shipped are"),
        ('profile = "nowhere.toml"', "nowhere.toml"),
        ("profile = 3", "profile"),
        ("profile = {base = 3}", "profile.base is 3"),
        ('profile = {base = "nothing"}', "unknown profile 'nothing'"),
    ],
)
def test_a_profile_that_is_not_there_is_named(tmp_path, line, hint):
    with pytest.raises(ConfigError) as caught:
        _load(tmp_path, f"{line}\n{TASK}")
    assert hint in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "hint"),
    [
        ("topk = 128\n", "", "lacks topk"),
        ("topk = 128", "topk = 128\ntopq = 1", "unknown keys topq"),
        ("topk = 128", "topk = true", "topk is True, expected int"),
        ("topk = 128", "topk = 128.0", "topk is 128.0, expected int"),
        ('dtype = "float32"', "dtype = 32", "dtype is 32, expected str"),
    ],
)
def test_a_broken_profile_file_is_explained(tmp_path, old, new, hint):
    path = make_file(tmp_path)
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(ConfigError, match="mine") as caught:
        read_profile(path)
    assert hint in str(caught.value)


def test_limits_below_the_floors_are_refused_in_a_task(tmp_path):
    make_file(tmp_path, share_null_ppm=1)
    with pytest.raises(ConfigError, match="share_null_ppm is 1, expected 2000"):
        _load(tmp_path, f'profile = "mine.toml"\n{TASK}')


def test_tables_need_a_record(tmp_path):
    with pytest.raises(ConfigError, match="no complete"):
        format_tables([read_profile(make_file(tmp_path))])


def test_a_record_is_toml_that_others_read(tmp_path):
    assert tomllib.loads(make_file(tmp_path).read_text())["measured"]["pairs"][1] == {"name": "é", "gap": [0.25]}


def test_a_role_refuses_a_task_of_another_dtype(tmp_path):
    spec, _ = _load(tmp_path, TASK)
    require_dtype(spec, ComputeSettings())
    with pytest.raises(ConfigError, match=r"set compute\.dtype = 'float32'"):
        require_dtype(spec, ComputeSettings(dtype="bfloat16"))


def test_the_documents_tables_are_those_of_the_files():
    text = (SHIPPED["torch-fp32"].parents[2] / "docs" / "calibration.md").read_text()
    assert text.endswith(format_tables([read_profile(path) for path in SHIPPED.values()]))
    for name in SHIPPED:
        assert f"calibration/{name}.svg" in text
