"""V8: crash-to-accept. Whatever breaks on the verifiers' side, nothing unjudged is ever good, and nothing unjudged is paid.

Broken parts: a scorer, an environment, bundles that no relay has or that cannot be read, and a verifier killed with SIGKILL
between its journal and the ledger. Every trial must end with no GOOD row for what was not judged, in no money for it, and
receipted leaves burned.
"""

from __future__ import annotations

import os
import signal

import pytest

from protocol.errors import Fault, Ignore
from protocol.ledger import calls, events
from protocol.merkle import compute_root
from protocol.rounds import get_end_round, get_outcomes, get_times
from protocol.settlement import compute_settlement, get_epoch_deadline
from protocol.task import compute_leaf_pay_max
from protocol.verdict import Row, Status, pack_rows, unpack_rows
from tests.support.forge import count_good, count_rollouts
from tests.support.scenario import make_account, make_model
from tests.support.verifier_kit import VERIFIERS, VerifierNetwork, run
from verifier.scorer import TorchScorer


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("models") / "base", 0)


class BrokenScorer:
    """Fails for every batch in which a victim's prompt stands, or for all."""

    def __init__(self, scorer, victims=None):
        self.scorer, self.victims, self.calls = scorer, victims, 0

    def load(self, folder):
        self.scorer.load(folder)

    def score(self, requests, completions, *, temperature, sampled=None):
        self.calls += 1
        if self.victims is None or any(request.key in self.victims for request in requests):
            raise Fault("out of memory")
        return self.scorer.score(requests, completions, temperature=temperature, sampled=sampled)


class BrokenEnvironment:
    """An environment whose infrastructure fails for some prompts."""

    def __init__(self, environment, error, indices=None):
        self.environment, self.error, self.indices = environment, error, indices
        self.num_prompts, self.vocab_size = environment.num_prompts, environment.vocab_size

    def prompt(self, index):
        return self.environment.prompt(index)

    def respond(self, index, completion):
        return self.environment.respond(index, completion)

    def reward(self, index, completion):
        if self.indices is None or index in self.indices:
            raise self.error
        return self.environment.reward(index, completion)


def test_honest_control(court):
    bundles = court.honest(2).values()
    assert count_rollouts(bundles) >= 200
    assert count_good(court.rows(court.submit_all(bundles), 2)) == len(bundles)


def test_v8_a_scorer_that_fails_gives_no_rows(court):
    scorer = BrokenScorer(court.scorer)
    submissions = court.submit_all(court.honest().values())
    judgement = court.judge(submissions, scorer=scorer)
    assert len(submissions) >= 50
    assert judgement.rows == []
    assert judgement.findings == []
    assert scorer.calls == len(submissions) + 1  # together, then one by one


def test_v8_a_scorer_that_fails_for_some_judges_the_others(court):
    """One node's rollouts cannot void the verdict on its neighbours, and are not good because of it."""
    victims = list(court.honest())[::2]
    keys = {
        key for one in court.assignments() if one.account in victims for slot in (0, 1) for key in court.keys(one, slot)
    }
    judgement = court.judge(court.submit_all(court.honest().values()), scorer=BrokenScorer(court.scorer, keys))
    assert {row.account for row in judgement.rows} == set(court.honest()) - set(victims)
    assert count_good(judgement.rows) == len(judgement.rows)


@pytest.mark.parametrize("error", [Fault("sandbox is down"), Ignore("nobody knows")])
def test_v8_an_environment_that_fails_gives_no_rows(court, error):
    environment = BrokenEnvironment(court.environment, error)
    judgement = court.judge(court.submit_all(court.honest().values()), environment=environment)
    assert judgement.rows == []
    assert judgement.findings == []


def test_v8_an_environment_that_fails_for_some_judges_the_others(court):
    victims = set(list(court.honest())[::3])
    indices = {group.prompt_index for account in victims for group in court.honest()[account].groups}
    environment = BrokenEnvironment(court.environment, Fault("sandbox is down"), indices)
    judgement = court.judge(court.submit_all(court.honest().values()), environment=environment)
    assert {row.account for row in judgement.rows} == set(court.honest()) - victims
    assert count_good(judgement.rows) == len(judgement.rows)


@pytest.mark.parametrize("reward", [-1, 1_000_001, 10**9])
def test_v8_an_environment_with_an_impossible_reward_accuses_nobody(court, reward):
    environment = BrokenEnvironment(court.environment, Fault("unused"), set())
    environment.reward = lambda index, completion: reward
    judgement = court.judge(court.submit_all(court.honest().values()), environment=environment)
    assert judgement.rows == []


def test_v8_an_unreadable_bundle_gets_no_row_and_the_others_do(court):
    """A relay that cuts what it serves costs a node this round's pay, and no stake."""
    submissions = court.submit_all(court.honest().values())
    victims = list(submissions)[::2]
    for i, account in enumerate(victims):
        cut = i * 37 % len(submissions[account].data)
        submissions[account] = submissions[account]._replace(data=submissions[account].data[:cut])
    judgement = court.judge(submissions)
    assert {row.account for row in judgement.rows} == set(submissions) - set(victims)
    assert count_good(judgement.rows) == len(judgement.rows)
    assert judgement.findings == []


# From rows to money


def reveal(court, said, *, committee=("v0", "v1", "v2")):
    """The ledger after a round in which everybody submitted honest work and verifiers said `said[name](account)`: a row,
    or None for nothing."""
    submissions = court.submit_all(court.honest().values())
    state, task = court.close_round(submissions)
    times = get_times(task, 0)
    from protocol.ledger.state import apply

    for name in committee:
        rows = [row for account in submissions if (row := said[name](account)) is not None]
        event = events.VerdictRevealed(task.task, 0, make_account(name), pack_rows(rows), bytes(32))
        apply(state, events.Logged(times.verdict_reveal_deadline, 0, event))
    state.block_number = get_epoch_deadline(task, 0) + 1
    return state, task


def good(account):
    return Row(account, Status.GOOD, 0, 2, 40, 2)


def test_v8_receipted_and_never_judged_is_burned(court):
    """No verifier revealed anything: all work is unpaid, and its whole price is burned, so nobody gains by silence."""
    state, task = reveal(court, {}, committee=())
    result = compute_settlement(state, task, 0)
    assert result.paid_total == 0
    assert result.earnings == {}
    assert result.root == compute_root([])
    assert result.slashed == ()
    assert result.burned_total == len(court.honest()) * 2 * compute_leaf_pay_max(task.spec)


def test_v8_judged_by_one_of_three_is_not_judged(court):
    silent = lambda account: None  # noqa: E731
    state, task = reveal(court, {"v0": good, "v1": silent, "v2": silent})
    result = compute_settlement(state, task, 0)
    assert result.earnings == {}
    assert result.burned_total == len(court.honest()) * 2 * compute_leaf_pay_max(task.spec)


def test_v8_a_crashed_verifier_does_not_take_the_others_verdict_away(court):
    silent = lambda account: None  # noqa: E731
    state, task = reveal(court, {"v0": good, "v1": good, "v2": silent})
    result = compute_settlement(state, task, 0)
    assert set(court.honest()) < set(result.earnings)
    assert make_account("v2") not in result.earnings
    assert result.burned_total == 0


def test_v8_contradicting_rows_judge_nothing(court):
    """A row for good and two different ones for bad: no two thirds, no pay, no slash."""
    said = {
        "v0": good,
        "v1": lambda account: Row(account, Status.UNPAID, 17, 2, 0, 2),
        "v2": lambda account: Row(account, Status.CHEAT, 18, 2, 0, 2),
    }
    result = compute_settlement(*reveal(court, said), 0)
    assert result.earnings == {}
    assert result.slashed == ()


@pytest.mark.parametrize("bad", [b"\1", b"\0" * 32, b"\xff" * 32, b"\1" * 33, b"\0" * 20 + b"\1" + b"\0" * 9 + b"\1\1"])
def test_v8_unreadable_rows_are_no_rows(court, bad):
    """Two verifiers reveal bytes that are no rows: the third alone judges nothing."""
    from protocol.ledger.state import apply

    state, task = reveal(court, {"v0": good}, committee=("v0",))
    for name in ("v1", "v2"):
        event = events.VerdictRevealed(task.task, 0, make_account(name), bad, bytes(32))
        apply(state, events.Logged(state.block_number, 0, event))
    assert get_outcomes(state, task, 0) == {}
    assert compute_settlement(state, task, 0).earnings == {}


# Whole verifiers


def settle_first_epoch(network):
    async def scenario():
        await network.run(get_epoch_deadline(network.world.task, 0) + 14)
        await network.close()

    run(scenario())
    return network.world.task


def test_v8_a_network_whose_scorers_are_broken_pays_nothing(tmp_path, base):
    network = VerifierNetwork(tmp_path, base)
    for name in VERIFIERS:
        network.scorers[name] = BrokenScorer(TorchScorer())
        network.restart(name)
    task = settle_first_epoch(network)
    for index in (0, 1):
        assert all(unpack_rows(one.rows) == () for one in task.reveals.get(index, {}).values())
    leaves = sum(one.leaves for index in (0, 1) for one in task.commitments[index].values())
    assert leaves == 8
    assert task.final.paid_total == 0
    assert task.final.burned_total == leaves * compute_leaf_pay_max(task.spec)
    assert task.final.slashed == ()


def test_v8_one_broken_verifier_of_three_changes_no_verdict(tmp_path, base):
    network = VerifierNetwork(tmp_path, base)
    network.scorers["v1"] = BrokenScorer(TorchScorer())
    network.restart("v1")
    task = settle_first_epoch(network)
    for index in (0, 1):
        outcomes = get_outcomes(network.world.chain.state, task, index)
        assert {outcome.row.status for outcome in outcomes.values()} == {Status.GOOD}
        assert all(make_account("v1") not in outcome.agreed for outcome in outcomes.values())
    assert task.final.burned_total == 0
    earnings = compute_settlement(network.world.chain.state, task, 0).earnings
    assert make_account("v1") not in earnings
    assert make_account("v0") in earnings


def test_v8_bundles_that_no_relay_has_any_more_are_burned(tmp_path, base):
    network = VerifierNetwork(tmp_path, base)
    network.withheld = {(0, "node-a"), (1, "node-a")}
    for name in VERIFIERS:
        network.verifiers[name]._fetch_bundle = _never
    task = settle_first_epoch(network)
    assert task.final.paid_total == 0
    assert task.final.burned_total == 8 * compute_leaf_pay_max(task.spec)


async def _never(task, round_index, account):
    """A fetch that finds nothing."""


def kill_before(network, name, kind):
    """Make a forked copy of the process run on until the verifier `name` would send a call of this kind, and die there by
    SIGKILL: its disk is what it leaves."""
    process = os.fork()
    if process:
        _, status = os.waitpid(process, 0)
        return status
    try:
        submit = network.ledgers[name].submit

        async def submit_or_die(intent, call):
            if isinstance(call, kind):
                os.kill(os.getpid(), signal.SIGKILL)
            await submit(intent, call)

        network.ledgers[name].submit = submit_or_die
        run(network.run(get_times(network.world.task, 0).verdict_reveal_deadline))
    finally:
        os._exit(7)  # it was never reached
    return 7


@pytest.mark.parametrize("kind", [calls.CommitVerdict, calls.RevealVerdict])
def test_v8_killed_between_journal_and_ledger(tmp_path, base, kind):
    """The restarted verifier finds its verdict on disk, and reveals those rows and no others."""
    network = VerifierNetwork(tmp_path, base)
    times = get_times(network.world.task, 0)
    run(network.run(times.audit_block))
    assert os.WIFSIGNALED(kill_before(network, "v0", kind))
    [record] = (tmp_path / "v0").glob("verdicts-*/00000000.verdict")
    written = record.read_bytes()
    assert network.world.task.verdict_commits == {}  # the copy died, this chain never saw it
    network.restart("v0")
    run(network.run(times.verdict_commit_deadline))
    assert record.read_bytes() == written
    assert network.world.task.verdict_commits[0][make_account("v0")] in written
    run(network.run(times.verdict_reveal_deadline + 1))
    mine = network.world.task.reveals[0].get(make_account("v0"))
    assert mine is not None
    assert mine.rows in written
    others = [network.world.task.reveals[0][make_account(name)].rows for name in ("v1", "v2")]
    assert others == [mine.rows, mine.rows]
    assert [one["round"] for one in network.texts("v0", "verdict")].count(0) == 0  # it judged once, before it died


def test_v8_a_damaged_record_leaves_the_round_unjudged_by_this_verifier(tmp_path, base):
    network = VerifierNetwork(tmp_path, base)
    times = get_times(network.world.task, 0)
    run(network.run(times.verdict_commit_deadline))
    [record] = (tmp_path / "v0").glob("verdicts-*/00000000.verdict")
    for damaged in (b"", record.read_bytes()[:-1], b"\xc1" * 64):
        record.write_bytes(damaged)
        with pytest.raises(Fault, match="damaged"):
            network.restart("v0")
    record.unlink()
    network.restart("v0")
    run(network.run(times.opening_deadline + 1))
    assert make_account("v0") not in network.world.task.reveals[0]
    outcomes = get_outcomes(network.world.chain.state, network.world.task, 0)
    assert {outcome.row.status for outcome in outcomes.values()} == {Status.GOOD}
    assert get_end_round(network.world.task) == 4
