"""Merkle trees, verdict rows and lotteries: what everybody must compute alike, over any input."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import Reject
from protocol.lottery import PPM, compute_audited_leaves, compute_committee
from protocol.merkle import compute_earning_leaf, compute_proof, compute_root, keccak, verify_proof
from protocol.verdict import ROW_BYTES, Row, Status, compute_verdict_commitment, pack_rows, unpack_rows

HASHES = st.binary(min_size=32, max_size=32)
LEAVES = st.lists(HASHES, min_size=1, max_size=33, unique=True)
ACCOUNTS = st.binary(min_size=20, max_size=20)


# Merkle


@given(LEAVES)
def test_every_leaf_is_under_the_root(leaves):
    root = compute_root(leaves)
    for index, leaf in enumerate(leaves):
        verify_proof(root, leaf, compute_proof(leaves, index))


@given(LEAVES, HASHES, st.data())
def test_nothing_else_is(leaves, other, data):
    root, index = compute_root(leaves), data.draw(st.integers(0, len(leaves) - 1))
    proof = compute_proof(leaves, index)
    if other not in leaves:
        with pytest.raises(Reject):
            verify_proof(root, other, proof)
    if proof:
        at = data.draw(st.integers(0, len(proof) - 1))
        broken = (*proof[:at], keccak(proof[at]), *proof[at + 1 :])
        for forged in (proof[:-1], (*proof, other), broken):
            with pytest.raises(Reject):
                verify_proof(root, leaves[index], forged)


@given(LEAVES, st.data())
def test_another_leaf_or_another_count_is_another_root(leaves, data):
    root, index = compute_root(leaves), data.draw(st.integers(0, len(leaves) - 1))
    assert compute_root([*leaves[:index], keccak(leaves[index]), *leaves[index + 1 :]]) != root
    assert compute_root([*leaves, keccak(leaves[-1])]) != root
    if len(leaves) > 1:
        assert compute_root(leaves[:-1]) != root


@given(st.lists(HASHES, min_size=3, max_size=17, unique=True))
def test_an_inner_node_is_no_leaf_of_the_settlement(leaves):
    """Leaves are hashed twice: nobody can find an account and amount whose leaf is an inner node."""
    inner = keccak(min(leaves[:2]) + max(leaves[:2]))
    verify_proof(compute_root(leaves), inner, compute_proof(leaves, 0)[1:])  # the tree alone does not tell
    assert compute_earning_leaf(leaves[0], leaves[1][:20], 5) == keccak(
        keccak(leaves[0] + bytes(12) + leaves[1][:20] + (5).to_bytes(32, "big"))
    )


def test_a_proof_longer_than_any_tree_is_refused():
    with pytest.raises(Reject, match="too long"):
        verify_proof(bytes(32), bytes(32), [bytes(32)] * 33)


# Verdict rows

ROWS = st.builds(
    Row,
    account=ACCOUNTS,
    status=st.sampled_from(Status),
    reason=st.integers(0, 255),
    groups=st.integers(0, 2**16 - 1),
    tokens=st.integers(0, 2**32 - 1),
    audited=st.integers(0, 2**16 - 1),
    evidence=st.integers(-(2**15), 2**15 - 1),
)
TABLES = st.lists(ROWS, max_size=8, unique_by=lambda row: row.account)


@given(TABLES, st.randoms())
def test_rows_round_trip_in_account_order(rows, random):
    shuffled = list(rows)
    random.shuffle(shuffled)
    packed = pack_rows(shuffled)
    assert packed == pack_rows(rows)
    assert len(packed) == ROW_BYTES * len(rows)
    assert list(unpack_rows(packed)) == sorted(rows)


@given(st.binary(max_size=4 * ROW_BYTES))
def test_any_bytes_are_rows_in_canonical_form_or_a_reject(data):
    try:
        rows = unpack_rows(data)
    except Reject:
        return
    assert pack_rows(rows) == data


@given(TABLES.filter(bool), st.data())
def test_rows_that_are_not_canonical_are_refused(rows, data):
    packed = bytearray(pack_rows(rows))
    at = ROW_BYTES * data.draw(st.integers(0, len(rows) - 1))
    for change in (
        {at + 20: 0},
        {at + 20: 5},
    ):
        forged = bytearray(packed)
        for position, value in change.items():
            forged[position] = value
        with pytest.raises(Reject):
            unpack_rows(bytes(forged))
    with pytest.raises(Reject):
        unpack_rows(bytes(packed[-ROW_BYTES:]) + bytes(packed))
    with pytest.raises(Reject):
        unpack_rows(bytes(packed[:-1]))


COMMITMENTS = st.fixed_dictionaries(
    {
        "task": HASHES,
        "round_index": st.integers(0, 2**32),
        "verifier": ACCOUNTS,
        "rows": st.binary(max_size=64),
        "report": HASHES,
        "salt": HASHES,
    }
)


@given(COMMITMENTS, COMMITMENTS)
def test_a_commitment_binds_all_of_its_parts(mine, theirs):
    """V2: also the verifier, so a copied commitment can never be opened by its copier."""
    for name, value in theirs.items():
        changed = {**mine, name: value}
        same = changed == mine
        assert (compute_verdict_commitment(**changed) == compute_verdict_commitment(**mine)) == same


# Lotteries


def audited(beacon, *, ppm=100_000, leaves=40, root=b"\1" * 32):
    return compute_audited_leaves(
        chain_id=1,
        ledger=bytes(20),
        task=bytes(32),
        round_index=3,
        account=b"\2" * 20,
        root=root,
        num_leaves=leaves,
        beacon=beacon,
        audit_ppm=ppm,
    )


def beacons(count):
    return [keccak(i.to_bytes(8, "big")) for i in range(count)]


@given(HASHES, st.integers(1, PPM), st.integers(1, 64))
def test_at_least_one_leaf_is_audited_and_all_at_p_1(beacon, ppm, leaves):
    drawn = audited(beacon, ppm=ppm, leaves=leaves)
    assert drawn
    assert list(drawn) == sorted(set(drawn))
    assert set(drawn) <= set(range(leaves))
    assert audited(beacon, ppm=PPM, leaves=leaves) == tuple(range(leaves))
    assert drawn == audited(beacon, ppm=ppm, leaves=leaves)


@given(HASHES, st.integers(1, PPM - 1))
def test_a_higher_probability_audits_no_less(beacon, ppm):
    low, high = audited(beacon, ppm=ppm), audited(beacon, ppm=min(PPM, ppm * 2))
    assert set(low) <= set(high)


def test_every_leaf_is_as_likely_as_p():
    """Chi-square over 4,000 beacons x 40 leaves at p = 10 %; the limit is the 1 - 1e-6 quantile for 40 cells."""
    trials, leaves, p = 4_000, 40, 0.1
    counts = np.zeros(leaves)
    for beacon in beacons(trials):
        drawn = audited(beacon)
        if len(drawn) > 1:  # a lone leaf may be the one drawn for want of any
            counts[list(drawn)] += 1
    lone = trials * (leaves * p * (1 - p) ** (leaves - 1))
    expected = (trials * leaves * p - lone) / leaves
    statistic = ((counts - expected) ** 2 / (expected * (1 - p))).sum()
    assert statistic < 96.0


def test_the_lottery_depends_on_root_and_beacon():
    """A node that knew the beacon before its root could choose what is audited; roots are fixed before it exists."""
    [beacon] = beacons(1)
    assert len({audited(beacon, root=keccak(bytes([i]))) for i in range(50)}) > 40
    assert len({audited(one) for one in beacons(50)}) > 40


def test_every_verifier_is_drawn_as_often_as_any_other():
    """Chi-square over 4,000 committees of 3 of 12."""
    candidates = [bytes([i]) * 20 for i in range(12)]
    counts = np.zeros(12)
    for beacon in beacons(4_000):
        committee = compute_committee(task=bytes(32), round_index=0, beacon=beacon, candidates=candidates, size=3)
        assert len(set(committee)) == 3
        for account in committee:
            counts[account[0]] += 1
    expected = 4_000 * 3 / 12
    assert ((counts - expected) ** 2 / (expected * 0.75)).sum() < 52.0


@given(st.lists(ACCOUNTS, unique=True, max_size=12), HASHES, st.integers(1, 5), st.randoms())
def test_a_committee_does_not_depend_on_the_order_of_candidates(candidates, beacon, size, random):
    shuffled = list(candidates)
    random.shuffle(shuffled)
    draw = [
        compute_committee(task=bytes(32), round_index=0, beacon=beacon, candidates=some, size=size)
        for some in (candidates, shuffled)
    ]
    assert draw[0] == draw[1]
    assert len(draw[0]) == min(size, len(candidates))
