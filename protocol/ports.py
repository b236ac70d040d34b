"""The seams between the rules and the world: what a role needs, without saying who provides it.

Role packages (`inference`, `verifier`, `trainer`, `shardcast`, `contracts`) never import each other. They receive these
ports from the composition root `troth`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from protocol.episodes import Respond
from protocol.ledger.calls import Call
from protocol.ledger.events import Logged
from protocol.ledger.state import LedgerState


class IntentStatus(NamedTuple):
    """How a ledger intent stands.

    Attributes:
        status: `pending` until the call is final in the chain; `reverted` when the contract refused it.
        block_number: block of inclusion, 0 while pending.
        error: decoded contract error with its values, empty unless reverted.
    """

    status: Literal["unknown", "pending", "final", "reverted"]
    block_number: int = 0
    error: str = ""


class Ledger(Protocol):
    """One participant's connection to a ledger: a replica to read, a durable outbox to write."""

    @property
    def account(self) -> bytes: ...
    @property
    def chain_id(self) -> int: ...
    @property
    def address(self) -> bytes:
        """Address of the task contract, which is part of every signing domain."""
        ...

    @property
    def state(self) -> LedgerState: ...

    async def poll(self) -> list[Logged]:
        """Advance the replica to the chain's head and push the outbox; returns the new events in chain order."""
        ...

    async def submit(self, intent: str, call: Call) -> None:
        """Make a call durable under an idempotent name. A second submit under one name does nothing."""
        ...

    def outcome(self, intent: str) -> IntentStatus: ...

    async def wait(self, intent: str, timeout_s: float) -> IntentStatus:
        """Poll until the intent is final or reverted. Raises `Fault` after `timeout_s`."""
        ...


class BlobStore(Protocol):
    """Blobs by 32-byte key, spread over relays; the reader checks what it gets."""

    async def put(self, key: bytes, data: bytes) -> None:
        """Store `data` at a relay. Raises `Reject` with the relay's reason, or `Fault` when no relay answers."""
        ...

    async def get(self, key: bytes) -> bytes:
        """Fetch the blob under `key`. Raises `Fault` when no relay has it."""
        ...


class PolicyStore(Protocol):
    """Policies by ledger record: fetched from peers, verified, assembled."""

    async def fetch(self, task: bytes, version: int) -> Path:
        """Return the folder of a policy whose content hash equals the ledger's. Raises `Fault` when it cannot be had."""
        ...

    async def publish(self, task: bytes, version: int, parent: int, folder: Path) -> tuple[bytes, bytes]:
        """Serve a new policy's bytes; returns its content hash and its manifest hash."""
        ...


class Clock(Protocol):
    """Wall clock. It only paces retries; deadlines are block numbers."""

    def time(self) -> float: ...
    async def sleep(self, seconds: float) -> None: ...


class Environment(Protocol):
    """Prompts and rewards: pure, deterministic, bounded."""

    @property
    def num_prompts(self) -> int:
        """Prompts are numbered from 0 to num_prompts - 1."""
        ...

    @property
    def vocab_size(self) -> int:
        """Token ids at or above it are never valid."""
        ...

    def prompt(self, index: int) -> tuple[int, ...]:
        """Prompt tokens of a prompt index."""
        ...

    def respond(self, index: int, completion: Sequence[int]) -> tuple[int, ...]:
        """Tokens that follow a completion which ends in a stop token; empty when it is over (see protocol.episodes).

        A function of its arguments. An infrastructure error raises `Fault`.
        """
        ...

    def reward(self, index: int, completion: Sequence[int]) -> int:
        """Reward of a completion in millionths, 0 to 1,000,000. An infrastructure error raises `Fault`, it is never 0."""
        ...


class SampleRequest(NamedTuple):
    """One completion to make or to replay.

    Attributes:
        prompt: prompt token ids.
        key: the sample's 64-bit Philox key (see protocol.assignment).
        respond: what follows a stop token (protocol.episodes); None when every stop token ends the completion.
    """

    prompt: tuple[int, ...]
    key: int
    respond: Respond | None = None


class Generation(NamedTuple):
    """One completion from an engine.

    Attributes:
        tokens: completion token ids, stop tokens and the environment's answers included.
        hidden: uint16 bf16 bit patterns, shape [sampled, hidden]: the post-norm last hidden state from which each sampled
            token was drawn, the first row being the state behind the first completion token. Without answers every
            token is sampled.
    """

    tokens: tuple[int, ...]
    hidden: NDArray[np.uint16]


class Engine(Protocol):
    """A generation engine that samples by replayable Gumbel noise (protocol.sampling)."""

    def load(self, folder: Path) -> None:
        """Load a policy folder (models.policy). Atomic: on failure the old policy stays."""
        ...

    def generate(
        self,
        requests: Sequence[SampleRequest],
        *,
        temperature: float,
        max_tokens: int,
        stop_tokens: Sequence[int],
    ) -> list[Generation]:
        """Complete every request. The result does not depend on batch composition or order beyond near-ties."""
        ...


class Scored(NamedTuple):
    """A verifier's own prefill of one completion under the claimed policy.

    Attributes:
        hidden: uint16 bf16 bit patterns, [sampled, hidden], same rows as `Generation.hidden`.
        gaps: float64 [sampled], max(z) - z[token] with z = logits / T + gumbel; 0 where the replay hits.
        logprobs: float64 [sampled], log softmax(logits / T) at the token.
        winners: int64 [sampled], the tokens that sampling gives; for people who look, None where nobody asked.
    """

    hidden: NDArray[np.uint16]
    gaps: NDArray[np.float64]
    logprobs: NDArray[np.float64]
    winners: NDArray[np.int64] | None = None


class Scorer(Protocol):
    """A verifier's prefill. It shares no code path with an engine's decode."""

    def load(self, folder: Path) -> None: ...

    def score(
        self,
        requests: Sequence[SampleRequest],
        completions: Sequence[Sequence[int]],
        *,
        temperature: float,
        sampled: Sequence[NDArray[np.int64]] | None = None,
    ) -> list[Scored]:
        """Prefill every completion once.

        Args:
            sampled: positions of the sampled tokens of each completion, ascending; None when all are.
        """
        ...
