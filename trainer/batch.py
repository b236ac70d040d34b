"""What a step consumes: groups of verified rollouts, and which of the waiting ones go into the next batch.

`choose_batch` is a pure function of what waits, so the content of a batch and its order follow from the ledger: groups
are taken by (round, account, slot), too stale ones are left out, and no node fills more than its share.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainer.config import TrainerConfig


class GroupKey(NamedTuple):
    """Where a group stands on the ledger; sorting by it is the order of every batch."""

    round_index: int
    account: bytes
    slot: int


@dataclass(frozen=True)
class TrainingGroup:
    """One admitted group.

    Attributes:
        leaf: its leaf hash in the node's commitment tree.
        policy_version: of the policy that sampled it.
        rewards_micro: int64 [group size], as the environment gives them.
        logprobs: one float32 [sampled] per rollout: log-probabilities under the rollout's own policy at the task's
            temperature, recomputed by the trainer.
        sampled: positions of the sampled tokens of each completion, ascending; None when all are. Only they are trained.
    """

    key: GroupKey
    leaf: bytes
    policy_version: int
    prompt: tuple[int, ...]
    completions: tuple[tuple[int, ...], ...]
    rewards_micro: NDArray[np.int64]
    logprobs: tuple[NDArray[np.float32], ...]
    sampled: tuple[NDArray[np.int64], ...] | None = None

    @property
    def num_sampled(self) -> int:
        """Tokens that are trained on."""
        return sum(len(line) for line in (self.completions if self.sampled is None else self.sampled))


def choose_batch(
    config: TrainerConfig,
    waiting: Iterable[TrainingGroup],
    *,
    version: int,
    max_staleness: int,
    groups_max: int,
    num_nodes: int,
) -> list[TrainingGroup]:
    """Choose the next batch.

    Args:
        version: policy version the step starts from.
        max_staleness: most versions between a group's policy and `version`.
        groups_max: most groups of a batch; older ones go first.
        num_nodes: nodes that deliver to this task now. With one, it may fill the batch.
    """
    ordered = sorted(waiting, key=lambda group: group.key)
    fresh = [group for group in ordered if version - group.policy_version <= max_staleness]
    if num_nodes > 1:
        fresh = _cap_nodes(fresh, min(groups_max, len(fresh)), config.node_share_max_ppm)
    return fresh[:groups_max]


def _cap_nodes(groups: Sequence[TrainingGroup], size: int, share_ppm: int) -> list[TrainingGroup]:
    """The oldest groups such that no node has more than its share of the batch, at most `size` of them.

    The share is of what is taken, so the cap is lowered until it fits.
    """
    counts = Counter(group.key.account for group in groups)
    while size:
        cap = size * share_ppm // 1_000_000
        available = sum(min(count, cap) for count in counts.values())
        if available >= size:
            break
        size = available
    taken: Counter[bytes] = Counter()
    batch: list[TrainingGroup] = []
    for group in groups:
        if len(batch) < size and taken[group.key.account] < size * share_ppm // 1_000_000:
            taken[group.key.account] += 1
            batch.append(group)
    return batch
