"""Adversaries that serve bytes: a relay wants an honest node slashed for what the relay made up.

A relay is trusted with pay, never with stake. Whatever it serves in place of a node's bundle, the node gets a good verdict or
none at all, and nobody is slashed. Bytes under the node's own signature for this round still count against it.
"""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

import verifier.judge
from protocol.checks import open_bundle
from protocol.codec import encode
from protocol.errors import Reason
from protocol.ledger import events
from protocol.ledger.state import apply
from protocol.messages import Bundle, Signed, compute_bundle_key, make_domain
from protocol.rounds import get_members, get_outcomes, get_times
from protocol.settlement import compute_settlement, get_epoch_deadline
from protocol.verdict import Status, pack_rows, unpack_rows
from tests.support.forge import CHAIN_ID, LEDGER, count_good, count_rollouts, edit_samples
from tests.support.scenario import make_account, make_key, make_model
from tests.support.verifier_kit import VERIFIERS, VerifierNetwork, run

TRIALS_MIN = 50


def cut(court, account, honest):
    return honest[account].data[: len(honest[account].data) // 2]


def flip(court, account, honest):
    data, rng = bytearray(honest[account].data), np.random.default_rng(account[0])
    data[int(rng.integers(0, len(data)))] ^= int(rng.integers(1, 256))
    return bytes(data)


def swap(court, account, honest):
    """The neighbour's honest bundle."""
    accounts = list(honest)
    return honest[accounts[(accounts.index(account) + 1) % len(accounts)]].data


def sign(court, account, honest):
    """The node's bundle under the relay's own signature."""
    bundle = court.honest(1)[account]
    domain = make_domain(CHAIN_ID, LEDGER, court.task_id, Bundle)
    body = encode(bundle)
    return encode(Signed(body, make_key("relay-a").sign(domain, body)))


def replay(court, account, honest):
    """The node's own honest, truly signed bundle of the round before."""
    return court.submit(court.honest(0)[account]).data


SERVED = [
    cut,
    flip,
    swap,
    sign,
    replay,
    lambda court, account, honest: b"",
    lambda court, account, honest: bytes(99_999),
]


def test_honest_control(court):
    bundles = court.honest(1).values()
    assert count_rollouts(bundles) >= 200
    assert count_good(court.rows(court.submit_all(bundles), 1)) == len(bundles)


@pytest.mark.parametrize("serve", SERVED, ids=["cut", "flip", "swap", "sign", "replay", "empty", "long"])
def test_v4_nothing_a_relay_serves_accuses_a_node(court, serve):
    honest = court.submit_all(court.honest(1).values())
    served = {account: one._replace(data=serve(court, account, honest)) for account, one in honest.items()}
    assert len(served) >= TRIALS_MIN
    assert all(served[account].data != honest[account].data for account in honest)
    judgement = court.judge(served, 1)
    assert judgement.rows == []
    assert judgement.findings == []


@pytest.mark.parametrize("serve", SERVED[:5], ids=["cut", "flip", "swap", "sign", "replay"])
def test_v4_it_is_this_check_that_protects_the_node(court, monkeypatch, serve):
    """Without it every one of these nodes is a cheat."""
    monkeypatch.setattr(verifier.judge, "open_served", open_bundle)
    honest = court.submit_all(court.honest(1).values())
    served = {account: one._replace(data=serve(court, account, honest)) for account, one in honest.items()}
    assert {row.status for row in court.rows(served, 1)} == {Status.CHEAT}


def test_v4_the_others_are_judged(court):
    honest = court.submit_all(court.honest(1).values())
    victims = set(list(honest)[::2])
    served = {a: one._replace(data=replay(court, a, honest)) if a in victims else one for a, one in honest.items()}
    rows = court.judge(served, 1).rows
    assert {row.account for row in rows} == set(honest) - victims
    assert count_good(rows) == len(rows)


def test_v4_what_a_node_signed_for_this_round_still_counts_against_it(court):
    """Two statements of one node about one round: the root on the ledger and another bundle."""
    served = {}
    for account, bundle in court.honest(1).items():
        other = edit_samples(bundle, lambda one: replace(one, reward_micro=1_000_001))
        served[account] = court.submit(other)._replace(root=court.submit(bundle).root)
    rows = court.rows(served, 1)
    assert len(rows) >= TRIALS_MIN
    assert {(row.status, row.reason) for row in rows} == {(Status.CHEAT, Reason.ROOT_MISMATCH)}


def test_v4_a_framed_node_keeps_its_place_and_its_stake(court):
    """The whole way: judged by three, revealed, settled. The round is burned, not paid, and nobody is slashed."""
    honest = court.submit_all(court.honest(1).values())
    victim = next(iter(honest))
    honest[victim] = honest[victim]._replace(data=replay(court, victim, honest))
    state, task = court.close_round(honest, 1)
    rows, times = pack_rows(court.judge(honest, 1).rows), get_times(task, 1)
    for name in VERIFIERS:
        reveal = events.VerdictRevealed(court.task_id, 1, make_account(name), rows, bytes(32))
        apply(state, events.Logged(times.verdict_reveal_deadline, 0, reveal))
    state.block_number = get_epoch_deadline(task, 0) + 1
    outcomes = get_outcomes(state, task, 1)
    assert set(outcomes) == set(honest) - {victim}
    settled = compute_settlement(state, task, 0)
    assert settled.slashed == ()
    assert victim not in settled.earnings
    assert settled.burned_total > 0
    assert victim in get_members(state, task, 7)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("framing") / "base", 3)


class LyingBlobs:
    """A relay that serves, in place of one node's bundle of a round, what `lies` returns, as long as that is something."""

    def __init__(self, blobs, key, lies):
        self._blobs, self._key, self._lies = blobs, key, lies

    async def put(self, key, data):
        await self._blobs.put(key, data)

    async def get(self, key):
        data = await self._blobs.get(key)
        return (self._lies() or data) if key == self._key else data


def run_with_lies(tmp_path, base, lies_of):
    """Two rounds of a network in which every verifier reads through a relay that lies about node-a in round 1."""
    network = VerifierNetwork(tmp_path, base)
    world = network.world
    key = compute_bundle_key(world.task_id, 1, make_account("node-a"))
    for name in VERIFIERS:
        network.verifiers[name]._blobs = LyingBlobs(world.blobs, key, lies_of(network))

    async def scenario():
        await network.run(get_times(world.task, 1).verdict_reveal_deadline + 1)
        await network.close()

    run(scenario())
    return network, {verifier: unpack_rows(one.rows) for verifier, one in world.task.reveals[1].items()}


def test_v4_verifiers_say_nothing_of_a_node_whose_relay_replays(tmp_path, base):
    def lies_of(network):
        old = compute_bundle_key(network.world.task_id, 0, make_account("node-a"))
        return lambda: network.world.blobs.blobs[old]

    network, revealed = run_with_lies(tmp_path, base, lies_of)
    assert set(revealed) == {make_account(name) for name in VERIFIERS}
    assert {tuple(row.account for row in rows) for rows in revealed.values()} == {(make_account("node-b"),)}
    for name in VERIFIERS:
        assert network.texts(name, "rejected") == []
        assert "bundle of another round" in network.texts(name, "bundle_refused")[0]["text"]


def test_v4_a_bundle_is_asked_for_until_it_is_the_nodes(tmp_path, base):
    """Another relay answers the third time."""

    def lies_of(network):
        answers = [b"\xc1", bytes(300)]
        return lambda: answers.pop() if answers else None

    network, revealed = run_with_lies(tmp_path, base, lies_of)
    assert {tuple(row.status for row in rows) for rows in revealed.values()} == {(Status.GOOD, Status.GOOD)}
    assert len(network.texts("v0", "bundle_refused")) == 2
