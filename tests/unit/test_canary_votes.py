"""Fresh verifiers judge an opened canary with the real judge, and the settlement follows their votes."""

from __future__ import annotations

import asyncio

from protocol.canaries import compute_seal
from protocol.ledger import calls
from protocol.rounds import get_committee, get_times
from protocol.settlement import compute_settlement, get_epoch_deadline
from tests.support.scenario import make_account, make_model
from tests.support.verifier_kit import VerifierNetwork

SALT = b"\x5a" * 32


def _final(status: str, block: int, error: str) -> None:
    assert status == "final", error


def test_v1_honest_work_opened_as_a_canary_is_found_good_by_fresh_verifiers(tmp_path):
    """One verifier is drawn of three; the other two look again, say that nothing is wrong, and nobody is slashed."""
    network = VerifierNetwork(tmp_path, make_model(tmp_path / "base", 0), nodes=("node-a",), verifiers_per_round=1)
    node, chain, task_id = make_account("node-a"), network.world.chain, network.world.task_id
    seal = compute_seal(task=task_id, round_index=0, node=node, salt=SALT)
    chain.mempool.append((make_account("sealer"), calls.SealCanary(seal, 0), _final))
    opened: list[int] = []

    def open_canary() -> None:
        if not opened and chain.block_number >= get_times(network.world.task, 0).verdict_reveal_deadline:
            chain.mempool.append((node, calls.OpenCanary(task_id, 0, SALT), _final))
            opened.append(chain.block_number)

    async def scenario() -> None:
        await network.run(get_epoch_deadline(network.world.task, 0) + 1, each=open_canary)
        await network.close()

    asyncio.run(scenario())
    state, task = network.world.chain.state, network.world.task
    [drawn] = get_committee(state, task, 0)
    votes = task.canaries[0][node].votes
    assert set(votes) == {make_account(name) for name in network.verifiers} - {drawn}
    assert not any(votes.values())
    result = compute_settlement(state, task, 0)
    assert result.slashed == ()
    assert drawn in result.earnings
