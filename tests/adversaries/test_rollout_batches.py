"""V7: honest work is accepted however it was batched and whichever attention either side runs.

Nodes decode 1, 8 or 32 sequences at a time; verifiers prefill one by one or many together, with eager attention or with
torch's own. The task's limits are those of the float32 profile.
"""

from __future__ import annotations

import pytest

from protocol.verdict import Status
from tests.support.forge import count_rollouts
from verifier.scorer import TorchScorer

BATCHES = (1, 8, 32)
NODES = 16


class InBatches:
    """An engine that is asked for so many completions at a time."""

    def __init__(self, engine, size):
        self._engine, self._size = engine, size

    def generate(self, requests, **options):
        made = []
        for start in range(0, len(requests), self._size):
            made += self._engine.generate(requests[start : start + self._size], **options)
        return made


@pytest.fixture(scope="module")
def made(court):
    """Every node's work by batch size."""
    engine, bundles = court.engine(court.policy), {}
    for size in BATCHES:
        court._engines[court.policy] = InBatches(engine, size)
        bundles[size] = court.make(court.policy, court.assignments()[:NODES])
    court._engines[court.policy] = engine
    return bundles


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("tokens_max", [16, 1 << 16], ids=["one-by-one", "together"])
def test_v7_honest_work_of_any_batch_is_accepted(court, made, attention, tokens_max):
    scorer = TorchScorer(vocab_size=court.environment.vocab_size, batch_tokens_max=tokens_max)
    scorer.load(court.policy)
    scorer._model.set_attn_implementation(attention)
    assert scorer._model.config._attn_implementation == attention
    for size, bundles in made.items():
        assert count_rollouts(bundles) >= 100
        rows = court.rows(court.submit_all(bundles), scorer=scorer)
        assert {row.status for row in rows} == {Status.GOOD}, f"decoded {size} at a time"


def test_v7_batches_change_no_token(made):
    """One right completion for every assignment, however many were decoded together."""
    tokens = {
        size: [sample.tokens for bundle in bundles for group in bundle.groups for sample in group.samples]
        for size, bundles in made.items()
    }
    assert tokens[1] == tokens[8] == tokens[32]
