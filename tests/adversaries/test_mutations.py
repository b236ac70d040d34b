"""Each check taken out of the real code lets through the adversary that it stops: see mutations."""

from __future__ import annotations

import pytest

from protocol.errors import Reason
from protocol.verdict import Status
from tests.adversaries.mutations import MUTATIONS

#: Failures that whoever served the bytes could have caused, as these adversaries show them: no row follows.
NO_EVIDENCE = frozenset({Reason.SIGNATURE, Reason.DUPLICATE})
IDS = [mutation.name for mutation in MUTATIONS]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=IDS)
def test_the_adversary_is_stopped_by_the_check_and_by_nothing_else(court, monkeypatch, mutation):
    submissions = mutation.forge(court)
    assert submissions
    refused = court.judge(submissions).rows
    if mutation.reasons <= NO_EVIDENCE:  # not even a row
        assert refused == []
    else:
        assert {row.account for row in refused} == set(submissions)
        assert {row.reason for row in refused} <= mutation.reasons
        assert all(row.status is not Status.GOOD for row in refused)
    mutation.disable(monkeypatch)
    accepted = court.rows(submissions)  # every submission has a row
    assert {row.status for row in accepted} == {Status.GOOD}


def test_honest_control(court):
    rows = court.rows(court.submit_all(court.honest().values()))
    assert all(row.status is Status.GOOD for row in rows)


def test_every_reason_of_the_judge_has_a_mutation():
    """What a judge can reject a submission for. The cap of near-ties is taken out by its own adversary (R15), because it
    needs a tolerance this court does not have; a token that does not exist (TOKEN_RANGE) is stopped twice, here and by
    the scorer. The others belong to other messages or to no message at all."""
    judged = {
        Reason.MALFORMED,
        Reason.SIGNATURE,
        Reason.ROOT_MISMATCH,
        Reason.STALE_POLICY,
        Reason.DUPLICATE,
        Reason.ASSIGNMENT,
        Reason.GROUP_SIZE,
        Reason.SLOT_GAP,
        Reason.LENGTH,
        Reason.TERMINATION,
        Reason.REWARD,
        Reason.COMMITMENT_FORMAT,
        Reason.COMMITMENT_MISMATCH,
        Reason.REPLAY,
        Reason.QUOTA,
    }
    assert set().union(*(mutation.reasons for mutation in MUTATIONS)) == judged
