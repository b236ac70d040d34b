"""The four ways a piece of work can end badly, and who has to act on it.

Every check in Troth raises; none returns a boolean that a caller could drop.

- `Reject`: the sender is at fault. It carries evidence that a third party can re-run; only a `Reject` can cost anybody money.
- `Ignore`: nobody is at fault (a duplicate, an old message, a round that was void). The message is dropped.
- `Fault`: we are at fault (disk, memory, a missing policy). No verdict follows; the work goes to another verifier.
- `ConfigError`: the user is at fault and can mend it.

Messages say what was wrong, what was observed, what the limit is and what to do.
"""

from __future__ import annotations

from enum import IntEnum


class Reason(IntEnum):
    """Why a submission or message was rejected. The numbers are on the wire: never renumber, only append."""

    MALFORMED = 1
    SIGNATURE = 2
    UNREGISTERED = 3
    ROOT_MISMATCH = 4
    STALE_POLICY = 5
    DUPLICATE = 6
    ASSIGNMENT = 7
    PROMPT = 8
    GROUP_SIZE = 9
    SLOT_GAP = 10
    LENGTH = 11
    TERMINATION = 12
    TOKEN_RANGE = 13
    REWARD = 14
    LOGPROB = 15
    COMMITMENT_FORMAT = 16
    COMMITMENT_MISMATCH = 17
    REPLAY = 18
    NEAR_TIES = 19
    NON_FINITE = 20
    LATE = 21
    ROLLBACK = 22
    SHARD = 23
    MANIFEST = 24
    QUOTA = 25
    RESPONSE = 26
    EVIDENCE = 27


#: Rejections whose evidence is exact (anybody who re-runs them gets the same answer on any machine) and that no honest
#: node can cause by being slow or short of slots. These are slashable.
DETERMINISTIC = frozenset(Reason) - {
    Reason.QUOTA,
    Reason.COMMITMENT_MISMATCH,
    Reason.REPLAY,
    Reason.NEAR_TIES,
    Reason.LOGPROB,
    Reason.LATE,
    Reason.ROLLBACK,
    Reason.EVIDENCE,
}


class TrothError(Exception):
    """Base of all errors this project raises on purpose."""


class Reject(TrothError):
    """The sender's fault.

    Args:
        reason: the rule that was broken.
        what: the rule in words, and the object it was broken by.
        observed: what was seen.
        limit: what would have been right.
        todo: what the sender can do about it.
        where: index of the object inside the submission, for example (slot, sample, position).
        severe: a numeric check was missed by more than its second limit (always true for deterministic reasons).
    """

    def __init__(
        self,
        reason: Reason,
        what: str,
        *,
        observed: object = "",
        limit: object = "",
        todo: str = "",
        where: tuple[int, ...] = (),
        severe: bool = False,
    ) -> None:
        self.reason = reason
        self.what = what
        self.observed = observed
        self.limit = limit
        self.todo = todo
        self.where = where
        self.severe = severe or reason in DETERMINISTIC
        parts = [f"{reason.name.lower()}: {what}"]
        if observed != "":
            parts.append(f"observed {observed}")
        if limit != "":
            parts.append(f"limit {limit}")
        if todo:
            parts.append(todo)
        super().__init__("; ".join(parts))


class Ignore(TrothError):
    """Nobody's fault: drop the message and go on."""


class Fault(TrothError):
    """Our fault: no verdict may follow from it."""


class ConfigError(TrothError):
    """The user's fault: the message says what to change."""
