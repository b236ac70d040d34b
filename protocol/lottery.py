"""Draws from beacons: which leaves are audited, and which verifiers judge a round."""

from __future__ import annotations

from collections.abc import Sequence

from protocol.codec import tagged_hash

PPM = 1_000_000


def compute_audited_leaves(
    *,
    chain_id: int,
    ledger: bytes,
    task: bytes,
    round_index: int,
    account: bytes,
    root: bytes,
    num_leaves: int,
    beacon: bytes,
    audit_ppm: int,
) -> tuple[int, ...]:
    """Leaf i is audited when H(beacon, root, i) < p * 2^256. At least one leaf of every submission is.

    Args:
        beacon: hash of the round's audit block, which is later than every commitment and receipt.
        audit_ppm: the node's audit probability in millionths.
    """
    seed = tagged_hash(
        "audit",
        chain_id.to_bytes(8, "big"),
        ledger,
        task,
        round_index.to_bytes(8, "big"),
        account,
        root,
        beacon,
    )
    draws = [int.from_bytes(tagged_hash("leaf", seed, i.to_bytes(8, "big")), "big") for i in range(num_leaves)]
    limit = audit_ppm * 2**256 // PPM
    drawn = [i for i, draw in enumerate(draws) if draw < limit]
    return tuple(drawn) or tuple(sorted(range(num_leaves), key=draws.__getitem__)[:1])


def compute_committee(
    *, task: bytes, round_index: int, beacon: bytes, candidates: Sequence[bytes], size: int
) -> tuple[bytes, ...]:
    """The verifiers that judge a round: the `size` candidates with the lowest H(beacon, verifier)."""
    seed = tagged_hash("committee", task, round_index.to_bytes(8, "big"), beacon)
    ranked = sorted(candidates, key=lambda account: tagged_hash("verifier", seed, account))
    return tuple(ranked[:size])
