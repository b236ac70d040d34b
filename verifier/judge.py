"""Judging a round: every submission gets a row, or none at all.

Cheap checks run on 100 % of each submission; the leaves the lottery drew are prefilled together, one batch over all
nodes. A `Reject` becomes a row and a finding, a `Fault` or `Ignore` becomes no row: unknown is unpaid. Bytes that a relay
could have made up are an `Ignore` (verifier.evidence): they cost a node its pay, never its stake.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from protocol.checks import (
    Replays,
    count_sampled,
    get_assignment,
    make_replays,
    match_groups,
    validate_groups,
    validate_quota,
    validate_scored,
)
from protocol.errors import Fault, Ignore, Reason, Reject
from protocol.evidence import compute_evidence
from protocol.ledger.state import LedgerState, Task
from protocol.messages import Bundle, Finding, Group
from protocol.ports import Environment, Scored, Scorer
from protocol.rounds import get_audited
from protocol.verdict import Row, Status
from verifier.evidence import open_served

log = logging.getLogger("troth.verifier")

#: Longest text of a finding, in characters.
FINDING_CHARS_MAX = 400


class Judgement(NamedTuple):
    """Rows and findings of one round, and how much was prefilled."""

    rows: list[Row]
    findings: list[Finding]
    tokens_audited: int


@dataclass(frozen=True)
class _Audit:
    """A submission that passed the cheap checks and waits for its audited leaves."""

    account: bytes
    bundle: Bundle
    groups: list[Group]
    replays: Replays


def get_status(error: Reject) -> Status:
    """What a rejection means for the submission."""
    if error.reason is Reason.QUOTA:
        return Status.SHORT
    return Status.CHEAT if error.severe else Status.UNPAID


def judge_round(
    state: LedgerState,
    task: Task,
    round_index: int,
    bundles: Mapping[bytes, bytes],
    *,
    environment: Environment,
    scorer: Scorer,
    hidden: int,
    chain_id: int,
    ledger: bytes,
) -> Judgement:
    """Judge all submissions of a round that could be fetched.

    Args:
        bundles: sealed bundle bytes by account.
        scorer: has the round's policy loaded.
        hidden: hidden size of that policy.
    """
    rows: list[Row] = []
    findings: list[Finding] = []
    audits: list[_Audit] = []
    for account, data in sorted(bundles.items()):
        try:
            audits.append(
                _open(state, task, round_index, account, data, environment, hidden, chain_id=chain_id, ledger=ledger)
            )
        except Reject as error:
            _record(rows, findings, task, round_index, account, error, audited=0)
        except (Fault, Ignore) as error:
            log.warning("round %d, node 0x%s: no verdict: %s", round_index, account.hex(), error)
    for audit, scored in _score(audits, scorer, task.spec.sampling.temperature_milli / 1000):
        evidence = 0
        try:
            matches = match_groups(task.spec.profile, audit.groups, scored)
            evidence = compute_evidence(task.spec.profile, matches, [one.gaps for one in scored])
            validate_scored(task.spec, audit.groups, scored, matches)
        except Reject as error:
            audited = len(audit.groups)
            _record(rows, findings, task, round_index, audit.account, error, audited=audited, evidence=evidence)
        except Fault as error:
            log.warning("round %d, node 0x%s: no verdict: %s", round_index, audit.account.hex(), error)
        else:
            tokens = count_sampled(task.spec, environment, audit.bundle)
            groups = len(audit.bundle.groups)
            rows.append(Row(audit.account, Status.GOOD, 0, groups, tokens, len(audit.groups), evidence))
    audited = sum(len(positions) for audit in audits for positions in audit.replays.sampled)
    return Judgement(sorted(rows), findings, audited)


def _open(
    state: LedgerState,
    task: Task,
    round_index: int,
    account: bytes,
    data: bytes,
    environment: Environment,
    hidden: int,
    *,
    chain_id: int,
    ledger: bytes,
) -> _Audit:
    """All checks that need no model; returns what is to be prefilled."""
    assignment = get_assignment(state, task, round_index, account, chain_id=chain_id, ledger=ledger)
    commitment = task.commitments[round_index][account]
    bundle = open_served(task.spec, assignment, commitment, data, state.participants[account].network_key)
    validate_quota(assignment, bundle)
    validate_groups(task.spec, environment, assignment, bundle, hidden)
    drawn = get_audited(state, task, round_index, account, chain_id=chain_id, ledger=ledger)
    groups = [bundle.groups[i] for i in drawn]
    return _Audit(account, bundle, groups, make_replays(task.spec, environment, assignment, groups))


def _score(audits: Sequence[_Audit], scorer: Scorer, temperature: float) -> list[tuple[_Audit, list[Scored]]]:
    """Prefill all audits in one call; if that fails, one by one, so that one node cannot void the others' verdicts."""
    requests = [request for audit in audits for request in audit.replays.requests]
    completions = [completion for audit in audits for completion in audit.replays.completions]
    sampled = [positions for audit in audits for positions in audit.replays.sampled]
    try:
        scored = scorer.score(requests, completions, temperature=temperature, sampled=sampled)
    except Fault as error:
        log.warning("prefill of the whole round failed, trying node by node: %s", error)
        return [pair for audit in audits if (pair := _score_alone(audit, scorer, temperature)) is not None]
    pairs, start = [], 0
    for audit in audits:
        end = start + len(audit.replays.requests)
        pairs.append((audit, scored[start:end]))
        start = end
    return pairs


def _score_alone(audit: _Audit, scorer: Scorer, temperature: float) -> tuple[_Audit, list[Scored]] | None:
    requests, completions, sampled = audit.replays
    try:
        return audit, scorer.score(requests, completions, temperature=temperature, sampled=sampled)
    except Fault as error:
        log.warning("node 0x%s: no verdict: %s", audit.account.hex(), error)
        return None


def _record(
    rows: list[Row],
    findings: list[Finding],
    task: Task,
    round_index: int,
    account: bytes,
    error: Reject,
    *,
    audited: int,
    evidence: int = 0,
) -> None:
    """A row and a finding for a rejected submission. Tokens are 0: nothing of it is paid."""
    groups = task.commitments[round_index][account].leaves
    rows.append(Row(account, get_status(error), int(error.reason), groups, 0, audited, evidence))
    findings.append(Finding(account, int(error.reason), str(error)[:FINDING_CHARS_MAX], error.where))
