"""Calibration: statistics against hand-made figures, the rule that chooses limits, and the command on a tiny model."""

from __future__ import annotations

import json
import math
import xml.etree.ElementTree as ET

import numpy as np
import pytest

from protocol.errors import ConfigError, Fault
from protocol.evidence import EVIDENCE_MIN, compute_evidence
from protocol.ports import SampleRequest
from protocol.presets import PROFILE_FP32
from protocol.task import BET_MAX
from protocol.toploc import ChunkMatch
from tests.support.scenario import make_model
from troth.calibrate.choose import FIND_ROLLOUTS, choose_bet, choose_profile
from troth.calibrate.measure import Terms, make_rollouts, measure_pairs, score_rollouts
from troth.calibrate.pairs import make_pairs, select_pairs
from troth.calibrate.picture import format_picture
from troth.calibrate.prompts import make_requests
from troth.calibrate.run import Options, run_calibration
from troth.calibrate.statistics import (
    Observed,
    compute_auc,
    compute_nats,
    estimate_delay,
    find_rejections,
    join,
    summarise,
    summarise_all,
)
from troth.calibrate.vllm_child import make_with_vllm

TERMS = Terms(1.0, 6, (), 128, 32, None)


def make_observed(rollouts=500, *, differing=0, size=128, miss_every=0, gap=0.01, mean=0.0, mismatches=0):
    """Rollouts of one chunk and ten tokens each."""
    flat = np.zeros(rollouts, dtype=np.int64)
    gaps = np.zeros(10 * rollouts)
    if miss_every:
        gaps[::miss_every] = gap
    return Observed(
        flat + mismatches,
        flat + mismatches,
        flat + mean,
        flat * 1.0,
        flat + size,
        flat + differing,
        np.arange(rollouts),
        gaps,
        np.repeat(np.arange(rollouts), 10),
        flat + 65_497,
        rollouts,
    )


def choose(honest, **alternatives):
    return choose_profile("mine", "float32", honest, alternatives, topk=128, chunk=32)


def test_quantiles_are_values_that_were_seen():
    assert summarise(np.arange(1, 10_001)) == [5001, 9001, 9901, 9991, 10000, 10000]
    assert summarise(np.zeros(0)) == []


def test_auc_counts_ties_half():
    assert compute_auc(np.array([1.0, 2.0]), np.array([3.0, 4.0])) == 1
    assert compute_auc(np.array([1.0, 2.0]), np.array([1.0, 2.0])) == 0.5
    assert compute_auc(np.array([3.0]), np.array([1.0])) == 0


def test_joined_lots_keep_their_rollouts_apart():
    both = join([make_observed(2, differing=1), make_observed(3, miss_every=10)])
    assert both.num_rollouts == 5
    assert both.misses.tolist() == [0, 0, 1, 1, 1]
    assert both.shares.tolist() == [1 / 128, 1 / 128, 0, 0, 0]
    assert both.chunk_rollouts.tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="nothing"):
        join([])


def test_what_is_counted_is_what_the_ledgers_test_counts():
    observed = make_observed(20, differing=6, miss_every=37)
    matches = [[ChunkMatch(0, 0, 0.0, 0.0, 128, 6)]] * 20
    units = compute_evidence(PROFILE_FP32, matches, np.split(observed.gaps, 20))
    shares = compute_nats(observed.shares, PROFILE_FP32.share_null_ppm / 1e6, PROFILE_FP32.share_bet_milli / 1e3)
    ties = compute_nats((observed.gaps > 0) * 1.0, PROFILE_FP32.ties_null_ppm / 1e6, PROFILE_FP32.ties_bet_milli / 1e3)
    assert units == math.floor(256 * (shares.sum() + ties.sum())) > EVIDENCE_MIN
    delay = estimate_delay(PROFILE_FP32, observed)
    assert delay == pytest.approx(math.log(2e6) / ((shares.sum() + ties.sum()) / 20))


def test_single_checks_are_those_of_the_verifier():
    limit = PROFILE_FP32.exponent_mismatches_max
    assert not find_rejections(PROFILE_FP32, make_observed(3, mismatches=limit)).any.any()
    assert find_rejections(PROFILE_FP32, make_observed(3, mismatches=limit + 1)).activations.all()
    late = find_rejections(PROFILE_FP32, make_observed(4, miss_every=20))
    assert late.replay.tolist() == [True, False, True, False]
    assert not late.activations.any()


def test_limits_are_twice_the_largest_honest_figure_and_not_below_the_floors():
    quiet, loud = make_observed(), make_observed(600, differing=8, mean=0.6, mismatches=3, miss_every=50, gap=0.01)
    profile = choose({"a": quiet, "b": loud}, other=make_observed(differing=100, mean=2.0)).profile
    assert profile.exponent_mismatches_max == 6
    assert profile.mantissa_mean_milli_max == 1200
    assert profile.replay_tolerance_micro == 20_000
    assert profile.replay_severe_micro == 200_000
    assert profile.near_ties_sequence_max == 2
    assert profile.near_ties_per_1k_max == 30
    assert profile.share_null_ppm == math.ceil(1.5e6 * 8 / 128)
    assert profile.ties_null_ppm == 30_000
    floors = choose({"a": quiet, "b": quiet}, other=make_observed(differing=100, mean=2.0)).profile
    assert (floors.share_null_ppm, floors.mantissa_mean_milli_max, floors.replay_tolerance_micro) == (2_000, 250, 500)
    assert floors.ties_null_ppm == 300, "no miss in 10,000 tokens shows no rate below 3 in 10,000"


def test_a_bet_is_the_best_one_against_the_weakest_that_can_be_found():
    measured = {
        "barely": (np.array([1.0] + [0.0] * 399), 1.0),
        "weak": (np.array([0.0, 0.04]), 2.0),
        "strong": (np.array([0.5, 0.9]), 2.0),
    }
    bet = choose_bet(measured, 2_000)
    assert bet.alternative == "weak"
    tried = np.linspace(0, BET_MAX / 0.002, 20_001)
    growths = [compute_nats(measured["weak"][0], 0.002, one).mean() for one in tried]
    assert bet.milli / 1e3 == pytest.approx(tried[int(np.argmax(growths))], rel=0.01)
    best = max(compute_nats(measured["barely"][0], 0.002, one).mean() for one in tried)
    assert 0 < best * FIND_ROLLOUTS < math.log(1e6), "it differs from honest work, and is not found in time"


def test_a_bet_without_anything_to_find_is_that_of_ten_nulls():
    assert choose_bet({"same": (np.zeros(9), 1.0)}, 100) == (9_000, "")


def test_too_few_rollouts_give_no_profile():
    with pytest.raises(ConfigError, match="998 honest rollouts over 2 accepted pairs"):
        choose({"a": make_observed(499), "b": make_observed(499)}, other=make_observed(differing=100))


def test_a_profile_that_would_find_nothing_is_not_written():
    honest = {"a": make_observed(differing=60, mean=1.0), "b": make_observed(differing=60, mean=1.0)}
    with pytest.raises(ConfigError, match="no profile would be worth having: none of 1 alternatives"):
        choose(honest, int8=make_observed(differing=80, mean=1.5))
    row = choose(honest, int8=make_observed(differing=80), int4=make_observed(differing=128, mean=3.0)).alternatives
    assert [one["refused"] for one in row] == [0, 1]
    assert "rollouts_to_alarm" not in row[0]
    assert row[0]["auc_share"] == 1


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("calibrate") / "model", 3)


def test_the_pairs_of_a_model_run_and_agree_in_fp32(model):
    pairs = [pair for pair in make_pairs("float32", 1, with_vllm=False) if "threads" not in pair.name]
    requests = make_requests(["random", "sort"], 24, vocab=32, folder=model, args='{"digits":4}', seed=5)
    found = measure_pairs(model, pairs, requests, TERMS, lambda text: None)
    assert list(found) == [pair.name for pair in pairs]
    for pair in pairs:
        one = found[pair.name]
        assert one.num_rollouts == (24 if pair.maker.divisor == 1 else 6)
        assert len(one.gaps) == 6 * one.num_rollouts
        assert (one.shares.mean() < 0.002) == pair.is_accepted, "another dtype is no honest pair"
    summary = summarise_all(found["batch-32"])
    assert (summary["rollouts"], summary["tokens"], len(summary["share"])) == (24, 144, 6)


def test_rollouts_of_another_model_stand_out(model, tmp_path):
    pair = make_pairs("float32", 1, with_vllm=False)[0]
    requests = make_requests(["random"], 16, vocab=32, folder=model, args="{}", seed=6)
    made = make_rollouts(make_model(tmp_path / "other", 4), pair.maker, requests, TERMS)
    assert find_rejections(PROFILE_FP32, score_rollouts(model, pair.prefill, requests, made, TERMS)).any.all()


def test_prompts_come_from_where_they_are_said_to(model, tmp_path):
    file = tmp_path / "prompts"
    file.write_text("[1, 2]\n\n[31]\n")
    found = make_requests([str(file), "random"], 5, vocab=32, folder=model, args="{}", seed=1)
    assert all(one.prompt in {(1, 2), (31,)} for one in found[::2])
    assert len({one.key for one in found}) == 5
    assert found == make_requests([str(file), "random"], 5, vocab=32, folder=model, args="{}", seed=1)
    with pytest.raises(ConfigError, match="have token 31, the model's go from 0 to 7"):
        make_requests([str(file)], 40, vocab=8, folder=model, args="{}", seed=1)
    with pytest.raises(ConfigError, match="expected random, a file of token ids, or an environment"):
        make_requests(["nowhere"], 2, vocab=32, folder=model, args="{}", seed=1)
    for text in ("[1, -2]", "[]", "{}", "[1.5]", "[true]", "[" * 5_000):
        file.write_text(f"[1]\n{text}\n")
        with pytest.raises(ConfigError, match="line 2"):
            make_requests([str(file)], 2, vocab=32, folder=model, args="{}", seed=1)
    file.write_text("\n")
    with pytest.raises(ConfigError, match="has no prompts"):
        make_requests([str(file)], 2, vocab=32, folder=model, args="{}", seed=1)


def test_unknown_pairs_are_named():
    with pytest.raises(ConfigError, match="unknown pair 'batch-33': did you mean"):
        select_pairs(make_pairs("float32", 1, with_vllm=False), ["batch-33"])


def test_vllm_that_is_not_there_or_fails_is_said(model, tmp_path):
    maker = make_pairs("float32", 1, with_vllm=True)[9].maker
    requests = [SampleRequest((1, 2), 3)]
    with pytest.raises(ConfigError, match="make venv-vllm"):
        make_with_vllm(tmp_path / "python", model, maker, requests, TERMS)
    with pytest.raises(ConfigError, match="need --vllm-python"):
        make_rollouts(model, maker, requests, TERMS)
    failing = tmp_path / "python"
    failing.write_text("#!/bin/sh\necho no vllm here >&2\nexit 3\n")
    failing.chmod(0o755)
    with pytest.raises(Fault, match=r"exit 3\): no vllm here"):
        make_with_vllm(failing, model, maker, requests, TERMS)
    failing.write_text('#!/bin/sh\nprintf junk > "$4"\n')
    with pytest.raises(Fault, match="cannot be read"):
        make_with_vllm(failing, model, maker, requests, TERMS)


def test_a_picture_is_an_image_of_all_rows():
    honest, other = {"a <b>": make_observed(differing=1)}, {"int8": make_observed(differing=9, mean=0.5)}
    root = ET.fromstring(format_picture(PROFILE_FP32, honest, other, "x & y"))
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"a <b>", "int8", "x & y"} <= set(texts)
    assert len(list(root.iter("{http://www.w3.org/2000/svg}rect"))) == 1 + 2 * 2 * 2


def make_options(model, **changes):
    options = Options(
        model=model,
        name="tiny-fp32",
        dtype="float32",
        rollouts=340,
        alternative_rollouts=16,
        pairs=("batch-32", "batch-64", "eager"),
        alternatives=("int8", "pruned-30"),
        prompts=("random",),
        args="{}",
        threads=1,
        seed=0,
        terms=TERMS._replace(max_tokens=3),
        command="troth calibrate tiny",
    )
    return options._replace(**changes)


def test_a_calibration_from_model_to_profile(model):
    told = []
    profile, measured, picture = run_calibration(make_options(model), told.append)
    assert (profile.name, profile.dtype, measured["rows"]) == ("tiny-fp32", "float32", 1_020)
    assert [one["name"] for one in measured["alternatives"]] == ["int8", "pruned-30"]
    assert all(one["refused"] > 0.5 or one["rollouts_to_alarm"] < 100 for one in measured["alternatives"])
    assert measured["model"]["parameters"] > 10_000
    assert picture.startswith("<svg")
    assert any("left out: --vllm-python" in line for line in told)
    json.dumps(measured, allow_nan=False)


@pytest.mark.parametrize(
    ("changes", "hint"),
    [
        ({"dtype": "float16"}, "expected one of float32, bfloat16"),
        ({"pairs": ("prefill-in-bfloat16",)}, "no accepted pair"),
        ({"rollouts": 100}, "300 honest rollouts over 3 accepted pairs are too few"),
        ({"prompts": ("nowhere",)}, "prompts are 'nowhere'"),
    ],
)
def test_what_cannot_be_calibrated_is_refused_before_it_takes_time(model, changes, hint):
    with pytest.raises(ConfigError, match=hint):
        run_calibration(make_options(model, **changes), lambda text: None)


def test_a_folder_that_is_none_is_named(tmp_path):
    with pytest.raises(ConfigError, match="is no folder"):
        run_calibration(make_options(tmp_path / "nowhere"), lambda text: None)
