"""Why a node's work was refused: verifiers' public reports, checked against the ledger before they are believed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from protocol.codec import decode
from protocol.errors import Fault, Ignore, Reason, Reject
from protocol.ledger.state import Task
from protocol.messages import REPORT_BYTES_MAX, Finding, Report, compute_report_key, make_domain, unseal_body
from protocol.ports import BlobStore, Ledger
from protocol.rounds import get_committee


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
) -> None:
    """Emit one `rejected` event per finding about this account in a round's reports."""
    said: set[tuple[int, str]] = set()
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
                events("rejected", {"round": round_index, "verifier": verifier, **_describe(finding)})


def _describe(finding: Finding) -> dict[str, object]:
    known = finding.reason in list(Reason)
    reason = Reason(finding.reason).name.lower() if known else str(finding.reason)
    return {"reason": reason, "text": finding.text[:2000], "where": list(finding.where)[:4]}
