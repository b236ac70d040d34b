"""Forgers for roc.py: honest rollouts of a policy, and what an attacker hands in instead. Ids are the threat model's rows.

Every forger that can commits with the true policy's own prefill of what it hands in, so that only the replay stands in its
way; those that run another policy commit to that policy's activations (R1, R3), or use it as a draft only (R2).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from models.policy import read_config
from protocol.assignment import compute_sample_key
from protocol.codec import tagged_hash
from protocol.ports import Environment, SampleRequest
from protocol.task import ProofProfile
from protocol.toploc import PRIME, build_proofs
from troth.calibrate.alternatives import make_alternatives
from troth.calibrate.measure import Made, Terms, make_rollouts
from troth.calibrate.pairs import Maker
from troth.calibrate.prompts import RANDOM, make_requests
from verifier.scorer import TorchScorer

GROUP_SIZE = 16
#: Rollouts that are decoded together.
BATCH = 256
#: Keys per group of the forger that hands in the best 16.
BEST_OF = 64
QUANTILES = 19

Edit = Callable[[int, tuple[int, ...]], tuple[int, ...]]


class Attack(NamedTuple):
    """What is handed in, one entry per rollout, and which of them are not the honest ones: bool [rollouts]."""

    row: str
    name: str
    made: Made
    is_forged: NDArray[np.bool_]


@dataclass
class World:
    """A policy, its task, and honest rollouts of it: groups of `GROUP_SIZE` share a prompt.

    Args:
        environment: of the policy; prompts are random tokens and rewards a hash when None.
        num_rollouts: a multiple of `GROUP_SIZE`.
    """

    folder: Path
    profile: ProofProfile
    environment: Environment | None
    num_rollouts: int
    max_tokens: int
    temperature: float
    seed: int

    def __post_init__(self) -> None:
        config, groups = read_config(self.folder), self.num_rollouts // GROUP_SIZE
        self.vocab = self.environment.vocab_size if self.environment else int(config["vocab_size"])
        stop = config.get("eos_token_id")
        stops = tuple(stop) if isinstance(stop, list) else () if stop is None else (int(stop),)
        profile = self.profile
        self.terms = Terms(self.temperature, self.max_tokens, stops, profile.topk, profile.chunk, None)
        self.maker = Maker("torch", BATCH, profile.dtype, 1)
        if self.environment is None:
            found = make_requests([RANDOM], groups, vocab=self.vocab, folder=self.folder, args="{}", seed=self.seed)
            self.prompts, self.indices = [one.prompt for one in found], [0] * groups
        else:
            rng = np.random.default_rng(self.seed)
            self.indices = rng.integers(self.environment.num_prompts, size=groups).tolist()
            self.prompts = [self.environment.prompt(index) for index in self.indices]
        self.requests = [
            SampleRequest(self.prompts[group], self._key(group, number))
            for group in range(groups)
            for number in range(GROUP_SIZE)
        ]
        self.honest = self.make(self.folder)

    def _key(self, group: int, number: int) -> int:
        return compute_sample_key(tagged_hash("roc", self.seed.to_bytes(8, "big"), group.to_bytes(8, "big")), number)

    def make(self, folder: Path, **terms: float) -> Made:
        """What a node with the weights in `folder` makes of the assignment, at other terms than the task's if named."""
        return make_rollouts(folder, self.maker, self.requests, self.terms._replace(**terms))

    def prefill(self, completions: Sequence[tuple[int, ...]]) -> list[NDArray[np.uint16]]:
        """The true policy's own activations of any completions, in batches that are not the verifier's."""
        scorer = TorchScorer(dtype=self.profile.dtype)
        scorer.load(self.folder)
        hiddens = []
        for start in range(0, len(completions), BATCH):
            part = slice(start, start + BATCH)
            scored = scorer.score(self.requests[part], completions[part], temperature=self.temperature)
            hiddens += [one.hidden for one in scored]
        return hiddens

    def commit(self, row: str, name: str, completions: list[tuple[int, ...]]) -> Attack:
        """Completions with the true policy's commitments; forged where the tokens are not the honest ones."""
        profile = self.profile
        proofs = build_proofs(self.prefill(completions), topk=profile.topk, chunk=profile.chunk)
        pairs = zip(completions, self.honest.completions, strict=True)
        return Attack(row, name, Made(completions, proofs), np.array([a != b for a, b in pairs]))

    def reward(self, group: int, tokens: tuple[int, ...]) -> int:
        """Reward of a completion, in millionths."""
        if self.environment is None:
            return 1_000_000 * (hashlib.sha256(repr(tokens).encode()).digest()[0] & 1)
        return self.environment.reward(self.indices[group], tokens)


def make_attacks(world: World, work: Path, names: Sequence[str] | None) -> Iterator[Attack]:
    """All attacks one after the other; other policies (all alternatives, or those named) are written to `work`."""
    alternatives = make_alternatives(world.folder, work, names, world.seed, environment=world.environment)
    for name, folder in alternatives:
        made = world.make(folder)
        honest = zip(world.honest.completions, world.honest.proofs, strict=True)
        pairs = zip(zip(made.completions, made.proofs, strict=True), honest, strict=True)
        yield Attack("R3" if name.startswith("stale") else "R1", name, made, np.array([a != b for a, b in pairs]))
        yield world.commit("R2", f"{name}, true prefill", made.completions)
    yield from make_token_attacks(world)
    yield from make_polynomials(world)


def make_token_attacks(world: World) -> Iterator[Attack]:
    """R7, R9, R10, R11: other tokens, true commitments."""
    yield best_of(world)
    for name, edit in (("one token", edit_one), ("5 % of tokens", edit_share(5)), ("47 % of tokens", edit_share(47))):
        yield world.commit("R9", f"edits {name}", _edit(world, edit))
    if world.terms.stop_tokens:
        stop = world.terms.stop_tokens[0]
        yield world.commit("R10", "end at half", _edit(world, lambda vocab, line: (*line[: len(line) // 2], stop)))
    for name, temperature in (("temperature 0.7", 0.7), ("greedy", 1e-3)):
        made = world.make(world.folder, temperature=world.temperature * temperature)
        yield world.commit("R11", name, made.completions)


def best_of(world: World) -> Attack:
    """The 16 completions with the highest rewards out of 64 keys, those of the assigned keys first among equals."""
    groups = len(world.prompts)
    requests = [SampleRequest(world.prompts[g], world._key(g, n)) for g in range(groups) for n in range(BEST_OF)]
    lines = make_rollouts(world.folder, world.maker, requests, world.terms).completions
    chosen: list[tuple[int, ...]] = []
    for group in range(groups):
        many = lines[group * BEST_OF : (group + 1) * BEST_OF]
        chosen += sorted(many, key=lambda line: -world.reward(group, line))[:GROUP_SIZE]
    return world.commit("R7", f"best 16 of {BEST_OF}", chosen)


def _edit(world: World, edit: Edit) -> list[tuple[int, ...]]:
    """Honest completions edited; stop tokens are neither edited nor put in, so that every completion has a right end."""
    stops, edited = set(world.terms.stop_tokens), []
    for line in world.honest.completions:
        body = line[:-1] if line[-1] in stops else line
        changed = edit(world.vocab, body) if body else line
        edited.append(
            changed if not body or changed[-1:] == world.terms.stop_tokens[:1] else changed + line[len(body) :]
        )
    return [tuple(_avoid(token, at, line, stops, world.vocab) for at, token in enumerate(line)) for line in edited]


def _avoid(token: int, at: int, line: tuple[int, ...], stops: set[int], vocab: int) -> int:
    while at + 1 < len(line) and token in stops:
        token = (token + 1) % vocab
    return token


def draw(*parts: object) -> int:
    """A number that a forger's choice follows from, so that runs repeat."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big")


def edit_one(vocab: int, line: tuple[int, ...]) -> tuple[int, ...]:
    """One token becomes any other."""
    at = draw("at", line) % len(line)
    return (*line[:at], (line[at] + 1 + draw("to", line) % (vocab - 1)) % vocab, *line[at + 1 :])


def edit_share(percent: int) -> Edit:
    """Each token becomes another with this chance, at least one does."""

    def edit(vocab: int, line: tuple[int, ...]) -> tuple[int, ...]:
        edited = tuple(
            (token + 1 + draw("to", i, line) % (vocab - 1)) % vocab if draw(percent, i, line) % 100 < percent else token
            for i, token in enumerate(line)
        )
        return edited if edited != line else edit_one(vocab, line)

    return edit


def make_polynomials(world: World) -> Iterator[Attack]:
    """C1, C2: honest tokens with commitments that no model made."""
    rng, honest = np.random.default_rng(world.seed), world.honest
    everything = np.ones(len(honest.completions), dtype=np.bool_)

    def forge(make: Callable[[int], list[int]]) -> Made:
        proofs = [tuple(pack(make(len(p) // 2 - 1)) for p in proof) for proof in honest.proofs]
        return Made(honest.completions, proofs)

    yield Attack("C1", "random polynomial", forge(lambda size: rng.integers(0, PRIME, size).tolist()), everything)
    value = find_constant(world.prefill(honest.completions[:BATCH]), world.profile)
    made = forge(lambda size: [value] + [0] * (size - 1))
    yield Attack("C2", f"constant polynomial, best of {2 * QUANTILES}", made, everything)


def pack(coefficients: list[int]) -> bytes:
    """Bytes of a commitment with the largest modulus."""
    return np.array([PRIME, *coefficients]).astype(">u2").tobytes()


def find_constant(hiddens: Sequence[NDArray[np.uint16]], profile: ProofProfile) -> int:
    """Of 19 quantiles of the largest magnitudes, with either sign, the bit pattern that shares sign and exponent with most
    entries that are committed to."""
    chunks = [h[i : i + profile.chunk].reshape(-1) for h in hiddens for i in range(0, len(h), profile.chunk)]
    top = np.concatenate([one[np.argsort(one & 0x7FFF)[-profile.topk :]] for one in chunks])
    quantiles = np.quantile(top & 0x7FFF, np.linspace(0.02, 0.98, QUANTILES)).astype(np.int64)
    values = [int(value) | sign for value in quantiles for sign in (0, 0x8000) if int(value) | sign < PRIME]
    return max(values, key=lambda value: int(((top ^ value) >> 7 == 0).sum()))
