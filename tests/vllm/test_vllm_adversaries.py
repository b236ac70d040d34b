"""Adversaries who run vLLM: R1, R2, R3, R7, R9, R11 through the real engine, judged by the real judge with torch.

Every row of an attack is a node of its own, with its own prompts and keys. The honest control goes through the same bench.
"""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from inference import vllm_runtime
from protocol.assignment import compute_sample_key
from protocol.errors import Reason
from protocol.verdict import Status
from tests.support.forge import (
    Court,
    count_good,
    count_rollouts,
    edit_samples,
    edit_weights,
    make_dishonest,
    round_to_int8,
    tokens_of,
)

TRIALS_MIN = 50


class VllmCourt(Court):
    """A court whose nodes all generate with one vLLM."""

    def __init__(self, directory: Any, vllm: Any, **changes: Any) -> None:
        super().__init__(directory, **changes)
        self._vllm, self._in_use = vllm, None

    def engine(self, folder: Any) -> Any:
        if self._in_use != folder:
            self._vllm.load(folder)
            self._in_use = folder
        return self._vllm


@pytest.fixture(scope="module")
def court(engine, tmp_path_factory):
    return VllmCourt(tmp_path_factory.mktemp("court"), engine)


def judge(court, bundles):
    """Rows of enough trials, none of them accepted."""
    rows = court.rows(court.submit_all(make_dishonest(court, bundles)))
    assert len(rows) >= TRIALS_MIN
    assert count_good(rows) == 0
    return rows


def test_honest_control(court):
    """vLLM's rollouts under the policy they are labelled with: every one of N >= 400 accepted, by a verifier on torch."""
    bundles = list(court.honest().values())
    assert count_rollouts(bundles) >= 400
    rows = court.rows(court.submit_all(bundles))
    assert count_good(rows) == len(bundles) >= TRIALS_MIN


def test_honest_nodes_on_torch_make_the_same_rollouts(court, tmp_path):
    """One assignment has one right answer, whichever engine gives it."""
    embedded = Court(tmp_path)
    assert embedded.assignments() == court.assignments()
    theirs = embedded.honest()
    assert {account: tokens_of(one) for account, one in court.honest().items()} == {
        account: tokens_of(one) for account, one in theirs.items()
    }


def test_r1_int8_weights(court, tmp_path):
    """The round's policy rounded to eight bits, the cheapest way to serve it."""
    rounded = edit_weights(court.policy, tmp_path / "int8", round_to_int8)
    rows = court.rows(court.submit_all(court.make(rounded, court.assignments())))
    assert len(rows) >= TRIALS_MIN
    assert count_good(rows) == 0


def test_r2_vllms_own_sampler(court, monkeypatch):
    """Temperature and a seed per sample handed to vLLM, as anybody would do it: the right distribution, and not the
    right tokens. The commitments are true."""
    make_params = vllm_runtime.Runtime._make_params

    def with_own_sampler(self, row, terms):
        params = make_params(self, row, terms)
        params.temperature, params.seed, params.extra_args = terms.temperature, row.request.key % 2**31, None
        return params

    monkeypatch.setattr(vllm_runtime.Runtime, "_make_params", with_own_sampler)
    rows = judge(court, court.make(court.policy, court.assignments()))
    assert {row.reason for row in rows} == {Reason.REPLAY}
    assert {row.status for row in rows} == {Status.CHEAT}


def test_r3_stale_weights(court):
    """The policy before the round's, labelled as the round's."""
    rows = judge(court, court.make(court.older, court.assignments()))
    assert {row.reason for row in rows} <= {Reason.REPLAY, Reason.COMMITMENT_MISMATCH}
    assert {row.status for row in rows} == {Status.CHEAT}


def test_r3_stale_weights_by_an_old_output_head(court, monkeypatch, tmp_path):
    """What a node would submit whose vLLM kept parts of the old policy and did not look: here the norms and matrices are
    the round's, the embedding and the output head are not."""
    from safetensors.torch import load_file

    old = load_file(court.older / "model.safetensors")
    mixed = edit_weights(
        court.policy, tmp_path / "mixed", lambda name, w: old[name] if "embed" in name or "lm_head" in name else w
    )
    rows = judge(court, court.make(mixed, court.assignments()))
    assert {row.status for row in rows} == {Status.CHEAT}


@pytest.mark.parametrize("temperature", [0.7, 0.001])
def test_r11_other_temperature(court, temperature):
    """Sharper than the task asks, down to greedy."""
    rows = judge(court, court.make(court.policy, court.assignments(), temperature=temperature))
    assert {row.reason for row in rows} == {Reason.REPLAY}


def test_r7_other_keys(court):
    """Keys of the node's own choice, as for picking the best of many."""

    def keys(one, slot):
        return [compute_sample_key(one.seed(slot), number + 64) for number in range(court.spec.group_size)]

    rows = judge(court, court.make(court.policy, court.assignments(), keys=keys))
    assert {row.reason for row in rows} == {Reason.REPLAY}


def test_r9_edited_tokens(court):
    """One token of every completion that has two is another one, committed to with the true policy's own activations."""

    def edit(slot, number, tokens):
        return tokens if len(tokens) < 2 else (2 + (tokens[0] - 1) % 30, *tokens[1:])

    rows = judge(court, [court.rewrite(one, edit) for one in court.honest().values()])
    assert {row.reason for row in rows} == {Reason.REPLAY}


def test_c2_commitments_of_another_rollout(court):
    """Honest tokens under commitments that were made for somebody else's."""
    bundles = list(court.honest().values())
    forged = []
    for mine, theirs in zip(bundles, bundles[1:] + bundles[:1], strict=True):
        proofs = iter([sample.proofs for group in theirs.groups for sample in group.samples])
        forged.append(edit_samples(mine, lambda sample, proofs=proofs: replace(sample, proofs=next(proofs))))
    rows = court.rows(court.submit_all(forged))
    assert len(rows) >= TRIALS_MIN
    assert count_good(rows) == 0
    assert {row.reason for row in rows} <= {Reason.COMMITMENT_MISMATCH, Reason.COMMITMENT_FORMAT}
