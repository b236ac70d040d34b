"""Judging a round: every submission gets a row, or none at all.

`get_submissions` takes from the ledger what there is to know about each; `judge_submissions` needs nothing else and works
in a process of its own (verifier.isolated_main). Cheap checks run on 100 % of each submission; the leaves the lottery drew
are prefilled together, one batch over all nodes. A `Reject` becomes a row and a finding, a `Fault` or `Ignore` becomes no
row: unknown is unpaid. Bytes that a relay could have made up are an `Ignore` (verifier.evidence): they cost a node its pay,
never its stake.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from protocol.checks import (
    Assignment,
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
from protocol.ledger.state import Commitment, LedgerState, Task
from protocol.messages import Bundle, Finding, Group
from protocol.ports import Environment, Scored, Scorer
from protocol.rounds import get_audited
from protocol.task import TaskSpec
from protocol.verdict import Row, Status
from verifier.evidence import open_served

log = logging.getLogger("troth.verifier")

#: Longest text of a finding, in characters.
FINDING_CHARS_MAX = 400


class Submission(NamedTuple):
    """One node's bundle of a round, and what the ledger says about it.

    Attributes:
        data: sealed bundle bytes, as fetched.
        public: the node's network key.
        drawn: leaves that the lottery drew.
    """

    account: bytes
    data: bytes
    assignment: Assignment
    commitment: Commitment
    public: bytes
    drawn: tuple[int, ...]


class Unjudged(NamedTuple):
    """A submission without a row, which is nobody's verdict, and why."""

    account: bytes
    text: str


class Judgement(NamedTuple):
    """Rows and findings of a round, how much was prefilled, and what could not be judged."""

    rows: list[Row]
    findings: list[Finding]
    tokens_audited: int
    unjudged: list[Unjudged]

    def join(self, other: Judgement) -> Judgement:
        """Both as one."""
        return Judgement(
            sorted(self.rows + other.rows),
            sorted(self.findings + other.findings, key=lambda finding: finding.account),
            self.tokens_audited + other.tokens_audited,
            self.unjudged + other.unjudged,
        )


@dataclass(frozen=True)
class _Audit:
    """A submission that passed the cheap checks and waits for its audited leaves."""

    submission: Submission
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
    """Judge all submissions of a round that could be fetched, in this process.

    Args:
        bundles: sealed bundle bytes by account.
        scorer: has the round's policy loaded.
        hidden: hidden size of that policy.
    """
    submissions, known = get_submissions(state, task, round_index, bundles, chain_id=chain_id, ledger=ledger)
    return known.join(judge_submissions(task.spec, submissions, environment=environment, scorer=scorer, hidden=hidden))


def get_submissions(
    state: LedgerState,
    task: Task,
    round_index: int,
    bundles: Mapping[bytes, bytes],
    *,
    chain_id: int,
    ledger: bytes,
) -> tuple[list[Submission], Judgement]:
    """Submissions that are to be judged, by account, and what the ledger alone says about the others."""
    submissions: list[Submission] = []
    known = Judgement([], [], 0, [])
    for account, data in sorted(bundles.items()):
        commitment = task.commitments[round_index][account]
        try:
            assignment = get_assignment(state, task, round_index, account, chain_id=chain_id, ledger=ledger)
        except Reject as error:
            _record(known, account, commitment, error, audited=0)
        except Ignore as error:
            _leave(known, account, error)
        else:
            drawn = get_audited(state, task, round_index, account, chain_id=chain_id, ledger=ledger)
            public = state.participants[account].network_key
            submissions.append(Submission(account, data, assignment, commitment, public, drawn))
    return submissions, known


def inspect_submission(spec: TaskSpec, submission: Submission) -> str:
    """Whether its bytes can be held for or against the node; returns why they will be rejected, if that is seen already.

    Raises:
        Ignore: they say nothing about the node.
    """
    try:
        open_served(spec, submission.assignment, submission.commitment, submission.data, submission.public)
    except Reject as error:
        return str(error)
    return ""


def judge_submissions(
    spec: TaskSpec, submissions: Sequence[Submission], *, environment: Environment, scorer: Scorer, hidden: int
) -> Judgement:
    """Judge submissions of one round.

    Args:
        scorer: has the round's policy loaded.
        hidden: hidden size of that policy.
    """
    judgement = Judgement([], [], 0, [])
    audits: list[_Audit] = []
    for one in submissions:
        try:
            audits.append(_open(spec, one, environment, hidden))
        except Reject as error:
            _record(judgement, one.account, one.commitment, error, audited=0)
        except (Fault, Ignore) as error:
            _leave(judgement, one.account, error)
    for audit, scored in _score(judgement, audits, scorer, spec.sampling.temperature_milli / 1000):
        account, evidence = audit.submission.account, 0
        try:
            matches = match_groups(spec.profile, audit.groups, scored)
            evidence = compute_evidence(spec.profile, matches, [one.gaps for one in scored])
            validate_scored(spec, audit.groups, scored, matches)
        except Reject as error:
            audited, commitment = len(audit.groups), audit.submission.commitment
            _record(judgement, account, commitment, error, audited=audited, evidence=evidence)
        except Fault as error:
            _leave(judgement, account, error)
        else:
            tokens, groups = count_sampled(spec, environment, audit.bundle), len(audit.bundle.groups)
            judgement.rows.append(Row(account, Status.GOOD, 0, groups, tokens, len(audit.groups), evidence))
    audited = sum(len(positions) for audit in audits for positions in audit.replays.sampled)
    return judgement.join(Judgement([], [], audited, []))


def _open(spec: TaskSpec, submission: Submission, environment: Environment, hidden: int) -> _Audit:
    """All checks that need no model; returns what is to be prefilled."""
    assignment = submission.assignment
    bundle = open_served(spec, assignment, submission.commitment, submission.data, submission.public)
    validate_quota(assignment, bundle)
    validate_groups(spec, environment, assignment, bundle, hidden)
    groups = [bundle.groups[i] for i in submission.drawn]
    return _Audit(submission, bundle, groups, make_replays(spec, environment, assignment, groups))


def _score(
    judgement: Judgement, audits: Sequence[_Audit], scorer: Scorer, temperature: float
) -> list[tuple[_Audit, list[Scored]]]:
    """Prefill all audits in one call; if that fails, one by one, so that one node cannot void the others' verdicts."""
    requests = [request for audit in audits for request in audit.replays.requests]
    completions = [completion for audit in audits for completion in audit.replays.completions]
    sampled = [positions for audit in audits for positions in audit.replays.sampled]
    try:
        scored = scorer.score(requests, completions, temperature=temperature, sampled=sampled)
    except Fault as error:
        log.warning("prefill of the whole round failed, trying node by node: %s", error)
        return [pair for audit in audits if (pair := _score_alone(judgement, audit, scorer, temperature)) is not None]
    pairs, start = [], 0
    for audit in audits:
        end = start + len(audit.replays.requests)
        pairs.append((audit, scored[start:end]))
        start = end
    return pairs


def _score_alone(
    judgement: Judgement, audit: _Audit, scorer: Scorer, temperature: float
) -> tuple[_Audit, list[Scored]] | None:
    requests, completions, sampled = audit.replays
    try:
        return audit, scorer.score(requests, completions, temperature=temperature, sampled=sampled)
    except Fault as error:
        _leave(judgement, audit.submission.account, error)
        return None


def _leave(judgement: Judgement, account: bytes, error: Fault | Ignore) -> None:
    """No row for a submission, which is our fault or nobody's."""
    log.warning("node 0x%s: no verdict: %s", account.hex(), error)
    judgement.unjudged.append(Unjudged(account, str(error)[:FINDING_CHARS_MAX]))


def _record(
    judgement: Judgement, account: bytes, commitment: Commitment, error: Reject, *, audited: int, evidence: int = 0
) -> None:
    """A row and a finding for a rejected submission. Tokens are 0: nothing of it is paid."""
    judgement.rows.append(Row(account, get_status(error), int(error.reason), commitment.leaves, 0, audited, evidence))
    judgement.findings.append(Finding(account, int(error.reason), str(error)[:FINDING_CHARS_MAX], error.where))
