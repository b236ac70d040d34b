"""An explanation runs the judge's rules on one rollout and goes on after a failure; it never says more than it measured."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from protocol.errors import Fault
from protocol.ledger import events
from protocol.ledger.state import apply
from protocol.rounds import get_times
from protocol.verdict import Row, Status, pack_rows
from tests.support.forge import CHAIN_ID, HIDDEN, LEDGER, Court, edit_groups, edit_samples
from tests.support.scenario import make_account
from verifier.explain import Rollout, explain


@pytest.fixture(scope="module")
def court(tmp_path_factory):
    return Court(tmp_path_factory.mktemp("explain"), num_nodes=4, name="explain")


@pytest.fixture
def honest(court):
    return next(iter(court.honest().values()))


def ask(court, submission, account, *, slot=0, sample=0, served=True, scorer=None, environment=None, edit=None):
    """Checks by name of one rollout of a submission."""
    state, task = court.close_round({account: submission})
    if edit is not None:
        edit(state, task)
    checks = explain(
        state,
        task,
        Rollout(0, account, slot, sample),
        submission.data if served else None,
        environment=environment or court.environment,
        scorer=scorer or court.scorer,
        hidden=HIDDEN,
        chain_id=CHAIN_ID,
        ledger=LEDGER,
    )
    return {check.name: check for check in checks}


def failed(checks):
    return {name for name, check in checks.items() if check.passed is False}


def test_an_honest_rollout_passes_every_check(court, honest):
    checks = ask(court, court.submit(honest), honest.account, slot=1, sample=3)
    assert failed(checks) == set()
    assert list(checks) == [
        "assignment",
        "commitment",
        "receipt",
        "size",
        "envelope",
        "quota",
        "structure and rewards of the group",
        "commitment format",
        "audit lottery",
        "activations, chunk 0",
        "replay",
        "near-ties",
        "log-probability",
        "verdict",
    ]
    assert checks["audit lottery"].text == "drawn"
    assert all(check.observed for check in checks.values())
    assert checks["log-probability"].passed is None


def test_an_edited_token_fails_replay_alone_and_the_numbers_are_there(court, honest):
    forged = court.rewrite(honest, lambda slot, number, tokens: (2 + tokens[0] % 30, *tokens[1:]))
    checks = ask(court, court.submit(forged), honest.account)
    assert failed(checks) == {"replay"}
    gap = float(checks["replay"].observed.split()[1])
    assert gap > float(checks["replay"].limit.split()[0])


def test_a_failure_does_not_end_the_explanation(court, honest):
    """False rewards, and commitments of nothing: both are said, and the prefill is still done."""
    forged = edit_samples(
        honest, lambda s: replace(s, reward_micro=7, proofs=(b"\xff\xd9" + bytes(len(s.proofs[0]) - 2),))
    )
    checks = ask(court, court.submit(forged), honest.account)
    assert failed(checks) == {"structure and rewards of the group", "activations, chunk 0"}
    assert checks["structure and rewards of the group"].observed == "7"
    assert "mismatches" in checks["activations, chunk 0"].observed
    assert checks["replay"].passed


def test_a_malformed_commitment_is_said_and_nothing_is_compared(court, honest):
    forged = edit_samples(honest, lambda s: replace(s, proofs=(b"",)))
    checks = ask(court, court.submit(forged), honest.account)
    assert failed(checks) == {"commitment format", "activations"}


@pytest.mark.parametrize(
    ("change", "last"),
    [
        (lambda s: s._replace(data=b"\xc1"), "envelope"),
        (lambda s: s._replace(root=b"\1" * 32), "envelope"),
        (lambda s: s._replace(policy=b"\1" * 32), "envelope"),
    ],
)
def test_what_cannot_be_opened_is_not_looked_into(court, honest, change, last):
    checks = ask(court, change(court.submit(honest)), honest.account)
    assert failed(checks) == {last}
    assert list(checks)[-1] == last


def test_a_short_submission_says_how_many_are_missing(court, honest):
    checks = ask(court, court.submit(replace(honest, groups=honest.groups[:1])), honest.account)
    assert failed(checks) == {"quota"}
    assert (checks["quota"].observed, checks["quota"].limit) == ("1 groups", "2 groups")


def test_a_bundle_nobody_serves(court, honest):
    checks = ask(court, court.submit(honest), honest.account, served=False)
    assert failed(checks) == {"bundle"}
    assert list(checks)[-1] == "bundle"


def test_a_bundle_without_a_receipt(court, honest):
    checks = ask(court, court.submit(honest), honest.account, edit=lambda state, task: task.receipts.clear())
    assert failed(checks) == {"receipt"}


def test_nothing_on_the_ledger(court, honest):
    checks = ask(court, court.submit(honest), honest.account, edit=lambda state, task: task.commitments.clear())
    assert list(checks) == ["assignment", "commitment"]
    assert failed(checks) == {"commitment"}


def test_an_account_that_had_nothing_to_do(court, honest):
    checks = ask(court, court.submit(honest), honest.account, edit=lambda state, task: task.members.clear())
    assert list(checks) == ["assignment"]
    assert "no slots" in checks["assignment"].text


def test_a_void_round(court, honest):
    checks = ask(court, court.submit(honest), honest.account, edit=lambda state, task: state.beacons.clear())
    assert failed(checks) == {"assignment"}
    assert "void" in checks["assignment"].text


@pytest.mark.parametrize(("slot", "sample"), [(2, 0), (0, 4), (10**9, 0), (0, 10**9)])
def test_a_rollout_that_is_not_there(court, honest, slot, sample):
    checks = ask(court, court.submit(honest), honest.account, slot=slot, sample=sample)
    assert failed(checks) == {"rollout"}


def test_our_own_fault_is_no_failure_of_the_node(court, honest):
    class Broken:
        def score(self, requests, completions, *, temperature, sampled=None):
            raise Fault("out of memory")

    checks = ask(court, court.submit(honest), honest.account, scorer=Broken())
    assert failed(checks) == set()
    assert checks["activations"].passed is None
    assert checks["activations"].text == "out of memory"


@pytest.mark.parametrize("tokens", [(), (40, 1), (2, 3, 4, 5, 6, 7, 8, 9)])
def test_completions_no_model_could_take_do_not_stop_the_explanation(court, honest, tokens):
    forged = edit_samples(honest, lambda sample: replace(sample, tokens=tokens))
    checks = ask(court, court.submit(forged), honest.account)
    assert "structure and rewards of the group" in failed(checks)
    assert checks["activations"].passed is None
    assert "verdict" in checks


@pytest.mark.parametrize("index", [-1, 10**6, 2**63])
def test_a_prompt_that_does_not_exist_does_not_stop_the_explanation(court, honest, index):
    forged = edit_groups(honest, lambda group: replace(group, prompt_index=index))
    checks = ask(court, court.submit(forged), honest.account)
    assert failed(checks) == {"structure and rewards of the group"}
    assert "another prompt" in checks["structure and rewards of the group"].text
    assert checks["activations"].passed is None


def test_the_committees_verdict_is_shown_once_it_is_known(court, honest):
    def reveal(state, task):
        rows = pack_rows([Row(honest.account, Status.CHEAT, 18, 2, 0, 2)])
        deadline = get_times(task, 0).verdict_reveal_deadline
        for name in ("v0", "v1"):
            event = events.VerdictRevealed(task.task, 0, make_account(name), rows, bytes(32))
            apply(state, events.Logged(deadline, 0, event))
        state.block_number = get_times(task, 0).opening_deadline + 1

    checks = ask(court, court.submit(honest), honest.account, edit=reveal)
    assert failed(checks) == {"verdict"}
    assert checks["verdict"].observed == "cheat"
    assert checks["verdict"].text == "2 of 3 verifiers revealed, 2 agree"
    assert ask(court, court.submit(honest), honest.account)["verdict"].passed is None
