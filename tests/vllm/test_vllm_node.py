"""A node on vLLM in the real worker: rounds, a new policy between them, and real verifiers on torch who judge it."""

from __future__ import annotations

import pytest

from inference.vllm_engine import VllmEngine
from inference.worker import NodeWorker
from protocol.ledger import events
from protocol.rounds import get_end_round, get_outcomes, get_times
from protocol.verdict import Status
from tests.support.scenario import make_account, make_key, make_model
from tests.support.verifier_kit import VerifierNetwork, run
from troth.engines import make_engine
from troth.settings import load_settings


@pytest.fixture(scope="module")
def policies(tmp_path_factory):
    directory = tmp_path_factory.mktemp("node")
    return [make_model(directory / f"v{seed}", 80 + seed) for seed in (0, 1)]


def test_rounds_of_a_node_on_vllm_are_judged_good(engine, tmp_path, policies):
    """The engine comes from the settings, and works in the threads the worker gives it. Policy 1 is recorded while the
    task runs: vLLM swaps between rounds. A second node is on torch."""
    engine.close()
    settings = load_settings([], ["--compute.engine", "vllm", "--compute.vllm.max_num_seqs", "32"])
    network = VerifierNetwork(tmp_path, policies[0], nodes=("node-torch",))
    world, seen = network.world, []
    chosen = make_engine(settings.compute, world.environment.vocab_size)
    assert isinstance(chosen, VllmEngine)
    network.ledgers["node-vllm"] = world.register("node-vllm", events.Role.NODE)
    network.nodes["node-vllm"] = NodeWorker(
        ledger=network.ledgers["node-vllm"],
        task=world.task_id,
        environment=world.environment,
        engine=chosen,
        policies=world.policies,
        blobs=world.blobs,
        key=make_key("node-vllm"),
        directory=tmp_path / "node-vllm",
        events=lambda event, fields: seen.append((event, fields)),
    )

    async def scenario():
        await network.run(get_times(world.task, 0).start + 1)
        world.record_policy(1, policies[1])
        await network.run(get_times(world.task, get_end_round(world.task) - 1).opening_deadline + 1)
        await network.close()

    try:
        run(scenario())
    finally:
        chosen.close()
    assert [fields for event, fields in seen if event == "fault"] == []
    made = [fields for event, fields in seen if event == "round_made"]
    assert len(made) == get_end_round(world.task) == 4
    assert {fields["version"] for fields in made} == {0, 1}
    for index in range(4):
        outcomes = get_outcomes(world.chain.state, world.task, index)
        assert set(outcomes) == {make_account("node-torch"), make_account("node-vllm")}
        for outcome in outcomes.values():
            assert outcome.row.status is Status.GOOD
            assert outcome.row.groups == outcome.row.audited == 2
