"""From a receipted submission to training groups: fetched, checked on 100 %, scored by the trainer's own prefill.

Nothing a node claims is used: prompts, keys and rewards are recomputed, log-probabilities are the trainer's. The checks
are those of every verifier (protocol.checks). A submission is scored as a whole and alone, so that an auditor who repeats
it gets the same bits. Neighbours: trainer.worker decides when, trainer.audit repeats it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from models.policy import read_hidden_size
from protocol.checks import get_assignment, make_replays, open_bundle, validate_groups, validate_quota, validate_scored
from protocol.ledger.state import LedgerState, Task
from protocol.messages import compute_leaf
from protocol.ports import Environment, Scorer
from trainer.batch import GroupKey, TrainingGroup


@dataclass(frozen=True)
class LoadedScorer:
    """A scorer of one policy version, and the policy's hidden size."""

    scorer: Scorer
    hidden: int


class Scorers:
    """The scorers of the last few policy versions.

    Args:
        make: loads a scorer from a policy folder.
        size: most that are kept; every one holds a model.
    """

    def __init__(self, make: Callable[[Path], Scorer], *, size: int = 2) -> None:
        self._make = make
        self._size = size
        self._loaded: OrderedDict[int, LoadedScorer] = OrderedDict()

    def has(self, version: int) -> bool:
        """Whether `get` needs no folder."""
        return version in self._loaded

    def get(self, version: int, folder: Path | None) -> LoadedScorer:
        """The scorer of a version, loaded from `folder` when it is not here."""
        if version in self._loaded:
            self._loaded.move_to_end(version)
        else:
            assert folder is not None
            self._loaded[version] = LoadedScorer(self._make(folder), read_hidden_size(folder))
            while len(self._loaded) > self._size:
                self._loaded.popitem(last=False)
        return self._loaded[version]


def check_submission(
    state: LedgerState,
    task: Task,
    round_index: int,
    account: bytes,
    data: bytes,
    *,
    chain_id: int,
    ledger: bytes,
    environment: Environment,
    loaded: LoadedScorer,
) -> list[TrainingGroup]:
    """Check and score one bundle.

    Args:
        data: the sealed bundle as fetched.
        loaded: scorer of the round's policy.

    Returns:
        Its groups in slot order.

    Raises:
        Reject: the first rule it breaks.
        Ignore: the round is void.
        Fault: our own numbers or environment failed.
    """
    spec = task.spec
    assignment = get_assignment(state, task, round_index, account, chain_id=chain_id, ledger=ledger)
    commitment = task.commitments[round_index][account]
    bundle = open_bundle(spec, assignment, commitment, data, state.participants[account].network_key)
    validate_quota(assignment, bundle)
    validate_groups(spec, environment, assignment, bundle, loaded.hidden)
    requests, completions, sampled = make_replays(spec, environment, assignment, bundle.groups)
    scored = loaded.scorer.score(
        requests, completions, temperature=spec.sampling.temperature_milli / 1000, sampled=sampled
    )
    validate_scored(spec, bundle.groups, scored)
    size = spec.group_size
    return [
        TrainingGroup(
            key=GroupKey(round_index, account, group.slot),
            leaf=compute_leaf(task.task, round_index, account, group),
            policy_version=assignment.policy_version,
            prompt=requests[index * size].prompt,
            completions=tuple(sample.tokens for sample in group.samples),
            rewards_micro=np.array([sample.reward_micro for sample in group.samples], dtype=np.int64),
            logprobs=tuple(one.logprobs.astype(np.float32) for one in scored[index * size : (index + 1) * size]),
            sampled=tuple(sampled[index * size : (index + 1) * size]),
        )
        for index, group in enumerate(bundle.groups)
    ]
