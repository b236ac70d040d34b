"""Why a node's work was refused: verifiers' public reports, checked against the ledger before they are believed."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable

from protocol.codec import decode
from protocol.errors import Fault, Ignore, Reason, Reject
from protocol.evidence import describe_trial
from protocol.ledger.state import Task
from protocol.messages import REPORT_BYTES_MAX, Finding, Report, compute_report_key, make_domain, unseal_body
from protocol.ports import BlobStore, Ledger
from protocol.rounds import get_committee, get_outcomes, get_times, get_trial

#: Longest text of a finding that is passed on, in characters.
TEXT_CHARS_MAX = 2_000
#: How protocol.errors.Reject writes its numbers.
_OBSERVED = re.compile(r"; observed (.*?)(?=; limit |; |$)", re.S)
_LIMIT = re.compile(r"; limit (.*?)(?=; |$)", re.S)


def open_report(ledger: Ledger, task: Task, round_index: int, verifier: bytes, data: bytes) -> Report:
    """Parse a report and check that it is the one its verifier revealed.

    Raises:
        Reject: when it is malformed, unsigned, or not what the ledger names.
    """
    revealed = task.reveals[round_index][verifier].report
    digest = hashlib.sha256(data).digest()
    if digest != revealed:
        raise Reject(
            Reason.ROOT_MISMATCH,
            "report is not the one revealed",
            observed=digest.hex()[:16],
            limit=revealed.hex()[:16],
        )
    domain = make_domain(ledger.chain_id, ledger.address, task.task, Report)
    body = unseal_body(data, domain, ledger.state.participants[verifier].network_key, bytes_max=REPORT_BYTES_MAX)
    return decode(Report, body, bytes_max=REPORT_BYTES_MAX)


async def explain_round(
    ledger: Ledger,
    blobs: BlobStore,
    task: Task,
    round_index: int,
    events: Callable[[str, dict[str, object]], None],
    rejected: Callable[[dict[str, object]], None] = lambda fields: None,
) -> None:
    """Emit one `rejected` event per finding about this account in a round's reports, and call `rejected` with it.

    An alarm of the sequential test is nobody's finding: the ledger's own numbers say it.
    """
    said: set[tuple[int, str]] = set()
    outcome = get_outcomes(ledger.state, task, round_index).get(ledger.account)
    if outcome is not None and outcome.row.reason == Reason.EVIDENCE:
        fields = describe_alarm(ledger, task, round_index)
        events("rejected", {"round": round_index, **fields})
        rejected({"round": round_index, **fields})
    revealed = task.reveals.get(round_index, {})
    for verifier in get_committee(ledger.state, task, round_index):
        if verifier not in revealed:
            continue
        try:
            data = await blobs.get(compute_report_key(task.task, round_index, verifier))
            report = open_report(ledger, task, round_index, verifier, data)
        except (Fault, Ignore, Reject) as error:
            events("report_missing", {"round": round_index, "verifier": verifier, "text": str(error)})
            continue
        for finding in report.findings:
            if finding.account == ledger.account and (finding.reason, finding.text) not in said:
                said.add((finding.reason, finding.text))
                fields = describe_finding(task.task, round_index, finding)
                events("rejected", {"round": round_index, "verifier": verifier, **fields})
                rejected({"round": round_index, "verifier": "0x" + verifier.hex(), **fields})


def describe_alarm(ledger: Ledger, task: Task, round_index: int) -> dict[str, object]:
    """The alarm of this node's sequential test in a round, in the form of `describe_finding`."""
    deadline = get_times(task, round_index).opening_deadline
    trial = describe_trial(get_trial(ledger.state, task, ledger.account, deadline + 1))
    nats = ", ".join(f"{index} {added:+.3f}" for index, added in trial["nats_by_round"].items())
    observed, limit = f"log10 of R is {trial['log10']}", f"below {trial['alarm_log10']}"
    return {
        "reason": Reason.EVIDENCE.name.lower(),
        "text": f"evidence: {trial['rounds']} audited rounds together are not those of the round's policy, whatever each "
        f"alone said; observed {observed}; limit {limit}; nats added by round: {nats}; generate with the profile's "
        f"dtype and engine pair",
        "where": [],
        "observed": observed,
        "limit": limit,
        "reproduce": f"troth explain {task.task.hex()[:12]}/{round_index}/0x{ledger.account.hex()}/0/0",
    }


def describe_finding(task: bytes, round_index: int, finding: Finding) -> dict[str, object]:
    """A finding as its node reads it: the rule, what was observed, the limit, where, and the command that shows it again.

    The text is a stranger's, and is shown on terminals: it is cut, and characters that do not print become question marks. A
    finding whose text is not in the usual form keeps it whole.
    """
    known = finding.reason in list(Reason)
    text, where = finding.text[:TEXT_CHARS_MAX], list(finding.where)[:4]
    text = "".join(character if character.isprintable() else "?" for character in text)
    observed = _OBSERVED.search(text)
    limit = _LIMIT.search(text)
    slot, sample = (*where, 0, 0)[:2]
    rollout = f"{task.hex()[:12]}/{round_index}/0x{finding.account.hex()}/{slot}/{sample}"
    return {
        "reason": Reason(finding.reason).name.lower() if known else str(finding.reason),
        "text": text,
        "where": where,
        "observed": observed[1] if observed else "",
        "limit": limit[1] if limit else "",
        "reproduce": f"troth explain {rollout}",
    }
