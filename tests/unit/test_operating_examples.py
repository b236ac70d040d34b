"""The examples an operator copies: every command, option, path and variable in them exists in this version."""

from __future__ import annotations

import configparser
import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import typer

from troth import keystore
from troth.cli import app
from troth.cli.app import split_overrides
from troth.settings import load_settings

ROOT = Path(__file__).parents[2]
UNIT = ROOT / "examples" / "systemd" / "troth-node.service"
CONTAINER = ROOT / "examples" / "container" / "Containerfile"


def require_command(words):
    """A `troth` command line: its command, options and settings exist and take their values."""
    rest, overrides = split_overrides(words)
    load_settings([], overrides)
    command = typer.main.get_command(app)
    while rest and rest[0] in getattr(command, "commands", {}):
        command = command.commands[rest.pop(0)]
    assert not hasattr(command, "commands"), f"{words} names no command"
    takes_value, arguments = {}, 0
    for parameter in command.params:
        arguments += parameter.param_type_name == "argument"
        for name in parameter.opts:
            takes_value[name] = not getattr(parameter, "is_flag", False)
    while rest:
        name = rest.pop(0)
        if arguments and not name.startswith("-"):
            arguments -= 1
            continue
        assert name in takes_value, f"`{' '.join(words)}`: no option {name}"
        if takes_value[name]:
            rest.pop(0)


class Repeating(dict):
    """configparser keeps the last of equal keys; a unit may repeat them, so they are joined."""

    def __setitem__(self, key, value):
        if isinstance(value, list) and key in self:
            value = [*self[key], *value]
        super().__setitem__(key, value)


@pytest.fixture(scope="module")
def unit():
    parser = configparser.ConfigParser(dict_type=Repeating, strict=False, interpolation=None, delimiters=("=",))
    parser.optionxform = str
    parser.read_string(UNIT.read_text())
    return parser


def test_the_unit_starts_a_command_that_exists(unit):
    words = shlex.split(unit["Service"]["ExecStart"])
    assert Path(words[0]).name == "troth"
    require_command(words[1:])
    assert "--yes" in words  # nobody is there to be asked


def test_the_units_secrets_are_credentials(unit):
    service = unit["Service"]
    credentials = dict(line.split(":", 1) for line in service["LoadCredential"].splitlines())
    assert set(credentials) == {"keystore", "password"}
    assert keystore.PASSWORD_FILE_VARIABLE + "=%d/password" in service["Environment"]
    assert "%d/keystore" in service["ExecStart"]
    assert keystore.PASSWORD_VARIABLE + "=" not in UNIT.read_text()


def test_the_unit_restarts_what_can_be_restarted_and_is_shut_in(unit):
    service = unit["Service"]
    assert service["Restart"] == "always"
    assert service["RestartPreventExitStatus"] == "2"  # ConfigError: it would fail again
    assert service["User"] != "root"
    for name in ("NoNewPrivileges", "PrivateTmp", "ProtectKernelTunables", "RestrictSUIDSGID"):
        assert service[name] == "yes"
    assert service["ProtectSystem"] == "strict"
    assert service["CapabilityBoundingSet"] == ""
    directory = Path("/var/lib") / service["StateDirectory"]
    assert f"--directory {directory}" in service["ExecStart"]  # the one place it may write to


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed; parsed above")
def test_systemd_finds_nothing_wrong(tmp_path):
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text().replace("/opt/troth/venv/bin/troth", sys.executable))
    done = subprocess.run(["systemd-analyze", "verify", copy], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.fixture(scope="module")
def steps():
    """Instructions of the container file, continuation lines joined: (instruction, rest)."""
    text = re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", CONTAINER.read_text(), flags=re.M))
    return [tuple(line.split(None, 1)) for line in text.splitlines() if line.strip()]


def rests(steps, name):
    return [rest for instruction, rest in steps if instruction == name]


def test_the_container_copies_what_is_there(steps):
    for rest in rests(steps, "COPY"):
        words = shlex.split(rest)
        if words[0].startswith("--from="):
            assert words[0] == "--from=build"
            continue
        for source in words[:-1]:
            assert (ROOT / source).exists(), source


def test_the_container_runs_commands_that_exist(steps):
    [entry] = rests(steps, "ENTRYPOINT")
    words = json.loads(entry)
    assert words[0] == "troth"
    require_command(words[1:])
    [health] = rests(steps, "HEALTHCHECK")
    words = json.loads(health[health.index("[") :])
    assert words[:3] == ["troth", "node", "status"]
    require_command(words[1:])
    data = words[words.index("--directory") + 1]
    assert data in rests(steps, "VOLUME")
    assert f'"--directory", "{data}"' in entry


def test_the_container_is_of_this_python_and_runs_as_nobody_in_particular(steps):
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    assert wanted == ">=3.11,<3.12"
    images = [rest.split()[0] for rest in rests(steps, "FROM")]
    assert {image.rsplit("/", 1)[-1] for image in images} == {"python:3.11-slim"}
    [user] = rests(steps, "USER")
    assert int(user) > 0
    order = [instruction for instruction, _ in steps]
    assert order.index("USER") < order.index("ENTRYPOINT")
    assert keystore.PASSWORD_FILE_VARIABLE + "=/run/secrets/password" in " ".join(rests(steps, "ENV"))
    assert any("-r requirements/base.txt" in rest for rest in rests(steps, "RUN"))  # pinned


@pytest.mark.parametrize(
    "words", [["node", "fly"], ["node", "run", "--nonsense", "3"], ["node", "run", "--slotz", "3"]]
)
def test_what_does_not_exist_is_found(words):
    with pytest.raises(AssertionError):
        require_command(words)


def test_every_command_in_the_operators_guide_exists():
    text = (ROOT / "docs" / "operating.md").read_text()
    found = re.findall(r"(?:^|`)\$? ?troth ([a-z][^`\n#|>]*)", text, flags=re.M)
    assert len(found) >= 8
    for line in found:
        require_command([re.sub(r"^[A-Z]+$", "1", word) for word in shlex.split(line)])
