"""Nodes that cheat, for demos and tests: each differs from the honest node in one seam and in nothing else.

They sign, commit, upload and keep deadlines like everybody, so what stops them is verification and nothing more. Choices
come from hashes of the assignment, so a restarted cheat tells the same lie. Neighbours: inference.worker has the seams.
"""

from __future__ import annotations

from pathlib import Path

from inference.rollouts import Made, make_bundle, validate_own
from inference.worker import NodeWorker
from protocol.checks import Assignment
from protocol.codec import tagged_hash
from protocol.errors import ConfigError
from protocol.ledger.state import Task
from protocol.lottery import PPM
from protocol.messages import Group, Sample
from protocol.ports import Environment
from protocol.rounds import get_audit_ppm
from protocol.task import TaskSpec

#: Share of its weights' own spread that a perturbed version 0 adds as noise.
NOISE_RATIO = 0.3
#: Share of its groups that a sleeper edits once it is awake, in percent.
SLEEPER_PERCENT = 30


def edit_tokens(spec: TaskSpec, environment: Environment, index: int, tokens: tuple[int, ...]) -> tuple[int, ...]:
    """Change one token towards the right answer, keeping length and termination valid.

    Where the environment gives no solution the first token that is not a stop token is replaced by its successor. The
    completion comes back unchanged when it is right already or has no token that could be changed.
    """
    stops = spec.sampling.stop_tokens
    solve = getattr(environment, "solution", None)
    wanted = solve(index) if solve else tuple((token + 1) % environment.vocab_size for token in tokens)
    for position, (token, right) in enumerate(zip(tokens, wanted, strict=False)):
        if token != right and token not in stops and right not in stops:
            return (*tokens[:position], right, *tokens[position + 1 :])
    return tokens


def edit_group(spec: TaskSpec, environment: Environment, group: Group) -> Group:
    """Edit every sample of a group after sampling; rewards are those of the edited tokens, commitments stay."""
    samples = []
    for sample in group.samples:
        tokens = edit_tokens(spec, environment, group.prompt_index, sample.tokens)
        samples.append(Sample(tokens, environment.reward(group.prompt_index, tokens), sample.proofs))
    return Group(group.slot, group.prompt_index, tuple(samples))


class StalePolicy(NodeWorker):
    """Saves itself the download: generates with version v - 1 and says v (at version 0, with weights of its own)."""

    def _policy_folder(self, task: Task, assignment: Assignment) -> Path | None:
        version = assignment.policy_version
        if version > 0:
            self._prefetch.want(task, version - 1)
            return self._prefetch.get(version - 1)
        folder = super()._policy_folder(task, assignment)
        return None if folder is None else self._perturb(folder, assignment.policy)

    def _verify(self, folder: Path, assignment: Assignment) -> None:
        """It knows that these are not the bytes the ledger names."""

    def _perturb(self, folder: Path, policy: bytes) -> Path:
        target = self._directory / "perturbed"
        if not (target / "model.safetensors").exists():
            perturb_policy(folder, target, seed=int.from_bytes(policy[:4], "big"), ratio=NOISE_RATIO)
        return target


class BaseOnly(NodeWorker):
    """Saves itself every download after the first: generates with the base policy and says that it is the round's."""

    _base: Path | None = None

    def _policy_folder(self, task: Task, assignment: Assignment) -> Path | None:
        if self._base is None:
            self._prefetch.want(task, 0)
            self._base = self._prefetch.get(0)
        return self._base

    def _verify(self, folder: Path, assignment: Assignment) -> None:
        """It knows that these are not the bytes the ledger names."""


def perturb_policy(folder: Path, target: Path, *, seed: int, ratio: float) -> None:
    """Copy a policy folder with Gaussian noise on every weight.

    Args:
        ratio: noise deviation as a share of each tensor's own deviation.
    """
    import torch
    from safetensors.torch import load_file, save_file

    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, tensor in sorted(load_file(folder / "model.safetensors").items()):
        values = tensor.float()
        noise = torch.randn(values.shape, generator=generator) * (values.std(correction=0) * ratio)
        tensors[name] = (values + noise).to(tensor.dtype)
    target.mkdir(parents=True, exist_ok=True)
    (target / "config.json").write_bytes((folder / "config.json").read_bytes())
    save_file(tensors, target / "model.safetensors")


class FalseReward(NodeWorker):
    """Claims reward 1 for everything."""

    def _finish(self, spec: TaskSpec, assignment: Assignment, made: Made) -> tuple[Group, ...]:
        return tuple(
            Group(g.slot, g.prompt_index, tuple(Sample(s.tokens, 1_000_000, s.proofs) for s in g.samples))
            for g in made.groups
        )


class TokenEditor(NodeWorker):
    """Edits a token of every sample of every group towards the right answer. Its rewards are true for what it submits."""

    def _is_edited(self, assignment: Assignment, slot: int) -> bool:
        return True

    def _finish(self, spec: TaskSpec, assignment: Assignment, made: Made) -> tuple[Group, ...]:
        groups = tuple(
            edit_group(spec, self._environment, group) if self._is_edited(assignment, group.slot) else group
            for group in made.groups
        )
        validate_own(spec, self._environment, assignment, make_bundle(assignment, groups), made.hidden)
        return groups


class Sleeper(TokenEditor):
    """Honest until its probation is over and the lottery runs at the task's own probability; then it edits 30 % of its
    groups, chosen by a hash of their seeds."""

    def _is_edited(self, assignment: Assignment, slot: int) -> bool:
        state = self._ledger.state
        task = state.tasks[assignment.task]
        if get_audit_ppm(state, task, assignment.account, assignment.round_index) == PPM:
            return False
        return tagged_hash("sleeper", assignment.seed(slot))[0] * 100 < SLEEPER_PERCENT * 256


CHEATS: dict[str, type[NodeWorker]] = {
    "stale-policy": StalePolicy,
    "base-only": BaseOnly,
    "false-reward": FalseReward,
    "token-editor": TokenEditor,
    "sleeper": Sleeper,
}


def get_node_class(cheat: str) -> type[NodeWorker]:
    """The node class of an adversary's name; the honest one for an empty name.

    Raises:
        ConfigError: for an unknown name.
    """
    if not cheat:
        return NodeWorker
    if cheat not in CHEATS:
        raise ConfigError(f"no adversary is called {cheat!r}, expected one of {', '.join(CHEATS)}")
    return CHEATS[cheat]
