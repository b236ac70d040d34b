"""A verdict done again: the judge's own row for one submission, and every number behind one of its rollouts.

`explain` says which rule a rollout keeps or breaks; this adds what it was decided by, token for token and chunk for chunk, and
what the committee revealed. It takes values only: whether they come from a ledger and relays or from a folder that a stranger
made is the caller's business (troth.replay). Neighbours: verifier.judge decides, verifier.explain shows the rules.
"""

from __future__ import annotations

from typing import NamedTuple

from protocol.checks import validate_match
from protocol.errors import Reason, Reject
from protocol.ledger.state import LedgerState, Task
from protocol.ports import Environment, Scorer
from protocol.rounds import get_committee, get_outcomes
from protocol.task import ProofProfile
from protocol.verdict import Row, unpack_rows
from verifier.explain import Check, Numbers, Rollout, explain
from verifier.judge import judge_round


class TokenNumbers(NamedTuple):
    """One sampled token.

    Attributes:
        position: in the completion, from 0.
        winner: the token that sampling gives.
        gap: score of the winner minus that of the token, logit / T.
        logprob: log-probability at the task's temperature.
        near_tie: a miss within tolerance.
        passed: the gap is within tolerance.
    """

    position: int
    token: int
    winner: int
    gap: float
    logprob: float
    near_tie: bool
    passed: bool


class ChunkNumbers(NamedTuple):
    """One commitment against the prefill; what is compared is described in protocol.toploc.ChunkMatch."""

    chunk: int
    first_position: int
    size: int
    differing: int
    mismatches: int
    mismatches_max: int
    mantissa_mean: float
    mantissa_mean_max: float
    mantissa_median: float
    mantissa_median_max: int
    passed: bool


class Replay(NamedTuple):
    """A verdict done again.

    Attributes:
        row: the judge's row for the submission; None where it gives none.
        finding: why, where the row is not good or absent.
        committee: revealed rows about the submission, by verifier of the drawn committee; None where a verifier said nothing.
        outcome: what the committee agreed on; None where it did not, or not yet.
    """

    checks: list[Check]
    tokens: list[TokenNumbers]
    chunks: list[ChunkNumbers]
    row: Row | None
    finding: str
    committee: dict[bytes, Row | None]
    outcome: Row | None

    @property
    def agrees(self) -> bool | None:
        """Whether this row says of the submission what the committee agreed on; None without either."""
        if self.row is None or self.outcome is None:
            return None
        mine, theirs = self.row, self.outcome
        # Evidence of many rounds makes a cheat of a row that is none by itself.
        by_sum = theirs.reason == Reason.EVIDENCE
        return by_sum or (mine.status, mine.groups, mine.tokens) == (theirs.status, theirs.groups, theirs.tokens)


def replay(
    state: LedgerState,
    task: Task,
    rollout: Rollout,
    data: bytes | None,
    *,
    environment: Environment,
    scorer: Scorer,
    hidden: int,
    chain_id: int,
    ledger: bytes,
) -> Replay:
    """Judge a submission again and show one rollout's numbers; see `verifier.explain.explain` for the arguments.

    Raises:
        Fault: when our own numbers or environment fail.
    """
    seen: list[Numbers] = []
    checks = list(
        explain(
            state,
            task,
            rollout,
            data,
            environment=environment,
            scorer=scorer,
            hidden=hidden,
            chain_id=chain_id,
            ledger=ledger,
            observe=seen.append,
        )
    )
    row, finding = None, "nothing to judge"
    if data is not None and rollout.account in task.commitments.get(rollout.round_index, {}):
        judgement = judge_round(
            state,
            task,
            rollout.round_index,
            {rollout.account: data},
            environment=environment,
            scorer=scorer,
            hidden=hidden,
            chain_id=chain_id,
            ledger=ledger,
        )
        row = next(iter(judgement.rows), None)
        said = [*(one.text for one in judgement.findings), *(one.text for one in judgement.unjudged)]
        finding = said[0] if said else ""
    profile, numbers = task.spec.profile, next(iter(seen), None)
    outcome = get_outcomes(state, task, rollout.round_index).get(rollout.account)
    return Replay(
        checks,
        _list_tokens(profile, numbers) if numbers else [],
        _list_chunks(profile, numbers) if numbers else [],
        row,
        finding,
        _get_revealed(state, task, rollout),
        None if outcome is None else outcome.row,
    )


def _list_tokens(profile: ProofProfile, numbers: Numbers) -> list[TokenNumbers]:
    tolerance = profile.replay_tolerance_micro / 1e6
    scored, winners = numbers.scored, numbers.scored.winners
    found = []
    for i, position in enumerate(numbers.sampled.tolist()):
        gap, token = float(scored.gaps[i]), numbers.tokens[position]
        winner = token if winners is None else int(winners[i])
        found.append(
            TokenNumbers(
                position, token, winner, gap, float(scored.logprobs[i]), 0 < gap <= tolerance, gap <= tolerance
            )
        )
    return found


def _list_chunks(profile: ProofProfile, numbers: Numbers) -> list[ChunkNumbers]:
    found = []
    for number, match in enumerate(numbers.matches):
        try:
            validate_match(profile, match, ())
            passed = True
        except Reject:
            passed = False
        found.append(
            ChunkNumbers(
                number,
                int(numbers.sampled[number * profile.chunk]),
                match.size,
                match.differing,
                match.mismatches,
                profile.exponent_mismatches_max * match.size // profile.topk,
                match.mantissa_mean,
                profile.mantissa_mean_milli_max / 1000,
                match.mantissa_median,
                profile.mantissa_median_max,
                passed,
            )
        )
    return found


def _get_revealed(state: LedgerState, task: Task, rollout: Rollout) -> dict[bytes, Row | None]:
    found: dict[bytes, Row | None] = {}
    for verifier in get_committee(state, task, rollout.round_index):
        found[verifier] = None
        reveal = task.reveals.get(rollout.round_index, {}).get(verifier)
        if reveal is None:
            continue
        try:
            rows = unpack_rows(reveal.rows)
        except Reject:
            continue
        found[verifier] = next((row for row in rows if row.account == rollout.account), None)
    return found
