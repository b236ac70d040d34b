"""`--key value` settings are taken out of a command line before its options are read, and nothing else is."""

from __future__ import annotations

import pytest

from troth.cli import split_overrides
from troth.settings import load_settings


@pytest.mark.parametrize(
    ("line", "rest", "overrides"),
    [
        ("node run", "node run", ""),
        ("node run --slots 4 --yes", "node run --yes", "--slots 4"),
        ("node run --slots=4 --yes", "node run --yes", "--slots=4"),
        ("relay run --network.bind tcp://127.0.0.1:7000", "relay run", "--network.bind tcp://127.0.0.1:7000"),
        ("task show abcd --ledger.rpc http://x --json", "task show abcd --json", "--ledger.rpc http://x"),
        ("stake add --amount 5 --directory home", "stake add --amount 5", "--directory home"),
        ("node run --config a.toml --task ab -c b.toml", "node run --config a.toml -c b.toml", "--task ab"),
        ("doctor --task ab --role node --directory run", "doctor --role node", "--task ab --directory run"),
        ("node run --network.bnd x", "node run", "--network.bnd x"),
        ("node run --nonsense 3", "node run --nonsense 3", ""),
        ("node run --slots", "node run", "--slots"),
    ],
)
def test_settings_are_told_from_options(line, rest, overrides):
    assert split_overrides(line.split()) == (rest.split(), overrides.split())


@pytest.mark.parametrize(
    "line",
    [
        "",
        "--help",
        "demo --directory run --keep",
        "devnet --directory chain --seed 3",
        "fund 0xab --tokens 5",
        "keys new --path run/keystore.json",
    ],
)
def test_commands_with_options_of_their_own_keep_them(line):
    assert split_overrides(line.split()) == (line.split(), [])


def test_a_value_that_looks_like_an_option_stays_with_its_setting():
    rest, overrides = split_overrides(["node", "run", "--keystore", "--yes"])
    assert (rest, overrides) == (["node", "run"], ["--keystore", "--yes"])


def test_what_is_taken_out_is_what_the_settings_get():
    line = ["node", "run", "--slots", "7", "--yes", "--ledger.rpc=http://127.0.0.1:9", "--network.bind", "tcp://*:1"]
    rest, overrides = split_overrides(line)
    settings = load_settings([], overrides)
    assert rest == ["node", "run", "--yes"]
    assert (settings.slots, settings.ledger.rpc, settings.network.bind) == (7, "http://127.0.0.1:9", "tcp://*:1")
