"""`troth env check` passes what is sound and says of what is not which rule it breaks; `troth env sample` shows prompts and
rewards; `troth task publish` asks first."""

from __future__ import annotations

import hashlib
import json

import pytest

import environments
import tests.support.bad_environments  # registers the entry "bad"
import troth.environment_check as module
from protocol.errors import ConfigError
from protocol.task import Environment as EnvironmentSpec
from tests.support.network import run_troth
from troth.environment_check import check_environment, require_sound, sample_environment


@pytest.fixture(autouse=True)
def _with_bad_environments(monkeypatch):
    monkeypatch.setattr(
        module, "_BOOT", module._BOOT.replace("from env", "import tests.support.bad_environments; from env")
    )


def make_spec(entry, **args):
    text = json.dumps(args, sort_keys=True, separators=(",", ":"))
    return EnvironmentSpec(entry, text, environments.content_hash(entry, text))


def find_failed(kind, **options):
    rows = check_environment(make_spec("bad", kind=kind), [], num_prompts=3, max_tokens=256, **options)
    assert len({row.check for row in rows}) == len(rows) >= 15
    return [row.check for row in rows if row.status == "failed"]


@pytest.mark.parametrize(
    ("kind", "failed"),
    [
        ("Good", []),
        ("Hash", ["same rewards"]),
        ("Zone", ["same prompts"]),
        ("Order", ["same prompts"]),
        ("Folder", ["same rewards"]),
        ("Empty", ["prompt length"]),
        ("Range", ["tokens"]),
        ("Answer", ["tokens"]),
        ("High", ["rewards"]),
        ("Float", ["rewards"]),
        ("Faulty", ["rewards"]),
        ("Slow", ["longest prompt"]),
        ("Network", ["network"]),
        ("Process", ["process"]),
        ("Write", ["write"]),
        ("Variable", ["variable"]),
        ("Code", ["code"]),
        ("Wrong", ["known answers"]),
    ],
)
def test_each_broken_rule_is_found_and_no_other(kind, failed, monkeypatch):
    monkeypatch.setattr(module, "PROMPT_S_MAX", 0.3)
    assert find_failed(kind) == failed


def test_an_environment_that_hangs_or_dies_is_said_so(monkeypatch):
    monkeypatch.setattr(module, "PROBE_S_MAX", 0.5)
    with pytest.raises(ConfigError, match="hangs"):
        find_failed("Slow")
    monkeypatch.setattr(module, "PROBE_S_MAX", 60.0)
    monkeypatch.setattr(module, "_BOOT", "import os; os.abort()")
    with pytest.raises(ConfigError, match="ended the process"):
        find_failed("Good")


def test_an_environment_without_its_files_cannot_be_looked_at(tmp_path):
    spec = make_spec("dataset", data="1" * 64, reward="exact")
    with pytest.raises(ConfigError, match="no data set file with SHA-256 1111"):
        check_environment(spec, [tmp_path])


def test_publishing_is_refused_with_what_failed():
    require_sound(make_spec("sort", digits=3), [], max_tokens=8)
    with pytest.raises(
        ConfigError,
        match=r"not fit to be published: network: observed network: socket.getaddrinfo 127.0.0.1.*--no-check",
    ):
        require_sound(make_spec("bad", kind="Network"), [], max_tokens=8)


def test_samples_show_prompts_right_answers_and_rewards(tmp_path):
    data = b'{"prompt":"1+1=","answer":"2"}\n'
    (tmp_path / "d.jsonl").write_bytes(data)
    spec = make_spec("dataset", data=hashlib.sha256(data).hexdigest(), reward="exact")
    [row] = sample_environment(spec, [tmp_path], num_prompts=3, first=0, completions=["2", "3"])
    assert (row["prompt"], row["tokens"], row["answer"], row["reward"]) == ("1+1=", 4, "2", 1_000_000)
    assert [one["reward"] for one in row["completions"]] == [1_000_000, 0]
    [row] = sample_environment(make_spec("sort", digits=2), [], num_prompts=1, first=30, completions=["2,3,1"])
    assert row["answer"] == "".join(sorted(row["prompt"][2:-1])) + "<eos>"
    assert (row["reward"], row["completions"][0]["reward"]) == (1_000_000, 0)
    for completion in ("two", "99", ""):
        with pytest.raises(ConfigError, match="expected"):
            sample_environment(make_spec("sort"), [], num_prompts=1, first=0, completions=[completion])
    with pytest.raises(ConfigError, match="first prompt is 10000"):
        sample_environment(make_spec("sort"), [], num_prompts=1, first=10_000, completions=[])


def test_the_commands_speak_json_and_have_exit_codes(tmp_path):
    done = run_troth("env", "check", "sort", "--args", '{"digits": 3}', "--json")
    shown = json.loads(done.stdout)
    assert (done.returncode, shown["ok"]) == (0, True)
    assert shown["content_hash"] == environments.content_hash("sort", '{"digits":3}').hex()
    done = run_troth("env", "sample", "sort", "-n", 2, "--completion", "2,2,2,2,1", "--json")
    assert [row["completions"][0]["reward"] for row in json.loads(done.stdout)] == [1_000_000, 0]
    assert "sort-N" in run_troth("env", "list").stdout
    for arguments in (
        ("env", "check", "sorting"),
        ("env", "check", "sort", "--args", "{"),
        ("env", "sample", "no.toml"),
    ):
        done = run_troth(*arguments)
        assert (done.returncode, done.stdout) == (2, "")


def test_a_failed_check_exits_with_3(monkeypatch, capsys):
    import sys

    from troth.cli import main

    monkeypatch.setattr(sys, "argv", ["troth", "env", "check", "bad", "--args", '{"kind":"High"}'])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 3
    assert "not fit: rewards" in capsys.readouterr().err


assert tests.support.bad_environments
