"""Adversaries that choose their tokens: R7 best of many, R8 prompt tampering, R9 edits, R10 endings, R11 temperature,
R15 near-ties.

Where it can, the forger commits to its own tokens with the true policy's own activations (`Court.rewrite`), so that only
replay stands in its way.
"""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from msgspec.structs import replace

from protocol import checks
from protocol.assignment import compute_sample_key
from protocol.errors import Reason
from protocol.presets import PROFILE_FP32
from protocol.sampling import scores
from protocol.verdict import Status
from tests.adversaries.mutations import put, without
from tests.support.forge import Court, count_good, count_rollouts, edit_samples, make_dishonest, tokens_of

TRIALS_MIN = 50
EOS, VOCAB = 1, 32


def judge(court, bundles):
    """Rows of enough trials, none of them accepted."""
    rows = court.rows(court.submit_all(bundles))
    assert len(rows) >= TRIALS_MIN
    assert count_good(rows) == 0
    return rows


def draw(*parts):
    """A number that a forger's choice follows from, so that runs repeat."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big")


def edit_token(token, *parts):
    """Another token that does not end the completion."""
    return [t for t in range(2, VOCAB) if t != token][draw(*parts) % (VOCAB - 3)]


def edit_share(share):
    """An edit of so many percent of all tokens, never of those that end a completion."""

    def edit(slot, number, tokens):
        return tuple(
            edit_token(token, slot, number, i)
            if token != EOS and draw("share", slot, number, i, tokens) % 100 < share
            else token
            for i, token in enumerate(tokens)
        )

    return edit


def edit_one(bundle):
    """An edit of one token of one rollout of one group."""
    slot, number = draw(bundle.account) % len(bundle.groups), draw(bundle.account, 1) % len(bundle.groups[0].samples)
    position = draw(bundle.account, 2) % len(bundle.groups[slot].samples[number].tokens)

    def edit(at_slot, at_number, tokens):
        if (at_slot, at_number) != (slot, number):
            return tokens
        made = edit_token(tokens[position], bundle.account)
        ends = position + 1 == len(tokens) < 6
        return (*tokens[:position], made, *([EOS] if ends else []), *tokens[position + 1 :])

    return edit


def test_honest_control_of_committing_by_prefill(court):
    """A forger's tools are not what gives it away: honest tokens with commitments made by prefill pass."""
    bundles = [court.rewrite(one, lambda slot, number, tokens: tokens) for one in court.honest().values()]
    rows = court.rows(court.submit_all(bundles))
    assert count_rollouts(bundles) >= 200
    assert count_good(rows) == len(bundles)


@pytest.fixture(scope="module")
def wide_court(tmp_path_factory):
    """One group of 16 per node."""
    return Court(tmp_path_factory.mktemp("wide"), num_nodes=52, slots=1, group_size=16, name="wide")


def count_right(court, index, tokens):
    return sum(a == b for a, b in zip(tokens, court.environment.solution(index), strict=False))


def test_r7_best_16_of_64(wide_court):
    """48 more keys per group than assigned; the 16 rollouts nearest to the answer are submitted."""
    court, wide = wide_court, []

    def keys(one, slot):
        return [compute_sample_key(one.seed(slot), number) for number in range(64)]

    def nearest(group):
        ranked = sorted(group.samples, key=lambda one: -count_right(court, group.prompt_index, one.tokens))
        return replace(group, samples=tuple(ranked[:16]))

    for bundle in court.make(court.policy, court.assignments(), keys=keys):
        wide.append(replace(bundle, groups=tuple(nearest(group) for group in bundle.groups)))
    rows = judge(court, make_dishonest(court, wide))
    assert {row.reason for row in rows} == {Reason.REPLAY}
    assert {row.status for row in rows} == {Status.CHEAT}


def test_r7_the_assigned_16_in_another_order(wide_court):
    """Reward filtering within the group: the same rollouts, best first."""
    court = wide_court
    bundles = [
        replace(one, groups=tuple(replace(g, samples=g.samples[1:] + g.samples[:1]) for g in one.groups))
        for one in court.honest().values()
    ]
    assert {row.reason for row in judge(court, make_dishonest(court, bundles))} == {Reason.REPLAY}


def test_r7_honest_control_of_groups_of_16(wide_court):
    bundles = wide_court.honest().values()
    assert count_rollouts(bundles) >= 200
    assert count_good(wide_court.rows(wide_court.submit_all(bundles))) == len(bundles)


@pytest.mark.parametrize("commit", ["as generated", "by true prefill"])
def test_r8_one_token_inserted_before_the_completion(court, commit):
    """The first digit of the answer is put behind the prompt; what the policy makes of that is passed off as its own."""

    def prompt(one, slot):
        index = court.prompt_index(one, slot)
        return (*court.environment.prompt(index), court.environment.solution(index)[0])

    bundles = make_dishonest(court, court.make(court.policy, court.assignments(), prompt=prompt))
    if commit == "by true prefill":
        bundles = [court.rewrite(one, lambda slot, number, tokens: tokens) for one in bundles]
    rows = judge(court, bundles)
    assert {row.reason for row in rows} <= {Reason.REPLAY, Reason.COMMITMENT_MISMATCH}
    assert {row.status for row in rows} == {Status.CHEAT}


def test_r9_one_token_edited(court):
    bundles = [court.rewrite(one, edit_one(one)) for one in court.honest().values()]
    changed = [
        sum(
            a != b
            for mine, theirs in zip(tokens_of(one), tokens_of(court.honest()[one.account]), strict=True)
            for a, b in zip(mine, theirs, strict=True)
        )
        for one in bundles
    ]
    assert set(changed) == {1}
    rows = judge(court, bundles)
    assert {row.reason for row in rows} == {Reason.REPLAY}


def test_r9_one_token_edited_after_committing(court):
    """The commitments stay those of the honest rollout."""
    bundles = []
    for honest in court.honest().values():
        edited = court.rewrite(honest, edit_one(honest))
        pairs = [zip(a.samples, b.samples, strict=True) for a, b in zip(edited.groups, honest.groups, strict=True)]
        groups = [
            replace(group, samples=tuple(replace(a, proofs=b.proofs) for a, b in pair))
            for group, pair in zip(edited.groups, pairs, strict=True)
        ]
        lengths = [[len(one) for one in group] for group in tokens_of(edited)]
        if lengths == [[len(one) for one in group] for group in tokens_of(honest)]:
            bundles.append(replace(edited, groups=tuple(groups)))
    judge(court, bundles)


@pytest.mark.parametrize("percent", [5, 47])
def test_r9_a_share_of_tokens_edited(court, percent):
    made = [court.rewrite(one, edit_share(percent)) for index in (0, 1) for one in court.honest(index).values()]
    rows = []
    for index in (0, 1):
        bundles = make_dishonest(court, [one for one in made if one.round == index], index)
        rows += court.rows(court.submit_all(bundles), index)
    assert len(rows) >= TRIALS_MIN
    assert count_good(rows) == 0
    assert {row.reason for row in rows} == {Reason.REPLAY}


@pytest.mark.parametrize("at", [1, 3, 5])
def test_r10_eos_forced(court, at):
    """Every completion that is longer is ended at token `at` by an end token the policy did not draw there."""
    bundles = [
        court.rewrite(one, lambda slot, number, tokens: tokens if len(tokens) <= at else (*tokens[: at - 1], EOS))
        for one in court.honest().values()
    ]
    rows = judge(court, make_dishonest(court, bundles))
    assert {row.reason for row in rows} == {Reason.REPLAY}


@pytest.mark.parametrize("length", [1, 4, 5])
def test_r10_truncation(court, length):
    """Cut without an end token, down to one token and up to one less than allowed."""
    bundles = [court.rewrite(one, lambda slot, number, tokens: tokens[:length]) for one in court.honest().values()]
    rows = judge(court, make_dishonest(court, bundles))
    assert {row.reason for row in rows} == {Reason.TERMINATION}


def test_r10_tokens_after_the_end(court):
    """The last but one token becomes an end token and the completion goes on."""
    bundles = [
        court.rewrite(one, lambda slot, number, tokens: (*tokens[:-2], EOS, tokens[-1]) if len(tokens) > 1 else tokens)
        for one in court.honest().values()
    ]
    assert {row.reason for row in judge(court, bundles)} == {Reason.TERMINATION}


@pytest.mark.parametrize(
    ("reason", "edit"),
    [
        (Reason.LENGTH, lambda tokens: ()),
        (Reason.LENGTH, lambda tokens: (*(t if t != EOS else 2 for t in tokens), *[2] * (7 - len(tokens)))),
        (Reason.TOKEN_RANGE, lambda tokens: (VOCAB, *tokens[1:])),
        (Reason.TOKEN_RANGE, lambda tokens: (-1, *tokens[1:])),
        (Reason.TOKEN_RANGE, lambda tokens: (2**40, *tokens[1:])),
    ],
)
def test_r10_lengths_and_tokens_out_of_range(court, reason, edit):
    bundles = [
        edit_samples(one, lambda sample: replace(sample, tokens=edit(sample.tokens))) for one in court.honest().values()
    ]
    assert {row.reason for row in judge(court, bundles)} == {reason}


@pytest.mark.parametrize("temperature", [0.7, 0.001])
def test_r11_other_temperature(court, temperature):
    """0.7, and greedy. The commitments are true: temperature does not enter the activations."""
    rows, rounds = [], (0, 1)
    for index in rounds:
        bundles = make_dishonest(
            court, court.make(court.policy, court.assignments(index), temperature=temperature), index
        )
        rows += court.rows(court.submit_all(bundles), index)
    assert len(rows) >= TRIALS_MIN
    assert count_good(rows) == 0
    assert {row.reason for row in rows} == {Reason.REPLAY}


@pytest.fixture(scope="module")
def tolerant_court(tmp_path_factory):
    """A profile whose tolerance is so wide that many tokens have a runner-up within it."""
    profile = replace(PROFILE_FP32, replay_tolerance_micro=1_000_000, replay_severe_micro=5_000_000)
    return Court(tmp_path_factory.mktemp("tolerant"), profile=profile, name="tolerant")


def flip_near_ties(court, bundle):
    """The last token of every full-length completion becomes its runner-up where the tolerance allows that. Returns the
    forgery and the number of flips."""
    runners = {}
    for slot, number, _, z in court.positions(bundle, start=5):
        first, second = np.argsort(z)[::-1][:2]
        if z[first] - z[second] < 0.99:
            runners[slot, number] = int(second)
    flip = lambda slot, number, tokens: (*tokens[:5], runners[slot, number]) if (slot, number) in runners else tokens  # noqa: E731
    return court.rewrite(bundle, flip), len(runners)


def near_ties_max(court, bundle):
    """What all audited rollouts of a submission may have together."""
    sizes = [len(sample.tokens) for group in bundle.groups for sample in group.samples]
    return checks.compute_near_ties_max(court.spec.profile, sum(sizes), num_rollouts=len(sizes))


def test_r15_near_ties_flipped_within_the_tolerance(tolerant_court, monkeypatch):
    """No single token is out of tolerance and no rollout has more than one; there are too many of them together. As many
    as chance gives are allowed, because honest machines differ."""
    court = tolerant_court
    forged = [flip_near_ties(court, one) for one in court.honest().values()]
    allowed = [bundle for bundle, flips in forged if flips <= near_ties_max(court, bundle)]
    greedy = [bundle for bundle, flips in forged if flips > near_ties_max(court, bundle)]
    rows = court.rows(court.submit_all(greedy))
    assert len(rows) >= 20
    assert count_good(rows) == 0
    assert {row.reason for row in rows} == {Reason.NEAR_TIES}
    assert {row.status for row in rows} == {Status.UNPAID}
    assert count_good(court.rows(court.submit_all(allowed))) == len(allowed) > 0
    put(monkeypatch, checks._replay_failures, without(checks._replay_failures, Reason.NEAR_TIES))
    assert count_good(court.rows(court.submit_all(greedy))) == len(greedy)


def steer(court, bundle, place):
    """One rollout in which every token that has a runner-up within tolerance becomes it: what follows is drawn anew, with the
    assigned key, so that each choice steers the rest. Returns the forgery and the flips."""
    slot, number = place
    assignment, group = court.assignment(bundle.account, bundle.round), bundle.groups[slot]
    prompt, key = court.environment.prompt(group.prompt_index), court.keys(assignment, slot)[number]
    tokens, flips = [], 0
    while len(tokens) < court.spec.sampling.max_tokens and EOS not in tokens:
        z = scores(
            court._logits((*prompt, *tokens)),
            np.array([key], dtype=np.uint64),
            np.array([len(tokens)]),
            temperature=court.spec.sampling.temperature_milli / 1000,
            vocab_size=VOCAB,
        )[0]
        first, second = np.argsort(z)[::-1][:2]
        flipped = bool(z[first] - z[second] < 0.99 and second != EOS)
        tokens, flips = [*tokens, int(second if flipped else first)], flips + flipped
    edit = lambda at, sample, given: tuple(tokens) if (at, sample) == place else given  # noqa: E731
    return court.rewrite(bundle, edit), flips


def test_r15_near_ties_of_one_rollout(tolerant_court, monkeypatch):
    """All flips are in one rollout, and fewer than the submission as a whole may have: its own cap finds them."""
    court = tolerant_court
    steered = [(one, *steer(court, one, (0, 0))) for one in court.honest().values()]
    greedy = [bundle for one, bundle, flips in steered if 1 < flips <= near_ties_max(court, one)]
    allowed = [bundle for _, bundle, flips in steered if flips <= 1]
    judgement = court.judge(court.submit_all(greedy))
    assert len(judgement.rows) >= 10
    assert {(row.status, row.reason) for row in judgement.rows} == {(Status.UNPAID, Reason.NEAR_TIES)}
    for finding in judgement.findings:
        assert finding.where == (0, 0)
        assert "slot 0, sample 0" in finding.text
        assert "limit 1; generate with" in finding.text
    assert count_good(court.rows(court.submit_all(allowed))) == len(allowed) > 0
    monkeypatch.setattr(checks, "compute_near_ties_max", lambda profile, num_tokens, num_rollouts=1: 3)
    assert count_good(court.rows(court.submit_all(greedy))) == len(greedy)
