"""The trainer against real nodes over an in-memory ledger: what it admits, when it trains, and that crashes lose nothing."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import os
import shutil
from collections import Counter

import pytest
from safetensors.torch import load_file, save_file

from environments.sort import SortEnvironment
from protocol.checks import get_assignment
from protocol.codec import decode, encode
from protocol.errors import ConfigError, Fault
from protocol.identity import verify_signature
from protocol.ledger import events
from protocol.ledger.calls import RecordPolicy
from protocol.merkle import compute_root
from protocol.messages import (
    LINEAGE_BYTES_MAX,
    Bundle,
    Lineage,
    Signed,
    compute_bundle_key,
    compute_leaf,
    compute_lineage_key,
    make_domain,
    seal,
)
from protocol.rounds import get_audit_ppm, get_round_policy, get_times, is_suspended
from protocol.verdict import Status
from tests.support.scenario import make_account, make_key
from tests.support.trainer_kit import TrainerNetwork
from tests.support.twins import hash_policy
from trainer.config import TrainerConfig
from trainer.warmup import make_base_policy


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "base"
    make_base_policy(folder, SortEnvironment(2), seed=0, target=0.3)
    return folder


def read_lineages(network: TrainerNetwork) -> list[Lineage]:
    """Every recorded policy's lineage, checked against the ledger and the trainer's key."""
    task, found = network.world.task, []
    for policy in task.policies[1:]:
        data = network.world.blobs.blobs[compute_lineage_key(task.task, policy.version)]
        assert hashlib.sha256(data).digest() == policy.lineage
        signed = decode(Signed, data, bytes_max=LINEAGE_BYTES_MAX)
        chain = network.world.chain
        domain = make_domain(chain.chain_id, chain.address, task.task, Lineage)
        verify_signature(make_key("trainer").public, domain, signed.body, signed.signature)
        found.append(decode(Lineage, signed.body, bytes_max=LINEAGE_BYTES_MAX))
    return found


def find_leaves(network: TrainerNetwork) -> dict[bytes, tuple[int, bytes]]:
    """(round, account) of every leaf of every stored bundle."""
    task, leaves = network.world.task, {}
    for index, receipts in task.receipts.items():
        for account in receipts:
            data = network.world.blobs.blobs[compute_bundle_key(task.task, index, account)]
            bundle = decode(Bundle, decode(Signed, data, bytes_max=1 << 24).body, bytes_max=1 << 24)
            for group in bundle.groups:
                leaves[compute_leaf(task.task, index, account, group)] = (index, account)
    return leaves


def check_lineage(network: TrainerNetwork) -> list[Lineage]:
    """What must hold after any run: an unbroken chain of policies, no leaf used twice, none too stale."""
    task, lineages, places = network.world.task, read_lineages(network), find_leaves(network)
    used = Counter(leaf for lineage in lineages for leaf in lineage.leaves)
    assert max(used.values(), default=1) == 1
    for version, lineage in enumerate(lineages, start=1):
        recorded = task.policies[version]
        assert lineage.policy_version == version
        assert lineage.parent == task.policies[version - 1].policy
        assert lineage.policy == recorded.policy == hash_policy(network.world.policies.folders[task.task, version])
        assert lineage.batch_root == recorded.batch_root == compute_root(lineage.leaves)
        for leaf in lineage.leaves:
            policy = get_round_policy(task, places[leaf][0])
            assert version - 1 - policy.version <= task.spec.max_staleness
    return lineages


def test_policies_are_made_published_and_recorded_in_order(tmp_path, base):
    network = TrainerNetwork(tmp_path, base)
    asyncio.run(network.run(60, until=network.has_version(4)))
    lineages = check_lineage(network)
    assert len(lineages) >= 4
    assert [fields["version"] for fields in network.steps[: len(lineages)]] == list(range(1, len(lineages) + 1))
    assert len({policy.policy for policy in network.world.task.policies}) == len(lineages) + 1
    first = network.steps[0]
    assert first["staleness_max"] == 0
    assert first["groups"] == len(lineages[0].leaves)
    assert 0 < first["reward_mean"] < 1
    assert round(first["reward_mean"] * 1e6) == lineages[0].reward_micro
    assert first["updates_skipped"] == first["tokens_skipped"] == 0
    assert first["cpu_training"] > 0
    assert first["cpu_verification"] > 0


def test_a_batch_is_in_ledger_order(tmp_path, base):
    network = TrainerNetwork(tmp_path, base)
    asyncio.run(network.run(60, until=network.has_version(3)))
    places = find_leaves(network)
    for lineage in read_lineages(network):
        order = [places[leaf] for leaf in lineage.leaves]
        assert order == sorted(order)


def test_another_account_is_no_trainer(tmp_path, base):
    network = TrainerNetwork(tmp_path, base, trainer=make_account("somebody else"))
    with pytest.raises(ConfigError, match=make_account("somebody else").hex()):
        asyncio.run(network.restart())


def test_groups_of_nodes_at_p_1_wait_until_a_committee_found_them_good(tmp_path, base):
    network = TrainerNetwork(tmp_path, base, nodes=("a", "b"), probation_groups=1000)
    network.statuses[0, "b"] = Status.UNPAID

    async def scenario():
        await network.start()
        times = get_times(network.world.task, 0)
        while network.world.chain.block_number <= times.verdict_reveal_deadline:
            await network.run(1)
            assert not network.steps
        await network.run(12, until=network.has_version(1))

    asyncio.run(scenario())
    assert get_audit_ppm(network.world.chain.state, network.world.task, make_account("a"), 0) == 1_000_000
    places = find_leaves(network)
    used = [places[leaf] for lineage in read_lineages(network) for leaf in lineage.leaves]
    assert used
    assert (0, make_account("b")) not in used
    dropped = [fields for kind, fields in network.seen if kind == "dropped" and fields["round"] == 0]
    assert [(fields["account"], fields["reason"]) for fields in dropped] == [(make_account("b"), "not_judged_good")]


def test_a_suspended_node_is_ignored(tmp_path, base):
    network = TrainerNetwork(tmp_path, base)
    network.statuses[0, "c"] = Status.CHEAT
    asyncio.run(network.run(64))
    task, places = network.world.task, find_leaves(network)
    over = get_times(task, 0).opening_deadline
    late = [
        places[leaf]
        for policy, lineage in zip(task.policies[1:], read_lineages(network), strict=True)
        if policy.block_number > over + 2
        for leaf in lineage.leaves
    ]
    assert late
    assert make_account("c") not in {account for _, account in late}
    assert is_suspended(network.world.chain.state, task, make_account("c"), over + 1)


def edit_first_token(network: TrainerNetwork, name: str) -> None:
    """Replace what a node stored and committed in round 0 by a bundle with one edited token, reward consistent."""
    chain, task, account = network.world.chain, network.world.task, make_account(name)
    key = compute_bundle_key(task.task, 0, account)
    data = network.world.blobs.blobs[key]
    bundle = decode(Bundle, decode(Signed, data, bytes_max=1 << 24).body, bytes_max=1 << 24)
    group = bundle.groups[0]
    from msgspec.structs import replace

    sample = next(s for s in group.samples if len(s.tokens) == 3)
    tokens = ((sample.tokens[0] - 1) % 10 + 2, *sample.tokens[1:])
    edited = replace(sample, tokens=tokens, reward_micro=network.world.environment.reward(group.prompt_index, tokens))
    samples = tuple(edited if s is sample else s for s in group.samples)
    bundle = replace(bundle, groups=(replace(group, samples=samples), *bundle.groups[1:]))
    root = compute_root([compute_leaf(task.task, 0, account, g) for g in bundle.groups])
    network.world.blobs.blobs[key] = seal(
        make_key(name), make_domain(chain.chain_id, chain.address, task.task, Bundle), bundle
    )
    for state in (chain.state, network.trainer_ledger.state):
        state.tasks[task.task].commitments[0][account].root = root


def test_R9_an_edited_token_is_found_by_the_trainers_own_replay(tmp_path, base):
    network = TrainerNetwork(tmp_path, base)

    async def scenario():
        await network.start()
        for _ in range(60):
            if len(network.world.task.receipts.get(0, {})) == 3:
                break
            await network.act()
            network.world.chain.advance()
        await network.trainer_ledger.poll()
        edit_first_token(network, "b")
        await network.run(20, until=network.has_version(1))

    asyncio.run(scenario())
    dropped = [fields for kind, fields in network.seen if kind == "dropped"]
    assert [(f["account"], f["round"], f["reason"]) for f in dropped] == [(make_account("b"), 0, "replay")]
    assert "score gap" in dropped[0]["text"]
    used = [find_leaves(network).get(leaf) for leaf in read_lineages(network)[0].leaves]
    assert (0, make_account("b")) not in used


def test_T1_no_node_fills_more_than_half_of_a_batch(tmp_path, base):
    network = TrainerNetwork(tmp_path, base, nodes=("a", "b"), config=TrainerConfig(groups_min=4, warmup_steps=2))
    asyncio.run(network.run(70))
    places = find_leaves(network)
    lineages = check_lineage(network)
    assert len(lineages) >= 3
    for lineage in lineages:
        counts = Counter(places[leaf][1] for leaf in lineage.leaves)
        assert max(counts.values()) * 2 <= len(lineage.leaves)


def test_a_single_node_may_fill_a_batch(tmp_path, base):
    network = TrainerNetwork(tmp_path, base, nodes=("a",))
    asyncio.run(network.run(60, until=network.has_version(2)))
    assert len(check_lineage(network)) >= 2
    assert network.steps[0]["nodes"] == 1


def test_too_stale_groups_are_never_used(tmp_path, base):
    network = TrainerNetwork(tmp_path, base, max_staleness=1)
    network.attests = False
    asyncio.run(network.run(60))
    task = network.world.task
    assert len(task.receipts) >= 5
    # Every round used version 0, which is too old for a trainer at version 2.
    assert [fields["staleness_max"] for fields in network.steps] == [0, 1]
    assert len(check_lineage(network)) == 2
    network.attests = True
    asyncio.run(network.run(20, until=network.has_version(3)))
    assert len(check_lineage(network)) >= 3


def test_nothing_is_made_after_the_last_round(tmp_path, base):
    from msgspec.structs import replace

    from protocol.presets import MINIMAL

    schedule = replace(MINIMAL.schedule, start_delay_blocks=20, epoch_rounds=2, num_epochs=1)
    network = TrainerNetwork(tmp_path, base, schedule=schedule)
    asyncio.run(network.run(80))
    last = get_times(network.world.task, 1).verdict_reveal_deadline
    lineages = check_lineage(network)
    assert lineages
    assert max(policy.block_number for policy in network.world.task.policies) <= last + 7
    used = sum(len(lineage.leaves) for lineage in lineages)
    assert used == sum(c.leaves for by in network.world.task.commitments.values() for c in by.values())


def test_training_goes_on_ahead_of_the_ledger_but_not_far(tmp_path, base):
    network = TrainerNetwork(tmp_path, base, config=TrainerConfig(groups_min=2, groups_max=2, warmup_steps=2))

    async def scenario():
        await network.start()
        await network.run(60, until=lambda: len(network.world.task.receipts.get(0, {})) == 3)
        # The chain stands still: records stay pending.
        for _ in range(30):
            await network.step_trainer()

    asyncio.run(scenario())
    assert [fields["version"] for fields in network.steps][-1] - (len(network.world.task.policies) - 1) == 2
    asyncio.run(network.run(10))
    check_lineage(network)


def test_outages_of_relays_only_delay(tmp_path, base):
    network = TrainerNetwork(tmp_path, base)

    async def scenario():
        await network.run(40, until=network.has_version(1))
        known = len(network.world.task.policies)
        network.trainer_blobs.down = True
        await network.run(12)
        network.trainer_blobs.down = False
        await network.run(40, until=network.has_version(known + 1))
        return known

    known = asyncio.run(scenario())
    assert len(check_lineage(network)) > known


class Killed(BaseException):
    """The process dies here; nothing may catch it."""


def test_T4_killed_before_and_after_every_effect_and_restarted(tmp_path, base, monkeypatch):
    """The trainer dies at the n-th effect on disk, store, relay or ledger, for n = 0, 1, 2 ... in one growing run."""
    network = TrainerNetwork(tmp_path, base, config=TrainerConfig(total_steps=60, groups_min=4, warmup_steps=2))
    budget = [10**9]

    def wrap_sync(real):
        def call(*args, **kwargs):
            spend()
            return real(*args, **kwargs)

        return call

    def wrap_async(real):
        async def call(*args, **kwargs):
            spend()
            result = await real(*args, **kwargs)
            spend()
            return result

        return call

    def spend():
        budget[0] -= 1
        if budget[0] < 0:
            raise Killed

    async def scenario():
        await network.run(60, until=network.has_version(1))
        for name in ("fsync", "rename", "replace", "unlink"):
            monkeypatch.setattr(os, name, wrap_sync(getattr(os, name)))
        network.world.policies.publish = wrap_async(network.world.policies.publish)
        network.trainer_blobs.put = wrap_async(network.trainer_blobs.put)
        killed = 0
        for number in itertools.count():
            network.trainer_ledger.submit = wrap_async(network.trainer_ledger.submit)
            for _ in range(15):
                await network.act()
                budget[0] = number
                try:
                    await network.step_trainer()
                except Killed:
                    killed += 1
                    break
                finally:
                    budget[0] = 10**9
                network.world.chain.advance()
            else:
                # A whole step fits: every effect of one has been the last.
                return killed
            await network.restart()
            network.world.chain.advance()
        raise AssertionError

    killed = asyncio.run(scenario())
    assert killed > 20
    monkeypatch.undo()
    asyncio.run(network.run(12))
    lineages = check_lineage(network)
    assert len(lineages) >= 3
    records = [call for _, call in network.trainer_ledger.submitted if isinstance(call, RecordPolicy)]
    assert len({call.version for call in records}) == len(records)


def test_a_generation_that_was_not_recorded_is_recorded_not_trained_again(tmp_path, base):
    network = TrainerNetwork(tmp_path, base)

    async def scenario():
        await network.run(40, until=network.has_version(1))
        submit = network.trainer_ledger.submit

        async def fail(intent, call):
            raise Fault("the outbox is full")

        network.trainer_ledger.submit = fail
        made = len(network.steps)
        await network.run(30, until=lambda: len(network.steps) > made)
        weights = hash_policy(
            tmp_path / "trainer" / "generations" / network.world.task_id.hex()[:16] / _newest(network)
        )
        network.trainer_ledger.submit = submit
        made = network.steps[-1]["version"]
        await network.restart()
        await network.step_trainer()
        network.world.chain.advance()
        return made, weights

    def _newest(network):
        return f"{network.steps[-1]['version']:08d}/policy"

    made, weights = asyncio.run(scenario())
    assert network.count("resumed") == 1
    assert network.world.task.policies[made].policy == weights
    check_lineage(network)


def test_lost_generations_are_replaced_by_the_ledgers_policy_and_no_leaf_is_used_again(tmp_path, base):
    network = TrainerNetwork(tmp_path, base, config=TrainerConfig(groups_min=4, warmup_steps=2))

    async def scenario():
        await network.run(60, until=network.has_version(3))
        shutil.rmtree(tmp_path / "trainer")
        await network.restart()
        await network.run(30, until=network.has_version(len(network.world.task.policies) + 1))

    asyncio.run(scenario())
    assert network.count("adopted") == 2
    assert len(check_lineage(network)) >= 5


def test_a_restored_backup_goes_on_from_the_ledger(tmp_path, base):
    network = TrainerNetwork(tmp_path, base, config=TrainerConfig(groups_min=4, warmup_steps=2))

    async def scenario():
        await network.run(60, until=network.has_version(1))
        shutil.copytree(tmp_path / "trainer", tmp_path / "backup")
        await network.run(60, until=network.has_version(4))
        await network.restart(tmp_path / "backup")
        await network.run(30, until=network.has_version(len(network.world.task.policies) + 1))

    asyncio.run(scenario())
    assert len(check_lineage(network)) >= 6


def test_a_twin_that_recorded_first_ends_our_lineage(tmp_path, base):
    network = TrainerNetwork(tmp_path, base)
    other = tmp_path / "other"
    shutil.copytree(base, other)
    tensors = load_file(base / "model.safetensors")
    save_file({name: tensor * 1.01 for name, tensor in tensors.items()}, other / "model.safetensors")

    async def scenario():
        await network.run(60, until=network.has_version(1))
        seen = len(network.steps)
        for _ in range(60):
            await network.act()
            await network.step_trainer()
            if len(network.steps) > seen:
                break
            network.world.chain.advance()
        # What our trainer has just sent never gets in: its twin was first.
        network.world.chain.mempool.clear()
        taken = len(network.world.task.policies)
        lineage = seal(
            make_key("trainer"),
            make_domain(network.world.chain.chain_id, network.world.chain.address, network.world.task_id, Lineage),
            Lineage(1, network.world.task_id, taken, bytes(32), bytes(32), (), bytes(32), bytes(32), bytes(32), 0),
        )
        network.world.blobs.blobs[compute_lineage_key(network.world.task_id, taken)] = lineage
        network.world.policies.folders[network.world.task_id, taken] = other
        digest = hashlib.sha256(lineage).digest()
        network.world.chain.emit(
            events.PolicyRecorded(network.world.task_id, taken, hash_policy(other), bytes(32), bytes(32), digest)
        )
        await network.run(30, until=network.has_version(taken + 1))
        return taken

    taken = asyncio.run(scenario())
    assert network.count("diverged") == 1
    ours = read_lineages(network)[taken]
    assert ours.parent == hash_policy(other)


def test_assignments_are_those_of_the_ledger(tmp_path, base):
    """The kit itself: nodes deliver what the ledger assigned, else nothing above proves anything."""
    network = TrainerNetwork(tmp_path, base)
    asyncio.run(network.run(60, until=network.has_version(1)))
    task, chain = network.world.task, network.world.chain
    for account in task.receipts[0]:
        assignment = get_assignment(chain.state, task, 0, account, chain_id=chain.chain_id, ledger=chain.address)
        assert task.commitments[0][account].leaves == assignment.quota
    assert sum(c.leaves for c in task.commitments[0].values()) == task.spec.groups_per_round
    assert encode(task.spec)
