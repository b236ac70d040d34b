"""Adversaries that send something else than what was assigned: R4 replays, R5 copies, R6 holes, R12 log-probabilities,
R13 rewards, R14 indices and group sizes. None of these needs a model to be found.
"""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from protocol.errors import Reason, Reject
from protocol.messages import compute_bundle_bytes_max, compute_bundle_root
from protocol.verdict import Status
from tests.support.forge import CHAIN_ID, LEDGER, Court, Submission, count_good, count_rollouts, edit_groups
from trainer.ingest import LoadedScorer, check_submission

TRIALS_MIN = 50


@pytest.fixture(scope="module")
def other_court(tmp_path_factory):
    """Another task with the same nodes, policies and environment."""
    return Court(tmp_path_factory.mktemp("other"), name="other")


def judge(court, submissions, *reasons, status=Status.CHEAT, round_index=0):
    """Enough trials, none accepted, all for one of these reasons."""
    rows = court.rows(submissions, round_index)
    assert len(rows) >= TRIALS_MIN
    assert count_good(rows) == 0
    assert {row.reason for row in rows} <= set(reasons)
    assert {row.status for row in rows} == {status}


def ignore(court, submissions, round_index=0):
    """Enough trials, none accepted and nobody accused: a relay could have made these bytes up without the node."""
    assert len(submissions) >= TRIALS_MIN
    assert court.judge(submissions, round_index)[:2] == ([], [])


def edited(court, edit):
    """Submissions of every node's honest bundle after `edit`."""
    return court.submit_all(edit(one) for one in court.honest().values())


def edit_first(bundle, **changes):
    """Change fields of the first group."""
    return replace(bundle, groups=(replace(bundle.groups[0], **changes), *bundle.groups[1:]))


def test_honest_control(court):
    bundles = court.honest(1).values()
    assert count_rollouts(bundles) >= 200
    rows = court.rows(court.submit_all(bundles), 1)
    assert count_good(rows) == len(bundles)


# R4: replays


def test_r4_bundle_of_another_round(court):
    """Anybody who has the old bundle can serve it as the new one, so it gets no row."""
    ignore(court, court.submit_all(court.honest(0).values()), round_index=1)


def test_r4_bundle_of_another_round_relabelled(court):
    bundles = [replace(one, round=1) for one in court.honest(0).values()]
    judge(court, court.submit_all(bundles), Reason.ASSIGNMENT, round_index=1)


def test_r4_bundle_of_another_task(court, other_court):
    """The signature is good in another domain only: nobody can tell who served it here."""
    ignore(court, other_court.submit_all(other_court.honest().values()))


def test_r4_bundle_of_another_task_signed_again(court, other_court):
    judge(court, court.submit_all(other_court.honest().values()), Reason.DUPLICATE)


def test_r4_bundle_of_another_task_relabelled(court, other_court):
    bundles = [replace(one, task=court.task_id) for one in other_court.honest().values()]
    judge(court, court.submit_all(bundles), Reason.ASSIGNMENT)


def test_r4_one_group_in_two_slots(court):
    judge(court, edited(court, lambda b: replace(b, groups=(b.groups[0], b.groups[0]))), Reason.SLOT_GAP)


def test_r4_one_group_in_two_slots_renumbered(court):
    twin = lambda b: replace(b, groups=(b.groups[0], replace(b.groups[0], slot=1)))  # noqa: E731
    judge(court, edited(court, twin), Reason.ASSIGNMENT)


def test_r4_one_rollout_for_the_whole_group(court):
    """The samples of a group have keys of their own: a copy of the first is not what the others' keys give."""
    copied = lambda b: edit_groups(b, lambda g: replace(g, samples=(g.samples[0],) * len(g.samples)))  # noqa: E731
    bundles = [copied(one) for one in court.honest().values()]
    judge(court, court.submit_all(bundles), Reason.REPLAY)


# R5: copies of another node's work


def next_of(court):
    """Thief and victim: every node copies the one after it."""
    honest = list(court.honest().values())
    return [(thief.account, victim) for thief, victim in zip(honest, honest[1:] + honest[:1], strict=True)]


def test_r5_envelope_copied(court):
    copies = {thief: court.submit(victim) for thief, victim in next_of(court)}
    ignore(court, copies)


def test_r5_signed_again(court):
    copies = {thief: court.submit(victim, account=thief) for thief, victim in next_of(court)}
    judge(court, copies, Reason.DUPLICATE)


def test_r5_signed_again_under_the_copied_root(court):
    """The thief copied the root from the ledger before it saw the bundle."""
    copies = {}
    for thief, victim in next_of(court):
        own = court.submit(replace(victim, account=thief))
        copies[thief] = own._replace(root=compute_bundle_root(victim))
    judge(court, copies, Reason.ROOT_MISMATCH)


def test_r5_relabelled_with_a_root_of_its_own(court):
    bundles = [replace(victim, account=thief) for thief, victim in next_of(court)]
    judge(court, court.submit_all(bundles), Reason.ASSIGNMENT)


def test_r5_completions_copied_under_the_thiefs_own_prompts(court):
    """Copied rollouts under the right prompt indices, with rewards to match."""
    bundles = []
    for thief, victim in next_of(court):
        own = court.honest()[thief]
        pairs = zip(own.groups, victim.groups, strict=True)
        groups = tuple(replace(mine, samples=theirs.samples) for mine, theirs in pairs)
        bundles.append(court.rewrite(replace(own, groups=groups), lambda slot, number, tokens: tokens))
    judge(court, court.submit_all(bundles), Reason.REPLAY)


def test_r5_the_victim_is_paid(court):
    [(thief, victim), *_] = next_of(court)
    submissions = {victim.account: court.submit(victim), thief: court.submit(replace(victim, account=thief))}
    by_account = {row.account: row.status for row in court.rows(submissions)}
    assert by_account == {victim.account: Status.GOOD, thief: Status.CHEAT}


# R6: holes


@pytest.mark.parametrize("kept", [0, 1])
def test_r6_hard_slot_left_out(court, kept):
    """Unpaid, and the next quota is what was delivered; not slashed, because a slow node looks the same."""
    alone = lambda b: replace(b, groups=(replace(b.groups[kept], slot=0),))  # noqa: E731
    judge(court, edited(court, alone), Reason.QUOTA, status=Status.SHORT)


def test_r6_nothing_but_a_root(court):
    judge(court, edited(court, lambda b: replace(b, groups=())), Reason.QUOTA, status=Status.SHORT)


def test_r6_slots_in_another_order(court):
    judge(court, edited(court, lambda b: replace(b, groups=b.groups[::-1])), Reason.SLOT_GAP)


def test_r6_slots_in_another_order_renumbered(court):
    turned = lambda b: replace(  # noqa: E731
        b, groups=(replace(b.groups[1], slot=0), replace(b.groups[0], slot=1))
    )
    judge(court, edited(court, turned), Reason.ASSIGNMENT)


def test_r6_a_slot_of_the_next_numbers(court):
    """Slots 0 and 2 in place of 0 and 1."""
    gap = lambda b: replace(b, groups=(b.groups[0], replace(b.groups[1], slot=2)))  # noqa: E731
    judge(court, edited(court, gap), Reason.SLOT_GAP)


def test_r6_more_slots_than_the_quota(court):
    more = lambda b: replace(b, groups=(*b.groups, replace(b.groups[0], slot=2)))  # noqa: E731
    rows = {row.account: row for row in court.judge(edited(court, more)).rows}
    assert len(court.accounts) >= TRIALS_MIN
    assert {row.reason for row in rows.values()} <= {Reason.QUOTA}
    limit = compute_bundle_bytes_max(court.spec, court.spec.slots_max) + 80
    for account, submission in edited(court, more).items():  # what is longer than any honest bundle is not even parsed
        assert (account in rows) == (len(submission.data) <= limit)


def test_r6_an_easier_prompt(court):
    """Generated for another prompt and saying so."""
    easier = {one.account: index for index, one in enumerate(court.assignments())}
    made = court.make(
        court.policy, court.assignments(), prompt=lambda one, slot: court.environment.prompt(easier[one.account])
    )
    bundles = [edit_groups(one, lambda g, i=easier[one.account]: replace(g, prompt_index=i)) for one in made]
    judge(court, court.submit_all(bundles), Reason.ASSIGNMENT)


# R12: log-probabilities


@pytest.mark.parametrize("value", [-0.5, float("inf"), float("nan"), [0.0] * 6, None])
def test_r12_there_is_no_field_for_log_probabilities(court, value):
    submissions = {
        account: court.submit_raw(one, lambda fields: [sample.append(value) for sample in fields[5][0][2]])
        for account, one in court.honest().items()
    }
    judge(court, submissions, Reason.MALFORMED)


def test_r12_the_trainers_log_probabilities_are_its_scorers(court):
    """Whatever was served: accepted bytes give the scorer's numbers, bytes with numbers of their own give nothing."""
    account, bundle = next(iter(court.honest().items()))
    loaded = LoadedScorer(court.scorer, 64)

    def ingest(submission):
        state, task = court.close_round({account: submission})
        return check_submission(
            state,
            task,
            0,
            account,
            submission.data,
            chain_id=CHAIN_ID,
            ledger=LEDGER,
            environment=court.environment,
            loaded=loaded,
        )

    groups = ingest(court.submit(bundle))
    assert len(groups) == 2
    for group, sent in zip(groups, bundle.groups, strict=True):
        prompts = [court.environment.prompt(sent.prompt_index)] * len(sent.samples)
        reference = court.logprobs(prompts, [sample.tokens for sample in sent.samples])
        for mine, theirs in zip(group.logprobs, reference, strict=True):
            np.testing.assert_allclose(mine, theirs, atol=1e-4)
    with pytest.raises(Reject) as caught:
        ingest(court.submit_raw(bundle, lambda fields: fields[5][0][2][0].append(0.0)))
    assert caught.value.reason is Reason.MALFORMED


# R13: rewards


@pytest.mark.parametrize("claim", [1_000_000, -1, 10**9, 1, 2**63 - 1])
def test_r13_false_reward(court, claim):
    def lie(bundle):
        sample = replace(bundle.groups[1].samples[3], reward_micro=claim)
        assert sample.reward_micro != bundle.groups[1].samples[3].reward_micro
        group = replace(bundle.groups[1], samples=(*bundle.groups[1].samples[:3], sample))
        return replace(bundle, groups=(bundle.groups[0], group))

    judge(court, edited(court, lie), Reason.REWARD)


@pytest.mark.parametrize(
    "claim", [1.0, 0.0, -0.0, float("nan"), float("inf"), True, False, None, "0", b"\0", [0], 2**64]
)
def test_r13_rewards_of_other_types(court, claim):
    def change(fields):
        fields[5][0][2][0][1] = claim

    if claim == 2**64:
        with pytest.raises(OverflowError):  # MessagePack itself has no such number
            court.submit_raw(next(iter(court.honest().values())), change)
        return
    submissions = {account: court.submit_raw(one, change) for account, one in court.honest().items()}
    judge(court, submissions, Reason.MALFORMED)


# R14: indices and sizes


@pytest.mark.parametrize("step", [1, -1, 10**6])
def test_r14_wrong_prompt_index(court, step):
    judge(
        court, edited(court, lambda b: edit_first(b, prompt_index=b.groups[0].prompt_index + step)), Reason.ASSIGNMENT
    )


def test_r14_one_rollout_less(court):
    judge(court, edited(court, lambda b: edit_first(b, samples=b.groups[0].samples[:-1])), Reason.GROUP_SIZE)


def test_r14_one_rollout_more(court):
    more = lambda b: edit_first(b, samples=(*b.groups[0].samples, b.groups[0].samples[0]))  # noqa: E731
    judge(court, edited(court, more), Reason.GROUP_SIZE)


def test_r14_empty_group(court):
    judge(court, edited(court, lambda b: edit_first(b, samples=())), Reason.GROUP_SIZE)


@pytest.mark.parametrize("slot", [1, 7, -1, 2**32])
def test_r14_wrong_or_repeated_slot(court, slot):
    judge(court, edited(court, lambda b: edit_first(b, slot=slot)), Reason.SLOT_GAP)


@pytest.mark.parametrize("slot", [None, "0", 0.0, False, [], b""])
def test_r14_slot_that_is_no_number(court, slot):
    def change(fields):
        fields[5][0][0] = slot

    judge(court, {a: court.submit_raw(one, change) for a, one in court.honest().items()}, Reason.MALFORMED)


def test_more_leaves_committed_than_served(court):
    submissions = {
        account: Submission(one.data, one.root, one.leaves - 1, one.policy)
        for account, one in court.submit_all(court.honest().values()).items()
    }
    judge(court, submissions, Reason.ROOT_MISMATCH)
