"""Harnesses of a node's work: bundles from envelope to the last cheap check, commitments, completions, a relay's shelf."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
from msgspec.structs import replace

import environments
from environments import math_answer, sandbox
from environments.code import is_equal
from protocol.assignment import compute_prompt_index
from protocol.checks import (
    Assignment,
    count_sampled,
    get_assignment,
    make_replays,
    validate_groups,
    validate_quota,
    validate_tokens,
)
from protocol.codec import encode
from protocol.errors import Fault, Ignore, Reject
from protocol.ledger import calls, events
from protocol.ledger.state import Commitment
from protocol.messages import (
    Bundle,
    Group,
    Lineage,
    NodeRecord,
    Report,
    Sample,
    Signed,
    compute_bundle_key,
    compute_bundle_root,
    compute_lineage_key,
    compute_report_key,
    make_domain,
    seal,
)
from protocol.task import Environment as EnvironmentSpec
from protocol.toploc import build_proofs, match_proofs, parse_proof, validate_format
from tests.fuzz.kit import Harness, Target, attempt
from tests.fuzz.targets_messages import make_task_spec
from tests.support.scenario import STAKE, make_account, make_key, make_spec
from tests.support.twins import MemoryChain, MemoryLedger, MemoryPolicies
from troth.directory import Directory
from troth.relay import RelayWorker
from verifier.evidence import open_served

HIDDEN, TOPK, CHUNK = 8, 4, 2
NODE, KEY = make_account("fuzz-node"), make_key("fuzz-node")


def make_small_spec(scratch: Path):
    """A task whose bundles are a few hundred bytes."""
    spec = make_task_spec(scratch)
    profile = replace(spec.profile, topk=TOPK, chunk=CHUNK, exponent_mismatches_max=1)
    return replace(spec, profile=profile, group_size=2, groups_per_round=2, slots_max=2)


def make_hidden(tokens: int, seed: int = 0) -> np.ndarray:
    """bf16 bit patterns [tokens, HIDDEN] of ordinary numbers."""
    values = np.random.default_rng(seed).standard_normal((tokens, HIDDEN)).astype(np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def make_work(spec, environment, assignment: Assignment) -> Bundle:
    """An honest bundle, activations aside."""
    groups = []
    for slot in range(assignment.quota):
        index = compute_prompt_index(assignment.seed(slot), environment.num_prompts)
        samples = []
        for tokens in (environment.solution(index), (7, 1)):
            proofs = build_proofs([make_hidden(len(tokens))], topk=TOPK, chunk=CHUNK)[0]
            samples.append(Sample(tokens, environment.reward(index, tokens), proofs))
        groups.append(Group(slot, index, tuple(samples)))
    named = (assignment.task, assignment.round_index, assignment.account, assignment.policy)
    return Bundle(1, *named, tuple(groups))


def _bundle(scratch: Path) -> Target:
    """A body under its node's own signature, committed to as it is: the checks behind the envelope are all that is left."""
    spec = make_small_spec(scratch)
    environment = environments.load(spec.environment)
    assignment = Assignment(31_337, b"\xb0" * 20, b"\x11" * 32, 4, NODE, b"\x22" * 32, b"\x33" * 32, 1, 2)
    domain = make_domain(assignment.chain_id, assignment.ledger, assignment.task, Bundle)
    seed = make_work(spec, environment, assignment)

    def commit(data: bytes) -> Commitment:
        try:
            bundle = msgspec.msgpack.decode(data, type=Bundle)
            return Commitment(compute_bundle_root(bundle), len(bundle.groups), bundle.policy, 1)
        except (msgspec.DecodeError, UnicodeDecodeError, OverflowError, RecursionError, ValueError):
            return Commitment(bytes(32), 1, assignment.policy, 1)

    def fuzz(data: bytes) -> str:
        sealed = encode(Signed(data, KEY.sign(domain, data)))

        def work() -> None:
            bundle = open_served(spec, assignment, commit(data), sealed, KEY.public)
            assert encode(bundle) == data
            validate_quota(assignment, bundle)
            validate_groups(spec, environment, assignment, bundle, HIDDEN)
            replays = make_replays(spec, environment, assignment, bundle.groups)
            assert count_sampled(spec, environment, bundle) == sum(len(one) for one in replays.sampled)

        return attempt((Reject, Ignore), work)

    return Target(fuzz, [encode(seed)])


def _commitment(scratch: Path) -> Target:
    """One commitment: what is parsed is packed again to the same bytes."""

    def fuzz(data: bytes) -> str:
        def work() -> None:
            modulus, coefficients = parse_proof(data, size=TOPK, modulus_min=65_433)
            packed = np.array([modulus, *coefficients.tolist()], dtype=">u2").tobytes()
            assert packed == data

        return attempt(Reject, work)

    return Target(fuzz, list(build_proofs([make_hidden(6)], topk=TOPK, chunk=CHUNK)[0]))


def _split_proofs(data: bytes) -> tuple[bytes, ...]:
    """Commitments of any lengths: each is led by its length."""
    proofs, at = [], 0
    while at < len(data) and len(proofs) < 64:
        size = data[at]
        proofs.append(data[at + 1 : at + 1 + size])
        at += 1 + size
    return tuple(proofs)


def _match(scratch: Path) -> Target:
    """All commitments of a completion against a verifier's own activations."""
    hidden = make_hidden(5)

    def fuzz(data: bytes) -> str:
        proofs = _split_proofs(data)

        def work() -> None:
            limits = {"topk": TOPK, "chunk": CHUNK, "modulus_min": 65_433}
            validate_format(proofs, num_tokens=len(hidden), hidden=HIDDEN, **limits)
            for match in match_proofs([hidden], [proofs], **limits)[0]:
                assert 0 <= match.exponent_mismatches <= match.mismatches <= match.size
                assert 0 <= match.differing <= match.size

        return attempt(Reject, work)

    honest = build_proofs([hidden], topk=TOPK, chunk=CHUNK)[0]
    return Target(fuzz, [b"".join(bytes([len(proof)]) + proof for proof in honest)])


def _completion(entry: str, args: str, max_tokens: int, stop: tuple[int, ...]) -> Callable[[Path], Target]:
    """Tokens that a node sends (two bytes each), before the rules of an environment's turns, and its grader."""

    def make(scratch: Path) -> Target:
        spec = make_task_spec(scratch)
        named = EnvironmentSpec(entry, args, environments.content_hash(entry, args))
        spec = replace(
            spec, environment=named, sampling=replace(spec.sampling, max_tokens=max_tokens, stop_tokens=stop)
        )
        environment = environments.load(named)

        def fuzz(data: bytes) -> str:
            tokens = tuple(int.from_bytes(data[i : i + 2], "big") for i in range(2, len(data) - 1, 2))
            index = int.from_bytes(data[:2], "big") % environment.num_prompts

            def work() -> None:
                validate_tokens(spec, environment, index, tokens, (0, 0))
                reward = environment.reward(index, tokens)
                assert type(reward) is int
                assert 0 <= reward <= 1_000_000

            return attempt(Reject, work)

        seeds = []
        for index in range(3):
            rows = [(stop[0],)] + ([environment.solution(index)] if hasattr(environment, "solution") else [])
            if entry == "calculator":
                rows.append((*b"1+2", *b"=", *b"3", 256))
            seeds += [b"".join(n.to_bytes(2, "big") for n in (index, *row)) for row in rows]
        return Target(fuzz, seeds)

    return make


def _answer_text(scratch: Path) -> Target:
    """What a model wrote, before a mathematical grader: bounded, or no answer."""

    def fuzz(data: bytes) -> str:
        found, is_latex = math_answer.find_answer(data.decode(errors="replace"))
        if not is_latex:
            numbers = math_answer._EXPRESSION.findall(found)
            found = numbers[-1].strip() if numbers else ""
        return "accepted" if not math_answer.screen(found) else "screened"

    texts = [
        "so \\boxed{\\frac{1}{2}}",
        "$x^2+1$ and \\(3\\)",
        "it is 1,234.5 + 6 * (7 - 8)%",
        "\\boxed{\\sqrt{2}^{3}!}",
    ]
    return Target(fuzz, [text.encode() for text in texts])


def _sandbox_reply(scratch: Path) -> Target:
    """What comes out of a process that ran a stranger's program, and its comparison with what was expected."""

    def fuzz(data: bytes) -> str:
        outcomes = sandbox._read_outcomes(data, 3)
        assert len(outcomes) == 3
        for outcome in outcomes:
            assert not outcome.error or not is_equal(outcome.error, [1, 2])
            is_equal(outcome.value, [1, {"a": 2.5}])
        return attempt(Fault, lambda: sandbox._judge_end({"end": "exit", "code": 0}, data))

    return Target(
        fuzz, [b'["ready"]\n["value", [1, 2]]\n["error", "x"]\n', b'["value", {"a": 1e400}]\n["limit", "steps"]\n']
    )


def _letter(scratch: Path) -> Target:
    """A letter at a relay's door: bundle, report or lineage record, from whoever it claims to be."""
    policy = scratch / "policy"
    policy.mkdir(exist_ok=True)
    chain = MemoryChain()
    spec = replace(make_spec(policy), group_size=2, groups_per_round=2, slots_max=2)
    spec = replace(spec, profile=replace(spec.profile, topk=TOPK, chunk=CHUNK, exponent_mismatches_max=1))
    chain.state.block_number = 1

    def call(name: str, one: calls.Call) -> None:
        said: list[str] = []
        chain.mempool.append((make_account(name), one, lambda status, block, error: said.append(error)))
        chain.advance()
        assert said == [""], said

    call("initiator", calls.Publish(encode(spec), 10**12))
    [task] = chain.state.tasks
    roles = {"relay": 3, "trainer": 4, "verifier": 2, "fuzz-node": 1}
    for name, role in roles.items():
        record = NodeRecord(1, make_account(name), hashlib.sha256(name.encode()).digest(), "tcp://127.0.0.1:1", 1)
        sealed = seal(make_key(name), make_domain(chain.chain_id, chain.address, bytes(32), NodeRecord), record)
        call(name, calls.Register(events.Role(role), make_key(name).public, sealed, STAKE))
    call("fuzz-node", calls.Join(task, 2))
    ledger = MemoryLedger(chain, make_account("relay"))
    while not chain.state.beacons:
        chain.advance()
    environment = environments.load(spec.environment)
    place = {"chain_id": chain.chain_id, "ledger": chain.address}
    assignment = get_assignment(chain.state, chain.state.tasks[task], 0, NODE, **place)
    honest = make_work(spec, environment, assignment)
    chain.emit(events.RootCommitted(task, 0, NODE, compute_bundle_root(honest), len(honest.groups), honest.policy))
    report = seal(
        make_key("verifier"), make_domain(chain.chain_id, chain.address, task, Report), Report(1, task, 0, NODE, ())
    )
    digest = hashlib.sha256(report).digest()
    chain.emit(events.VerdictRevealed(task, 0, make_account("verifier"), b"", digest))
    asyncio.run(ledger.poll())
    worker = RelayWorker(
        ledger=ledger,
        directory=Directory(ledger),
        has_blob=lambda key: False,
        policies=MemoryPolicies(scratch),
        events=lambda kind, fields: None,
    )
    keys = [
        compute_bundle_key(task, 0, NODE),
        compute_report_key(task, 0, make_account("verifier")),
        compute_lineage_key(task, 0),
        compute_lineage_key(task, 1),
        bytes(32),
    ]
    senders = [hashlib.sha256(name.encode()).digest() for name in (*roles, "stranger")]
    domain = make_domain(chain.chain_id, chain.address, task, Bundle)
    bundle = seal(KEY, domain, honest)
    lineage = encode(Lineage(1, task, 1, bytes(32), bytes(32), (), bytes(32), bytes(32), bytes(32), 0))

    def fuzz(data: bytes) -> str:
        head = data[0] if data else 0
        sender, key = senders[head % 5], keys[head // 5 % 5]
        outcome = attempt((Reject, Ignore), lambda: worker.accept(sender, key, data[1:]))
        if outcome == "accepted" and key in keys[:2]:
            assert data[1:] in (bundle, report), "a relay took what the ledger does not name"
        return outcome

    seeds = [(3, 0, bundle), (2, 1, report), (1, 2, lineage), (1, 3, lineage), (4, 4, b"x")]
    return Target(fuzz, [bytes([key * 5 + sender]) + body for sender, key, body in seeds])


HARNESSES = {
    "bundle": Harness(_bundle, "msgpack", share=100),
    "commitment": Harness(_commitment, "bytes", share=40, bytes_max=64),
    "commitments_matched": Harness(_match, "bytes", share=30, bytes_max=256),
    "completion_sort": Harness(_completion("sort", '{"digits":4}', 6, (1,)), "bytes", share=20, bytes_max=64),
    "completion_guess": Harness(_completion("guess", "{}", 24, (1, 2)), "bytes", share=20, bytes_max=64),
    "completion_calculator": Harness(
        _completion("calculator", '{"size":50}', 64, (256, ord("="))), "bytes", share=20, bytes_max=160
    ),
    "answer_text": Harness(_answer_text, "text", share=20, bytes_max=600),
    "sandbox_reply": Harness(_sandbox_reply, "text", share=20, bytes_max=4000),
    "relay_letter": Harness(_letter, "tagged", share=40),
}
