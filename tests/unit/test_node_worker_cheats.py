"""The adversaries lie in the one way they say: everything else about them passes, and a restart tells the same lie."""

from __future__ import annotations

import asyncio

import pytest

from inference.engine import TorchEngine
from inference.rollouts import make_groups
from inference.worker import NodeWorker
from protocol.checks import get_assignment, open_bundle, validate_groups, validate_quota
from protocol.errors import ConfigError, Reason, Reject
from protocol.ledger import events
from protocol.lottery import PPM
from protocol.messages import compute_bundle_key
from protocol.rounds import get_audit_ppm, get_times
from protocol.verdict import Row, Status, pack_rows
from tests.support.scenario import Scenario, make_account, make_key, make_model, make_spec
from troth.cheats import CHEATS, edit_tokens, get_node_class


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("models") / "base", 0)


@pytest.fixture
def world(tmp_path, base):
    return Scenario(tmp_path, make_spec(base), base)


class Party:
    """A node of some kind on its own ledger connection; verdicts on it are written by the test."""

    def __init__(self, world, kind, name="cheat"):
        self.world, self.account = world, make_account(name)
        self.ledger = world.register(name, events.Role.NODE)
        self.worker = kind(
            ledger=self.ledger,
            task=world.task_id,
            environment=world.environment,
            engine=TorchEngine(),
            policies=world.policies,
            blobs=world.blobs,
            key=make_key(name),
            directory=world.directory / name,
            events=lambda event, fields: None,
        )

    async def run_until(self, block, judge=False):
        while self.world.chain.block_number < block:
            await self.ledger.poll()
            await self.worker.step()
            await asyncio.sleep(0)
            self.world.chain.advance()
            if judge:
                self._judge()
        for _ in range(2):
            await self.ledger.poll()
            await self.worker.step()
            await asyncio.sleep(0)

    def _judge(self):
        """Receipt what is stored, and have the committee call every submission good."""
        chain, task = self.world.chain, self.world.task
        for index, roots in list(task.commitments.items()):
            stored = compute_bundle_key(task.task, index, self.account) in self.world.blobs.blobs
            if stored and self.account not in task.receipts.get(index, {}):
                chain.emit(events.BundlesReceipted(task.task, index, make_account("relay"), (self.account,)))
            if chain.block_number == get_times(task, index).verdict_reveal_deadline:
                rows = pack_rows([Row(self.account, Status.GOOD, 0, roots[self.account].leaves, 10, 1)])
                for verifier in ("v0", "v1", "v2"):
                    chain.emit(events.VerdictRevealed(task.task, index, make_account(verifier), rows, bytes(32)))

    def open(self, index):
        """The submitted bundle of a round with its assignment, after the checks that need no environment."""
        state, task = self.world.chain.state, self.world.task
        assignment = get_assignment(
            state, task, index, self.account, chain_id=self.world.chain.chain_id, ledger=self.world.chain.address
        )
        data = self.world.blobs.blobs[compute_bundle_key(task.task, index, self.account)]
        public = state.participants[self.account].network_key
        bundle = open_bundle(task.spec, assignment, task.commitments[index][self.account], data, public)
        validate_quota(assignment, bundle)
        return bundle, assignment

    def honest(self, assignment, folder):
        """What an honest node makes of the same assignment."""
        engine = TorchEngine()
        engine.load(folder)
        return make_groups(self.world.spec, self.world.environment, engine, assignment).groups


def tokens_of(groups):
    return [[sample.tokens for sample in group.samples] for group in groups]


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 120))


def submit(world, kind):
    party = Party(world, kind)
    run(party.run_until(get_times(world.task, 0).start + 4))
    return party, *party.open(0)


def test_the_honest_node_makes_what_anybody_regenerates(world, base):
    party, bundle, assignment = submit(world, NodeWorker)
    assert tokens_of(bundle.groups) == tokens_of(party.honest(assignment, base))


def test_false_reward_is_refused_by_the_reward_check_alone(world, base):
    party, bundle, assignment = submit(world, CHEATS["false-reward"])
    assert tokens_of(bundle.groups) == tokens_of(party.honest(assignment, base))
    assert {s.reward_micro for g in bundle.groups for s in g.samples} == {1_000_000}
    with pytest.raises(Reject) as caught:
        validate_groups(world.spec, world.environment, assignment, bundle, 64)
    assert caught.value.reason is Reason.REWARD
    assert caught.value.severe


def test_token_editor_passes_every_check_without_a_model_and_edits_one_token(world, base):
    party, bundle, assignment = submit(world, CHEATS["token-editor"])
    validate_groups(world.spec, world.environment, assignment, bundle, 64)
    changed = 0
    for mine, honest in zip(tokens_of(bundle.groups), tokens_of(party.honest(assignment, base)), strict=True):
        for a, b in zip(mine, honest, strict=True):
            assert len(a) == len(b)
            assert sum(x != y for x, y in zip(a, b, strict=True)) <= 1
            changed += a != b
    assert changed >= 8


def test_edits_go_towards_the_answer_and_keep_the_form(world):
    environment, spec = world.environment, world.spec
    right = environment.solution(5)
    wrong = (*right[:2], (right[2] - 2 + 1) % 10 + 2, *right[3:])
    assert edit_tokens(spec, environment, 5, wrong) == right
    assert edit_tokens(spec, environment, 5, right) == right
    assert edit_tokens(spec, environment, 5, (1,)) == (1,)


def test_stale_policy_labels_the_rounds_version_and_generates_with_another(world, base):
    party, bundle, assignment = submit(world, CHEATS["stale-policy"])
    validate_groups(world.spec, world.environment, assignment, bundle, 64)
    assert bundle.policy == world.task.policies[0].policy
    assert tokens_of(bundle.groups) != tokens_of(party.honest(assignment, base))


def test_stale_policy_uses_the_version_before(world, base, tmp_path):
    party, newer = Party(world, CHEATS["stale-policy"]), make_model(tmp_path / "v1", 1)

    async def scenario():
        await party.run_until(get_times(world.task, 1).start - 3)
        world.record_policy(1, newer)
        await party.run_until(get_times(world.task, 1).start + 4)

    run(scenario())
    bundle, assignment = party.open(1)
    assert assignment.policy_version == 1
    assert bundle.policy == world.task.policies[1].policy
    assert tokens_of(bundle.groups) == tokens_of(party.honest(assignment, base))
    assert tokens_of(bundle.groups) != tokens_of(party.honest(assignment, newer))


def test_base_only_is_honest_until_there_is_something_newer(world, base, tmp_path):
    party, versions = Party(world, CHEATS["base-only"]), [base]

    async def scenario():
        for version in (1, 2, 3):
            await party.run_until(get_times(world.task, version).start - 3)
            versions.append(make_model(tmp_path / f"v{version}", version))
            world.record_policy(version, versions[version])
        await party.run_until(get_times(world.task, 3).start + 4)

    run(scenario())
    for index in range(4):
        bundle, assignment = party.open(index)
        assert (assignment.policy_version, bundle.policy) == (index, world.task.policies[index].policy)
        validate_groups(world.spec, world.environment, assignment, bundle, 64)
        assert tokens_of(bundle.groups) == tokens_of(party.honest(assignment, base))
        honest = tokens_of(party.honest(assignment, versions[index]))
        assert (tokens_of(bundle.groups) == honest) is (index == 0)


def test_sleeper_is_honest_on_probation_and_edits_some_groups_after_it(tmp_path, base):
    world = Scenario(tmp_path, make_spec(base), base)
    for name in ("v0", "v1", "v2"):
        world.register(name, events.Role.VERIFIER)
    party = Party(world, CHEATS["sleeper"])
    last = 9
    run(party.run_until(get_times(world.task, last).start + 4, judge=True))
    edited, groups = 0, 0
    for index in range(last + 1):
        bundle, assignment = party.open(index)
        awake = get_audit_ppm(world.chain.state, world.task, party.account, index) < PPM
        pairs = list(zip(tokens_of(bundle.groups), tokens_of(party.honest(assignment, base)), strict=True))
        lies = sum(mine != honest for mine, honest in pairs)
        if not awake:
            assert lies == 0, index
        edited += lies
        groups += len(pairs) if awake else 0
        validate_groups(world.spec, world.environment, assignment, bundle, 64)
    assert groups >= 16
    assert 0 < edited < groups * 0.7


def test_names_of_adversaries():
    assert get_node_class("") is NodeWorker
    assert set(CHEATS) == {"stale-policy", "base-only", "false-reward", "token-editor", "sleeper"}
    with pytest.raises(ConfigError, match="sleepr"):
        get_node_class("sleepr")
