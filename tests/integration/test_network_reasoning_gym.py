"""A reasoning-gym set through a whole network: a node answers it byte by byte, or in the tokens of a tokenizer that everybody
fetches with the base policy; a verifier replays every token.

Real sockets, a real chain, the roles as the command line runs them; only the processes are one. The model is random and
tiny, so rewards are mostly 0: what counts is that nothing about the set needs to be known to the protocol.
"""

from __future__ import annotations

import asyncio
import hashlib
import json

import pytest

import environments
from protocol.codec import PROTOCOL_VERSION
from protocol.presets import MINIMAL, PROFILE_FP32
from protocol.rounds import get_outcomes, get_times
from protocol.task import Environment, Sampling, Schedule, TaskSpec, compute_epoch_pay_max
from protocol.verdict import Status
from tests.support.network import start_network
from tests.support.scenario import make_model
from tests.support.tokenizer import make_tokenizer_json
from troth.views import count_rollouts

TOKENIZER = make_tokenizer_json()
#: Arguments, end token and number of tokens of a codec.
CODECS = {
    "bytes": ({}, 256, 257),
    "tokenizer": ({"template": "chatml", "tokenizer": hashlib.sha256(TOKENIZER).hexdigest()}, 2, 400),
}
GROUP_SIZE, GROUPS, ROUNDS = 4, 4, 2
SCHEDULE = Schedule(
    start_delay_blocks=60,
    round_blocks=14,
    epoch_rounds=ROUNDS,
    num_epochs=1,
    grace_blocks=1,
    commit_blocks=14,
    receipt_blocks=6,
    finality_blocks=1,
    verdict_commit_blocks=14,
    verdict_reveal_blocks=6,
    challenge_blocks=4,
    timeout_blocks=40,
)


def make_task(codec: str, policy: bytes, manifest: bytes, trainer: bytes, token: bytes) -> TaskSpec:
    more, end_token, _ = CODECS[codec]
    args = json.dumps({"dataset": "basic_arithmetic", "size": 200, **more}, sort_keys=True, separators=(",", ":"))
    return TaskSpec(
        version=PROTOCOL_VERSION,
        name="basic-arithmetic",
        base_policy=policy,
        base_manifest=manifest,
        environment=Environment("reasoning_gym", args, environments.content_hash("reasoning_gym", args)),
        licence_data="Apache-2.0",
        licence_model="Apache-2.0",
        sampling=Sampling(1000, 12, (end_token,)),
        group_size=GROUP_SIZE,
        groups_per_round=GROUPS,
        slots_max=GROUPS,
        max_staleness=4,
        profile=PROFILE_FP32,
        schedule=SCHEDULE,
        economics=MINIMAL.economics,
        verifiers_per_round=1,
        trainer=trainer,
        token=token,
    )


@pytest.mark.slow
@pytest.mark.parametrize("codec", CODECS)
def test_a_reasoning_gym_set_is_sampled_verified_and_found_good(tmp_path, codec):
    base = make_model(tmp_path / "base", 0, vocab=CODECS[codec][2])
    if codec == "tokenizer":
        (base / "tokenizer.json").write_bytes(TOKENIZER)

    async def scenario():
        async with start_network(tmp_path, 0.4) as network:
            policy, manifest = await network.shelve("trainer", base)
            for name in ("relay", "verifier", "node"):
                network.start(name, name)
            await network.until(lambda: network.registered("trainer", "relay", "verifier", "node"))
            spec = make_task(codec, policy, manifest, network.keys["trainer"].account, network.deployment.token)
            await network.publish(spec, compute_epoch_pay_max(spec))
            over = get_times(network.task, ROUNDS - 1).opening_deadline
            await network.until(lambda: network.ledger.state.block_number > over)

            node, verifier = network.keys["node"].account, network.keys["verifier"].account
            for round_index in range(ROUNDS):
                [(account, outcome)] = get_outcomes(network.ledger.state, network.task, round_index).items()
                row = outcome.row
                assert (account, row.status, row.groups) == (node, Status.GOOD, GROUPS)
                assert row.audited == GROUPS, "a new node is on probation: every group is replayed"
                assert GROUPS * GROUP_SIZE <= row.tokens <= GROUPS * GROUP_SIZE * spec.sampling.max_tokens
                assert outcome.agreed == (verifier,)
            assert count_rollouts(network.ledger.state, network.task) == {
                "accepted": ROUNDS * GROUPS * GROUP_SIZE,
                "rejected": {},
            }

    asyncio.run(asyncio.wait_for(scenario(), 200))
