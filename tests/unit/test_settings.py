"""Settings and task files: mistakes are named, with the nearest right key."""

from __future__ import annotations

import msgspec
import pytest

from protocol.adapter import WHOLE_POLICIES, Adapter
from protocol.codec import encode
from protocol.errors import ConfigError, Reject
from protocol.task import compute_epoch_pay_max, compute_terms, decode_spec
from troth.settings import load_settings, parse_overrides
from troth.task_file import load_task_file


def test_files_merge_left_to_right_and_overrides_win(tmp_path):
    first, second = tmp_path / "a.toml", tmp_path / "b.toml"
    first.write_text('directory = "one"\nslots = 3\n[ledger]\nrpc = "http://a"\npoll_seconds = 1.0\n')
    second.write_text('slots = 4\n[ledger]\nrpc = "http://b"\n')
    settings = load_settings([first, second], ["--ledger.poll-seconds", "2.5", "--network.bind=tcp://127.0.0.1:1"])
    assert (settings.directory, settings.slots) == ("one", 4)
    assert (settings.ledger.rpc, settings.ledger.poll_seconds) == ("http://b", 2.5)
    assert settings.network.bind == "tcp://127.0.0.1:1"


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("slotz = 3", "did you mean slots?"),
        ("[ledger]\nrcp = 'x'", "did you mean ledger.rpc?"),
        ("[compute]\nthreads = 0", "compute.threads: Input should be greater than or equal to 1, got 0"),
        ("slots = 'many'", "slots: Input should be a valid integer"),
        ("slots = ", "is not TOML"),
    ],
)
def test_mistakes_are_named(tmp_path, text, hint):
    path = tmp_path / "troth.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"troth\.toml") as caught:
        load_settings([path])
    assert hint in str(caught.value)


def test_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read .*absent.toml: No such file"):
        load_settings([tmp_path / "absent.toml"])


@pytest.mark.parametrize("arguments", [["slots", "3"], ["--slots"]])
def test_bad_overrides_are_named(arguments):
    with pytest.raises(ConfigError, match="slots"):
        parse_overrides(arguments)


TASK = """
name = "sort-4"
base_policy = "{policy}"
base_manifest = "{policy}"
licence_data = "CC0-1.0"
licence_model = "Apache-2.0"
trainer = "0x{account}"
[environment]
entry = "sort"
args = {{ digits = 4 }}
[sampling]
max_tokens = 6
stop_tokens = [1]
[escrow]
deposit = 1_000_000_000
""".format(policy="ab" * 32, account="cd" * 20)


def _load(tmp_path, text):
    path = tmp_path / "task.toml"
    path.write_text(text)
    return load_task_file(path, token=bytes(20), content_hash=lambda entry, args: bytes(32))


def test_a_task_file_becomes_a_canonical_spec(tmp_path):
    spec, deposit = _load(tmp_path, TASK)
    assert decode_spec(encode(spec)) == spec
    assert spec.environment.args == '{"digits":4}'
    assert deposit >= compute_epoch_pay_max(spec) == compute_terms(spec).epoch_pay_max


def test_an_adapter_table_becomes_canonical_terms(tmp_path):
    table = '[adapter]\nrank = 8\nmodules = ["v_proj", "q_proj"]\n[escrow]'
    spec, _ = _load(tmp_path, TASK.replace("[escrow]", table))
    assert spec.adapter == Adapter(8, 16, ("q_proj", "v_proj"))
    assert decode_spec(encode(spec)) == spec
    whole, _ = _load(tmp_path, TASK)
    assert whole.adapter == WHOLE_POLICIES
    with pytest.raises(Reject, match="not in canonical form"):
        decode_spec(msgspec.msgpack.encode(msgspec.msgpack.decode(encode(whole))[:-1]))


@pytest.mark.parametrize(
    ("old", "new", "hint"),
    [
        ('licence_data = "CC0-1.0"\n', "", "licence_data is required"),
        ('licence_model = "Apache-2.0"', 'licence_model = "  "', "licence_model is required"),
        ("deposit = 1_000_000_000", "deposit = 1_000", "expected at least"),
        ('name = "sort-4"', 'nmae = "sort-4"', "unknown key nmae: did you mean name?"),
        ("max_tokens = 6", "max_tokens = 0", "sampling.max_tokens is 0, expected 1 to 131072"),
        ("max_tokens = 6", "max_tokens = 6\ntemperature = 0.12345", "more than three decimals"),
        ("max_tokens = 6", "max_tokens = 6\ntemperature = 0.0", "greater than 0"),
        ("stop_tokens = [1]", "stop_tokens = []", "stop_tokens must name"),
        ("stop_tokens = [1]", 'stop_strings = ["x"]', "unknown key sampling.stop_strings"),
        ('name = "sort-4"', 'name = "sort-4"\npreset = "huge"', "expected one of minimal, mainnet"),
        ("[escrow]", "[economics]\naudit_pmm = 3\n[escrow]", "did you mean economics.audit_ppm?"),
        ("[escrow]", "[profile]\ntopk = 0\n[escrow]", "profile.topk is 0, expected 1 to 1024"),
        ("[escrow]", '[profile]\ntopk = "many"\n[escrow]', "profile.topk is 'many', expected int"),
        ("[escrow]", "[adapter]\nrank = 300\nmodules = ['q_proj']\n[escrow]", "adapter.rank is 300, expected 0 to 256"),
        ("[escrow]", "[adapter]\nrank = 4\n[escrow]", "adapter.modules has 0 names, expected 1 to 16"),
        ("[escrow]", "[adapter]\nrank = 4\nmodules = ['q.*']\n[escrow]", "adapter.modules names 'q.*'"),
        ("[escrow]", "[adapter]\nrank = 4\nmodules = ['v', 'v']\n[escrow]", "each once"),
        ("[escrow]", "[adapter]\nrank = 4\nalpha = 0\nmodules = ['v']\n[escrow]", "adapter.alpha is 0"),
        ("[escrow]", "[adapter]\nmodules = ['q_proj']\n[escrow]", "adapter.rank is 0 (whole policies) but"),
        ("ab" * 32, "ab" * 31, "base_policy is 'abab"),
        ("0x" + "cd" * 20, "0xcd", "trainer is '0xcd', expected 20 bytes of hex"),
        ('trainer = "0x' + "cd" * 20 + '"', "", "task.toml: trainer is missing"),
    ],
)
def test_mistakes_in_a_task_are_named(tmp_path, old, new, hint):
    assert old in TASK
    with pytest.raises(ConfigError, match=r"task\.toml: ") as caught:
        _load(tmp_path, TASK.replace(old, new))
    assert hint in str(caught.value)


@pytest.mark.parametrize("text", ["5958", "12e4", "0x12", "true", "1979-05-27"])
def test_text_that_looks_like_a_number_stays_text_on_the_command_line(text):
    assert load_settings([], ["--task", text, "--ledger.rpc", text]).task == text
    assert load_settings([], ["--task", '"ab"']).task == "ab"
