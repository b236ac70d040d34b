"""A verdict done again, from values and from a case on disk: the same row, every number, and no stranger is believed."""

from __future__ import annotations

import asyncio
import json
import shutil
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from models.adapter import BASE
from protocol.checks import compute_near_ties_max
from protocol.codec import decode, encode
from protocol.errors import ConfigError, Reason, Reject
from protocol.ledger import events
from protocol.ledger.state import apply
from protocol.rounds import get_times
from protocol.verdict import Row, Status, pack_rows
from shardcast.folder import hash_folder
from tests.support import forge
from tests.support.forge import CHAIN_ID, LEDGER, Court
from tests.support.scenario import make_account
from troth.case import CASE, FACTS, Case, open_case, write_case
from troth.facts import Fact, Facts, encode_facts, open_facts
from troth.network import LINKS
from troth.replay import compare_facts, replay_case, run
from troth.settings import load_settings
from verifier.explain import Rollout


@pytest.fixture(scope="module")
def court(tmp_path_factory):
    """Policies are named by their real content hashes, as on a network."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forge, "hash_policy", lambda folder: hash_folder(folder, links=LINKS))
        yield Court(tmp_path_factory.mktemp("replay"), num_nodes=3, name="replay")


@pytest.fixture(scope="module")
def honest(court):
    return next(iter(court.honest().values()))


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    return load_settings([], [f"--directory={tmp_path_factory.mktemp('reader')}"])


def list_events(court, submission, account, rows=None):
    """The ledger's events after a round, `rows` revealed by two of three verifiers."""
    logged = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forge, "apply", lambda state, one: (logged.append(one), apply(state, one)))
        _, task = court.close_round({account: submission})
    end = get_times(task, 0).verdict_reveal_deadline
    for name in ("v0", "v1") if rows else ():
        event = events.VerdictRevealed(task.task, 0, make_account(name), pack_rows(rows), bytes(32))
        logged.append(events.Logged(end, 0, event))
    # `close_round` folds the ledger twice, the second time in full. A ledger numbers the events of a block.
    first = max(place for place, one in enumerate(logged) if isinstance(one.event, events.TaskPublished))
    logged = logged[first:]
    ordered = sorted(enumerate(logged), key=lambda pair: pair[1].block_number)
    block = get_times(task, 0).opening_deadline + 1
    return [events.Logged(one.block_number, place, one.event) for place, (_, one) in enumerate(ordered)], block


def make_facts(court, submission, account, rows=None):
    logged, block = list_events(court, submission, account, rows)
    return encode_facts(logged, chain_id=CHAIN_ID, ledger=LEDGER, task=court.task_id, block_number=block)


@pytest.fixture(scope="module")
def good(court, honest):
    """An honest submission that the committee called good: its facts and its bytes."""
    submission = court.submit(honest)
    [row] = court.judge({honest.account: submission}).rows
    return make_facts(court, submission, honest.account, [row]), submission.data, row


def make_case(court, directory, facts, data, account, *, slot=1, sample=2, **changes):
    terms = {
        "facts": facts,
        "bundle": data,
        "policy": court.policy,
        "policy_hash": hash_folder(court.policy, links=LINKS),
        "base": None,
        "link": False,
    }
    write_case(directory, Rollout(0, account, slot, sample), **{**terms, **changes})
    return directory


@pytest.fixture
def case(court, good, honest, tmp_path):
    return make_case(court, tmp_path / "case", good[0], good[1], honest.account)


def do(settings, directory):
    return asyncio.run(replay_case(settings, directory))[1]


def test_a_case_gives_the_same_verdict_and_every_number(court, settings, good, honest, case):
    shown = do(settings, case)
    live = run(
        settings, open_facts(good[0]), Rollout(0, honest.account, 1, 2), good[1], court.environment, court.policy
    )
    assert json.loads(json.dumps(shown)) == json.loads(json.dumps(live))
    assert shown["agrees"] is True
    assert shown["verdict"]["status"] == shown["outcome"]["status"] == "good"
    assert shown["verdict"]["evidence_nats"] == good[2].evidence / 256
    assert [one["row"] is not None for one in shown["committee"]].count(True) == 2
    tokens = honest.groups[1].samples[2].tokens
    assert [one["token"] for one in shown["tokens"]] == list(tokens)
    assert [one["winner"] for one in shown["tokens"]] == list(tokens)
    assert all(one["gap"] == 0 and one["logprob"] < 0 and one["passed"] for one in shown["tokens"])
    [chunk] = shown["chunks"]
    assert (chunk["mismatches"], chunk["passed"], chunk["first_position"]) == (0, True, 0)
    assert chunk["size"] > 0


def test_an_edited_token_is_shown_with_the_one_that_should_be_there(court, settings, honest, tmp_path):
    original = honest.groups[0].samples[0].tokens
    first = 2 + original[0] % 30
    edit = lambda slot, number, tokens: (first, *tokens[1:]) if (slot, number) == (0, 0) else tokens  # noqa: E731
    submission = court.submit(court.rewrite(honest, edit))
    rows = [Row(honest.account, Status.GOOD, 0, 2, 0, 2)]  # a committee that looked away
    facts = make_facts(court, submission, honest.account, rows)
    shown = do(settings, make_case(court, tmp_path / "c", facts, submission.data, honest.account, slot=0, sample=0))
    line = shown["tokens"][0]
    assert (line["token"], line["winner"], line["passed"], line["near_tie"]) == (first, original[0], False, False)
    assert line["gap"] > 0.001
    assert (shown["verdict"]["status"], shown["verdict"]["reason"]) == ("cheat", "replay")
    assert "replay" in shown["finding"]
    assert shown["agrees"] is False


def test_a_case_without_a_bundle_says_so(court, settings, good, honest, tmp_path):
    shown = do(settings, make_case(court, tmp_path / "c", good[0], None, honest.account))
    assert shown["verdict"] is None
    assert shown["agrees"] is None
    assert [one["name"] for one in shown["checks"] if one["passed"] is False] == ["bundle"]


def test_a_case_may_link_to_the_policy(court, settings, good, honest, tmp_path):
    directory = make_case(court, tmp_path / "c", good[0], good[1], honest.account, link=True)
    assert (directory / "policy").is_symlink()
    assert do(settings, directory)["agrees"] is True


@pytest.mark.parametrize("name", ["facts.bin", "bundle.bin", "policy/model.safetensors", "policy/config.json"])
@pytest.mark.parametrize("change", ["flipped", "cut", "longer", "gone"])
def test_a_changed_file_is_named(settings, case, name, change):
    path = case / name
    data = path.read_bytes()
    path.unlink()
    if change != "gone":
        changed = {"flipped": data[:-1] + bytes([data[-1] ^ 1]), "cut": data[:-1], "longer": data + b"\0"}
        path.write_bytes(changed[change])
    with pytest.raises(Reject) as caught:
        do(settings, case)
    assert name.split("/")[0] in str(caught.value)


@pytest.mark.parametrize("name", ["policy/run.py", "policy/.hidden", "policy/more.json"])
def test_a_file_that_no_policy_has_is_refused(settings, case, name):
    (case / name).write_bytes(b"{}")
    with pytest.raises(Reject, match="policy"):
        do(settings, case)


def test_a_link_or_a_fifo_in_a_policy_is_refused_and_not_read(settings, case, tmp_path):
    (case / "policy" / "config.json").unlink()
    (case / "policy" / "config.json").symlink_to("/dev/zero")
    with pytest.raises(Reject, match="not a policy's folder"):
        do(settings, case)
    (case / FACTS).unlink()
    (case / FACTS).symlink_to("/dev/zero")
    with pytest.raises(Reject, match="not a plain file"):
        do(settings, case)


def test_long_files_are_refused_before_they_are_read(settings, case, monkeypatch):
    monkeypatch.setattr("troth.case.FACTS_BYTES_MAX", 100)
    with pytest.raises(Reject, match="limit 100 bytes"):
        do(settings, case)


def test_another_folder_is_no_case(settings, tmp_path, case):
    with pytest.raises(ConfigError, match="not a case"):
        do(settings, tmp_path)
    with pytest.raises(ConfigError, match="there already"):
        write_case(
            case,
            Rollout(0, bytes(20), 0, 0),
            facts=b"",
            bundle=None,
            policy=case,
            policy_hash=b"",
            base=None,
            link=False,
        )


def test_an_adapters_link_leads_to_the_cases_own_base(court, settings, good, honest, tmp_path):
    """A whole policy with a link beside it: the link is no content, and is not followed."""
    directory = make_case(court, tmp_path / "c", good[0], good[1], honest.account)
    (directory / "policy" / BASE).symlink_to("/etc")
    assert do(settings, directory)["agrees"] is True


@pytest.mark.parametrize(
    "changes",
    [
        {"version": 2},
        {"account": b"\1" * 19},
        {"round": 1 << 40},
        {"slot": -1},
        {"policy": b"\1" * 32},
        {"facts": b"\1" * 32},
        {"bundle": b"\1" * 32},
    ],
)
def test_a_case_that_names_what_it_does_not_hold(settings, case, changes):
    stored = decode(Case, (case / CASE).read_bytes(), bytes_max=1024)
    (case / CASE).write_bytes(encode(replace(stored, **changes)))
    with pytest.raises(Reject):
        do(settings, case)


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x98" * 1000, b"\xdd\xff\xff\xff\xff", b"\x90"])
def test_bytes_that_are_no_case(settings, case, data):
    (case / CASE).write_bytes(data)
    with pytest.raises(Reject) as caught:
        do(settings, case)
    assert caught.value.reason is Reason.MALFORMED


def forge_facts(good, change):
    facts = open_facts(good[0]).facts
    return change(facts)


def put(facts, index, **changes):
    events_ = list(facts.events)
    events_[index] = replace(events_[index], **changes)
    return replace(facts, events=tuple(events_))


def add(facts, kind, *fields):
    return replace(facts, events=(*facts.events, Fact(facts.block_number, 10**6, kind, (facts.task, *fields))))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda f: replace(f, events=f.events[1:]), "facts do not"),
        (lambda f: replace(f, events=f.events[::-1]), "order"),
        (lambda f: put(f, 0, kind="Exec"), "no ledger emits"),
        (lambda f: put(f, 0, fields=()), "fields"),
        (lambda f: put(f, 0, fields=("x",) * 5), "malformed"),
        (lambda f: put(f, -1, block_number=1 << 60), "order"),
        (lambda f: replace(f, task=b"\1" * 32), "never published"),
        (lambda f: replace(f, version=7), "version"),
        (lambda f: replace(f, block_number=1 << 60), "block number"),
        (lambda f: add(f, "PolicyAttested", 99, bytes(20)), "PolicyAttested"),
        (lambda f: add(f, "PolicyAttested", -1, bytes(20)), "negative"),
        (lambda f: add(f, "StakeChanged", 1, 1), "StakeChanged"),
        (lambda f: add(f, "RootCommitted", 1 << 40, bytes(20), bytes(32), 1, bytes(32)), "round"),
    ],
)
def test_facts_that_no_ledger_gives(good, change, text):
    with pytest.raises(Reject, match=text):
        open_facts(encode(forge_facts(good, change)))


def test_facts_are_canonical(good):
    replica = open_facts(good[0])
    assert isinstance(replica.facts, Facts)
    assert encode(replica.facts) == good[0]
    with pytest.raises(Reject):
        open_facts(good[0] + b"\0")


def test_facts_are_compared_with_a_ledger(court, good, honest, case):
    logged, block = list_events(court, court.submit(honest), honest.account, [good[2]])
    ledger = SimpleNamespace(chain_id=CHAIN_ID, address=LEDGER, state=SimpleNamespace(block_number=block + 50))
    opened = open_case(case)
    later = events.Logged(block + 20, 0, events.TaskToppedUp(court.task_id, 10**16))
    compare_facts(opened, ledger, [*logged, later])  # what came after the case's block does not matter
    with pytest.raises(Reject, match="not what this ledger says"):
        compare_facts(opened, ledger, logged[:-1])
    ledger.state.block_number = 1
    with pytest.raises(ConfigError, match="this ledger is at 1"):
        compare_facts(opened, ledger, logged)
    ledger.chain_id = 5
    with pytest.raises(ConfigError, match="chain 5"):
        compare_facts(opened, ledger, logged)


def test_a_case_can_be_moved(settings, case, tmp_path):
    shutil.copytree(case, tmp_path / "elsewhere", symlinks=True)
    shutil.rmtree(case)
    assert do(settings, tmp_path / "elsewhere")["agrees"] is True


def test_caps_of_near_ties(court):
    profile = replace(court.spec.profile, near_ties_sequence_max=3, near_ties_per_1k_max=4)
    assert compute_near_ties_max(profile, 249) == 3
    assert compute_near_ties_max(profile, 1000) == 7
    assert compute_near_ties_max(profile, 4000, num_rollouts=4) == 3 * 2 + 16
    assert compute_near_ties_max(profile, 4000, num_rollouts=5) == 3 * 3 + 16
