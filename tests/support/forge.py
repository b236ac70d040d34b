"""A bench for forgers: real bytes of honest and dishonest submissions, judged by the real judge over a real tiny model.

`Court` is one task with many nodes, of which every one is a separate trial: each has its own quota of slots, prompts and
sampling keys. Its ledger state is folded from events. A forger gets everything a real one has: the policy, its own
prefill under it (`prefill`), its keys, and the right to commit to whatever it likes (`submit`). Version 1 is the
policy of every round, version 0 the one before it.
Neighbours: tests.support.scenario makes models and specs, verifier.judge decides, tests/adversaries attack.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from msgspec.structs import replace
from numpy.typing import NDArray

import environments
from inference.engine import TorchEngine
from inference.rollouts import make_bundle
from models.policy import load_model
from protocol.assignment import compute_prompt_index, compute_sample_key
from protocol.checks import Assignment, get_assignment
from protocol.codec import encode, tagged_hash
from protocol.episodes import Respond, compute_sampled, make_respond
from protocol.ledger import events
from protocol.ledger.state import LedgerState, Task, apply
from protocol.messages import Bundle, Group, Sample, Signed, compute_bundle_root, make_domain, seal
from protocol.ports import SampleRequest, Scorer
from protocol.rounds import get_times
from protocol.sampling import scores
from protocol.task import TaskSpec
from protocol.toploc import build_proofs
from protocol.verdict import Row, Status
from tests.support.scenario import STAKE, make_account, make_key, make_model, make_spec
from tests.support.twins import hash_policy
from verifier.judge import Judgement, judge_round
from verifier.scorer import TorchScorer

CHAIN_ID, LEDGER = 31_337, bytes.fromhex("b0" * 20)
HIDDEN = 64
START_BLOCK = 20
NUM_NODES = 56


class Submission(NamedTuple):
    """What a node put on the ledger and what it serves."""

    data: bytes
    root: bytes
    leaves: int
    policy: bytes


class Court:
    """See the module.

    Args:
        directory: for policy folders.
        slots: quota of every node.
        name: two courts of different names are two tasks with the same nodes.
        changes: fields of the task's spec.
    """

    def __init__(
        self,
        directory: Path,
        *,
        num_nodes: int = NUM_NODES,
        slots: int = 2,
        group_size: int = 4,
        name: str = "court",
        **changes: Any,
    ) -> None:
        self.older = make_model(directory / "v0", 100)
        self.policy = make_model(directory / "v1", 101)
        self.spec: TaskSpec = make_spec(
            self.older,
            group_size=group_size,
            groups_per_round=num_nodes * slots,
            slots_max=slots,
            **changes,
        )
        self._temperature = self.spec.sampling.temperature_milli / 1000
        self.environment: Any = environments.load(self.spec.environment)
        self.names = [f"forge-{i}" for i in range(num_nodes)]
        self.accounts = [make_account(one) for one in self.names]
        self._key_of = {account: make_key(one) for account, one in zip(self.accounts, self.names, strict=True)}
        self.task_id = make_account(name).ljust(32, b"\1")
        self._engines: dict[Path, TorchEngine] = {}
        self._model: Any = None
        self._honest: dict[int, dict[bytes, Bundle]] = {}
        self.scorer = TorchScorer(vocab_size=self.environment.vocab_size)
        self.scorer.load(self.policy)

    # The ledger

    def _base_events(self) -> Iterable[tuple[int, events.Event]]:
        yield 1, events.TaskPublished(self.task_id, make_account("initiator"), START_BLOCK, 10**15, encode(self.spec))
        for version, folder in enumerate((self.older, self.policy)):
            names = (hash_policy(folder), bytes(32), bytes(32), bytes(32))
            yield 2, events.PolicyRecorded(self.task_id, version, *names)
            for relay in ("relay-a", "relay-b"):
                yield 3, events.PolicyAttested(self.task_id, version, make_account(relay))
        for name in ("v0", "v1", "v2"):
            key = make_key(name).public
            yield 4, events.ParticipantRegistered(make_account(name), events.Role.VERIFIER, key, b"", STAKE)
        for account in self.accounts:
            key = self._key_of[account].public
            yield 4, events.ParticipantRegistered(account, events.Role.NODE, key, b"", STAKE)
            yield 5, events.NodeJoined(self.task_id, account, self.spec.slots_max, 0)

    def _replay(self, logged: Iterable[tuple[int, events.Event]]) -> tuple[LedgerState, Task]:
        state = LedgerState()
        for block, event in logged:
            apply(state, events.Logged(block, 0, event))
            state.block_number = max(state.block_number, block)
        return state, state.tasks[self.task_id]

    def open_round(self, round_index: int = 0) -> tuple[LedgerState, Task]:
        """The ledger in the block after a round's start: its beacon is known, nothing is committed."""
        return self._replay([*self._base_events(), *self._beacon_of_start(round_index)])

    def _beacon_of_start(self, round_index: int) -> list[tuple[int, events.Event]]:
        start = START_BLOCK + round_index * self.spec.schedule.round_blocks
        return [(start + 1, events.BeaconRecorded(start, hash_block(self.task_id, start)))]

    def close_round(
        self, submissions: Mapping[bytes, Submission], round_index: int = 0, *, salt: bytes = b""
    ) -> tuple[LedgerState, Task]:
        """The ledger after a round's audit block: submissions committed and receipted.

        Args:
            salt: changes the audit beacon.
        """
        opened = self.open_round(round_index)[1]
        times = get_times(opened, round_index)
        logged = [*self._base_events(), *self._beacon_of_start(round_index)]
        for account, s in submissions.items():
            event = events.RootCommitted(self.task_id, round_index, account, s.root, s.leaves, s.policy)
            logged.append((times.start + 2, event))
        receipt = events.BundlesReceipted(self.task_id, round_index, make_account("relay-a"), tuple(submissions))
        audit = events.BeaconRecorded(times.audit_block, hash_block(self.task_id + salt, times.audit_block))
        return self._replay([*logged, (times.start + 3, receipt), (times.audit_block + 1, audit)])

    def assignment(self, account: bytes, round_index: int = 0) -> Assignment:
        """What the ledger says a node must do."""
        state, task = self.open_round(round_index)
        return get_assignment(state, task, round_index, account, chain_id=CHAIN_ID, ledger=LEDGER)

    def assignments(self, round_index: int = 0) -> list[Assignment]:
        """Every node's assignment."""
        state, task = self.open_round(round_index)
        return [
            get_assignment(state, task, round_index, account, chain_id=CHAIN_ID, ledger=LEDGER)
            for account in self.accounts
        ]

    # Making

    def engine(self, folder: Path) -> TorchEngine:
        """A node's engine with a policy loaded."""
        if folder not in self._engines:
            self._engines[folder] = TorchEngine(vocab_size=self.environment.vocab_size)
            self._engines[folder].load(folder)
        return self._engines[folder]

    def make(
        self,
        folder: Path,
        assignments: Sequence[Assignment],
        *,
        temperature: float | None = None,
        prompt: Callable[[Assignment, int], tuple[int, ...]] | None = None,
        keys: Callable[[Assignment, int], Sequence[int]] | None = None,
        slots: Sequence[int] | None = None,
        respond: Callable[[int], Respond] | None = None,
        stop_tokens: Sequence[int] | None = None,
    ) -> list[Bundle]:
        """What nodes make of their assignments with the weights in `folder`, labelled as the assignments say.

        Args:
            temperature: in place of the task's.
            prompt: tokens to generate a slot from, in place of the assigned prompt.
            keys: sampling keys of a slot in place of the assigned ones; as many samples are made.
            slots: to fill in place of 0 to quota - 1.
            respond: what answers a prompt index, in place of the environment.
            stop_tokens: in place of the task's.
        """
        spec, requests, counts = self.spec, [], []
        for one in assignments:
            for slot in slots or range(one.quota):
                index = self.prompt_index(one, slot)
                tokens = prompt(one, slot) if prompt else self.environment.prompt(index)
                answer = respond(index) if respond else make_respond(spec, self.environment, index)
                drawn = (keys or self.keys)(one, slot)
                counts.append(len(drawn))
                requests += [SampleRequest(tokens, key, answer) for key in drawn]
        made = self.engine(folder).generate(
            requests,
            temperature=temperature or self._temperature,
            max_tokens=spec.sampling.max_tokens,
            stop_tokens=spec.sampling.stop_tokens if stop_tokens is None else stop_tokens,
        )
        proofs = build_proofs([one.hidden for one in made], topk=spec.profile.topk, chunk=spec.profile.chunk)
        rollouts = iter(zip(made, proofs, strict=True))
        bundles, sizes = [], iter(counts)
        for one in assignments:
            groups = []
            for slot in slots or range(one.quota):
                index, size = self.prompt_index(one, slot), next(sizes)
                samples = []
                for generation, proof in islice(rollouts, size):
                    reward = self.environment.reward(index, generation.tokens)
                    samples.append(Sample(generation.tokens, reward, proof))
                groups.append(Group(slot, index, tuple(samples)))
            bundles.append(make_bundle(one, tuple(groups)))
        return bundles

    def honest(self, round_index: int = 0) -> dict[bytes, Bundle]:
        """Every node's honest work of a round, made once."""
        if round_index not in self._honest:
            made = self.make(self.policy, self.assignments(round_index))
            self._honest[round_index] = {bundle.account: bundle for bundle in made}
        return self._honest[round_index]

    def prompt_index(self, assignment: Assignment, slot: int) -> int:
        """The prompt a slot was assigned."""
        return compute_prompt_index(assignment.seed(slot), self.environment.num_prompts)

    def prefill(
        self,
        prompts: Sequence[tuple[int, ...]],
        completions: Sequence[tuple[int, ...]],
        sampled: Sequence[NDArray[np.int64]] | None = None,
    ) -> list[NDArray[np.uint16]]:
        """Activations of any completions under the round's policy: what a forger with the weights can always compute."""
        requests = [SampleRequest(prompt, 0) for prompt in prompts]
        return [one.hidden for one in self.scorer.score(requests, completions, temperature=1.0, sampled=sampled)]

    def logprobs(self, prompts: Sequence[tuple[int, ...]], completions: Sequence[tuple[int, ...]]) -> list[list[float]]:
        """Log-probabilities at the task's temperature, by an engine's logits."""
        found = []
        for prompt, completion in zip(prompts, completions, strict=True):
            one = []
            for position, token in enumerate(completion):
                scaled = self._logits((*prompt, *completion[:position]))[0].astype(np.float64) / self._temperature
                one.append(float(scaled[token] - np.logaddexp.reduce(scaled)))
            found.append(one)
        return found

    def commit_to(
        self,
        prompts: Sequence[tuple[int, ...]],
        completions: Sequence[tuple[int, ...]],
        sampled: Sequence[NDArray[np.int64]] | None = None,
    ) -> list[Any]:
        """Commitments to any completions that match the round's policy perfectly."""
        profile = self.spec.profile
        return build_proofs(self.prefill(prompts, completions, sampled), topk=profile.topk, chunk=profile.chunk)

    def rewrite(self, bundle: Bundle, edit: Callable[[int, int, tuple[int, ...]], tuple[int, ...]]) -> Bundle:
        """The strongest token forger: `edit(slot, sample, tokens)` changes completions, then rewards are those of the
        new tokens and commitments are the round's policy's own over them."""
        prompts, completions, sampled = [], [], []
        for group in bundle.groups:
            for number, sample in enumerate(group.samples):
                prompts.append(self.environment.prompt(group.prompt_index))
                completions.append(tuple(edit(group.slot, number, sample.tokens)))
                sampled.append(compute_sampled(self.spec, self.environment, group.prompt_index, completions[-1]))
        proofs = iter(self.commit_to(prompts, completions, sampled))
        tokens = iter(completions)
        groups = []
        for group in bundle.groups:
            samples = []
            for _ in group.samples:
                made = next(tokens)
                samples.append(Sample(made, self.environment.reward(group.prompt_index, made), next(proofs)))
            groups.append(replace(group, samples=tuple(samples)))
        return replace(bundle, groups=tuple(groups))

    def keys(self, assignment: Assignment, slot: int) -> list[int]:
        """The sampling keys of a slot."""
        return [compute_sample_key(assignment.seed(slot), number) for number in range(self.spec.group_size)]

    def positions(self, bundle: Bundle, *, start: int = 0) -> Iterator[tuple[int, int, int, NDArray[np.float64]]]:
        """Slot, sample, position and sampling scores [vocabulary] of every token of a bundle from position `start` on, by
        logits of its own: independent of the verifier's prefill."""
        assignment, temperature = self.assignment(bundle.account, bundle.round), self._temperature
        for group in bundle.groups:
            prompt = self.environment.prompt(group.prompt_index)
            for number, (key, sample) in enumerate(zip(self.keys(assignment, group.slot), group.samples, strict=True)):
                for position in range(start, len(sample.tokens)):
                    logits = self._logits((*prompt, *sample.tokens[:position]))
                    keys, at = np.array([key], dtype=np.uint64), np.array([position], dtype=np.int64)
                    z = scores(logits, keys, at, temperature=temperature, vocab_size=logits.shape[1])
                    yield group.slot, number, position, z[0]

    def gaps(self, bundle: Bundle) -> list[float]:
        """Replay gap of every token of a bundle."""
        tokens = [token for group in bundle.groups for sample in group.samples for token in sample.tokens]
        return [float(z.max() - z[token]) for token, (*_, z) in zip(tokens, self.positions(bundle), strict=True)]

    def _logits(self, tokens: tuple[int, ...]) -> NDArray[np.float32]:
        """float32 [1, vocabulary] behind a sequence, by the model as transformers runs it."""
        if self._model is None:
            self._model = load_model(self.policy)
        with torch.inference_mode():
            logits: NDArray[np.float32] = self._model(input_ids=torch.tensor([tokens])).logits[:, -1].numpy()
        return logits

    # Submitting

    def submit(self, bundle: Bundle, *, account: bytes | None = None) -> Submission:
        """Commit to a bundle and sign it, as `account` (the bundle's own when None)."""
        signer = bundle.account if account is None else account
        domain = make_domain(CHAIN_ID, LEDGER, self.task_id, Bundle)
        data = seal(self._key_of[signer], domain, bundle)
        return Submission(data, compute_bundle_root(bundle), len(bundle.groups), bundle.policy)

    def submit_all(self, bundles: Iterable[Bundle]) -> dict[bytes, Submission]:
        """One submission per bundle, by account."""
        return {bundle.account: self.submit(bundle) for bundle in bundles}

    def submit_raw(self, bundle: Bundle, change: Callable[[list[Any]], object]) -> Submission:
        """Sign a body that no `Bundle` could hold: `change` edits its nested lists in place. The commitment is honest."""
        fields = msgspec.to_builtins(bundle, builtin_types=(bytes,))
        change(fields)
        data = self.seal_body(bundle.account, msgspec.msgpack.encode(fields))
        return Submission(data, compute_bundle_root(bundle), len(bundle.groups), bundle.policy)

    def seal_body(self, account: bytes, body: bytes) -> bytes:
        """A node's signed envelope around any bytes."""
        domain = make_domain(CHAIN_ID, LEDGER, self.task_id, Bundle)
        return encode(Signed(body, self._key_of[account].sign(domain, body)))

    # Judging

    def judge(
        self,
        submissions: Mapping[bytes, Submission],
        round_index: int = 0,
        *,
        scorer: Scorer | None = None,
        environment: Any = None,
        salt: bytes = b"",
    ) -> Judgement:
        """The real judge on a round's submissions."""
        state, task = self.close_round(submissions, round_index, salt=salt)
        return judge_round(
            state,
            task,
            round_index,
            {account: one.data for account, one in submissions.items()},
            environment=environment or self.environment,
            scorer=scorer or self.scorer,
            hidden=HIDDEN,
            chain_id=CHAIN_ID,
            ledger=LEDGER,
        )

    def rows(self, submissions: Mapping[bytes, Submission], round_index: int = 0, **changes: Any) -> list[Row]:
        """Rows alone; every submission has one."""
        rows = self.judge(submissions, round_index, **changes).rows
        assert {row.account for row in rows} == set(submissions)
        return rows


def hash_block(task: bytes, number: int) -> bytes:
    """A block hash that differs between tasks, so that two courts are independent."""
    return tagged_hash("forge-block", task, number.to_bytes(8, "big"))


def make_dishonest(court: Court, made: Iterable[Bundle], round_index: int = 0) -> list[Bundle]:
    """Those of `made` whose rollouts are not, by luck, token for token the honest ones."""
    honest = court.honest(round_index)
    return [bundle for bundle in made if tokens_of(bundle) != tokens_of(honest[bundle.account])]


def tokens_of(bundle: Bundle) -> list[list[tuple[int, ...]]]:
    """Completions by group."""
    return [[sample.tokens for sample in group.samples] for group in bundle.groups]


def count_rollouts(bundles: Iterable[Bundle]) -> int:
    """Rollouts in bundles."""
    return sum(len(group.samples) for bundle in bundles for group in bundle.groups)


def count_good(rows: Iterable[Row]) -> int:
    """Accepted submissions."""
    return sum(row.status is Status.GOOD for row in rows)


def edit_groups(bundle: Bundle, edit: Callable[[Group], Group]) -> Bundle:
    """A bundle with every group edited."""
    return replace(bundle, groups=tuple(edit(group) for group in bundle.groups))


def edit_samples(bundle: Bundle, edit: Callable[[Sample], Sample]) -> Bundle:
    """A bundle with every sample edited."""
    return edit_groups(bundle, lambda group: replace(group, samples=tuple(edit(one) for one in group.samples)))


def edit_weights(folder: Path, target: Path, edit: Callable[[str, Any], Any]) -> Path:
    """Copy a policy folder with `edit(name, tensor)` on every tensor."""
    from safetensors.torch import load_file, save_file

    target.mkdir(parents=True, exist_ok=True)
    shutil.copy(folder / "config.json", target / "config.json")
    tensors = load_file(folder / "model.safetensors")
    save_file({name: edit(name, tensor).contiguous() for name, tensor in tensors.items()}, target / "model.safetensors")
    return target


def round_to_int8(name: str, tensor: Any) -> Any:
    """Symmetric per-row int8 rounding of matrices, as weight-only quantisation does it."""
    if tensor.dim() < 2:
        return tensor
    scale = tensor.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / 127
    return (tensor / scale).round().clamp(-127, 127) * scale
