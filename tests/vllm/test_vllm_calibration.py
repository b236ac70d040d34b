"""Honest rollouts of vLLM against the profile they are judged by, in numbers: none of 30,000 is refused."""

from __future__ import annotations

import numpy as np
import pytest

from protocol.checks import validate_match
from protocol.presets import PROFILE_FP32
from protocol.toploc import build_proofs, match_proofs
from tests.support.scenario import make_model
from tests.vllm.kit import make_family, make_requests, run
from verifier.scorer import TorchScorer

ROLLOUTS, BATCH = 30_000, 2_000


def count_near_ties(engine, folder, requests, **terms):
    """Near-ties of a batch; every commitment and every gap within the profile, else this raises."""
    made = run(engine, requests, **terms)
    proofs = build_proofs([one.hidden for one in made], topk=PROFILE_FP32.topk, chunk=PROFILE_FP32.chunk)
    scorer = TorchScorer()
    scorer.load(folder)
    scored = scorer.score(requests, [one.tokens for one in made], temperature=terms.get("temperature", 1.0))
    matches = match_proofs(
        [one.hidden for one in scored],
        proofs,
        topk=PROFILE_FP32.topk,
        chunk=PROFILE_FP32.chunk,
        modulus_min=PROFILE_FP32.modulus_min,
    )
    for number, chunks in enumerate(matches):
        for match in chunks:
            validate_match(PROFILE_FP32, match, (number,))
    gaps = np.concatenate([one.gaps for one in scored])
    assert gaps.max() <= PROFILE_FP32.replay_tolerance_micro / 1e6
    return len(gaps), int((gaps > 0).sum())


@pytest.mark.nightly
@pytest.mark.timeout(3000)
def test_v7_no_honest_rollout_of_vllm_is_refused(engine, tmp_path):
    """Two shapes, several temperatures, prompts from 1 to 200 tokens, batches of 2,000."""
    tokens = near_ties = 0
    shapes = [
        (make_model(tmp_path / "demo", 70), 32, 7),
        (make_family(tmp_path / "family", "llama-tied-gqa", 71), 300, 200),
    ]
    for number in range(ROLLOUTS // BATCH):
        folder, vocab, longest = shapes[number * 2 * BATCH // ROLLOUTS]
        engine.load(folder)
        lengths = np.random.default_rng(number).integers(1, longest + 1, BATCH)
        terms = {"temperature": (0.6, 1.0, 1.4)[number % 3], "max_tokens": 8}
        found = count_near_ties(engine, folder, make_requests(number, lengths, vocab=vocab), **terms)
        tokens, near_ties = tokens + found[0], near_ties + found[1]
    assert tokens >= 4 * ROLLOUTS
    assert near_ties * 1000 <= PROFILE_FP32.near_ties_per_1k_max * tokens
    print(f"\n{ROLLOUTS} rollouts, {tokens} tokens, {near_ties} near-ties")
