"""Every check, how to take it out, and an adversary that only it stops.

A mutation recompiles one function of the real code without the statements that raise (or note) one `Reject`, and puts it in
place of the original wherever that is imported. `test_mutations` then shows that the adversary, refused before, is paid:
so each adversary test depends on its check, and each check is needed.
"""

from __future__ import annotations
import __future__

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

import msgspec
from msgspec.structs import replace

import protocol.checks
import protocol.codec
import protocol.episodes
import protocol.identity
import protocol.messages
import protocol.toploc
import trainer.ingest
import verifier.evidence
import verifier.judge
from protocol.errors import Reason
from protocol.messages import Bundle
from tests.support.forge import Court, Submission, edit_groups, edit_samples, make_dishonest
from tests.support.twins import hash_policy

#: Modules in which a mutated function takes the original's place.
MODULES = (
    protocol.checks,
    protocol.codec,
    protocol.episodes,
    protocol.identity,
    protocol.messages,
    protocol.toploc,
    verifier.evidence,
    verifier.judge,
    trainer.ingest,
)
EOS = 1

Submissions = Mapping[bytes, Submission]


class _Remove(ast.NodeTransformer):
    """Replace `raise Reject(Reason.X, ...)` and `failures.append(Reject(Reason.X, ...))` by `pass`."""

    def __init__(self, reason: Reason, containing: str) -> None:
        self.reason, self.containing, self.removed = reason, containing, 0

    def _is_target(self, call: ast.expr | None) -> bool:
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.func.id != "Reject":
            return False
        text = ast.unparse(call)
        return text.startswith(f"Reject(Reason.{self.reason.name},") and self.containing in text

    def _passed(self, node: ast.stmt) -> ast.stmt:
        self.removed += 1
        return ast.copy_location(ast.Pass(), node)

    def visit_Raise(self, node: ast.Raise) -> ast.stmt:
        return self._passed(node) if self._is_target(node.exc) else node

    def visit_Expr(self, node: ast.Expr) -> ast.stmt:
        call = node.value
        noted = isinstance(call, ast.Call) and len(call.args) == 1 and self._is_target(call.args[0])
        return self._passed(node) if noted else node


def without(function: FunctionType, reason: Reason, containing: str = "") -> FunctionType:
    """`function` without the statements that reject for `reason` (and whose text contains `containing`)."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    remove = _Remove(reason, containing)
    tree = ast.fix_missing_locations(remove.visit(tree))
    assert remove.removed, f"{function.__name__} rejects nothing for {reason.name}"
    flags = __future__.annotations.compiler_flag
    made: dict[str, Any] = {}
    exec(compile(tree, f"<{function.__name__} without {reason.name}>", "exec", flags), function.__globals__, made)
    mutated: FunctionType = made[function.__name__]
    return mutated


def put(monkeypatch: Any, original: object, mutated: object) -> None:
    """Put `mutated` in the place of `original` in every module that knows it by name."""
    places: list[tuple[ModuleType, str]] = [
        (module, name) for module in MODULES for name, value in vars(module).items() if value is original
    ]
    assert places
    for module, name in places:
        monkeypatch.setattr(module, name, mutated)


@dataclass(frozen=True)
class Mutation:
    """One check and its adversary.

    Attributes:
        removed: (function, reason, text) triples of statements to take out. More than one where two checks stand
            behind each other and the adversary would run into the second.
        forge: the adversary's submissions.
        reasons: what stops it while the check is in place.
    """

    name: str
    removed: tuple[tuple[Any, Reason, str], ...]
    forge: Callable[[Court], Submissions]
    reasons: frozenset[Reason]

    def disable(self, monkeypatch: Any) -> None:
        """Take the check out until the monkeypatch is undone."""
        by_function: dict[Any, FunctionType] = {}
        for function, reason, containing in self.removed:
            assert function not in by_function, "one statement of a function at a time"
            by_function[function] = without(function, reason, containing)
        for function, mutated in by_function.items():
            put(monkeypatch, function, mutated)


def _honest(court: Court) -> Iterator[Bundle]:
    """Some nodes are enough here: what is shown is that the door is open, not how often it is."""
    yield from list(court.honest().values())[:6]


def _each(edit: Callable[[Bundle], Bundle]) -> Callable[[Court], Submissions]:
    return lambda court: court.submit_all(edit(one) for one in _honest(court))


def _rewritten(edit: Callable[[int, int, tuple[int, ...]], tuple[int, ...]]) -> Callable[[Court], Submissions]:
    def forge(court: Court) -> Submissions:
        bundles = [court.rewrite(one, edit) for one in court.honest().values()]
        return court.submit_all(make_dishonest(court, bundles)[:6])

    return forge


def _raw(change: Callable[[list[Any]], object]) -> Callable[[Court], Submissions]:
    return lambda court: {one.account: court.submit_raw(one, change) for one in _honest(court)}


def _other_signer(court: Court) -> Submissions:
    """Signed by the neighbour's key."""
    nodes = list(_honest(court))
    return {
        one.account: court.submit(one, account=other.account)
        for one, other in zip(nodes, nodes[1:] + nodes[:1], strict=True)
    }


def _late_root(court: Court) -> Submissions:
    """A root over something else, as a node would post that decides later what it has made."""
    return {one.account: court.submit(one)._replace(root=b"\1" * 32) for one in _honest(court)}


def _old_name(court: Court) -> Submissions:
    older = hash_policy(court.older)
    return {one.account: court.submit(one)._replace(policy=older) for one in _honest(court)}


def _other_prompt(court: Court) -> Submissions:
    """Prompt 0, generated and committed to honestly."""
    chosen = court.assignments()[:6]
    made = court.make(court.policy, chosen, prompt=lambda one, slot: court.environment.prompt(0))
    return court.submit_all(edit_groups(one, lambda group: replace(group, prompt_index=0)) for one in made)


def _other_weights(court: Court) -> Submissions:
    """Honest tokens, so that replay has nothing to find, with activations of the version before."""
    older = court.make(court.older, court.assignments()[:6])
    pool = [sample for one in older for group in one.groups for sample in group.samples]

    def swap(sample: Any) -> Any:
        same = [s for s in pool if len(s.tokens) == len(sample.tokens)] or [sample]
        return replace(sample, proofs=same[0].proofs)

    return court.submit_all(edit_samples(one, swap) for one in _honest(court))


def _long(tokens: tuple[int, ...]) -> tuple[int, ...]:
    return (*(token if token != EOS else 2 for token in tokens), *[2] * (7 - len(tokens)))


_CHECKS, _EPISODES, _TOPLOC = protocol.checks, protocol.episodes, protocol.toploc
_REPLAY = (_CHECKS._replay_failures, Reason.REPLAY, "")


def _replay_and(*others: tuple[Any, Reason, str]) -> tuple[tuple[Any, Reason, str], ...]:
    """Forged tokens also fail replay, which has a mutation of its own."""
    return (_REPLAY, *others)


def _longer(court: Court, bundle: Bundle) -> Submission:
    """The same bundle in a longer MessagePack form."""
    honest = court.submit(bundle)
    body, _ = msgspec.msgpack.decode(honest.data)
    return honest._replace(data=court.seal_body(bundle.account, b"\xdc\x00\x06" + body[1:]))


def _chosen_keys(court: Court) -> Submissions:
    """The right prompts, but slot 1 sampled with the keys of slot 5 and saying so: who may name any slot can try keys
    until the rollouts are good."""
    slots = {0: 0, 1: 5}
    made = court.make(court.policy, court.assignments()[:6], keys=lambda one, slot: court.keys(one, slots[slot]))
    return court.submit_all(edit_groups(one, lambda group: replace(group, slot=slots[group.slot])) for one in made)


def _one_more(bundle: Bundle) -> Bundle:
    """A commitment behind the last that counts."""
    group = bundle.groups[-1]
    last = replace(group.samples[-1], proofs=group.samples[-1].proofs * 2)
    return replace(bundle, groups=(*bundle.groups[:-1], replace(group, samples=(*group.samples[:-1], last))))


def _aliased(court: Court) -> list[Bundle]:
    """Honest commitments in which a coefficient below 39 is written with the field's order added: a second form of one
    polynomial, so that one commitment has two leaf hashes."""
    bundles = []
    for bundle in court.honest().values():
        made = edit_samples(bundle, lambda s: replace(s, proofs=tuple(_alias(proof) for proof in s.proofs)))
        if made != bundle:
            bundles.append(made)
    assert bundles
    return bundles[:6]


def _alias(proof: bytes) -> bytes:
    words = [int.from_bytes(proof[i : i + 2], "big") for i in range(0, len(proof), 2)]
    small = next((i for i, word in enumerate(words) if i and word < 65_536 - _TOPLOC.PRIME), None)
    if small is not None:
        words[small] += _TOPLOC.PRIME
    return b"".join(word.to_bytes(2, "big") for word in words)


MUTATIONS = [
    Mutation(
        "canonical form",
        ((protocol.codec.decode, Reason.MALFORMED, "canonical"),),
        lambda court: {one.account: _longer(court, one) for one in _honest(court)},
        frozenset({Reason.MALFORMED}),
    ),
    Mutation(
        "signature",
        ((protocol.identity.verify_signature, Reason.SIGNATURE, ""),),
        _other_signer,
        frozenset({Reason.SIGNATURE}),
    ),
    Mutation(
        "bundle version",
        ((_CHECKS.open_bundle, Reason.MALFORMED, "version"),),
        _each(lambda one: replace(one, version=2)),
        frozenset({Reason.MALFORMED}),
    ),
    Mutation(
        "task, round and node of the bundle",
        ((_CHECKS.open_bundle, Reason.DUPLICATE, ""),),
        _each(lambda one: replace(one, round=7)),
        frozenset({Reason.DUPLICATE}),
    ),
    Mutation(
        "root on the ledger",
        ((_CHECKS.open_bundle, Reason.ROOT_MISMATCH, ""),),
        _late_root,
        frozenset({Reason.ROOT_MISMATCH}),
    ),
    Mutation(
        "the round's policy",
        ((_CHECKS.open_bundle, Reason.STALE_POLICY, ""),),
        _old_name,
        frozenset({Reason.STALE_POLICY}),
    ),
    Mutation(
        "quota",
        ((_CHECKS.validate_quota, Reason.QUOTA, ""),),
        _each(lambda one: replace(one, groups=one.groups[:1])),
        frozenset({Reason.QUOTA}),
    ),
    Mutation(
        "contiguous slots",
        ((_CHECKS.validate_group, Reason.SLOT_GAP, ""),),
        _chosen_keys,
        frozenset({Reason.SLOT_GAP}),
    ),
    Mutation(
        "assigned prompt",
        ((_CHECKS.validate_group, Reason.ASSIGNMENT, ""),),
        _other_prompt,
        frozenset({Reason.ASSIGNMENT}),
    ),
    Mutation(
        "group size",
        ((_CHECKS.validate_group, Reason.GROUP_SIZE, ""),),
        _each(lambda one: edit_groups(one, lambda group: replace(group, samples=group.samples[:-1]))),
        frozenset({Reason.GROUP_SIZE}),
    ),
    Mutation(
        "reward",
        ((_CHECKS.validate_group, Reason.REWARD, ""),),
        _each(lambda one: edit_samples(one, lambda sample: replace(sample, reward_micro=1_000_000))),
        frozenset({Reason.REWARD}),
    ),
    Mutation(
        "length",
        _replay_and((_CHECKS.validate_tokens, Reason.LENGTH, "")),
        _rewritten(lambda slot, number, tokens: _long(tokens) if (slot, number) == (0, 0) else tokens),
        frozenset({Reason.LENGTH}),
    ),
    Mutation(
        "early end",
        ((_EPISODES.validate_turns, Reason.TERMINATION, "early"),),
        _rewritten(lambda slot, number, tokens: tokens[:5]),
        frozenset({Reason.TERMINATION}),
    ),
    Mutation(
        "tokens after the end",
        _replay_and((_EPISODES.validate_turns, Reason.TERMINATION, "goes on")),
        _rewritten(lambda slot, number, tokens: (EOS, *tokens[1:]) if len(tokens) > 1 else tokens),
        frozenset({Reason.TERMINATION}),
    ),
    Mutation(
        "replay",
        (_REPLAY,),
        _rewritten(lambda slot, number, tokens: (2 + (tokens[0] + 5) % 30, *tokens[1:]) if len(tokens) > 1 else tokens),
        frozenset({Reason.REPLAY}),
    ),
    Mutation(
        "activations",
        ((_CHECKS.validate_match, Reason.COMMITMENT_MISMATCH, ""),),
        _other_weights,
        frozenset({Reason.COMMITMENT_MISMATCH}),
    ),
    Mutation(
        "number of commitments",
        (
            (_TOPLOC._validate_count, Reason.COMMITMENT_FORMAT, ""),
            (_TOPLOC.parse_proof, Reason.COMMITMENT_FORMAT, "wrong length"),
        ),
        _each(lambda one: _one_more(one)),
        frozenset({Reason.COMMITMENT_FORMAT}),
    ),
    Mutation(
        "commitment length",
        ((_TOPLOC.parse_proof, Reason.COMMITMENT_FORMAT, "wrong length"),),
        _each(lambda one: edit_samples(one, lambda s: replace(s, proofs=(s.proofs[0] + bytes(2),)))),
        frozenset({Reason.COMMITMENT_FORMAT}),
    ),
    Mutation(
        "commitment modulus",
        ((_TOPLOC.parse_proof, Reason.COMMITMENT_FORMAT, "modulus"),),
        _each(lambda one: edit_samples(one, lambda s: replace(s, proofs=(b"\x80\x01" + s.proofs[0][2:],)))),
        frozenset({Reason.COMMITMENT_FORMAT}),
    ),
    Mutation(
        "commitment coefficients",
        ((_TOPLOC.parse_proof, Reason.COMMITMENT_FORMAT, "coefficient"),),
        lambda court: court.submit_all(_aliased(court)),
        frozenset({Reason.COMMITMENT_FORMAT}),
    ),
]
