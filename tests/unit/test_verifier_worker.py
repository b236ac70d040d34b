"""Three verifiers on one in-memory chain: rounds judged and revealed, epochs settled, restarts, and a dishonest settlement."""

from __future__ import annotations

import asyncio
import hashlib

import pytest

from protocol.codec import decode
from protocol.errors import Fault
from protocol.ledger import calls, events
from protocol.messages import REPORT_BYTES_MAX, Report, compute_report_key, make_domain, unseal_body
from protocol.rounds import get_committee, get_end_round, get_outcomes, get_times
from protocol.settlement import compute_settlement, get_epoch_deadline
from protocol.verdict import Status, unpack_rows
from tests.support.scenario import make_account, make_key, make_model
from tests.support.verifier_kit import VERIFIERS, VerifierNetwork, run
from troth.cheats import CHEATS, perturb_policy
from verifier.journal import Journal


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("models") / "base", 0)


@pytest.fixture
def network(tmp_path, base):
    return VerifierNetwork(tmp_path, base)


def end_of(network):
    """A block by which everything is settled."""
    task = network.world.task
    return get_times(task, get_end_round(task) - 1).verdict_reveal_deadline + 40


@pytest.fixture(scope="module")
def settled(tmp_path_factory, base):
    """A network that has run to its end."""
    made = VerifierNetwork(tmp_path_factory.mktemp("settled"), base)

    async def scenario():
        await made.run(end_of(made))
        await made.close()

    run(scenario())
    return made


def test_every_round_is_judged_good_by_the_whole_committee(settled):
    state, task = settled.world.chain.state, settled.world.task
    for index in range(get_end_round(task)):
        assert set(task.reveals[index]) == {make_account(name) for name in VERIFIERS}
        outcomes = get_outcomes(state, task, index)
        assert set(outcomes) == {make_account("node-a"), make_account("node-b")}
        for outcome in outcomes.values():
            assert outcome.row.status is Status.GOOD
            assert outcome.row.groups == outcome.row.audited == 2
            assert len(outcome.agreed) == 3


def test_two_epochs_are_settled_and_money_follows_the_verdicts(settled):
    state, task = settled.world.chain.state, settled.world.task
    assert [task.settlements[epoch].final for epoch in (0, 1)] == [True, True]
    own = compute_settlement(state, task, 1)
    assert task.final.root == own.root
    assert (task.final.paid_total, task.final.burned_total, task.final.slashed) == (own.paid_total, 0, ())
    economics, rows = task.spec.economics, []
    for index in range(get_end_round(task)):
        rows += [outcome.row for outcome in get_outcomes(state, task, index).values()]
    nodes = sum(row.groups * 4 * economics.reward_base + row.tokens * economics.reward_token for row in rows)
    assert own.paid_total == nodes + 3 * get_end_round(task) * economics.verifier_fee
    assert own.paid_total <= task.deposit


def test_usually_one_verifier_finalises(settled):
    sent = [
        call for name in VERIFIERS for _, call in settled.ledgers[name].submitted if isinstance(call, calls.Finalize)
    ]
    assert 2 <= len(sent) <= 3


def test_reports_are_published_and_are_what_was_revealed(settled):
    world = settled.world
    for index in range(get_end_round(world.task)):
        for name in VERIFIERS:
            account = make_account(name)
            data = world.blobs.blobs[compute_report_key(world.task_id, index, account)]
            assert hashlib.sha256(data).digest() == world.task.reveals[index][account].report
            domain = make_domain(world.chain.chain_id, world.chain.address, world.task_id, Report)
            body = unseal_body(data, domain, make_key(name).public, bytes_max=REPORT_BYTES_MAX)
            report = decode(Report, body, bytes_max=REPORT_BYTES_MAX)
            assert (report.round, report.verifier, report.findings) == (index, account, ())


def test_events_carry_the_numbers_an_operator_wants(settled):
    for name in VERIFIERS:
        verdicts = settled.texts(name, "verdict")
        assert [one["round"] for one in verdicts] == list(range(get_end_round(settled.world.task)))
        assert all(one["good"] == 2 and one["groups"] == one["leaves_audited"] == 4 for one in verdicts)
        assert all(one["tokens_audited"] > 0 and one["cpu_verification"] > 0 for one in verdicts)
        assert settled.texts(name, "rejected") == []


def test_the_journal_forgets_rounds_that_are_over(settled):
    for name in VERIFIERS:
        journal = Journal(settled.world.directory / name / f"verdicts-{settled.world.task_id.hex()[:16]}")
        assert all(index >= get_end_round(settled.world.task) - 4 for index in journal.records)


def test_a_restart_between_commit_and_reveal_reveals_the_same_bytes(network):
    """The commitment on the ledger binds rows, report and salt: a reveal that differs in one byte would be refused."""
    times = get_times(network.world.task, 0)

    async def scenario():
        committed_at = {}

        def each():
            commits = network.world.task.verdict_commits.get(0, {})
            for name in VERIFIERS:
                if make_account(name) in commits and name not in committed_at:
                    committed_at[name] = network.world.chain.block_number
                    network.restart(name)

        await network.run(times.verdict_reveal_deadline + 1, each=each)
        assert set(committed_at) == set(VERIFIERS)
        assert all(block <= times.verdict_commit_deadline for block in committed_at.values())
        await network.close()

    run(scenario())
    assert set(network.world.task.reveals[0]) == {make_account(name) for name in VERIFIERS}
    assert all(len(network.texts(name, "verdict")) >= 1 for name in VERIFIERS)
    assert [one["round"] for one in network.texts("v0", "verdict")].count(0) == 1


@pytest.mark.parametrize("phase", [0, 1])
def test_a_restart_in_every_other_block_changes_nothing(network, settled, phase):
    """Rows are those of an uncrashed network: what is judged follows from the ledger alone. A process that lives for
    two steps can fetch in one and judge in the next."""

    def each():
        if network.world.chain.block_number % 2 == phase:
            for name in VERIFIERS:
                network.restart(name)

    async def scenario():
        await network.run(end_of(network), each=each)
        await network.close()

    run(scenario())
    for index in range(get_end_round(network.world.task)):
        mine, theirs = network.world.task.reveals[index], settled.world.task.reveals[index]
        assert {v: r.rows for v, r in mine.items()} == {v: r.rows for v, r in theirs.items()}
    assert network.world.task.final.epoch == 1
    assert network.world.task.final.root == settled.world.task.final.root


def test_nobody_reveals_before_commitments_are_closed(network):
    times = get_times(network.world.task, 0)

    async def scenario():
        await network.run(times.verdict_commit_deadline)
        assert set(network.world.task.verdict_commits[0]) == {make_account(name) for name in VERIFIERS}
        assert network.world.task.reveals == {}
        sent = [call for name in VERIFIERS for _, call in network.ledgers[name].submitted]
        assert not [call for call in sent if isinstance(call, calls.RevealVerdict)]
        await network.close()

    run(scenario())


def test_a_cheat_is_rejected_slashed_and_forfeits_its_epoch(tmp_path, base):
    network = VerifierNetwork(tmp_path, base, nodes=("node-a",))
    ledger = network.world.register("cheat", events.Role.NODE)
    network.ledgers["cheat"] = ledger
    honest = network.nodes["node-a"]
    network.nodes["cheat"] = CHEATS["token-editor"](
        ledger=ledger,
        task=network.world.task_id,
        environment=network.world.environment,
        engine=type(honest._engine)(),
        policies=network.world.policies,
        blobs=network.world.blobs,
        key=make_key("cheat"),
        directory=tmp_path / "cheat",
        events=lambda kind, fields: None,
    )

    async def scenario():
        await network.run(get_epoch_deadline(network.world.task, 0) + 14)
        await network.close()

    run(scenario())
    task, cheat = network.world.task, make_account("cheat")
    outcome = get_outcomes(network.world.chain.state, task, 0)[cheat]
    assert outcome.row.status is Status.CHEAT
    assert len(outcome.agreed) == 3
    assert task.settlements[0].final
    assert task.settlements[0].slashed == (cheat,)
    assert network.world.chain.state.participants[cheat].slashed > 0
    assert cheat not in compute_settlement(network.world.chain.state, task, 0).earnings
    texts = network.texts("v0", "rejected")
    assert {one["account"] for one in texts} == {cheat}
    assert all("observed" in one["text"] and "limit" in one["text"] for one in texts)
    data = network.world.blobs.blobs[compute_report_key(task.task, 0, make_account("v0"))]
    domain = make_domain(network.world.chain.chain_id, network.world.chain.address, task.task, Report)
    report = decode(Report, unseal_body(data, domain, make_key("v0").public, bytes_max=1 << 20), bytes_max=1 << 20)
    assert [finding.account for finding in report.findings] == [cheat]


def test_a_dissenting_settlement_is_challenged_voided_and_settled_again(network):
    """Two of three verifiers vote for a root of their own; the third, honest, challenges. After it the two are honest
    again, the challenge is decided against the settlement and everybody settles what the ledger says."""
    world, liars = network.world, ("v1", "v2")
    deadline = get_epoch_deadline(world.task, 0)

    async def scenario():
        await network.run(deadline)
        stopped = {name: network.verifiers.pop(name) for name in liars}
        for worker in stopped.values():
            await worker.close()
        world.chain.advance()
        for name in liars:
            error = world.call(name, calls.VoteSettlement(world.task_id, 0, b"\7" * 32, 10**6, 0, ()))
            assert error == ""
        assert world.task.settlements[0].root == b"\7" * 32
        await network.run(world.chain.block_number + 2)
        assert world.task.settlements[0].challenged
        assert network.texts("v0", "challenge")
        for name in liars:
            network.restart(name)
        await network.run(world.chain.block_number + 40)
        await network.close()

    run(scenario())
    assert world.task.voids == {0: 1}
    own = compute_settlement(world.chain.state, world.task, 0)
    assert world.task.settlements[0].final
    assert world.task.settlements[0].root == own.root


def test_an_honest_settlement_survives_a_challenge(network):
    world = network.world
    deadline = get_epoch_deadline(world.task, 0)

    async def scenario():
        await network.run(deadline + 3)
        assert 0 in world.task.settlements
        assert world.call("node-a", calls.Challenge(world.task_id, 0)) == ""
        await network.run(world.chain.block_number + 16)
        await network.close()

    run(scenario())
    assert world.task.voids == {}
    assert world.task.settlements[0].final
    votes = [call for name in VERIFIERS for _, call in network.ledgers[name].submitted]
    assert {call.uphold for call in votes if isinstance(call, calls.VoteChallenge)} == {True}


def test_a_verifier_outside_the_committee_stays_silent(tmp_path, base):
    network = VerifierNetwork(tmp_path, base, verifiers_per_round=1)

    async def scenario():
        await network.run(get_times(network.world.task, 1).verdict_reveal_deadline + 1)
        await network.close()

    run(scenario())
    for index in (0, 1):
        committee = get_committee(network.world.chain.state, network.world.task, index)
        assert len(committee) == 1
        assert set(network.world.task.verdict_commits[index]) == set(committee)


def test_new_policies_are_attested_by_as_many_as_are_needed(network, base, tmp_path):
    newer = tmp_path / "newer"
    perturb_policy(base, newer, seed=3, ratio=0.01)
    world = network.world

    async def scenario():
        await network.run(world.task.start_block - 6)
        await world.policies.publish(world.task_id, 1, 0, newer)
        world.chain.emit(events.PolicyRecorded(world.task_id, 1, b"\1" * 32, b"\2" * 32, bytes(32), bytes(32)))
        await network.run(world.task.start_block + 2)
        await network.close()

    run(scenario())
    policy = world.task.policies[1]
    assert policy.eligible_block is not None
    assert len(policy.attestations) == 2


def test_a_policy_that_cannot_be_fetched_is_not_attested(network):
    world = network.world

    async def scenario():
        await network.run(world.task.start_block - 6)
        world.policies.missing.add(1)
        world.chain.emit(events.PolicyRecorded(world.task_id, 1, b"\1" * 32, b"\2" * 32, bytes(32), bytes(32)))
        await network.run(world.task.start_block + 2)
        await network.close()

    run(scenario())
    assert world.task.policies[1].attestations == {}
    assert network.texts("v0", "policy_missing")


def test_a_lost_bundle_gets_no_row_and_does_not_hold_up_the_others(network):
    network.withheld = {(0, "node-a")}
    for name in VERIFIERS:  # nobody fetches before the relay has lost it
        network.verifiers[name]._fetch_bundles = lambda task, index, name=name: None
    times = get_times(network.world.task, 0)

    async def scenario():
        await network.run(times.audit_block)
        for name in VERIFIERS:
            network.restart(name)
        await network.run(times.verdict_reveal_deadline + 1)
        await network.close()

    run(scenario())
    for reveal in network.world.task.reveals[0].values():
        assert [row.account for row in unpack_rows(reveal.rows)] == [make_account("node-b")]
    assert network.texts("v0", "verdict")[0]["missing"] == 1


def test_a_policy_that_cannot_be_had_stops_neither_settlement_nor_other_verifiers(network):
    """v0 gets no policy for round 0 and later ones: it judges nothing, says why, and still settles."""

    class Without:
        async def fetch(self, task, version):
            raise Fault("no peer has policy 0")

    network.verifiers["v0"]._policies = Without()

    async def scenario():
        await network.run(get_epoch_deadline(network.world.task, 0) + 14)
        await network.close()

    run(scenario())
    task = network.world.task
    assert {v for index in (0, 1) for v in task.reveals[index]} == {make_account("v1"), make_account("v2")}
    assert network.texts("v0", "fault")[0]["text"] == "no peer has policy 0"
    votes = [call for _, call in network.ledgers["v0"].submitted if isinstance(call, calls.VoteSettlement)]
    assert votes[0].epoch == 0
    assert task.settlements[0].final
    assert make_account("v0") not in compute_settlement(network.world.chain.state, task, 0).earnings


def test_a_peer_that_never_answers_keeps_no_step_waiting(network):
    """v0 asks for the policy of round 1 on, and hears nothing: round 0 is revealed in time, and so is what is settled."""
    world, policies = network.world, network.world.policies

    class Silent:
        async def fetch(self, task, version):
            if policies_silent:
                await asyncio.Event().wait()
            return await policies.fetch(task, version)

    policies_silent = False
    worker = network.verifiers["v0"]
    worker._policies = worker._attester._policies = Silent()
    times = get_times(world.task, 0)

    async def scenario():
        nonlocal policies_silent
        await network.run(times.audit_block + 4)  # round 0 is judged, round 1 is not audited yet
        assert make_account("v0") in world.task.verdict_commits[0]
        policies_silent = True
        worker._folders.clear()
        await network.run(get_epoch_deadline(world.task, 0) + 14)
        await network.close()

    run(scenario())
    assert make_account("v0") in world.task.reveals[0]
    assert make_account("v0") not in world.task.reveals[1]
    assert {make_account("v1"), make_account("v2")} <= set(world.task.reveals[1])
    assert world.task.settlements[0].final
