"""Moving intents along: simulate, sign, send, watch, and send again until final.

One `step` looks at every active intent once. Every decision is taken from the outbox and the chain, never from memory, so
a process killed anywhere continues where it was. A lost reply is harmless, because the same bytes are sent again and the
receipt decides. Neighbours: `contracts.outbox` holds the states, `contracts.client` calls `step`.
"""

from __future__ import annotations

import logging
import time
from typing import Any, NamedTuple

from eth_utils.crypto import keccak

from contracts import outbox as ob
from contracts.abi import LedgerAbi
from contracts.answers import Receipt, parse_quantity, parse_receipt
from contracts.deploy import Deployment
from contracts.jsonrpc import Rpc, RpcError
from contracts.outbox import Attempt, Intent, Outbox
from contracts.signing import Account

log = logging.getLogger(__name__)

#: A transaction that is not mined is sent again after this long, and replaced after that long.
REBROADCAST_S = 3
REPLACE_S = 60

#: Fees of a replacement, in percent of the old (nodes ask for at least 110).
REPLACE_PERCENT = 125

#: Gas limit over the estimate, in percent: state may change before inclusion.
GAS_PERCENT = 130

#: Gas over that, for the calls whose last caller does more than the others (the vote that completes a quorum stores the
#: result). A gas limit costs nothing until it is used.
GAS_ROOM = 300_000

#: Most intents in one batch to the node.
BATCH_INTENTS_MAX = 32


class Fees(NamedTuple):
    """Wei per gas."""

    base: int
    tip: int


class Sender:
    """Drives one account's outbox.

    Args:
        secret: key of the account, 32 bytes.
        fee_cap_max: the most wei per gas that is ever offered; above it, transactions wait.
    """

    def __init__(
        self, rpc: Rpc, abi: LedgerAbi, deployment: Deployment, outbox: Outbox, secret: bytes, fee_cap_max: int
    ) -> None:
        self._rpc = rpc
        self._abi = abi
        self._deployment = deployment
        self._outbox = outbox
        self._key = Account.from_key(secret)
        self._fee_cap_max = fee_cap_max
        # Pacing and memory of complaints only: losing these changes nothing but the timing.
        self._sent_at: dict[int, float] = {}
        self._lost_since: dict[int, float] = {}
        self._awaited: dict[int, frozenset[int]] = {}
        self._told: dict[str, str] = {}
        self.account = bytes.fromhex(self._key.address[2:])
        self._address = "0x" + self.account.hex()

    async def step(self, base_fee: int, cursor: int) -> None:
        """Look at every active intent once.

        Args:
            base_fee: of the newest block, in wei per gas.
            cursor: the last block that counts as final; the replica holds its events.

        Raises:
            Unreachable: the node went away; what was decided until then is on disk.
        """
        active = self._outbox.active()
        if not active:
            return
        await self._watch([item for item in active if item.state != ob.QUEUED], cursor)
        queued = [item for item in self._outbox.active() if item.state == ob.QUEUED]
        if queued:
            answers = await self._rpc.batch(
                [("eth_maxPriorityFeePerGas", []), ("eth_getTransactionCount", [self._address, "pending"])]
            )
            tip, chain_nonce = (parse_quantity(answer) for answer in answers)
            for item in queued:
                await self._advance_queued(item, Fees(base_fee, tip), chain_nonce)
        await self._send_due(base_fee)

    def complaint(self, intent: str) -> str:
        """What an intent is waiting for, as far as the node has said."""
        return self._told.get(intent, "it is not mined yet")

    def _tell(self, intent: str, message: str) -> None:
        """Log a complaint about an intent once, until it changes."""
        if self._told.get(intent) != message:
            self._told[intent] = message
            log.warning("%s: %s", intent, message)

    # -- what happened to signed transactions

    async def _watch(self, items: list[Intent], cursor: int) -> None:
        for start in range(0, len(items), BATCH_INTENTS_MAX):
            await self._watch_some(items[start : start + BATCH_INTENTS_MAX], cursor)

    async def _watch_some(self, items: list[Intent], cursor: int) -> None:
        attempts = [(item, attempt) for item in items for attempt in self._outbox.attempts(item.seq)]
        requests: list[tuple[str, list[Any]]] = [
            ("eth_getTransactionReceipt", ["0x" + attempt.hash.hex()]) for _, attempt in attempts
        ]
        # Asked for in the same batch: a nonce that is used up at a final block, and no receipt, means that it is lost.
        requests.append(("eth_getTransactionCount", [self._address, hex(max(cursor, 0))]))
        answers = await self._rpc.batch(requests)
        receipts: dict[int, Receipt] = {}
        for (item, _), answer in zip(attempts, answers, strict=False):
            parsed = parse_receipt(answer)
            if parsed is not None:
                receipts[item.seq] = parsed
        # A node that has pruned the cursor's state does not say: then nothing is given up.
        final_nonce = 0 if isinstance(answers[-1], RpcError) else parse_quantity(answers[-1])
        now = time.monotonic()
        for item in items:
            receipt = receipts.get(item.seq)
            if receipt is not None:
                await self._included(item, receipt, cursor)
            elif item.state == ob.INCLUDED:
                log.warning("%s: its block %d was orphaned, sending it again", item.intent, item.block_number)
                self._outbox.record_orphaned(item.seq)
                self._sent_at.pop(item.seq, None)
            elif item.nonce is None or final_nonce <= item.nonce:
                self._lost_since.pop(item.seq, None)
            elif now - self._lost_since.setdefault(item.seq, now) > REBROADCAST_S:
                # Believed only after some time: one of several nodes behind an address may lag with its receipts.
                log.warning("%s: nonce %d went to another transaction, signing again", item.intent, item.nonce)
                self._outbox.record_lost(item.seq)
                self._forget(item)

    async def _included(self, item: Intent, receipt: Receipt, cursor: int) -> None:
        number, block_hash = receipt.block_number, receipt.block_hash
        if item.state != ob.INCLUDED or item.block_hash != block_hash:
            self._outbox.record_included(item.seq, number, block_hash)
        if number > cursor:
            return
        if receipt.succeeded:
            self._outbox.record_final(item.seq)
            log.info("%s: final in block %d", item.intent, number)
        else:
            reason = await self._explain(item, number)
            self._outbox.record_reverted(item.seq, reason)
            log.warning("%s: reverted in block %d: %s", item.intent, number, reason)
        self._forget(item)

    def _forget(self, item: Intent) -> None:
        self._told.pop(item.intent, None)
        for memory in (self._sent_at, self._lost_since, self._awaited):
            memory.pop(item.seq, None)

    async def _explain(self, item: Intent, block_number: int) -> str:
        """Why a mined transaction failed: the same call on the state right after it."""
        try:
            await self._rpc.call("eth_call", self._request(item), hex(block_number))
        except RpcError as error:
            data = error.revert_data
            return self._abi.describe_error(data) if data is not None else error.message
        return "reverted in its block, though it would not any more"

    # -- from queued to signed

    def _request(self, item: Intent) -> dict[str, str]:
        return {"from": self._address, "to": "0x" + item.target.hex(), "data": "0x" + item.calldata.hex()}

    async def _advance_queued(self, item: Intent, fees: Fees, chain_nonce: int) -> None:
        if item.spend and not await self._has_allowance(item):
            return
        try:
            gas = parse_quantity(await self._rpc.call("eth_estimateGas", self._request(item), "pending"))
        except RpcError as error:
            self._refused(item, error)
            return
        if fees.base + fees.tip > self._fee_cap_max:
            self._tell(item.intent, f"fees are {fees.base + fees.tip} wei per gas, limit {self._fee_cap_max}: waiting")
            return
        fee_cap = min(2 * fees.base + fees.tip, self._fee_cap_max)
        self._sign(item, self._outbox.next_nonce(chain_nonce), gas * GAS_PERCENT // 100 + GAS_ROOM, fee_cap, fees.tip)

    def _refused(self, item: Intent, error: RpcError) -> None:
        """A simulation failed. Only a contract's revert is an answer, and only on a state that earlier intents have made.

        What is under way at the first refusal is waited for, once: later intents do not hold it up.
        """
        data = error.revert_data
        if data is None:
            self._tell(item.intent, f"cannot be simulated: {error.message}")
            return
        under_way = frozenset(
            other.seq
            for other in self._outbox.active()
            if other.state in (ob.SIGNED, ob.SENT) or (other.state == ob.QUEUED and other.seq < item.seq)
        )
        if self._awaited.setdefault(item.seq, under_way) & under_way:
            return
        reason = self._abi.describe_error(data)
        self._outbox.record_reverted(item.seq, reason)
        log.warning("%s: refused by the contract: %s", item.intent, reason)
        self._forget(item)

    def _sign(self, item: Intent, nonce: int, gas: int, fee_cap: int, tip: int) -> None:
        signed = self._key.sign_transaction(
            {
                "type": 2,
                "chainId": self._deployment.chain_id,
                "nonce": nonce,
                "to": item.target,
                "value": 0,
                "data": item.calldata,
                "gas": gas,
                "maxFeePerGas": fee_cap,
                "maxPriorityFeePerGas": min(tip, fee_cap),
            }
        )
        raw = bytes(signed.raw_transaction)
        self._outbox.record_signed(
            item.seq, nonce, bytes(keccak(raw)), raw, gas=gas, fee_cap=fee_cap, tip_cap=min(tip, fee_cap)
        )

    # -- allowances

    async def _has_allowance(self, item: Intent) -> bool:
        """Whether the target may take `item.spend` tokens; if not, see to the approval, which is an intent of its own.

        Allowances are exact, so spending intents of one target go one after another.
        """
        for other in self._outbox.active():
            if other.seq < item.seq and other.spend and other.target == item.target and other.state != ob.INCLUDED:
                return False
        call = self._abi.encode("token", "allowance", self.account, item.target)
        request = {"to": "0x" + self._deployment.token.hex(), "data": "0x" + call.hex()}
        answer = await self._rpc.call("eth_call", request, "latest")
        if parse_quantity(answer) >= item.spend:
            return True
        number = 1
        while (approval := self._outbox.get(f"{item.intent}#approve{number}")) is not None:
            if approval.state == ob.REVERTED:
                self._outbox.record_reverted(item.seq, f"its token approval failed: {approval.error}")
                return False
            if approval.state != ob.FINAL:
                return False
            number += 1
        payload = self._abi.encode("token", "approve", item.target, item.spend)
        self._outbox.submit(f"{item.intent}#approve{number}", self._deployment.token, payload)
        return False

    # -- sending

    async def _send_due(self, base_fee: int) -> None:
        now = time.monotonic()
        due: list[tuple[Intent, Attempt]] = []
        for item in self._outbox.active():
            if item.state not in (ob.SIGNED, ob.SENT):
                continue
            newest = self._outbox.attempts(item.seq)[-1]
            if item.state == ob.SENT and time.time() - newest.signed_at > REPLACE_S and base_fee > newest.fee_cap:
                newest = self._replace(item, newest)
            last = self._sent_at.get(item.seq)
            if last is None or now - last > REBROADCAST_S:
                due.append((item, newest))
        due.sort(key=lambda pair: pair[1].nonce)
        for start in range(0, len(due), BATCH_INTENTS_MAX):
            some = due[start : start + BATCH_INTENTS_MAX]
            answers = await self._rpc.batch(
                [("eth_sendRawTransaction", ["0x" + attempt.raw.hex()]) for _, attempt in some]
            )
            for (item, _), answer in zip(some, answers, strict=True):
                self._sent(item, answer, now)

    def _replace(self, item: Intent, old: Attempt) -> Attempt:
        """Offer more for the same call under the same nonce, within the cap."""
        fee_cap = old.fee_cap * REPLACE_PERCENT // 100 + 1
        if fee_cap > self._fee_cap_max:
            self._tell(item.intent, f"not mined at {old.fee_cap} wei per gas, and the limit is {self._fee_cap_max}")
            return old
        self._sign(item, old.nonce, old.gas, fee_cap, old.tip_cap * REPLACE_PERCENT // 100 + 1)
        self._sent_at.pop(item.seq, None)
        return self._outbox.attempts(item.seq)[-1]

    def _sent(self, item: Intent, answer: Any, now: float) -> None:
        self._sent_at[item.seq] = now
        if isinstance(answer, RpcError):
            text = answer.message.lower()
            # A node that has it, or has passed its nonce: the receipts tell what became of it.
            if not any(
                known in text for known in ("already known", "known transaction", "nonce too low", "already imported")
            ):
                self._tell(item.intent, f"the node refuses its transaction: {answer.message}")
                return
        self._outbox.record_sent(item.seq)
