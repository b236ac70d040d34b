"""What served bytes prove against a node: nothing, unless the node signed them for this very round.

A verifier gets bundles from relays, and a relay is trusted with pay, never with stake. Bytes that the node did not sign, and
an honest bundle of another round served in this one's place, can be made by whoever serves them; they are `Ignore`, so
no row follows and they are fetched again. Everything else is under the node's own signature and is judged.
Neighbours: verifier.worker checks what it fetched, verifier.judge what it judges, verifier.explain what it shows.
"""

from __future__ import annotations

from protocol.checks import Assignment, open_bundle
from protocol.codec import decode
from protocol.errors import Ignore, Reason, Reject
from protocol.ledger.state import Commitment
from protocol.messages import Bundle, compute_bundle_bytes_max, make_domain, unseal_body
from protocol.task import TaskSpec


def open_served(spec: TaskSpec, assignment: Assignment, commitment: Commitment, data: bytes, public: bytes) -> Bundle:
    """`protocol.checks.open_bundle` for bytes that came from somebody else than the node.

    Raises:
        Ignore: the bytes are not signed by the node, or are its bundle of another round: they say nothing about this one.
        Reject: the node signed them for this round, or signed what no node signs, and a rule is broken.
    """
    domain = make_domain(assignment.chain_id, assignment.ledger, assignment.task, Bundle)
    bytes_max = compute_bundle_bytes_max(spec, spec.slots_max)
    try:
        body = unseal_body(data, domain, public, bytes_max=bytes_max)
    except Reject as error:
        raise Ignore(f"served bytes are not signed by the node and prove nothing against it: {error}") from None
    try:
        return open_bundle(spec, assignment, commitment, data, public)
    except Reject as error:
        if error.reason is Reason.DUPLICATE:
            bundle = decode(Bundle, body, bytes_max=bytes_max)
            if (bundle.task, bundle.account) == (assignment.task, assignment.account):
                raise Ignore(f"the node's bundle of another round was served and proves nothing: {error}") from None
        raise
