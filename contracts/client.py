"""The EVM adapter of the `Ledger` port: one account's replica of the ledger, and its durable outbox.

`poll` does everything: it advances the replica and moves intents along, so a role that polls needs no background task. It
never raises because a node is away: it says so once, keeps trying with growing pauses, and loses nothing. A node of
another chain, or one without the contracts, is a `ConfigError`. When an intent is final, the replica holds its events.
Neighbours: `contracts.follower` (replica), `contracts.sender` (outbox), `contracts.devnet` (a node to talk to).
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from contracts import outbox as ob
from contracts.abi import LedgerAbi
from contracts.answers import parse_bytes, parse_quantity
from contracts.deploy import Deployment
from contracts.follower import Follower
from contracts.jsonrpc import HttpRpc, RpcError, Unreachable
from contracts.outbox import Outbox
from contracts.sender import Sender
from protocol.errors import ConfigError, Fault
from protocol.ledger import calls
from protocol.ledger import state as ledger_state
from protocol.ledger.events import Logged
from protocol.ledger.state import LedgerState
from protocol.ports import IntentStatus

log = logging.getLogger(__name__)

#: Pauses between attempts while the node is away: from the first to the longest, doubling, each up to twice as long.
BACKOFF_S_FIRST = 0.1
BACKOFF_S_MAX = 5.0

#: Pause between the polls of `wait`.
WAIT_POLL_S = 0.1

FEE_CAP_WEI_MAX = 200 * 10**9


class EvmLedger:
    """One participant's connection to a ledger on an EVM chain.

    Args:
        rpc_url: JSON-RPC over HTTP.
        deployment: chain id and addresses.
        secret: the account's key, 32 bytes.
        outbox_path: database of intents; one per account and chain.
        finality_depth: blocks on top of a block before it counts. 0 suits a devnet, 12 or more a chain with reorgs.
        fee_cap_wei_max: the most wei per gas that is offered.
        apply: reducer of the replica.

    Raises:
        ConfigError: when the outbox is in use or belongs to another account.
    """

    def __init__(
        self,
        rpc_url: str,
        deployment: Deployment,
        secret: bytes,
        outbox_path: Path,
        *,
        finality_depth: int = 0,
        fee_cap_wei_max: int = FEE_CAP_WEI_MAX,
        apply: Callable[[LedgerState, Logged], None] = ledger_state.apply,
    ) -> None:
        self.deployment = deployment
        self._url = rpc_url
        self._rpc = HttpRpc(rpc_url)
        self._abi = LedgerAbi()
        self._outbox = Outbox(outbox_path)
        self._follower = Follower(self._rpc, self._abi, deployment, apply, finality_depth)
        self._sender = Sender(self._rpc, self._abi, deployment, self._outbox, secret, fee_cap_wei_max)
        self._outbox.bind(account="0x" + self.account.hex(), ledger="0x" + deployment.book.hex())
        self._lock = asyncio.Lock()
        self._checked = False
        self._rewinds = 0
        self._undelivered: list[Logged] = []
        self._unsent = False
        self._away_since: float | None = None
        self._failures = 0
        self._advanced_at = -WAIT_POLL_S
        self._retry_at = 0.0

    # -- the port

    @property
    def account(self) -> bytes:
        """Our ledger account, 20 bytes."""
        return self._sender.account

    @property
    def chain_id(self) -> int:
        """EIP-155 chain id."""
        return self.deployment.chain_id

    @property
    def address(self) -> bytes:
        """Address of the task contract, which is part of every signing domain."""
        return self.deployment.book

    @property
    def state(self) -> LedgerState:
        """The replica. After a reorganisation it is another object: do not keep references across polls."""
        return self._follower.state

    @property
    def reachable(self) -> bool:
        """Whether the last attempt reached the node."""
        return self._away_since is None

    @property
    def unsent(self) -> bool:
        """Whether something was submitted since the last poll: polling again now sends it without waiting."""
        return self._unsent

    async def poll(self) -> list[Logged]:
        """Advance the replica to the head minus the finality depth and push the outbox; returns new events in order.

        Raises:
            ConfigError: the node is on another chain, or the contracts are not there.
            Fault: the node's events do not decode, or the outbox cannot be written.
        """
        async with self._lock:
            await self._advance()
            new, self._undelivered = self._undelivered, []
            return new

    async def _advance(self) -> None:
        """One look at the node. New events wait in `_undelivered` for the next `poll`."""
        self._advanced_at = time.monotonic()
        if self._advanced_at < self._retry_at:
            return
        self._unsent = False
        try:
            if not self._checked:
                await self._check_node()
            self._undelivered += await self._follower.poll()
            if self._follower.rewinds != self._rewinds:
                # Another chain behind the same address looks like a very deep reorganisation.
                self._rewinds = self._follower.rewinds
                await self._check_node()
            if self._follower.head is not None:
                await self._sender.step(self._follower.head.base_fee, self._follower.cursor)
        except (Unreachable, RpcError) as error:
            self._went_away(error)
        else:
            self._came_back()

    async def submit(self, intent: str, call: calls.Call) -> None:
        """Make a call durable under an idempotent name; it is sent by later polls. A known name does nothing.

        Raises:
            ConfigError: the call does not fit the contract.
            Fault: the disk refuses it.
        """
        if self._outbox.get(intent) is not None:
            return
        contract, calldata = self._abi.encode_call(call)
        self._unsent = True
        self._outbox.submit(intent, getattr(self.deployment, contract), calldata, self._spend(call))

    def outcome(self, intent: str) -> IntentStatus:
        """How an intent stands. It is final only when the replica holds its events, also after a restart."""
        row = self._outbox.get(intent)
        if row is None:
            return IntentStatus("unknown")
        if row.state == ob.FINAL and self.state.block_number >= row.block_number:
            return IntentStatus("final", row.block_number)
        if row.state == ob.REVERTED:
            return IntentStatus("reverted", row.block_number, row.error)
        return IntentStatus("pending", row.block_number)

    async def wait(self, intent: str, timeout_s: float) -> IntentStatus:
        """Keep polling until the intent is final or reverted. Events found meanwhile are returned by the next `poll`.

        Raises:
            Fault: after `timeout_s`, or when no such intent was submitted.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            status = self.outcome(intent)
            if status.status in ("final", "reverted"):
                return status
            if status.status == "unknown":
                raise Fault(f"intent {intent} was never submitted")
            if time.monotonic() > deadline:
                why = self._sender.complaint(intent) if self.reachable else "the node cannot be reached"
                raise Fault(f"intent {intent} is not final after {timeout_s:g} s: {why}; it stays in the outbox")
            async with self._lock:
                if time.monotonic() - self._advanced_at > WAIT_POLL_S:  # many waiters look as often as one
                    await self._advance()
            await asyncio.sleep(WAIT_POLL_S)

    async def close(self) -> None:
        """Close connections and the outbox."""
        await self._rpc.close()
        self._outbox.close()

    # -- beyond the port

    async def view(self, contract: str, function: str, *arguments: Any) -> tuple[Any, ...]:
        """Call a view of a contract (token, beacons, registry, court, book or canaries) at the newest block.

        Raises:
            Fault: the node is away, or the contract refuses.
        """
        request = {
            "from": "0x" + self.account.hex(),
            "to": "0x" + getattr(self.deployment, contract).hex(),
            "data": "0x" + self._abi.encode(contract, function, *arguments).hex(),
        }
        try:
            answer = await self._rpc.call("eth_call", request, "latest")
            return self._abi.decode_result(contract, function, parse_bytes(answer))
        except RpcError as error:
            data = error.revert_data
            raise Fault(
                f"{contract}.{function}: {error.message if data is None else self._abi.describe_error(data)}"
            ) from None
        except Unreachable as error:
            raise Fault(f"{contract}.{function}: the node at {self._url} cannot be reached: {error}") from None

    async def token_balance(self, account: bytes | None = None) -> int:
        """Token units of an account (default: ours)."""
        return int((await self.view("token", "balanceOf", account or self.account))[0])

    async def ether_balance(self, account: bytes | None = None) -> int:
        """Wei of an account (default: ours), which pays for gas.

        Raises:
            Fault: the node is away.
        """
        try:
            return parse_quantity(
                await self._rpc.call("eth_getBalance", "0x" + (account or self.account).hex(), "latest")
            )
        except (RpcError, Unreachable) as error:
            raise Fault(f"balance cannot be read from {self._url}: {error}") from None

    # -- within

    def _spend(self, call: calls.Call) -> int:
        """Token units the contract will take from us."""
        if isinstance(call, (calls.Register, calls.AddStake, calls.TopUp)):
            return call.amount
        if isinstance(call, calls.Publish):
            return call.deposit
        if isinstance(call, calls.SealCanary):
            return call.bond
        if isinstance(call, calls.Challenge):
            task = self.state.tasks.get(call.task)
            if task is None:
                raise ConfigError(f"task 0x{call.task.hex()[:16]} is not on this ledger: poll first, or check its id")
            return task.spec.economics.challenge_bond
        return 0

    async def _check_node(self) -> None:
        """Make sure, whenever the node comes (back), that it is the right chain with our contracts on it."""
        chain_id, code, genesis = await self._rpc.batch(
            [
                ("eth_chainId", []),
                ("eth_getCode", ["0x" + self.deployment.book.hex(), "latest"]),
                ("eth_getBlockByNumber", ["0x0", False]),
            ]
        )
        for answer in (chain_id, code, genesis):
            if isinstance(answer, RpcError):
                raise answer
        try:
            shown_id = int(chain_id, 16)
        except (TypeError, ValueError):
            raise Unreachable(f"its chain id is {str(chain_id)[:64]!r}") from None
        if shown_id != self.chain_id:
            raise ConfigError(
                f"the node at {self._url} is on chain {shown_id}, the deployment on {self.chain_id}: "
                "check the RPC URL and deployment.json"
            )
        if code in ("0x", None):
            raise ConfigError(
                f"no contract at 0x{self.deployment.book.hex()} on chain {self.chain_id} at {self._url}: "
                "deployment.json belongs to another chain, or the devnet was restarted"
            )
        if isinstance(genesis, dict):
            self._outbox.bind(genesis=str(genesis.get("hash")))
        self._checked = True

    def _went_away(self, error: Exception) -> None:
        if self._away_since is None:
            self._away_since = time.monotonic()
            log.warning("node at %s cannot be reached, trying again: %s", self._url, error)
        pause = min(BACKOFF_S_MAX / 2, BACKOFF_S_FIRST * 2 ** min(self._failures, 16))
        self._failures += 1
        self._checked = False
        # Jitter keeps a crowd of clients from coming back in step.
        self._retry_at = time.monotonic() + pause * random.uniform(1.0, 2.0)

    def _came_back(self) -> None:
        if self._away_since is not None:
            log.warning("node at %s is back after %.1f s", self._url, time.monotonic() - self._away_since)
        self._away_since, self._failures, self._retry_at = None, 0, 0.0
