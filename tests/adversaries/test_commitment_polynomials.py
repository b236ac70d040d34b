"""Adversaries of the activation commitments themselves: C1 random, C2 constant, C3 wrong counts and lengths, C4 non-finite.

The rollouts are honest everywhere here, so nothing but the commitment checks can find the forgery.
"""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from msgspec.structs import replace

from inference.engine import TorchEngine
from inference.worker import NodeWorker
from protocol.checks import validate_match
from protocol.errors import Fault, Reason, Reject
from protocol.ledger import events
from protocol.rounds import get_times
from protocol.toploc import PRIME, build_proofs, match_proofs, parse_proof
from protocol.verdict import Status
from tests.support.forge import count_good, count_rollouts, edit_samples, edit_weights
from tests.support.scenario import Scenario, make_key, make_spec
from verifier.scorer import TorchScorer

TRIALS_MIN = 50
RANDOM_POLYNOMIALS = 10_000
EXPONENT = 0x7F80


def pack(modulus, coefficients):
    """Bytes of a commitment."""
    return np.array([modulus, *coefficients]).astype(">u2").tobytes()


def size_of(proof):
    """Number of coefficients."""
    return len(proof) // 2 - 1


@pytest.fixture(scope="module")
def activations(court):
    """The round's policy's own activations of all honest rollouts, and their commitments."""
    prompts, tokens, proofs = [], [], []
    for bundle in court.honest().values():
        for group in bundle.groups:
            for sample in group.samples:
                prompts.append(court.environment.prompt(group.prompt_index))
                tokens.append(sample.tokens)
                proofs.append(sample.proofs)
    return court.prefill(prompts, tokens), proofs


def is_accepted(profile, match):
    try:
        validate_match(profile, match, ())
    except Reject:
        return False
    return True


def compare(profile, hiddens, proofs):
    """Matches of one-chunk completions."""
    limits = {"topk": profile.topk, "chunk": profile.chunk, "modulus_min": profile.modulus_min}
    return [match for [match] in match_proofs(hiddens, proofs, **limits)]


def forge_all(court, forge, **changes):
    """Rows of every node's honest bundle with all its commitments forged; `forge(sample)` gives a sample's."""
    bundles = [
        edit_samples(one, lambda sample: replace(sample, proofs=forge(sample))) for one in court.honest().values()
    ]
    rows = court.rows(court.submit_all(bundles), **changes)
    assert len(rows) >= TRIALS_MIN
    assert count_good(rows) == 0
    return rows


def test_honest_control(court, activations):
    hiddens, proofs = activations
    assert len(hiddens) >= 200
    matches = compare(court.spec.profile, hiddens, proofs)
    assert all(is_accepted(court.spec.profile, match) for match in matches)
    rows = court.rows(court.submit_all(court.honest().values()))
    assert count_good(rows) == len(court.honest())


def test_honest_control_of_several_chunks(chunked_court):
    bundles = chunked_court.honest().values()
    assert count_rollouts(bundles) >= 200
    assert {len(sample.proofs) for b in bundles for g in b.groups for sample in g.samples} == {1, 2, 3}
    assert count_good(chunked_court.rows(chunked_court.submit_all(bundles))) == len(bundles)


# C1


def test_c1_random_polynomials(court, activations):
    """10,000 well-formed commitments against real activations: none is accepted."""
    rng, profile = np.random.default_rng(1), court.spec.profile
    hiddens, proofs = activations
    picked = [i % len(hiddens) for i in range(RANDOM_POLYNOMIALS)]
    forged = [
        (pack(rng.integers(profile.modulus_min, PRIME + 1), rng.integers(0, PRIME, size_of(proofs[i][0]))),)
        for i in picked
    ]
    matches = compare(profile, [hiddens[i] for i in picked], forged)
    assert len(matches) == RANDOM_POLYNOMIALS
    assert sum(is_accepted(profile, match) for match in matches) == 0


def test_c1_random_polynomials_before_the_judge(court):
    rng = np.random.default_rng(2)
    rows = forge_all(court, lambda sample: (pack(PRIME, rng.integers(0, PRIME, size_of(sample.proofs[0]))),))
    assert {row.reason for row in rows} == {Reason.COMMITMENT_MISMATCH}
    assert {row.status for row in rows} == {Status.CHEAT}


def test_c1_commitment_of_another_rollout(court):
    """Real activations, but those of another completion of the same length."""
    pool = {}
    for bundle in court.honest(1).values():
        for group in bundle.groups:
            for sample in group.samples:
                pool.setdefault(len(sample.tokens), []).append(sample)

    def forge(sample):
        return next(one.proofs for one in pool[len(sample.tokens)] if one.proofs != sample.proofs)

    assert {row.reason for row in forge_all(court, forge)} == {Reason.COMMITMENT_MISMATCH}


# C2


def constants(hiddens, count=19):
    """Bit patterns at quantiles of the committed entries' magnitudes, with both signs."""
    flat = np.concatenate([np.sort(h.reshape(-1) & 0x7FFF)[-128:] for h in hiddens])
    quantiles = np.quantile(flat, np.linspace(0.02, 0.98, count)).astype(np.int64)
    return [int(value) | sign for value in np.unique(quantiles) for sign in (0, 0x8000)]


@pytest.fixture(scope="module")
def constant_matches(court, activations):
    """How every constant compares with every honest rollout."""
    hiddens, proofs = activations
    return {
        value: compare(
            court.spec.profile, hiddens, [(pack(PRIME, [value] + [0] * (size_of(p[0]) - 1)),) for p in proofs]
        )
        for value in constants(hiddens)
        if value < PRIME
    }


def test_c2_best_constant_polynomial(court, constant_matches):
    """For every rollout the constant that fits best: one number, no model. A check that is blind to signs would let
    activations of one magnitude pass."""
    profile = court.spec.profile
    assert len(constant_matches) >= 19
    best = [
        min(one.mismatches * profile.topk // one.size for one in column)
        for column in zip(*constant_matches.values(), strict=True)
    ]
    assert len(best) >= 200
    assert not any(is_accepted(profile, one) for row in constant_matches.values() for one in row)
    assert min(best) > profile.exponent_mismatches_max * 2


def test_c2_best_constant_polynomial_before_the_judge(court, constant_matches):
    value = min(constant_matches, key=lambda one: sum(match.mismatches for match in constant_matches[one]))
    rows = forge_all(court, lambda sample: (pack(PRIME, [value] + [0] * (size_of(sample.proofs[0]) - 1)),))
    assert {row.reason for row in rows} == {Reason.COMMITMENT_MISMATCH}


@pytest.mark.parametrize("modulus", [0, 1, 2, 128, 32_768, 32_769, 65_432, 65_498, 65_535])
def test_c2_modulus_that_makes_indices_collide(court, modulus):
    """A small modulus folds all indices onto few points; the honest coefficients stay."""
    rows = forge_all(court, lambda sample: (modulus.to_bytes(2, "big") + sample.proofs[0][2:],))
    assert {row.reason for row in rows} == {Reason.COMMITMENT_FORMAT}
    assert {row.status for row in rows} == {Status.CHEAT}


@pytest.mark.parametrize("modulus", [65_433, 65_496])
def test_c2_a_modulus_in_range_changes_nothing(court, activations, modulus):
    """Indices of short completions are below every allowed modulus: another one commits to the same entries."""
    hiddens, proofs = activations
    forged = [(modulus.to_bytes(2, "big") + p[0][2:],) for p in proofs]
    assert compare(court.spec.profile, hiddens, forged) == compare(court.spec.profile, hiddens, proofs)


def test_c2_coefficient_that_is_no_field_element(court):
    """65497 is 0 in the field: two byte strings for one polynomial are refused."""
    rows = forge_all(court, lambda sample: (sample.proofs[0][:-2] + PRIME.to_bytes(2, "big"),))
    assert {row.reason for row in rows} == {Reason.COMMITMENT_FORMAT}


# C3


@pytest.mark.parametrize(
    "forge",
    [
        lambda proofs: (),
        lambda proofs: proofs[:-1],
        lambda proofs: (*proofs, proofs[-1]),
        lambda proofs: (*proofs, b""),
        lambda proofs: (b"", *proofs[1:]),
        lambda proofs: (proofs[0] + b"\0", *proofs[1:]),
        lambda proofs: (proofs[0] + b"\0\0", *proofs[1:]),
        lambda proofs: (proofs[0][:-1], *proofs[1:]),
        lambda proofs: (proofs[0][:-2], *proofs[1:]),
        lambda proofs: (proofs[0][:2], *proofs[1:]),
    ],
    ids=["none", "n-1", "n+1", "an empty one more", "first empty", "+1 byte", "+2", "-1", "-2", "modulus alone"],
)
def test_c3_wrong_count_or_length(chunked_court, forge):
    def forge_last(bundle):
        """One rollout of the submission, so that it is no longer than an honest one may be."""
        group = bundle.groups[-1]
        longest = max(range(4), key=lambda i: len(group.samples[i].tokens))
        samples = [replace(s, proofs=forge(s.proofs)) if i == longest else s for i, s in enumerate(group.samples)]
        return replace(bundle, groups=(*bundle.groups[:-1], replace(group, samples=tuple(samples))))

    bundles = [forge_last(one) for one in chunked_court.honest().values()]
    rows = chunked_court.rows(chunked_court.submit_all(bundles))
    assert len(rows) >= TRIALS_MIN
    assert count_good(rows) == 0
    assert {row.reason for row in rows} == {Reason.COMMITMENT_FORMAT}
    assert {row.status for row in rows} == {Status.CHEAT}


def test_c3_chunks_in_another_order(chunked_court):
    """Where a completion has two full chunks, they are exchanged: every one must be at its own place."""
    bundles = []
    for one in chunked_court.honest().values():
        made = edit_samples(
            one,
            lambda s: replace(s, proofs=(s.proofs[1], s.proofs[0], *s.proofs[2:])) if len(s.tokens) >= 4 else s,
        )
        if made != one:
            bundles.append(made)
    rows = chunked_court.rows(chunked_court.submit_all(bundles))
    assert len(rows) >= TRIALS_MIN
    assert count_good(rows) == 0
    assert {row.reason for row in rows} == {Reason.COMMITMENT_MISMATCH}


def test_c3_one_bad_chunk_among_good_ones(chunked_court):
    """The last chunk of one rollout of one group."""

    def forge(bundle):
        group = bundle.groups[1]
        last = group.samples[3]
        bad = pack(PRIME, [0x3F80] + [0] * (size_of(last.proofs[-1]) - 1))
        samples = (*group.samples[:3], replace(last, proofs=(*last.proofs[:-1], bad)))
        return replace(bundle, groups=(bundle.groups[0], replace(group, samples=samples)))

    rows = chunked_court.rows(chunked_court.submit_all(forge(one) for one in chunked_court.honest().values()))
    assert len(rows) >= TRIALS_MIN
    assert count_good(rows) == 0


# C4


@pytest.fixture(scope="module")
def broken(court, tmp_path_factory):
    """Policies whose numbers are not finite, by the tensor that is broken."""
    directory = tmp_path_factory.mktemp("broken")

    def breaker(where, value):
        def edit(name, tensor):
            if where in name:
                tensor = tensor.clone()
                tensor.view(-1)[0] = value
            return tensor

        return edit

    cases = {"nan-head": ("lm_head", float("nan")), "inf-head": ("lm_head", float("inf"))}
    cases |= {"nan-norm": ("model.norm", float("nan")), "nan-mlp": ("layers.0.mlp.up_proj", float("nan"))}
    return {name: edit_weights(court.policy, directory / name, breaker(*case)) for name, case in cases.items()}


@pytest.mark.parametrize("kind", ["nan-head", "inf-head", "nan-norm", "nan-mlp"])
def test_c4_a_node_whose_policy_is_not_finite_commits_to_nothing(tmp_path, court, broken, kind):
    world, seen = Scenario(tmp_path, make_spec(broken[kind]), broken[kind]), []
    ledger = world.register("node", events.Role.NODE)
    node = NodeWorker(
        ledger=ledger,
        task=world.task_id,
        environment=world.environment,
        engine=TorchEngine(),
        policies=world.policies,
        blobs=world.blobs,
        key=make_key("node"),
        directory=tmp_path / "node",
        events=lambda event, fields: seen.append((event, fields)),
    )

    async def run():
        while world.chain.block_number < get_times(world.task, 1).start:
            await ledger.poll()
            await node.step()
            await asyncio.sleep(0)
            world.chain.advance()
        await node.close()

    asyncio.run(asyncio.wait_for(run(), 60))
    assert world.task.members
    assert world.task.commitments == {}
    assert world.blobs.blobs == {}
    assert [fields["text"] for event, fields in seen if event == "fault"]


@pytest.mark.parametrize("pattern", [0x7FC0, 0x7F80, 0xFF80, 0x7FFF])
def test_c4_activations_that_are_not_finite_are_never_committed_to(pattern):
    hidden = np.full((3, 64), 0x3F80, dtype=np.uint16)
    hidden[1, 5] = pattern
    with pytest.raises(Fault, match="not finite"):
        build_proofs([hidden], topk=128, chunk=32)


@pytest.mark.parametrize("pattern", [0x7FC0, 0x7F80, 0xFF80, 0x7FFF, 0xFFC0])
def test_c4_non_finite_patterns_match_nothing(court, pattern):
    """A constant polynomial of a NaN or an infinity, as far as the field can hold it."""
    rows = forge_all(court, lambda sample: (pack(PRIME, [pattern] + [0] * (size_of(sample.proofs[0]) - 1)),))
    expected = Reason.COMMITMENT_FORMAT if pattern >= PRIME else Reason.COMMITMENT_MISMATCH
    assert {row.reason for row in rows} == {expected}


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("kind", ["nan-head", "inf-head", "nan-norm", "nan-mlp"])
def test_c4_a_verifier_whose_policy_is_not_finite_says_nothing(court, broken, kind):
    """NaN never equals NaN by being both wrong: no row for anybody, honest or not."""
    scorer = TorchScorer()
    scorer.load(broken[kind])
    forged = {
        account: court.submit(
            edit_samples(one, lambda s: replace(s, proofs=(pack(PRIME, [0x7FC0] + [0] * (size_of(s.proofs[0]) - 1)),)))
        )
        for account, one in list(court.honest().items())[::2]
    }
    honest = court.submit_all(list(court.honest().values())[1::2])
    judgement = court.judge({**forged, **honest}, scorer=scorer)
    assert judgement.rows == []
    assert judgement.findings == []


def test_c4_own_activations_that_are_not_finite_are_never_compared(activations):
    hiddens, proofs = activations
    mine = hiddens[0].copy()
    mine[0, 0] = 0x7FC0
    with pytest.raises(Fault, match="not finite"):
        match_proofs([mine], [proofs[0]], topk=128, chunk=32, modulus_min=65_433)


def test_parsed_commitments_are_what_was_packed():
    coefficients = np.arange(128) * 511
    modulus, parsed = parse_proof(pack(65_497, coefficients), size=128, modulus_min=65_433)
    assert modulus == 65_497
    assert parsed.tolist() == coefficients.tolist()
