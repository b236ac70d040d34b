"""How often forged work is accepted, and honest work refused, with the benchmark's own forgers and the protocol's own checks.

The default suite runs a sample with fixed seeds; the long run, of 3,072 submissions per attack, is marked nightly. A unit is
accepted when nothing in it is refused with all of it audited; a submission is 8 groups of 16 rollouts.
"""

from __future__ import annotations

import importlib
from pathlib import Path

import numpy as np
import pytest

from environments.sort import SortEnvironment
from protocol.presets import PROFILE_FP32
from tests.support.scenario import make_model
from trainer.warmup import make_base_policy
from troth.calibrate.alternatives import make_alternatives

ROOT = Path(__file__).parents[2]
SAMPLE, SUBMISSION = 384, 128
#: Submissions of the long run, made in lots that fit into memory.
LONG, LOTS = 3_072, 48


@pytest.fixture(scope="module")
def roc():
    """The benchmark's modules: attacks, rates, roc."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        yield [importlib.import_module(name) for name in ("attacks", "rates", "roc")]


class Parity(SortEnvironment):
    """sort-4 with rewards that an untrained policy gets too, so that there is something to choose by."""

    def reward(self, index, completion):
        return 1_000_000 * (sum(completion) % 2)


@pytest.fixture(scope="module")
def world(roc, tmp_path_factory):
    """Three submissions of a random model with peaked distributions, on the prompts of sort-4."""
    folder = make_model(tmp_path_factory.mktemp("rates") / "model", 31)
    return roc[0].World(folder, PROFILE_FP32, Parity(4), SAMPLE, 6, 1.0, 0)


@pytest.fixture(scope="module")
def impostors(world, tmp_path_factory):
    """Policies that are not the world's, by name."""
    names = ["int8", "fp8", "int4-32", "noise-1", "sibling", "stale-10@1e-4"]
    return dict(make_alternatives(world.folder, tmp_path_factory.mktemp("impostors"), names, 0))


def assert_no_submission_passes(roc, world, attack, *, forged_min=100, rate_max=0.0):
    """At least so many forged rollouts, of which at most this share is accepted alone, and no submission."""
    verdicts = roc[2].judge_attack(world, attack)
    assert len(verdicts.rollouts) >= forged_min
    assert verdicts.rollouts.mean() <= rate_max
    assert verdicts.submissions.tolist() == [False] * (SAMPLE // SUBMISSION)
    return verdicts


def test_honest_control(roc, world):
    """Nothing honest is refused, alone or together, and the sequential test gains nothing from it."""
    for pair in roc[2].measure_honest(world, SUBMISSION, ["batch-8", "eager", "unpadded"]):
        assert (pair["n"], pair["refused"], pair["submissions"], pair["submissions_refused"]) == (SUBMISSION, 0, 1, 0)
        assert pair["nats_per_group"] < 0, pair


@pytest.mark.parametrize("name", ["fp8", "int4-32", "noise-1", "sibling"])
def test_r1_other_policies(roc, world, impostors, name):
    made = world.make(impostors[name])
    forged = np.ones(SAMPLE, dtype=bool)
    verdicts = assert_no_submission_passes(roc, world, roc[0].Attack("R1", name, made, forged))
    assert not verdicts.groups.any()


def test_r1_int8_passes_alone_and_not_in_a_submission(roc, world, impostors):
    """What a single comparison cannot see of a format this good, the sum of one submission does."""
    attack = roc[0].Attack("R1", "int8", world.make(impostors["int8"]), np.ones(SAMPLE, dtype=bool))
    verdicts = assert_no_submission_passes(roc, world, attack, rate_max=1.0)
    assert roc[1].simulate_rounds(verdicts, audit_share=1.0, seed=0) == {"refused": 1, "alarm": 1}
    assert roc[1].simulate_rounds(verdicts, audit_share=0.05, seed=0)["alarm"] <= 3


@pytest.mark.parametrize(("name", "forged_min"), [("int4-32", 20), ("sibling", 100)])
def test_r2_draft_with_true_prefill(roc, world, impostors, name, forged_min):
    """Commitments are the true policy's: of rollouts with other tokens the replay refuses every one."""
    attack = world.commit("R2", name, world.make(impostors[name]).completions)
    assert_no_submission_passes(roc, world, attack, forged_min=forged_min)


def test_r3_stale_policy(roc, world, impostors):
    made = world.make(impostors["stale-10@1e-4"])
    attack = roc[0].Attack("R3", "stale", made, np.ones(SAMPLE, dtype=bool))
    assert_no_submission_passes(roc, world, attack)


def test_r7_r9_r10_r11_other_tokens(roc, world):
    """The best of many keys, edits of one token, 5 and 47 %, early ends, other temperatures."""
    seen = []
    for attack in roc[0].make_token_attacks(world):
        assert_no_submission_passes(roc, world, attack)
        seen.append(attack.row)
    assert seen == ["R7", "R9", "R9", "R9", "R10", "R11", "R11"]


def test_c1_c2_polynomials_that_no_model_made(roc, world):
    attacks = list(roc[0].make_polynomials(world))
    assert [attack.row for attack in attacks] == ["C1", "C2"]
    for attack in attacks:
        assert_no_submission_passes(roc, world, attack, forged_min=SAMPLE)


def test_bounds_are_clopper_pearson(roc):
    """Against the closed form where nothing was seen, and textbook values."""
    bound = roc[1].bound
    assert bound(0, 3_000) == pytest.approx(1 - 0.05 ** (1 / 3_000), rel=1e-9)
    assert bound(0, 3_000) < 0.001 < bound(0, 2_990)
    assert bound(1, 10) == pytest.approx(0.39416, abs=1e-5)
    assert bound(5, 5) == 1.0
    assert bound(9_000, 10_000) == pytest.approx(0.9049, abs=2e-4)


@pytest.mark.nightly
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("kind", ["r1_int8", "r2_int4-32", "r3_stale-1@1e-4", "c2_constant"])
def test_3_072_submissions_of_an_attack(roc, tmp_path, kind):
    """None is accepted: the rate is below 0.1 % at 95 %. The policy is the demo's, warmed up on sort-4."""
    attacks, rates, bench = roc
    environment, policy = SortEnvironment(4), tmp_path / "demo"
    make_base_policy(policy, environment, seed=0)
    row, _, name = kind.partition("_")
    if name != "constant":
        [(_, folder)] = make_alternatives(policy, tmp_path, [name], 0, environment=environment)
    total = accepted = 0
    for lot in range(LOTS):
        world = attacks.World(policy, PROFILE_FP32, environment, LONG // LOTS * SUBMISSION, 6, 1.0, lot)
        if row == "c2":
            _, attack = attacks.make_polynomials(world)
        elif row == "r2":
            attack = world.commit("R2", name, world.make(folder).completions)
        else:
            attack = attacks.Attack(row, name, world.make(folder), np.ones(world.num_rollouts, dtype=bool))
        found = bench.judge_attack(world, attack).submissions
        total, accepted = total + len(found), accepted + int(found.sum())
    assert accepted == 0
    assert total >= 3_000
    assert rates.bound(accepted, total) < 0.001
    print(f"\n{kind}: {accepted} of {total} submissions accepted")
