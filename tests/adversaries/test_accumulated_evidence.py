"""Adversaries that pass every single check, judged by real verifiers over a real tiny model: what they do adds up.

The profiles are wider than any that is measured, so that nothing but the sequential test can find these nodes, and their
bets are chosen so that one round is not enough. Every test ends with the same nodes unfound by single checks.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from inference.engine import TorchEngine
from protocol.errors import Reason
from protocol.evidence import NO_TRIAL, compute_next, is_alarm
from protocol.ledger import events
from protocol.presets import PROFILE_FP32
from protocol.rounds import get_outcomes
from protocol.settlement import compute_settlement, get_epoch_deadline
from protocol.verdict import Status, unpack_rows
from tests.support.forge import Court
from tests.support.ledger_kit import Books
from tests.support.scenario import make_account, make_key, make_model
from tests.support.verifier_kit import VERIFIERS, VerifierNetwork, run
from troth.cheats import StalePolicy, perturb_policy

#: No commitment and no near-tie is refused by itself. A share of 0.12 adds about 0.9 nats a chunk.
WIDE = replace(
    PROFILE_FP32,
    exponent_mismatches_max=64,
    mantissa_mean_milli_max=127_000,
    mantissa_median_max=127,
    replay_tolerance_micro=100_000,
    replay_severe_micro=10_000_000,
    near_ties_sequence_max=100,
    share_null_ppm=10_000,
    share_bet_milli=15_000,
    ties_null_ppm=100,
    ties_bet_milli=20_000,
)
#: Noise on every weight, as a share of the weights' own deviation. int8 is about a hundred times as coarse.
RATIO = 0.0004


class SlightlyOther(StalePolicy):
    """Generates with weights that are almost those of the round's policy."""

    def _perturb(self, folder: Path, policy: bytes) -> Path:
        target = self._directory / "perturbed"
        if not (target / "model.safetensors").exists():
            perturb_policy(folder, target, seed=7, ratio=RATIO)
        return target


def test_r1_slightly_other_weights_pass_every_check_and_are_slashed_for_their_sum(tmp_path):
    """Two rounds, each called good by the whole committee; the second brings the alarm, and the epoch's settlement slashes."""
    base = make_model(tmp_path / "base", 0)
    network = VerifierNetwork(tmp_path, base, nodes=("node-a",), profile=WIDE)
    world, cheat = network.world, make_account("cheat")
    network.ledgers["cheat"] = world.register("cheat", events.Role.NODE)
    network.nodes["cheat"] = SlightlyOther(
        ledger=network.ledgers["cheat"],
        task=world.task_id,
        environment=world.environment,
        engine=TorchEngine(),
        policies=world.policies,
        blobs=world.blobs,
        key=make_key("cheat"),
        directory=tmp_path / "cheat",
        events=lambda kind, fields: None,
    )

    async def scenario():
        await network.run(get_epoch_deadline(world.task, 0) + 14)
        await network.close()

    run(scenario())
    state, task = world.chain.state, world.task
    for index in (0, 1):
        for verifier in VERIFIERS:
            rows = unpack_rows(task.reveals[index][make_account(verifier)].rows)
            assert {row.status for row in rows} == {Status.GOOD}
    first, second = (get_outcomes(state, task, index)[cheat] for index in (0, 1))
    assert (first.row.status, second.row.status) == (Status.GOOD, Status.CHEAT)
    assert (second.row.reason, len(second.agreed)) == (Reason.EVIDENCE, 3)
    assert 0 < first.row.evidence < 14 * 256 < first.row.evidence + second.row.evidence
    honest = [get_outcomes(state, task, index)[make_account("node-a")] for index in (0, 1)]
    assert all(one.row.status is Status.GOOD and one.row.evidence < 0 and one.trial.value < 1 for one in honest)
    assert task.settlements[0].final
    assert task.settlements[0].slashed == (cheat,)
    assert state.participants[cheat].slashed > 0
    earnings = compute_settlement(state, task, 0).earnings
    assert cheat not in earnings
    assert earnings[make_account("node-a")] > 0


@pytest.fixture(scope="module")
def wide_court(tmp_path_factory):
    """Six nodes under a profile whose tolerance many runners-up are within, whose caps hold one near-tie a rollout, and
    which bets on near-ties more than on commitments."""
    profile = replace(WIDE, replay_tolerance_micro=1_000_000, near_ties_sequence_max=1, share_bet_milli=1_000)
    return Court(tmp_path_factory.mktemp("wide"), num_nodes=6, profile=profile, name="wide")


def flip_one(court, bundle):
    """One near-tie of a submission of eight rollouts, in its last token; None where it has none."""
    for slot, number, _, z in court.positions(bundle, start=5):
        first, second = np.argsort(z)[::-1][:2]
        if z[first] - z[second] < 0.99:
            place, runner_up = (slot, number), int(second)
            break
    else:
        return None
    return court.rewrite(
        bundle, lambda at, sample, tokens: (*tokens[:5], runner_up) if (at, sample) == place else tokens
    )


def test_r15_one_near_tie_a_round_is_within_every_cap_and_too_many_over_time(wide_court):
    court, rounds = wide_court, range(7)
    trials = {account: [NO_TRIAL] for account in court.accounts}
    for index in rounds:
        forged = [flip_one(court, bundle) for bundle in court.honest(index).values()]
        rows = court.rows(court.submit_all(one for one in forged if one is not None), index)
        assert {row.status for row in rows} == {Status.GOOD}
        for row in rows:
            trials[row.account].append(compute_next(trials[row.account][-1], row.evidence))
    greedy = [steps for steps in trials.values() if len(steps) >= 6]
    assert len(greedy) >= 3
    assert all(is_alarm(steps[-1]) for steps in greedy)
    assert not any(is_alarm(steps[2]) for steps in greedy)
    for index in rounds:
        rows = court.rows(court.submit_all(court.honest(index).values()), index)
        assert all(row.status is Status.GOOD and row.evidence < 0 for row in rows)


def test_refused_rows_carry_their_evidence_too(wide_court, tmp_path):
    """Above a first limit a submission is unpaid, and what it showed counts on."""
    court = wide_court
    perturb_policy(court.policy, tmp_path / "other", seed=7, ratio=0.3)
    rows = court.rows(court.submit_all(court.make(tmp_path / "other", court.assignments())))
    assert {row.status for row in rows} <= {Status.UNPAID, Status.CHEAT}
    assert all(row.evidence > 14 * 256 for row in rows)


def test_what_is_refused_before_any_prefill_says_nothing(wide_court):
    court = wide_court
    bundles = [replace(one, groups=one.groups[:1]) for one in court.honest().values()]
    rows = court.rows(court.submit_all(bundles))
    assert {(row.status, row.evidence) for row in rows} == {(Status.SHORT, 0)}


def test_r16_a_sleeper_of_500_rounds_is_called_a_cheat():
    """Each of its later rounds adds two nats and passes; its honest ones add what a sound fp32 node's do."""
    books = Books(nodes={"a": 8}, num_epochs=200, deposit=10**18)
    honest, cheating = -8 * 58, 2 * 256
    found = None
    for index in range(530):
        books.play(index, {"a": (Status.GOOD, 8, 90)}, {"a": honest if index < 500 else cheating})
    books.state.block_number = 10**6
    for index in range(530):
        outcome = get_outcomes(books.state, books.task, index)[make_account("a")]
        if outcome.row.status is not Status.GOOD:
            found = index
            assert outcome.row.reason == Reason.EVIDENCE
            break
    # 13.8 nats for the level and 12.4 for the 500 rounds in which it might have begun: 13 or 14 rounds of two nats
    assert found in (512, 513)


def test_v4_a_minority_of_verifiers_cannot_frame_an_honest_node():
    """One of three reports all the evidence there can be, in every round, and agrees on everything else."""
    books = Books(nodes={"a": 8})
    for index in range(10):
        books.open(index)
        books.submit(index, "a", 8)
        books.close(index)
        for verifier, evidence in (("v0", -464), ("v1", 2**15 - 1), ("v2", -463)):
            books.say(index, {"a": (Status.GOOD, 8, 90)}, verifiers=(verifier,), evidence={"a": evidence})
    books.state.block_number = 10**6
    outcomes = [get_outcomes(books.state, books.task, index)[make_account("a")] for index in range(10)]
    assert {(one.row.status, one.row.evidence) for one in outcomes} == {(Status.GOOD, -463)}
    assert all(one.trial.value < 1 for one in outcomes)
