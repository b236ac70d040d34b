"""What people get wrong at the command line: each mistake ends with its exit code and one line that says what to do.

Every command is a process of its own against a real devnet; `run_troth` fails on any traceback. Exit codes: 1 failed,
2 usage, 3 rejected; stdout is data and stays empty when there is none.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from contracts.deploy import Deployment
from protocol.task import compute_epoch_pay_max
from tests.support.network import PASSWORD, SCRYPT_N, run_troth
from troth.demo.launch import free_port
from troth.keystore import create
from troth.task_file import load_task_file

START_SECONDS_MAX = 60.0
TOKENS = 10**9
TASK = (Path(__file__).parents[2] / "examples" / "sort4" / "task.toml").read_text()
NOBODY = "http://127.0.0.1:1"


class Chain:
    """A devnet process, and a directory with the keystore of an account that has money on it."""

    def __init__(self, root: Path) -> None:
        self.root, self.port = root, free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.deployment = root / "devnet" / "deployment.json"
        with (root / "devnet.txt").open("w") as log:
            command = ["devnet", "--port", str(self.port), "--block-seconds", "0.1"]
            self.process = subprocess.Popen(
                [sys.executable, "-m", "troth", *command, "--directory", str(root / "devnet")],
                stdout=log,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        self.home = root / "home"
        self.keys = create(self.home / "keystore.json", PASSWORD, scrypt_n=SCRYPT_N)
        deadline = time.monotonic() + START_SECONDS_MAX
        while not self.deployment.exists():
            assert self.process.poll() is None, (root / "devnet.txt").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.05)

    @property
    def options(self) -> tuple[str, ...]:
        return ("--ledger.rpc", self.url)

    def spoil(self, path: Path, **changes: object) -> Path:
        """A deployment file with a mistake in it."""
        path.write_text(json.dumps(json.loads(self.deployment.read_text()) | changes))
        return path


@pytest.fixture(scope="module")
def chain(tmp_path_factory):
    chain = Chain(tmp_path_factory.mktemp("chain"))
    try:
        funded = run_troth("fund", chain.home / "keystore.json", "--tokens", TOKENS, "--rpc", chain.url)
        assert (funded.returncode, funded.stdout) == (0, "")
        yield chain
    finally:
        chain.process.send_signal(signal.SIGTERM)
        assert chain.process.wait(15) in (0, 130), (chain.root / "devnet.txt").read_text()


def fails(code: int, *said: str, **process: object):
    """A checker: exit code, empty stdout, everything in `said` on stderr."""

    def check(*arguments: object) -> None:
        done = run_troth(*arguments, **process)
        assert done.returncode == code, done.stderr
        assert done.stdout == ""
        for words in said:
            assert words in done.stderr

    return check


def test_the_module_is_the_command():
    done = subprocess.run([sys.executable, "-m", "troth", "nodes"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert "No such command 'nodes'" in done.stderr


# Words on the command line and in files: no ledger is needed to see that they are wrong.


def test_an_unknown_command_or_option_is_a_mistake_of_usage():
    fails(2, "No such command 'nodes'")("nodes", "run")
    fails(2, "No such option: --forever")("node", "run", "--forever")
    fails(2, "--port")("devnet", "--port", 70_000)


def test_an_unknown_key_names_the_nearest(tmp_path):
    file = tmp_path / "troth.toml"
    file.write_text('[ledger]\nrcp = "http://127.0.0.1:8545"\n')
    fails(2, "troth.toml", "unknown key ledger.rcp", "did you mean ledger.rpc?")("task", "list", "--config", file)
    fails(2, "unknown key network.bnd", "did you mean network.bind?")("relay", "run", "--network.bnd", "tcp://*:1")


def test_an_unknown_cheat_of_the_demo_is_told_before_anything_starts(tmp_path):
    fails(2, "unknown cheat 'liar'", "sleeper")("demo", "--cheats", "liar", "--directory", tmp_path / "run")
    assert not (tmp_path / "run").exists()


# Keys.


def test_a_keystore_needs_its_own_password(chain):
    done = fails(2, "wrong password", str(chain.home / "keystore.json"), password="another one")
    done("node", "run", "--yes", "--directory", chain.home, *chain.options)
    fails(2, "no password", "TROTH_PASSWORD", password=None)("keys", "show", "--path", chain.home / "keystore.json")


def test_a_missing_keystore_says_how_to_make_one(tmp_path):
    fails(2, "no keystore", "troth keys new")("relay", "run", "--yes", "--directory", tmp_path)


def test_a_keystore_is_never_overwritten(chain):
    path = chain.home / "keystore.json"
    before = path.read_bytes()
    fails(2, "exists and is never overwritten")("keys", "new", "--path", path, "--work-factor", SCRYPT_N)
    assert path.read_bytes() == before


# The ledger.


def test_no_node_at_the_rpc_address_says_what_to_do(chain):
    said = ("no ledger node", NOBODY, "troth devnet")
    fails(1, *said)("relay", "run", "--yes", "--directory", chain.home, "--ledger.rpc", NOBODY)
    deployment = ("--ledger.deployment", chain.deployment)
    fails(1, "no ledger node", "check ledger.rpc")("task", "list", "--json", "--ledger.rpc", NOBODY, *deployment)


def test_another_chain_than_expected_is_refused(chain, tmp_path):
    fails(2, "ledger.chain_id is 5", "on chain 31337")("task", "list", "--json", *chain.options, "--ledger.chain_id", 5)
    other = chain.spoil(tmp_path / "other.json", chain_id=5)
    fails(2, "is on chain 31337, the deployment on 5")(
        "task", "list", "--json", *chain.options, "--ledger.deployment", other
    )


def test_a_wrong_deployment_is_refused_before_money_goes_to_it(chain, tmp_path):
    nowhere = "0x" + "11" * 20
    relay = ("relay", "run", "--yes", "--directory", tmp_path, "--keystore", chain.home / "keystore.json", "--stake", 1)
    mixed = chain.spoil(tmp_path / "mixed.json", registry=nowhere)
    fails(2, f"the registry is {nowhere}", "damaged or mixed")(*relay, *chain.options, "--ledger.deployment", mixed)
    gone = chain.spoil(tmp_path / "gone.json", book=nowhere)
    fails(2, f"no contract at {nowhere}")("task", "list", *chain.options, "--ledger.deployment", gone)
    late = chain.spoil(tmp_path / "late.json", block=10**9)
    fails(2, "begins at block 1000000000")("task", "list", *chain.options, "--ledger.deployment", late)
    broken = chain.spoil(tmp_path / "broken.json", token="0x12")
    fails(2, "token is '0x12', expected an address")("task", "list", *chain.options, "--ledger.deployment", broken)


# Tasks and money.


def write_task(path: Path, chain: Chain, change: tuple[str, str] = ("", "")) -> Path:
    head = f'base_policy = "{"ab" * 32}"\nbase_manifest = "{"cd" * 32}"\ntrainer = "0x{chain.keys.account.hex()}"\n'
    assert change[0] in TASK
    path.write_text(head + TASK.replace(*change) if change[0] else head + TASK)
    return path


def test_a_task_needs_its_licences(chain, tmp_path):
    task = write_task(tmp_path / "task.toml", chain, ('licence_model = "Apache-2.0"', ""))
    publish = ("task", "publish", task, "--yes", "--json", "--directory", chain.home, *chain.options)
    fails(2, "task.toml", "licence_model is required", "Apache-2.0")(*publish)


def test_a_deposit_below_one_epoch_says_what_one_costs(chain, tmp_path):
    good = write_task(tmp_path / "good.toml", chain)
    spec, _ = load_task_file(
        good, token=Deployment.load(chain.deployment).token, content_hash=lambda entry, args: bytes(32)
    )
    needed = compute_epoch_pay_max(spec)
    task = write_task(tmp_path / "task.toml", chain, ("deposit = 50_000_000", f"deposit = {needed - 1}"))
    publish = ("task", "publish", task, "--yes", "--json", "--directory", chain.home, *chain.options)
    fails(2, f"escrow.deposit is {needed - 1}", f"at least {needed}")(*publish)


def test_money_that_is_not_there_is_said_before_it_is_promised(chain, tmp_path):
    task = write_task(tmp_path / "task.toml", chain, ("deposit = 50_000_000", f"deposit = {10 * TOKENS}"))
    publish = ("task", "publish", task, "--yes", "--json", "--directory", chain.home, *chain.options)
    fails(2, f"holds {TOKENS} token units, deposit is {10 * TOKENS}")(*publish)
    home = ("--directory", chain.home, *chain.options)
    fails(2, "the stake is 5000000000", "fund it")("relay", "run", "--yes", "--stake", 5 * TOKENS, *home)


def test_money_is_not_moved_without_consent(chain, tmp_path):
    task = write_task(tmp_path / "task.toml", chain)
    home = ("--directory", chain.home, *chain.options)
    fails(2, "amount 50000000", "chain 31337", "--yes")("task", "publish", task, *home)
    fails(2, "--amount is -5")("stake", "add", "--amount", "-5", "--yes", *home)


def test_what_the_ledger_refuses_is_a_rejection(chain):
    add = ("stake", "add", "--amount", 5, "--yes", "--json", "--directory", chain.home, *chain.options)
    fails(3, "the ledger refused AddStake: WrongRole")(*add)


@pytest.mark.parametrize(
    "rollout", ["1", "ab/0/0x11/0/0", "ab/x/0x" + "11" * 20 + "/0/0", "ab/0/0x" + "11" * 20 + "/-1/0"]
)
def test_a_malformed_rollout_says_the_form(chain, rollout):
    fails(2, f"rollout is {rollout!r}", "TASK/ROUND/ACCOUNT/SLOT/SAMPLE")("explain", rollout, "--json", *chain.options)


def test_stdout_is_data_only(chain):
    listed = run_troth("task", "list", "--json", *chain.options)
    assert (listed.returncode, json.loads(listed.stdout), listed.stderr) == (0, [], "")
    shown = run_troth("stake", "show", "--json", "--directory", chain.home, *chain.options)
    assert shown.returncode == 0
    assert json.loads(shown.stdout)["balance"] == TOKENS
    fails(2, "no open task")("status", "--json", *chain.options)


# The machine.


def test_a_busy_port_is_named(chain, tmp_path):
    fails(2, f"port {chain.port}", "in use", "--port")("devnet", "--port", chain.port, "--directory", tmp_path)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        endpoint = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        relay = ("relay", "run", "--yes", "--directory", chain.home, "--stake", 1, "--network.bind", endpoint)
        fails(2, f"cannot listen on {endpoint}", "in use")(*relay, *chain.options)


def test_a_directory_that_is_a_file_is_named(chain, tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    fails(2, str(file), "cannot be made")("keys", "new", "--path", file / "keystore.json", "--work-factor", SCRYPT_N)
    fails(2, f"directory {file} cannot be used")("devnet", "--port", free_port(), "--directory", file)
    relay = ("relay", "run", "--yes", "--keystore", chain.home / "keystore.json", "--directory", file)
    fails(2, f"directory {file} cannot be used")(*relay, *chain.options)


def test_a_full_disk_is_said_in_one_line_and_leaves_no_half_keystore(chain, tmp_path):
    path = tmp_path / "new" / "keystore.json"
    fails(2, "cannot be written", "File too large", file_bytes_max=0)(
        "keys", "new", "--path", path, "--work-factor", SCRYPT_N
    )
    assert not list(path.parent.iterdir())
    home = tmp_path / "home"
    home.mkdir()
    shutil.copy(chain.home / "keystore.json", home)
    relay = ("relay", "run", "--yes", "--directory", home, "--stake", 1)
    fails(2, "outbox", "disk I/O error", file_bytes_max=4096)(*relay, *chain.options)
    fails(1, "File too large", "start again", file_bytes_max=16)(
        "devnet", "--port", free_port(), "--directory", tmp_path / "chain"
    )
