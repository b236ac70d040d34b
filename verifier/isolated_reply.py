"""What may be believed of a judging process's reply: that it is one which a judge can have given about what was asked.

The process has read strangers' bytes, so its reply is taken as theirs might be: rows of exactly the submissions asked about,
each of a form that follows from the rules, findings of exactly the rejected ones, everything within bounds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from protocol.errors import DETERMINISTIC, Fault, Reason
from protocol.task import TaskSpec
from protocol.verdict import Row, Status
from verifier.isolated_wire import Judged
from verifier.judge import FINDING_CHARS_MAX, Submission

#: Numbers that say where in a submission something was found: how many, and the largest.
_WHERE_MAX, _WHERE_NUMBER_MAX = 4, 1 << 31


def validate_judgement(spec: TaskSpec, submissions: Sequence[Submission], reply: Judged) -> None:
    """Check that a reply is what a judge can have said about these submissions.

    Raises:
        Fault: it is not. Whatever wrote it is not to be believed in anything.
    """
    asked = {one.account: one for one in submissions}
    rows, findings, tokens, unjudged = reply.judgement
    said = [row.account for row in rows] + [one.account for one in unjudged]
    if sorted(said) != sorted(asked):
        raise Fault(f"the judging process spoke of {len(said)} accounts that are not the {len(asked)} asked about")
    for row in rows:
        _validate_row(spec, asked[row.account], row)
    rejected = [(row.account, row.reason) for row in rows if row.status is not Status.GOOD]
    if sorted((one.account, one.reason) for one in findings) != sorted(rejected):
        raise Fault("the judging process's findings are not those of its rows")
    for finding in findings:
        where_ok = len(finding.where) <= _WHERE_MAX and all(0 <= number < _WHERE_NUMBER_MAX for number in finding.where)
        if len(finding.text) > FINDING_CHARS_MAX or not where_ok:
            raise Fault(f"the judging process's finding about 0x{finding.account.hex()} is too long, or points nowhere")
    if any(len(one.text) > FINDING_CHARS_MAX for one in unjudged):
        raise Fault("the judging process's reasons are too long")
    tokens_max = sum(len(one.drawn) for one in submissions) * spec.group_size * spec.sampling.max_tokens
    if not 0 <= tokens <= tokens_max or not (math.isfinite(reply.cpu_s) and reply.cpu_s >= 0):
        raise Fault(f"the judging process says it prefilled {tokens} tokens, limit {tokens_max}, in {reply.cpu_s} s")


def _validate_row(spec: TaskSpec, submission: Submission, row: Row) -> None:
    """One row against the submission it is about. Raises `Fault`."""
    groups, drawn = submission.commitment.leaves, len(submission.drawn)
    is_good = row.status is Status.GOOD
    fits = row.groups == groups and -(1 << 15) <= row.evidence < 1 << 15
    if is_good:
        tokens_max = groups * spec.group_size * spec.sampling.max_tokens
        fits &= groups == submission.assignment.quota and row.reason == 0 and row.audited == drawn
        fits &= 0 <= row.tokens <= tokens_max
    else:
        fits &= row.reason in set(Reason) and row.tokens == 0 and row.audited in (0, drawn)
        fits &= (row.status is Status.SHORT) == (row.reason == Reason.QUOTA)
        fits &= row.status is not Status.UNPAID or row.reason not in DETERMINISTIC
    if not fits:
        raise Fault(f"the judging process's row about 0x{row.account.hex()} cannot be: {row}")
