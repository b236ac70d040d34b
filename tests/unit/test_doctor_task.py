"""The doctor's judgement as a pure function: each trouble is the line that fails, with its number, limit and remedy."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.adapter import Adapter
from protocol.errors import ConfigError, Fault
from protocol.ledger import calls, events
from protocol.rounds import get_end_round, get_times
from protocol.task import compute_rollout_pay
from tests.support.scenario import STAKE, Scenario, make_account, make_model, make_spec
from troth import doctor_estimate, doctor_facts, doctor_speed, doctor_task, fit
from troth.operating import LAG_SECONDS_MIN, BlockClock
from troth.settings import ComputeSettings, RoleSettings

GIB = 2**30


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("models") / "base", 0)


@pytest.fixture
def world(tmp_path, base):
    return Scenario(tmp_path, make_spec(base), base)


def make_facts(world, folder, /, **changes):
    """A machine that is fit, but for `changes`."""
    clock = BlockClock("http://nobody")
    clock.head, clock.age_s, clock.block_s = world.chain.block_number, 1.0, 1.0
    config = json.loads((folder / "config.json").read_text())
    fields = {
        "task": world.task,
        "state": world.chain.state,
        "clock": clock,
        "base": fit.PolicyFacts(0, 500_000, config),
        "bytes_per_s": 1e6,
        "account": make_account("node"),
        "tokens": 0,
        "wei": 1,
        "free_memory": 4 * GIB,
        "free_disk": 10 * GIB,
        "tokens_per_s": 1000.0,
        "speed_from": "given",
    }
    settings = changes.pop("settings", RoleSettings())
    return doctor_facts.Facts(changes.pop("spec", world.spec), settings, **{**fields, **changes})


def levels(facts):
    return {line.name: line.level for line in doctor_task.judge(facts)}


def line_of(facts, name):
    [line] = [line for line in doctor_task.judge(facts) if line.name == name]
    return line


def test_a_fit_machine_is_fit(world, base):
    world.register("node", events.Role.NODE)
    facts = make_facts(world, base)
    assert set(levels(facts).values()) == {"ok"}
    assert doctor_task.describe(facts)["fit"]


def behind():
    clock = BlockClock("http://nobody")
    clock.head, clock.age_s, clock.block_s = 9, 400.0, 1.0
    return clock


@pytest.mark.parametrize(
    ("changes", "name", "level", "text"),
    [
        ({"free_memory": 1 << 20}, "memory", "fail", "free memory, or use a smaller compute.dtype"),
        ({"free_disk": 1 << 10}, "disk", "fail", "free disk"),
        ({"free_disk": 4 << 20}, "disk", "warn", "free disk"),
        ({"bytes_per_s": 10_000.0}, "link", "warn", "slower than rounds"),
        ({"bytes_per_s": None, "policy_error": "no relay"}, "link", "warn", "no relay"),
        ({"base": None, "policy_error": "no relay has it"}, "policy", "warn", "no relay has it"),
        ({"engine_error": "vllm is not installed"}, "engine", "fail", "vllm is not installed"),
        ({"environment_error": "installed ab, the task names cd"}, "environment", "fail", "the task names cd"),
        ({"sandbox_missing": "no user namespaces"}, "sandbox", "fail", "no user namespaces"),
        ({"account": None}, "account", "warn", "troth keys new"),
        ({"account": make_account("stranger"), "tokens": 5}, "stake", "fail", "0 bonded, 5 to bond"),
        ({"wei": 0}, "gas", "fail", "chain's coin"),
        ({"clock": behind()}, "ledger clock", "fail", "400 s old"),
        ({"ledger_error": "no ledger node"}, "ledger", "fail", "no ledger node"),
        ({"tokens_per_s": None, "speed_from": "not timed"}, "speed", "warn", "not timed"),
        ({"tokens_per_s": 0.5}, "speed", "fail", "not one group is done in time"),
        ({"tokens_per_s": 20.0}, "speed", "warn", "set slots = "),
    ],
)
def test_each_trouble_is_a_line(world, base, changes, name, level, text):
    world.register("node", events.Role.NODE)
    line = line_of(make_facts(world, base, **changes), name)
    assert line.level == level
    assert text in f"{line.observed} {line.limit} {line.todo}"
    healthy = make_facts(world, base)
    assert levels(healthy).get(name, "ok") == "ok"


def test_a_verifiers_account_cannot_be_a_node(world, base):
    world.register("node", events.Role.VERIFIER)
    assert line_of(make_facts(world, base), "role").level == "fail"


def test_a_stake_to_be_bonded_is_enough(world, base):
    line = line_of(make_facts(world, base, account=make_account("new"), tokens=STAKE), "stake")
    assert (line.level, line.todo) == ("ok", f"set stake = {world.spec.economics.node_stake_min} or more")


def test_a_wrong_numeric_type_is_told_before_it_costs(world, base):
    settings = RoleSettings(compute=ComputeSettings(dtype="bfloat16"))
    line = line_of(make_facts(world, base, settings=settings), "numeric type")
    assert line.level == "fail"
    assert "set compute.dtype = 'float32'" in line.todo


def test_the_registration_window(world, base):
    facts = make_facts(world, base)
    assert f"epoch 0, block {world.task.start_block}" in line_of(facts, "registration window").observed
    world.chain.advance(world.task.start_block - world.chain.block_number + 1)
    assert "epoch 1" in line_of(facts, "registration window").observed
    last = get_times(world.task, get_end_round(world.task) - 1).start
    world.chain.advance(last - world.chain.block_number)
    assert line_of(facts, "task").level == "fail"


def test_the_quota_shrinks_with_other_nodes(world, base):
    facts = make_facts(world, base)
    assert doctor_estimate.get_quota(facts) == 8
    for name in ("other-a", "other-b"):
        world.register(name, events.Role.NODE)
        assert world.call(name, calls.Join(world.task_id, 8)) == ""
    assert doctor_estimate.get_quota(facts) == 8 // 3
    few = make_facts(world, base, settings=RoleSettings(slots=2))
    assert doctor_estimate.get_quota(few) == 2


@given(speed=st.floats(0.01, 1e6), block_s=st.floats(0.05, 60))
def test_nobody_is_promised_more_than_the_task_pays(tmp_path_factory, base, speed, block_s):
    world = Scenario(tmp_path_factory.mktemp("world"), make_spec(base), base)
    facts = make_facts(world, base, tokens_per_s=speed)
    facts.clock.block_s = block_s
    found = doctor_estimate.estimate(facts)
    spec = world.spec
    rounds = 3600 / (spec.schedule.round_blocks * block_s)
    ceiling = rounds * spec.groups_per_round * spec.group_size
    assert 0 <= found.rollouts_per_hour <= ceiling * 1.001
    assert found.reward_per_hour <= ceiling * 1.001 * compute_rollout_pay(spec, spec.sampling.max_tokens)
    assert found.rollouts_per_hour * 3.5 <= speed * 3600 * 1.001  # and no more than it can sample
    assert len(found.assumptions) >= 6


def test_without_a_speed_nothing_is_promised(world, base):
    found = doctor_estimate.estimate(make_facts(world, base, tokens_per_s=None))
    assert (found.rollouts_per_hour, found.reward_per_hour) == (0.0, 0.0)
    assert "nothing is estimated" in found.assumptions[0]


def test_an_adapter_counts_as_one_on_disk_and_link(world, base):
    spec = make_spec(base, adapter=Adapter(8, 16, ("q_proj", "v_proj")))
    assert doctor_task.get_next_bytes(make_facts(world, base, spec=spec)) == 500_000 // 100
    latest = fit.PolicyFacts(3, 7_000, None)
    assert doctor_task.get_next_bytes(make_facts(world, base, spec=spec, latest=latest)) == 7_000


def test_a_policy_that_does_not_fit_is_a_config_error(world, base, tmp_path, monkeypatch):
    config = json.loads((base / "config.json").read_text())
    facts = fit.PolicyFacts(0, 1000, config)
    fit.require_fit(facts, world.spec, ComputeSettings(), tmp_path)
    with pytest.raises(ConfigError, match=r"takes .* GiB of disk"):
        fit.require_fit(facts._replace(bytes_total=1 << 60), world.spec, ComputeSettings(), tmp_path)
    monkeypatch.setattr(fit, "read_free_bytes", lambda: 1000)
    with pytest.raises(ConfigError, match=r"in float32 it needs .* GiB of memory, 0.00 GiB are free"):
        fit.require_fit(facts, world.spec, ComputeSettings(), tmp_path)
    fit.require_fit(facts, world.spec, ComputeSettings(device="cuda:0"), tmp_path)  # that memory is not this one
    with pytest.raises(ConfigError, match="cannot be run"):
        fit.require_fit(facts._replace(config={"model_type": "llama"}), world.spec, ComputeSettings(), tmp_path)


@pytest.mark.parametrize("data", [b"", b"[]", b"{", b"\xff", b"[" * 100_000])
def test_a_strangers_configuration_is_no_crash(data):
    with pytest.raises(Fault, match=r"config\.json"):
        fit.parse_config(data)


def test_speed_is_timed_on_a_model_of_that_shape(base):
    config = json.loads((base / "config.json").read_text())
    small = doctor_speed.measure_speed(config, ComputeSettings(), rollouts=8, max_tokens=16)
    assert small.tokens_per_s > 0
    assert "model of 2 layers" in small.how
    deep = doctor_speed.measure_speed({**config, "num_hidden_layers": 12}, ComputeSettings(), rollouts=8, max_tokens=16)
    assert "1 and 2 layers taken to 12" in deep.how
    assert 0 < deep.tokens_per_s < small.tokens_per_s


@pytest.mark.parametrize("change", [{"num_hidden_layers": "9"}, {"model_type": "nothing"}, {"hidden_size": 2**22}])
def test_a_shape_that_cannot_be_timed_says_so(base, change):
    config = json.loads((base / "config.json").read_text()) | change
    with pytest.raises(Fault):
        doctor_speed.measure_speed(config, ComputeSettings(), rollouts=8, max_tokens=16)


def test_a_given_speed_is_a_speed():
    assert doctor_speed.check_given(5.0).how == "given"
    for wrong in (0.0, -1.0, float("nan")):
        with pytest.raises(ConfigError, match="--tokens-per-second"):
            doctor_speed.check_given(wrong)


@pytest.mark.parametrize(
    ("age_s", "block_s", "lags"),
    [(5, 1, False), (61, 1, True), (61, 12, False), (121, 12, True), (-30, 0.1, False), (59, 0.1, False)],
)
def test_a_ledger_node_that_lags(age_s, block_s, lags):
    clock = BlockClock("http://nobody")
    assert clock.lag == ""
    clock.head, clock.age_s, clock.block_s = 5, age_s, block_s
    assert bool(clock.lag) == lags
    assert clock.limit_s >= LAG_SECONDS_MIN
