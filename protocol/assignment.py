"""Who makes which rollout with which randomness: everything follows from the round's beacon and a node's account.

    seed(slot)        = H("assignment", chain, ledger, task, round, beacon, policy, account, slot)
    prompt index      = first 8 bytes of H("prompt", seed), as an integer, modulo the number of prompts
    key(slot, sample) = first 8 bytes of H("sample", seed, sample), the Philox key of protocol.sampling

Nobody chooses: the beacon does not exist when nodes register and the policy is the ledger's. Anybody can recompute it.
"""

from __future__ import annotations

from protocol.codec import tagged_hash


def _be8(value: int) -> bytes:
    return value.to_bytes(8, "big")


def compute_slot_seed(
    *,
    chain_id: int,
    ledger: bytes,
    task: bytes,
    round_index: int,
    beacon: bytes,
    policy: bytes,
    account: bytes,
    slot: int,
) -> bytes:
    """Seed of one slot of one node in one round."""
    return tagged_hash(
        "assignment", _be8(chain_id), ledger, task, _be8(round_index), beacon, policy, account, _be8(slot)
    )


def compute_prompt_index(seed: bytes, num_prompts: int) -> int:
    """Index of the slot's prompt, 0 to num_prompts - 1."""
    return int.from_bytes(tagged_hash("prompt", seed)[:8], "big") % num_prompts


def compute_sample_key(seed: bytes, sample: int) -> int:
    """64-bit Philox key of one sample."""
    return int.from_bytes(tagged_hash("sample", seed, _be8(sample))[:8], "big")
