"""Episodes from end to end, without sockets: a node's own code makes them, a verifier judges them, the trainer takes them in.

The task is `guess`; the model is random, so that episodes are of all lengths.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from msgspec.structs import replace

import environments
from environments.guess import ANSWER_TOKENS, STOP_TOKENS
from inference.rollouts import make_bundle, make_groups, validate_own
from models.policy import load_model
from protocol.checks import count_sampled
from protocol.errors import Reason, Reject
from protocol.task import Environment as EnvironmentSpec
from protocol.task import Sampling
from protocol.verdict import Status
from tests.support.forge import CHAIN_ID, HIDDEN, LEDGER, Court, count_good, count_rollouts
from trainer.config import TrainerConfig
from trainer.decode import generate_turns, make_gumbel_pick
from trainer.grpo import compute_advantages, compute_loss
from trainer.ingest import LoadedScorer, check_submission
from trainer.packing import compute_logprobs, make_micro_batches
from trainer.step import Learner

MAX_TOKENS = 18


@pytest.fixture(scope="module")
def court(tmp_path_factory):
    return Court(
        tmp_path_factory.mktemp("episodes"),
        num_nodes=26,
        name="episodes",
        environment=EnvironmentSpec("guess", "{}", environments.content_hash("guess", "{}")),
        sampling=Sampling(1000, MAX_TOKENS, STOP_TOKENS),
    )


@pytest.fixture(scope="module")
def bundles(court):
    """What honest nodes make of their assignments."""
    made = []
    for assignment in court.assignments():
        groups = make_groups(court.spec, court.environment, court.engine(court.policy), assignment).groups
        made.append(make_bundle(assignment, groups))
        validate_own(court.spec, court.environment, assignment, made[-1], HIDDEN)
    return made


def take_in(court, bundle):
    submissions = court.submit_all([bundle])
    state, task = court.close_round(submissions)
    return check_submission(
        state,
        task,
        0,
        bundle.account,
        submissions[bundle.account].data,
        chain_id=CHAIN_ID,
        ledger=LEDGER,
        environment=court.environment,
        loaded=LoadedScorer(court.scorer, HIDDEN),
    )


def test_honest_episodes_are_accepted_paid_and_trained_on(court, bundles):
    assert count_rollouts(bundles) >= 200
    rows = court.rows(court.submit_all(bundles))
    assert count_good(rows) == len(bundles)
    tokens = {row.account: row.tokens for row in rows}
    for bundle in bundles[:8]:
        groups = take_in(court, bundle)
        assert sum(group.num_sampled for group in groups) == tokens[bundle.account]
        assert tokens[bundle.account] == count_sampled(court.spec, court.environment, bundle)
        for group in groups:
            for line, marks, logprobs in zip(group.completions, group.sampled, group.logprobs, strict=True):
                assert len(marks) == len(logprobs)
                assert (len(line) - len(marks)) % ANSWER_TOKENS == 0


def test_cheats_are_refused_by_verifier_and_trainer(court, bundles):
    """One answer edited in one rollout of a submission."""

    def edit(slot, number, tokens):
        return (*tokens[:1], 16, *tokens[2:]) if len(tokens) > ANSWER_TOKENS and tokens[0] in STOP_TOKENS else tokens

    forged = [one for one in (court.rewrite(bundle, edit) for bundle in bundles) if one not in bundles]
    assert len(forged) >= 15
    rows = court.rows(court.submit_all(forged))
    assert {(row.status, row.reason) for row in rows} == {(Status.CHEAT, Reason.RESPONSE)}
    for one in forged[:4]:
        with pytest.raises(Reject) as caught:
            take_in(court, one)
        assert caught.value.reason is Reason.RESPONSE


def test_the_environments_tokens_have_no_gradient(court, bundles):
    """The loss's gradient at every log-probability: nowhere but at sampled tokens, and there wherever there is an advantage."""
    groups = [group for bundle in bundles for group in take_in(court, bundle)][:24]
    rewards = np.stack([group.rewards_micro for group in groups])
    advantages = compute_advantages(rewards)
    assert (advantages != 0).any()
    model = load_model(court.policy)
    seen = answered = 0
    for part in make_micro_batches(groups, advantages, 400, "cpu"):
        logprobs, _ = compute_logprobs(model, part, 1.0, with_entropy=False, vocab_size=court.environment.vocab_size)
        logprobs.retain_grad()
        loss = compute_loss(TrainerConfig(), logprobs, part.old, part.advantages, part.mask, 100)
        loss.loss.backward()
        gradient = logprobs.grad
        assert torch.equal(gradient != 0, part.mask & (part.advantages != 0)[:, None])
        assert torch.allclose(logprobs[part.mask], part.old[part.mask], atol=1e-4)  # the same policy: both are its own
        seen += int(part.mask.sum())
        answered += sum(len(line) for group in groups for line in group.completions)
    assert seen == sum(group.num_sampled for group in groups)
    assert answered > seen


def test_a_policy_with_more_tokens_than_the_task(court, bundles):
    """The model has 32 tokens, the task 20: rollouts are drawn from 20, so that is what ratios must be taken over."""
    groups = [group for bundle in bundles for group in take_in(court, bundle)][:12]
    config = TrainerConfig(epochs=1)

    def clipped(vocab_size):
        return Learner(config, court.policy, temperature=1.0, vocab_size=vocab_size).step(groups, 0).clip_fraction

    assert clipped(court.environment.vocab_size) < 0.05 < clipped(None)


def test_the_trainers_own_decode_makes_the_same_episodes(court, bundles):
    """Evaluation has a loop of its own; with the same keys it takes the same turns."""
    rows = [
        (bundle, group, number)
        for bundle in bundles[:8]
        for group in bundle.groups
        for number in range(court.spec.group_size)
    ]
    keys = [court.keys(court.assignment(bundle.account), group.slot)[number] for bundle, group, number in rows]
    made = generate_turns(
        load_model(court.policy),
        [court.environment.prompt(group.prompt_index) for _, group, _ in rows],
        lambda row, completion: court.environment.respond(rows[row][1].prompt_index, completion),
        max_tokens=MAX_TOKENS,
        stop_tokens=STOP_TOKENS,
        pick=make_gumbel_pick(
            np.array(keys, dtype=np.uint64), temperature=1.0, vocab_size=court.environment.vocab_size
        ),
    )
    assert made == [group.samples[number].tokens for _, group, number in rows]
    assert len({len(line) for line in made}) > 5


def test_a_prompt_without_room_for_an_answer(court):
    """max_tokens 5: a guess and an answer would fill it, so every first guess ends the completion."""
    spec = replace(court.spec, sampling=Sampling(1000, 5, STOP_TOKENS))
    [assignment, *_] = court.assignments()
    for group in make_groups(spec, court.environment, court.engine(court.policy), assignment).groups:
        for sample in group.samples:
            assert not any(token in STOP_TOKENS for token in sample.tokens[:-1])
            assert len(sample.tokens) == 5 or sample.tokens[-1] in STOP_TOKENS
