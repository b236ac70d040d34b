"""The judging process against submissions that kill it, fill it, hang it or take it over: neighbours keep their rows, nobody is
rejected for it, and nothing a stranger sent is decoded anywhere else."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import pytest

from protocol.errors import ConfigError, Fault, Ignore, Reason
from protocol.verdict import Status
from tests.support import trap_keeper
from tests.support.forge import CHAIN_ID, LEDGER, Court, Submission, edit_samples
from troth.judging import make_judge, make_keeper
from troth.settings import RoleSettings, VerifierSettings
from verifier import isolated_wire
from verifier.isolated_judge import IsolatedJudge
from verifier.isolated_reply import validate_judgement
from verifier.isolated_wire import Judged
from verifier.isolation import Keeper
from verifier.judge import Judgement, get_submissions

ROOT = Path(__file__).parents[2]
TOKENS = {kind: token for token, kind in trap_keeper.KINDS.items()}


@pytest.fixture(scope="module")
def court(tmp_path_factory):
    return Court(tmp_path_factory.mktemp("court"), num_nodes=4)


class Bench:
    """A judge, its events and its quarantine folder."""

    def __init__(self, directory: Path, court: Court, keeper: Keeper | None = None, **limits: object) -> None:
        self.directory, self.court = directory, court
        self.events: list[tuple[str, dict[str, object]]] = []
        settings = RoleSettings(verifier=VerifierSettings(**{"memory_mib": 256, "job_seconds": 60.0, **limits}))
        self.keeper = keeper or make_keeper(settings.verifier, boot=trap_keeper.BOOT)
        self.judge: IsolatedJudge = make_judge(
            self.keeper,
            settings,
            court.spec.environment,
            directory,
            lambda kind, fields: self.events.append((kind, fields)),
        )

    def get(self, submissions: dict[bytes, Submission]) -> list:
        """Submissions as a verifier has them, in a round that is over."""
        state, task = self.court.close_round(submissions)
        bundles = {account: one.data for account, one in submissions.items()}
        found, _ = get_submissions(state, task, 0, bundles, chain_id=CHAIN_ID, ledger=LEDGER)
        return found

    def run(self, submissions: dict[bytes, Submission], seconds: float | None = None) -> Judgement:
        """The judgement of a round."""
        work = self.judge.judge(
            self.court.spec, self.get(submissions), folder=self.court.policy, base=None, seconds=seconds
        )
        return asyncio.run(asyncio.wait_for(work, 120)).judgement

    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.events]

    def quarantined(self) -> dict[str, str]:
        """Reasons by account, in hex."""
        return {path.stem[9:]: path.read_text() for path in self.directory.glob("quarantine/*.txt")}


@pytest.fixture(scope="module")
def keeper(tmp_path_factory):
    """One for all benches: its imports take seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_TRAP_FILE", str(tmp_path_factory.mktemp("trap") / "sprung"))
        made = make_keeper(VerifierSettings(), boot=trap_keeper.BOOT)
    yield made
    made.close()


@pytest.fixture
def bench_of(tmp_path, court, keeper):
    """Makes benches of some limits, one at a time."""
    made: list[Bench] = []

    def get(**limits: object) -> Bench:
        made.append(Bench(tmp_path, court, keeper, **limits))
        return made[-1]

    yield get
    for bench in made:
        bench.judge._end_child()


@pytest.fixture
def bench(bench_of):
    return bench_of()


def spring(court, account, kind):
    """A node's bundle whose first completion springs a trap; otherwise it is as committed."""
    bundle = court.honest()[account]
    token = TOKENS[kind]
    edited = court.rewrite(bundle, lambda slot, sample, tokens: (token,) * 6 if (slot, sample) == (0, 0) else tokens)
    return court.submit(edited)


def with_trap(court, kind, at=1):
    """Honest submissions, but for one."""
    submissions = court.submit_all(court.honest().values())
    account = court.accounts[at]
    return {**submissions, account: spring(court, account, kind)}, account


def test_it_says_what_the_judge_says_in_this_process(court, bench):
    submissions = court.submit_all(court.honest().values())
    bad = court.accounts[2]
    submissions[bad] = court.submit(
        edit_samples(court.honest()[bad], lambda one: msgspec.structs.replace(one, reward_micro=7))
    )
    here, there = court.judge(submissions), bench.run(submissions)
    assert there == here
    assert {row.account: row.status for row in there.rows}[bad] is Status.CHEAT
    assert [row.status for row in there.rows].count(Status.GOOD) == 3
    assert bench.kinds() == []


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("segv", "SIGSEGV"),
        ("exit", "status 0"),
        ("raise", "not foreseen"),
        ("oom", "MemoryError"),
        ("forge", "accounts that are not"),
    ],
)
def test_v8_a_submission_that_ends_the_process_has_no_row_and_its_neighbours_have_theirs(court, bench, kind, said):
    submissions, bad = with_trap(court, kind)
    judgement = bench.run(submissions)
    assert {row.account for row in judgement.rows} == set(submissions) - {bad}
    assert {row.status for row in judgement.rows} == {Status.GOOD}
    assert [one.account for one in judgement.unjudged] == [bad]
    assert judgement.findings == []
    assert bench.kinds() == ["fault", "quarantined"]
    assert said in bench.quarantined()[bad.hex()]
    assert (bench.directory / "quarantine" / f"00000000-{bad.hex()}.bundle").read_bytes() == submissions[bad].data


@pytest.mark.parametrize("kind", ["hang", pytest.param("spin", marks=pytest.mark.slow)])
def test_v8_a_submission_that_hangs_costs_its_share_of_the_time_and_no_row_of_others(court, bench, kind):
    submissions, bad = with_trap(court, kind, at=0)
    started = time.monotonic()
    judgement = bench.run(submissions, seconds=6.0)
    assert time.monotonic() - started < 40
    assert {row.account for row in judgement.rows} == set(submissions) - {bad}
    assert {row.status for row in judgement.rows} == {Status.GOOD}
    assert "not done in" in bench.quarantined()[bad.hex()]


def test_v8_cpu_seconds_of_a_job_are_bounded_in_the_process_itself(court, bench_of):
    bench = bench_of(job_seconds=1.0)
    submissions, bad = with_trap(court, "spin")
    judgement = bench.run({bad: submissions[bad]})
    assert judgement.rows == []
    assert [one.account for one in judgement.unjudged] == [bad]


def test_v8_every_submission_kills_the_process_and_nobody_has_a_row(court, bench):
    submissions = {account: spring(court, account, "segv") for account in court.accounts}
    judgement = bench.run(submissions)
    assert judgement.rows == []
    assert {one.account for one in judgement.unjudged} == set(submissions)
    assert set(bench.quarantined()) == {account.hex() for account in submissions}


def test_v8_what_fails_once_and_not_in_a_fresh_process_has_its_row(court, bench):
    account = court.accounts[0]
    judgement = bench.run({account: spring(court, account, "once")})
    assert bench.kinds() == ["fault"]
    assert [row.account for row in judgement.rows] == [account]  # a cheat as it happens: its tokens were edited
    assert judgement.rows[0].status is Status.CHEAT


def test_v8_kill_9_at_random_points_gives_every_row_or_none(court, bench):
    submissions = court.submit_all(court.honest().values())
    right = bench.run(submissions)
    rng, killed = random.Random(8), 0
    for _ in range(12):
        stop = threading.Event()

        delay = rng.uniform(0, 0.08)

        def kill(delay=delay, stop=stop):
            nonlocal killed
            stop.wait(delay)
            child = bench.judge.child
            if child is not None and child.alive:
                os.kill(child.pid, signal.SIGKILL)
                killed += 1

        killer = threading.Thread(target=kill)
        killer.start()
        judgement = bench.run(submissions)
        stop.set()
        killer.join()
        assert judgement.rows == right.rows
        assert judgement.findings == []
    assert killed


@pytest.mark.slow
def test_v8_the_keeper_killed_is_started_again(court, tmp_path):
    bench = Bench(tmp_path, court)
    submissions = court.submit_all(court.honest().values())
    right = bench.run(submissions)
    os.kill(bench.keeper.pid, signal.SIGKILL)
    assert bench.run(submissions).rows == right.rows
    asyncio.run(bench.judge.close())
    assert right.rows


def test_v5_claims_of_a_thousand_million_values_are_a_row_and_no_memory(court, bench_of):
    """300 bytes under the node's own signature that announce 10^9 groups, tokens or bytes."""
    bench, account = bench_of(memory_mib=64), court.accounts[0]
    head = msgspec.msgpack.encode(court.honest()[account])[:100]
    for claim in (b"\xdd\x3b\x9a\xca\x00", b"\xc6\x3b\x9a\xca\x00", b"\xdb\x3b\x9a\xca\x00", b"\xdf\x3b\x9a\xca\x00"):
        for body in (claim + b"\0" * 200, head + claim + b"\0" * 150, b"\x91" * 300):
            data = court.seal_body(account, body)
            assert len(data) < 400
            honest = court.submit(court.honest()[account])
            judgement = bench.run({account: honest._replace(data=data)})
            [row] = judgement.rows
            assert (row.status, row.reason) == (Status.CHEAT, Reason.MALFORMED)
    assert bench.kinds() == []
    assert bench.judge.child.usage.memory_bytes < 48 << 40


def test_v5_what_is_longer_than_a_bundle_can_be_is_not_even_sent_to_the_process(court, bench):
    account = court.accounts[0]
    [one] = bench.get({account: court.submit(court.honest()[account])})
    with pytest.raises(Ignore, match="limit"):
        asyncio.run(bench.judge.inspect(court.spec, one._replace(data=bytes(1 << 22))))


def test_v6_a_pickle_is_data_like_any_other_and_is_never_loaded(court, bench, tmp_path):
    canary = tmp_path / "canary"

    class Bomb:
        def __reduce__(self):
            return os.system, (f"touch {canary}",)

    import pickle

    account, body = court.accounts[0], pickle.dumps(Bomb())
    honest = court.submit(court.honest()[account])
    [row] = bench.run({account: honest._replace(data=court.seal_body(account, body))}).rows
    assert row.reason == Reason.MALFORMED
    assert bench.run({account: honest._replace(data=body)}).rows == []  # not signed: nobody's fault
    theirs, ours = socket.socketpair()
    with theirs, ours:
        theirs.sendall(len(body).to_bytes(4, "big") + body)
        with pytest.raises(Fault, match="no reply"):
            isolated_wire.receive_reply(ours, bytes_max=1 << 16, look=lambda: None)
    assert not canary.exists()


def test_v5_a_reply_is_bounded_before_it_is_read():
    theirs, ours = socket.socketpair()
    with theirs, ours:
        theirs.sendall((1 << 31).to_bytes(4, "big"))
        with pytest.raises(Fault, match="limit 1000"):
            isolated_wire.receive_reply(ours, bytes_max=1000, look=lambda: None)


def test_c5_malformed_commitments_never_end_the_process(court, bench):
    """What ends the reference parser: empty, two bytes, modulus 0, one too many, one missing."""
    account = court.accounts[0]
    bundle = court.honest()[account]
    child = None
    for change in (
        lambda proofs: (b"", *proofs[1:]),
        lambda proofs: (proofs[0][:2], *proofs[1:]),
        lambda proofs: (b"\0\0" + proofs[0][2:], *proofs[1:]),
        lambda proofs: (b"\xff\xff" * (len(proofs[0]) // 2), *proofs[1:]),
        lambda proofs: (*proofs, proofs[0]),
        lambda proofs: proofs[1:],
    ):
        first, *others = bundle.groups[0].samples
        damaged = msgspec.structs.replace(first, proofs=change(first.proofs))
        group = msgspec.structs.replace(bundle.groups[0], samples=(damaged, *others))
        edited = msgspec.structs.replace(bundle, groups=(group, *bundle.groups[1:]))
        [row] = bench.run({account: court.submit(edited)}).rows
        assert (row.status, row.reason) == (Status.CHEAT, Reason.COMMITMENT_FORMAT)
        assert child in (None, bench.judge.child.pid)
        child = bench.judge.child.pid
    assert bench.kinds() == []


# What a process that was taken over could do


def run_shut_in(methods: tuple[str, ...], source: str) -> str:
    """What a fresh interpreter prints that has cut its network off first."""
    code = f"from verifier.isolated_layers import cut_network\nprint(cut_network({methods!r}))\n{source}"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False, timeout=120,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("method", ["namespace", "filter"])
def test_v8_a_process_that_was_shut_in_reaches_no_port_of_this_machine(method):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        dial = (
            f"import socket\ntry:\n socket.create_connection(('127.0.0.1', {port}), 5)\n print('open')\n"
            "except OSError: print('shut')"
        )
        assert run_shut_in((method,), dial) == f"{method}\nshut\n"
        assert run_shut_in(("none",), dial) == "none\nopen\n"


@pytest.mark.parametrize("method", ["namespace", "filter"])
def test_x1_the_sandbox_of_the_code_environment_runs_inside(method):
    run = (
        "from environments.sandbox import FunctionCall, Sandbox\nbox = Sandbox()\nlayers = box.probe()\n"
        "print(layers.missing, 'no files' in layers.active, 'no sockets' in layers.active)\n"
        "print(box.run('def f(x): return x + 1', [FunctionCall('f', (1,))])[0].value)\nbox.close()"
    )
    assert run_shut_in((method,), run) == f"{method}\n True True\n2\n"


def test_an_open_network_must_be_asked_for(tmp_path, monkeypatch):
    """A kernel that refuses both ways, and a verifier that was not told to go without."""
    boot = (
        "import sys; sys.path.insert(0, sys.argv[1]); from verifier import isolated_layers as layers\n"
        "def refuse(): raise OSError(1, 'refused here')\n"
        "layers._enter_namespace = layers._filter_sockets = refuse\n"
        "layers.start_keeper(tuple(sys.argv[2].split(',')))"
    )
    keeper = make_keeper(VerifierSettings(), boot=boot)
    with pytest.raises(ConfigError, match=r"refused here.*verifier\.allow_network"):
        keeper.fork()
    keeper.close()


def test_the_process_has_no_password(monkeypatch):
    monkeypatch.setenv("TROTH_PASSWORD", "secret")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    keeper = make_keeper(VerifierSettings(), boot="import time; time.sleep(60)")
    names = Path(f"/proc/{keeper.pid}/environ").read_bytes().split(b"\0")
    keeper.close()
    assert any(name.startswith(b"PATH=") for name in names)
    assert not any(b"secret" in name for name in names)


def change_row(**changes):
    return lambda judgement: judgement._replace(rows=[judgement.rows[0]._replace(**changes), *judgement.rows[1:]])


@pytest.mark.parametrize(
    "forge",
    [
        change_row(account=bytes(20)),
        change_row(tokens=1 << 31),
        change_row(groups=1),
        change_row(audited=60_000),
        change_row(evidence=1 << 15),
        change_row(reason=int(Reason.REPLAY)),
        change_row(status=Status.CHEAT, reason=200, tokens=0),
        change_row(status=Status.CHEAT, reason=int(Reason.REPLAY), tokens=0),
        change_row(status=Status.UNPAID, reason=int(Reason.PROMPT), tokens=0),
        change_row(status=Status.SHORT, reason=int(Reason.REPLAY), tokens=0),
        lambda judgement: judgement._replace(rows=[*judgement.rows, judgement.rows[0]]),
        lambda judgement: judgement._replace(rows=judgement.rows[1:]),
        lambda judgement: judgement._replace(tokens_audited=1 << 40),
        lambda judgement: judgement._replace(tokens_audited=-1),
    ],
)
def test_v8_replies_that_no_judge_gives_are_no_verdict(court, bench, forge):
    submissions = court.submit_all(court.honest().values())
    asked = bench.get(submissions)
    right = court.judge(submissions)
    validate_judgement(court.spec, asked, Judged(right, 0.1))
    with pytest.raises(Fault):
        validate_judgement(court.spec, asked, Judged(forge(right), 0.1))


@pytest.mark.parametrize("cpu_s", [float("nan"), float("inf"), -1.0])
def test_v8_impossible_times_are_no_verdict(court, bench, cpu_s):
    submissions = court.submit_all(court.honest().values())
    with pytest.raises(Fault):
        validate_judgement(court.spec, bench.get(submissions), Judged(court.judge(submissions), cpu_s))
