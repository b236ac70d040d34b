"""Everything that crosses a wire, besides what the ledger carries: who sends it, who reads it, when it is stale.

Bounds are derived from the task, so that a reader knows before parsing how long an honest message can be.
"""

from __future__ import annotations

from protocol.codec import PROTOCOL_VERSION, Domain, Message, decode, encode, tagged_hash
from protocol.errors import Reason, Reject
from protocol.identity import NetworkKey, verify_signature
from protocol.merkle import compute_root, keccak
from protocol.task import TaskSpec
from protocol.toploc import compute_num_chunks

RECORD_BYTES_MAX = 512
ENDPOINT_CHARS_MAX = 200
REPORT_BYTES_MAX = 1 << 20
LINEAGE_BYTES_MAX = 1 << 20


class Signed(Message, frozen=True):
    """An envelope: canonical bytes of a body, and an Ed25519 signature of them under a domain named by the reader."""

    body: bytes
    signature: bytes


class NodeRecord(Message, frozen=True):
    """Where a participant is reached. Sent to the ledger by its owner, read by everybody; the newest on the ledger holds.

    Attributes:
        account: the ledger account that registers this record, so that no other account can use it.
        curve_public: X25519 key of its CURVE sockets, 32 bytes.
        endpoint: ZeroMQ endpoint it serves at, for example "tcp://192.0.2.1:7000"; empty for peers that only dial out.
        sequence: grows with every new record.
    """

    version: int
    account: bytes
    curve_public: bytes
    endpoint: str
    sequence: int


class Sample(Message, frozen=True):
    """One rollout: its completion, the reward its node claims (millionths), one commitment per chunk of tokens.

    There is no field for log-probabilities: the trainer uses its own, so there is nothing to lie about.
    """

    tokens: tuple[int, ...]
    reward_micro: int
    proofs: tuple[bytes, ...]


class Group(Message, frozen=True):
    """All rollouts of one slot. It is one leaf of the node's commitment tree."""

    slot: int
    prompt_index: int
    samples: tuple[Sample, ...]


class Bundle(Message, frozen=True):
    """A node's work of one round, one group per slot from 0. Sent by nodes to relays after the root is on the ledger,
    read by verifiers and trainers; stale after the round's receipt deadline."""

    version: int
    task: bytes
    round: int
    account: bytes
    policy: bytes
    groups: tuple[Group, ...]


class Finding(Message, frozen=True):
    """What one verifier found in one submission. `where` indexes slot, sample, position, as far as they apply."""

    account: bytes
    reason: int
    text: str
    where: tuple[int, ...]


class Report(Message, frozen=True):
    """A verifier's findings of a round, published with its reveal. Read by the nodes concerned and by `troth explain`."""

    version: int
    task: bytes
    round: int
    verifier: bytes
    findings: tuple[Finding, ...]


class Lineage(Message, frozen=True):
    """How a policy came to be. Sent by the trainer with the policy; its hash is on the ledger.

    Attributes:
        parent: content hash of the policy it was trained from.
        batch_root: Merkle root of `leaves`.
        leaves: leaf hashes of the groups that were consumed, in order.
        optimizer_hash / config_hash: of the state before the step and of the trainer's settings.
        policy: content hash of the result.
        reward_micro: mean verified reward of the rollouts in `leaves`, in millionths.
    """

    version: int
    task: bytes
    policy_version: int
    parent: bytes
    batch_root: bytes
    leaves: tuple[bytes, ...]
    optimizer_hash: bytes
    config_hash: bytes
    policy: bytes
    reward_micro: int


def seal(key: NetworkKey, domain: Domain, message: Message) -> bytes:
    """Canonical bytes of a signed envelope around `message`."""
    body = encode(message)
    return encode(Signed(body, key.sign(domain, body)))


def unseal_body(data: bytes, domain: Domain, public: bytes, *, bytes_max: int) -> bytes:
    """Check an envelope's size, form and signature; return the body.

    Raises:
        Reject: `MALFORMED` or `SIGNATURE`.
    """
    signed = decode(Signed, data, bytes_max=bytes_max + 80)
    verify_signature(public, domain, signed.body, signed.signature)
    return signed.body


def make_domain(chain_id: int, ledger: bytes, task: bytes, kind: type[Message]) -> Domain:
    """Signing domain of a message type in a task (zeros for messages of no task)."""
    return Domain(chain_id, ledger, task, kind.__name__)


def compute_leaf(task: bytes, round_index: int, account: bytes, group: Group) -> bytes:
    """Leaf hash of a group: keccak of a tagged hash, so hashed twice like every leaf (see protocol.merkle)."""
    return keccak(tagged_hash("group", task, round_index.to_bytes(8, "big"), account, encode(group)))


def compute_bundle_root(bundle: Bundle) -> bytes:
    """Merkle root over a bundle's groups in slot order: what the node commits on the ledger."""
    return compute_root([compute_leaf(bundle.task, bundle.round, bundle.account, group) for group in bundle.groups])


def compute_bundle_bytes_max(spec: TaskSpec, slots: int) -> int:
    """Longest signed bundle an honest node can make with `slots` groups."""
    tokens = spec.sampling.max_tokens
    proofs = compute_num_chunks(tokens, spec.profile.chunk) * (2 + 2 * spec.profile.topk + 5)
    sample = tokens * 5 + proofs + 32
    return slots * (spec.group_size * sample + 32) + 512


def compute_bundle_key(task: bytes, round_index: int, account: bytes) -> bytes:
    """Blob key under which a bundle is found."""
    return tagged_hash("bundle-key", task, round_index.to_bytes(8, "big"), account)


def compute_report_key(task: bytes, round_index: int, verifier: bytes) -> bytes:
    """Blob key under which a verifier's report is found."""
    return tagged_hash("report-key", task, round_index.to_bytes(8, "big"), verifier)


def compute_lineage_key(task: bytes, policy_version: int) -> bytes:
    """Blob key under which a policy's lineage record is found."""
    return tagged_hash("lineage-key", task, policy_version.to_bytes(8, "big"))


def open_record(data: bytes, *, account: bytes, network_key: bytes, chain_id: int, ledger: bytes) -> NodeRecord:
    """Parse and check a node record from the ledger.

    Raises:
        Reject: when it is malformed, not signed by the network key, or names another account.
    """
    domain = make_domain(chain_id, ledger, bytes(32), NodeRecord)
    body = unseal_body(data, domain, network_key, bytes_max=RECORD_BYTES_MAX)
    record = decode(NodeRecord, body, bytes_max=RECORD_BYTES_MAX)
    if record.account != account or len(record.curve_public) != 32 or record.version != PROTOCOL_VERSION:
        raise Reject(
            Reason.MALFORMED,
            "node record does not belong to the account that registered it",
            observed=record.account.hex(),
            limit=account.hex(),
        )
    if len(record.endpoint) > ENDPOINT_CHARS_MAX or not record.endpoint.isascii():
        raise Reject(Reason.MALFORMED, "node record endpoint", observed=len(record.endpoint), limit=ENDPOINT_CHARS_MAX)
    return record
