"""Merkle trees over keccak-256, in the form OpenZeppelin's MerkleProof verifies.

Leaves are hashed twice by the caller's leaf function (so that a leaf can never pass for an inner node), pairs are hashed
in sorted order, and an odd node moves up unchanged. The same tree commits rollouts and pays earnings.
"""

from __future__ import annotations

from collections.abc import Sequence

from sha3 import keccak_256

from protocol.errors import Reason, Reject

#: Deepest tree anybody may prove against: 2^32 leaves.
PROOF_LENGTH_MAX = 32


def keccak(data: bytes) -> bytes:
    """Keccak-256 as the EVM computes it."""
    digest: bytes = keccak_256(data).digest()
    return digest


def _pair(a: bytes, b: bytes) -> bytes:
    return keccak(a + b) if a < b else keccak(b + a)


def _levels(leaves: Sequence[bytes]) -> list[list[bytes]]:
    levels = [list(leaves)]
    while len(levels[-1]) > 1:
        row = levels[-1]
        paired = [_pair(row[i], row[i + 1]) for i in range(0, len(row) - 1, 2)]
        levels.append(paired + row[len(row) & ~1 :])
    return levels


def compute_root(leaves: Sequence[bytes]) -> bytes:
    """Root of 32-byte leaf hashes; 32 zero bytes for no leaves."""
    return _levels(leaves)[-1][0] if leaves else bytes(32)


def compute_proof(leaves: Sequence[bytes], index: int) -> tuple[bytes, ...]:
    """Siblings from leaf `index` up to the root."""
    proof = []
    for row in _levels(leaves)[:-1]:
        sibling = index ^ 1
        if sibling < len(row):
            proof.append(row[sibling])
        index //= 2
    return tuple(proof)


def verify_proof(root: bytes, leaf: bytes, proof: Sequence[bytes]) -> None:
    """Check that `leaf` is under `root`.

    Raises:
        Reject: `ROOT_MISMATCH`.
    """
    if len(proof) > PROOF_LENGTH_MAX:
        raise Reject(Reason.ROOT_MISMATCH, "Merkle proof is too long", observed=len(proof), limit=PROOF_LENGTH_MAX)
    node = leaf
    for sibling in proof:
        node = _pair(node, sibling)
    if node != root:
        raise Reject(
            Reason.ROOT_MISMATCH,
            "leaf is not under the root",
            observed=node.hex()[:16],
            limit=root.hex()[:16],
        )


def compute_earning_leaf(task: bytes, account: bytes, cumulative: int) -> bytes:
    """Leaf of the settlement tree: keccak(keccak(abi.encode(bytes32 task, address account, uint256 cumulative)))."""
    return keccak(keccak(task + account.rjust(32, b"\0") + cumulative.to_bytes(32, "big")))
