"""How fast this node works, measured in blocks: can a round still be finished in time?

Deadlines are blocks, so speed is tokens per block as the replica saw them pass during work: it holds the engine, the
machine's other load, the ledger node's delay and the chain's tick in one number, and needs no clock. Seconds are kept
for people only.
"""

from __future__ import annotations

from math import ceil

#: Weight of the newest measurement.
NEWEST_WEIGHT = 0.5
#: What is left of the expected work after a round was skipped for it: a machine that was slow once is tried again.
SKIP_DECAY = 0.75


class Pace:
    """Speed of one node in one task.

    Attributes:
        tokens_per_s: sampled tokens per second of generation, 0 before the first.
        tokens_per_rollout: mean length, 0 before the first.
    """

    def __init__(self) -> None:
        self.tokens_per_s = 0.0
        self.tokens_per_rollout = 0.0
        self._blocks_per_rollout: float | None = None

    @property
    def blocks_per_rollout(self) -> float:
        """Blocks that pass while one rollout is made, 0 before the first."""
        return self._blocks_per_rollout or 0.0

    def describe(self) -> dict[str, float]:
        """For the status file."""
        return {
            "tokens_per_s": round(self.tokens_per_s, 1),
            "blocks_per_rollout": round(self.blocks_per_rollout, 4),
        }

    def add_generation(self, rollouts: int, tokens: int, seconds: float) -> None:
        """Note what one call of the engine gave."""
        self.tokens_per_s = _mix(self.tokens_per_s, tokens / max(seconds, 1e-9))
        self.tokens_per_rollout = _mix(self.tokens_per_rollout, tokens / rollouts)

    def add_work(self, rollouts: int, blocks: int) -> None:
        """Note that `blocks` passed while `rollouts` were made, checked and written."""
        measured = blocks / rollouts
        known = self._blocks_per_rollout
        self._blocks_per_rollout = measured if known is None else known + NEWEST_WEIGHT * (measured - known)

    def predict_blocks(self, rollouts: int) -> int:
        """Blocks that `rollouts` more will take; 0 before anything was measured."""
        return ceil(self.blocks_per_rollout * rollouts - 1e-9)

    def relax(self) -> None:
        """A round was skipped for lack of time."""
        if self._blocks_per_rollout is not None:
            self._blocks_per_rollout *= SKIP_DECAY


def _mix(known: float, measured: float) -> float:
    return measured if known == 0 else known + NEWEST_WEIGHT * (measured - known)
