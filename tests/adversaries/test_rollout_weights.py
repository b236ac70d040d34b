"""Adversaries with other weights than the round's policy: R1 cheaper or perturbed, R2 draft with true prefill, R3 stale.

Every node of the court is one trial. A trial counts only when its rollouts are not, by luck, the honest ones.
"""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from protocol.errors import Reason
from protocol.verdict import Status
from tests.support.forge import count_good, count_rollouts, edit_weights, make_dishonest, round_to_int8
from tests.support.scenario import make_model
from tests.support.twins import hash_policy
from troth.cheats import perturb_policy

TRIALS_MIN = 50
NUMERIC = {Reason.COMMITMENT_MISMATCH, Reason.REPLAY, Reason.NEAR_TIES}


@pytest.fixture(scope="module")
def impostors(court, tmp_path_factory):
    """Policy folders that are not the round's policy."""
    directory = tmp_path_factory.mktemp("impostors")
    perturb_policy(court.policy, directory / "noise", seed=7, ratio=0.03)
    return {
        "int8": edit_weights(court.policy, directory / "int8", round_to_int8),
        "noise": directory / "noise",
        "sibling": make_model(directory / "sibling", 102),
    }


def test_honest_control(court):
    bundles = court.honest()
    rows = court.rows(court.submit_all(bundles.values()))
    assert count_rollouts(bundles.values()) >= 200
    assert count_good(rows) == len(bundles) >= TRIALS_MIN
    assert all(row.audited == row.groups == 2 and row.tokens > 0 for row in rows)


@pytest.mark.parametrize("kind", ["int8", "noise", "sibling"])
def test_r1_cheaper_or_perturbed_model(court, impostors, kind):
    bundles = court.make(impostors[kind], court.assignments())
    rows = court.rows(court.submit_all(bundles))
    assert len(rows) >= TRIALS_MIN
    assert count_good(rows) == 0
    assert {row.reason for row in rows} <= NUMERIC
    if kind == "sibling":
        assert {row.status for row in rows} == {Status.CHEAT}


def assert_honest_but_for_one_near_tie(court, bundle):
    """By an engine's logits, not the verifier's: one choice within the profile's tolerance, which an honest machine
    with other rounding could have made."""
    gaps = court.gaps(bundle)
    assert sum(gap > 0 for gap in gaps) == 1
    assert max(gaps) <= court.spec.profile.replay_tolerance_micro / 1e6


@pytest.mark.parametrize(("kind", "rounds"), [("int8", 5), ("noise", 2), ("sibling", 1)])
def test_r2_cheap_draft_with_true_prefill(court, impostors, kind, rounds):
    """The draft model samples with the assigned keys; the true model makes the commitments. Only replay can tell."""
    refused = []
    for index in range(rounds):
        drafts = make_dishonest(court, court.make(impostors[kind], court.assignments(index)), index)
        bundles = {one.account: court.rewrite(one, lambda slot, number, tokens: tokens) for one in drafts}
        for row in court.rows(court.submit_all(bundles.values()), index):
            if row.status is Status.GOOD:
                assert_honest_but_for_one_near_tie(court, bundles[row.account])
            else:
                refused.append(row)
    assert len(refused) >= TRIALS_MIN
    assert {row.reason for row in refused} <= {Reason.REPLAY, Reason.NEAR_TIES}
    if kind == "sibling":
        assert {row.status for row in refused} == {Status.CHEAT}


def test_r3_weights_of_the_version_before_labelled_as_this_one(court):
    bundles = court.make(court.older, court.assignments())
    rows = court.rows(court.submit_all(bundles))
    assert len(rows) >= TRIALS_MIN
    assert count_good(rows) == 0
    assert {row.status for row in rows} == {Status.CHEAT}


@pytest.mark.parametrize("where", ["bundle", "commitment", "both"])
def test_r3_names_the_version_before(court, where):
    older, submissions = hash_policy(court.older), {}
    for bundle in court.honest().values():
        said = bundle if where == "commitment" else replace(bundle, policy=older)
        submission = court.submit(said)
        policy = bundle.policy if where == "bundle" else older
        submissions[bundle.account] = submission._replace(policy=policy)
    rows = court.rows(submissions)
    assert len(rows) >= TRIALS_MIN
    assert count_good(rows) == 0
    assert {row.reason for row in rows} == {Reason.STALE_POLICY}
