"""Harnesses of files that a user gives: task.toml, settings and their overrides, keystores."""

from __future__ import annotations

import json
from pathlib import Path

from protocol.errors import ConfigError
from tests.fuzz.kit import Harness, Target, attempt
from troth import keystore
from troth.settings import load_settings
from troth.task_file import load_task_file

TASK_TOML = f"""name = "sort-4"
preset = "minimal"
base_policy = "{"ab" * 32}"
base_manifest = "{"cd" * 32}"
licence_data = "CC0-1.0"
licence_model = "Apache-2.0"
group_size = 4
groups_per_round = 8
slots_max = 8
trainer = "0x{"07" * 20}"
[environment]
entry = "sort"
args = {{ digits = 4 }}
[sampling]
temperature = 0.6
max_tokens = 6
stop_tokens = [1]
[escrow]
deposit = 100000000
[adapter]
rank = 2
modules = ["q_proj", "v_proj"]
[profile]
topk = 64
[schedule]
round_blocks = 7
[economics]
audit_ppm = 50000
"""
SETTINGS_TOML = """directory = "run/node"
slots = 4
environment_folders = ["data"]
[ledger]
rpc = "http://127.0.0.1:8545"
poll_seconds = 0.5
[network]
bind = "tcp://0.0.0.0:7000"
[compute]
engine = "torch"
threads = 2
[compute.vllm]
max_num_seqs = 64
[trainer]
learning_rate = 1e-4
"""


def _task_toml(scratch: Path) -> Target:
    path = scratch / "task.toml"

    def fuzz(data: bytes) -> str:
        path.write_bytes(data)

        def work() -> None:
            spec, deposit = load_task_file(path, token=bytes(20), content_hash=lambda entry, args: bytes(32))
            assert deposit > 0
            assert spec.adapter.rank >= 0

        return attempt(ConfigError, work)

    return Target(fuzz, [TASK_TOML.encode()])


def _settings_toml(scratch: Path) -> Target:
    """A settings file (even first byte), or the arguments of a command line, one a line."""
    path = scratch / "node.toml"
    path.write_text(SETTINGS_TOML)

    def fuzz(data: bytes) -> str:
        if not data or data[0] % 2 == 0:
            path.write_bytes(data[1:])
            return attempt(ConfigError, lambda: load_settings([path]))
        arguments = data[1:].decode(errors="replace").split("\n")
        return attempt(ConfigError, lambda: load_settings([], arguments))

    lines = "--slots\n4\n--ledger.rpc=http://x:1\n--compute.vllm.max_num_seqs\n8\n--task\n12e4"
    return Target(fuzz, [b"\0" + SETTINGS_TOML.encode(), b"\1" + lines.encode()])


def _keystore(scratch: Path) -> Target:
    """A keystore file: a real one, and one whose work factor makes trying a password cheap."""
    path = scratch / "keystore.json"
    keystore.create(path, "password", scrypt_n=keystore.SCRYPT_N_MIN, master=bytes(range(32)))
    made = json.loads(path.read_text())
    made["crypto"]["kdfparams"]["n"] = 2  # its password is wrong then, at no cost

    def fuzz(data: bytes) -> str:
        path.write_bytes(data)
        return attempt(ConfigError, lambda: keystore.load(path, "password"))

    return Target(fuzz, [path.read_bytes(), json.dumps(made).encode()])


HARNESSES = {
    "task_toml": Harness(_task_toml, "text", share=10),
    "settings_toml": Harness(_settings_toml, "text", share=10, bytes_max=2000),
    "keystore_json": Harness(_keystore, "json", share=3, bytes_max=2000),
}
