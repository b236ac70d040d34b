"""Each check taken out of the real code lets through the adversary that it stops: see mutations."""

from __future__ import annotations

import pytest

from protocol.verdict import Status
from tests.adversaries.mutations import MUTATIONS

IDS = [mutation.name for mutation in MUTATIONS]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=IDS)
def test_the_adversary_is_stopped_by_the_check_and_by_nothing_else(court, monkeypatch, mutation):
    submissions = mutation.forge(court)
    assert submissions
    refused = court.rows(submissions)
    assert {row.reason for row in refused} <= mutation.reasons
    assert all(row.status is not Status.GOOD for row in refused)
    mutation.disable(monkeypatch)
    accepted = court.rows(submissions)
    assert [row.account for row in accepted if row.status is Status.GOOD] == [row.account for row in accepted]


def test_honest_control(court):
    rows = court.rows(court.submit_all(court.honest().values()))
    assert all(row.status is Status.GOOD for row in rows)


def test_every_reason_of_the_judge_has_a_mutation():
    """What a judge can reject a submission for. The others belong to other messages or to no message at all."""
    from protocol.errors import Reason

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
