"""The devnet's chain: py-evm blocks on demand, a mempool, simulation, and rewinding to test reorganisations.

Guarantees: a transaction never advances the block number, only `mine` does; blocks are mined empty too; a transaction is
in at most one canonical block; block numbers are consecutive. State is in memory. Timestamps are whole seconds and must
grow, so with ticks below a second they run ahead of the wall clock. Neighbours: `contracts.devnet.methods` speaks
JSON-RPC over this, `contracts.devnet.mempool` orders what waits.
"""

from __future__ import annotations

import hashlib
import logging
import sys
import time
from typing import Any

from eth.abc import VirtualMachineAPI
from eth.chains.base import MiningChain
from eth.constants import CREATE_CONTRACT_ADDRESS
from eth.db.atomic import AtomicDB
from eth.exceptions import Revert
from eth.vm.forks.cancun import CancunVM
from eth.vm.spoof import SpoofTransaction
from eth_utils.exceptions import ValidationError

from contracts.devnet.blocks import GAS_LIMIT, BlockRecord, CallRequest, TxRecord, fee_caps, make_record
from contracts.devnet.mempool import Mempool, PendingTx
from contracts.jsonrpc import RpcError
from contracts.signing import RECURSION_MAX

log = logging.getLogger(__name__)

# py-evm's imports raise the recursion limit to where a stranger's nested JSON would overflow the C stack.
sys.setrecursionlimit(RECURSION_MAX)

#: Longest raw transaction, in bytes; the same as go-ethereum's.
RAW_TX_BYTES_MAX = 128 * 1024

BLOB_TX_TYPE = 3
_COINBASE = b"\x00" * 19 + b"\x01"


class DevChain:
    """A chain with one miner and no peers.

    Args:
        chain_id: EIP-155 chain id.
        balances: wei by address at genesis.
        seed: makes PREVRANDAO a function of (seed, block, fork), so runs differ only where wall-clock timestamps do.
    """

    def __init__(self, chain_id: int, balances: dict[bytes, int], seed: bytes) -> None:
        kind = type("TrothDevChain", (MiningChain,), {"chain_id": chain_id, "vm_configuration": ((0, CancunVM),)})
        self.chain_id = chain_id
        self._seed = seed
        self._forks = 0
        state = {a: {"balance": b, "nonce": 0, "code": b"", "storage": {}} for a, b in balances.items()}
        genesis = {"difficulty": 0, "gas_limit": GAS_LIMIT, "timestamp": int(time.time()) - 1, "coinbase": _COINBASE}
        self._chain: Any = kind.from_genesis(AtomicDB(), genesis, state)  # type: ignore[attr-defined]
        head = self._chain.get_canonical_head()
        self.blocks: list[BlockRecord] = [BlockRecord(head, 0, head.hash, ())]
        self.numbers: dict[bytes, int] = {head.hash: 0}
        self.transactions: dict[bytes, TxRecord] = {}
        self.pool = Mempool()
        self._views: dict[object, VirtualMachineAPI] = {}

    @property
    def head(self) -> BlockRecord:
        """The newest block."""
        return self.blocks[-1]

    @property
    def next_base_fee(self) -> int:
        """Base fee of the block that `mine` would make now, in wei per gas."""
        return int(self._next_header().base_fee_per_gas)

    def _next_header(self) -> Any:
        parent = self.head.header
        mix = hashlib.sha256(self._seed + parent.block_number.to_bytes(8, "big") + self._forks.to_bytes(8, "big"))
        return self._chain.create_header_from_parent(
            parent,
            timestamp=max(int(time.time()), parent.timestamp + 1),
            gas_limit=GAS_LIMIT,
            coinbase=_COINBASE,
            mix_hash=mix.digest(),
        )

    # -- transactions in

    def add_raw(self, raw: bytes) -> bytes:
        """Put a signed transaction into the mempool; returns its hash.

        Raises:
            RpcError: with go-ethereum's wording when it is malformed, known, badly priced or cannot ever be mined.
        """
        if len(raw) > RAW_TX_BYTES_MAX:
            raise RpcError(-32000, f"oversized data: transaction size {len(raw)}, limit {RAW_TX_BYTES_MAX}")
        if not raw or raw[0] == BLOB_TX_TYPE:
            raise RpcError(-32000, "transaction type not supported")
        try:
            tx = self._view("pending").get_transaction_builder().decode(raw)
            tx.validate()
            tx.check_signature_validity()
            sender, tx_chain_id = bytes(tx.sender), tx.chain_id
        except Exception as error:  # the decoder raises many kinds for hostile bytes
            raise RpcError(-32000, f"invalid transaction: {type(error).__name__}") from None
        if tx_chain_id != self.chain_id:
            raise RpcError(-32000, f"invalid chain id for signer: have {tx_chain_id} want {self.chain_id}")
        if bytes(tx.hash) in self.transactions:
            raise RpcError(-32000, "already known")
        fee_cap, tip_cap = fee_caps(tx)
        nonce, balance = self.nonce(sender), self.balance(sender)
        if tx.nonce < nonce:
            raise RpcError(-32000, f"nonce too low: next nonce {nonce}, tx nonce {tx.nonce}")
        if tip_cap > fee_cap:
            raise RpcError(-32000, "max priority fee per gas higher than max fee per gas")
        if tx.gas > GAS_LIMIT:
            raise RpcError(-32000, f"exceeds block gas limit: have {tx.gas}, limit {GAS_LIMIT}")
        if tx.gas < tx.intrinsic_gas:
            raise RpcError(-32000, f"intrinsic gas too low: gas {tx.gas}, minimum needed {tx.intrinsic_gas}")
        cost = tx.gas * fee_cap + tx.value
        if balance < cost:
            raise RpcError(-32000, f"insufficient funds for gas * price + value: balance {balance}, tx cost {cost}")
        self.pool.add(tx, sender, fee_cap, tip_cap)
        return bytes(tx.hash)

    # -- blocks

    def mine(self, seconds_max: float = 60.0) -> BlockRecord:
        """Mine one block out of what waits; after `seconds_max` of work the rest stays for the next block."""
        header = self._next_header()
        vm = self._chain.get_vm(header)
        stop = time.monotonic() + seconds_max
        nonces = {sender: vm.state.get_nonce(sender) for sender in self.pool.senders()}
        taken: list[tuple[PendingTx, Any, Any]] = []
        for entry in self.pool.ready(nonces):
            if entry.fee_cap < header.base_fee_per_gas or header.gas_used + entry.tx.gas > GAS_LIMIT:
                continue
            if time.monotonic() > stop:
                break
            try:
                receipt, computation = vm.apply_transaction(header, entry.tx)
            except ValidationError as error:
                log.info("dropped transaction 0x%s: %s", entry.hash.hex(), error)
                self.pool.remove(entry)
                continue
            header = vm.add_receipt_to_header(header, receipt)
            nonces[entry.sender] += 1
            taken.append((entry, receipt, computation))
        block = vm.set_block_transactions_and_withdrawals(
            vm.get_block(), header, tuple(e.tx for e, _, _ in taken), tuple(r for _, r, _ in taken)
        )
        mined = vm.mine_block(block).block
        self._chain.chaindb.persist_block(mined)
        record = make_record(mined.header, taken)
        self.blocks.append(record)
        self.numbers[record.hash] = record.number
        self.transactions.update((tx.hash, tx) for tx in record.transactions)
        for entry, _, _ in taken:
            self.pool.remove(entry)
        for sender, nonce in nonces.items():
            self.pool.drop_below(sender, nonce)
        self._views.clear()
        return record

    def rewind(self, depth: int, *, keep_transactions: bool) -> None:
        """Orphan the newest `depth` blocks; their transactions wait again, or are forgotten.

        Raises:
            RpcError: when the chain is not that long.
        """
        if not 0 < depth < len(self.blocks):
            raise RpcError(-32602, f"cannot rewind {depth} blocks: the chain has {len(self.blocks) - 1}")
        orphans = self.blocks[-depth:]
        del self.blocks[-depth:]
        self._forks += 1
        self._views.clear()
        for block in orphans:
            del self.numbers[block.hash]
            for record in block.transactions:
                del self.transactions[record.hash]
                if keep_transactions:
                    self.pool.add(record.tx, record.sender, *fee_caps(record.tx))

    # -- reading and simulating

    def _view(self, at: int | str) -> VirtualMachineAPI:
        """A VM for reading: "pending" is the next block's environment on the head's state, a number is that block's own.

        Fees are free in a view, as in eth_call. Everything done to it is rolled back by the caller.
        """
        vm = self._views.get(at)
        if vm is None:
            header = self._next_header() if at == "pending" else self.blocks[int(at)].header
            vm = self._chain.get_vm(header.copy(base_fee_per_gas=0))
            if len(self._views) >= 8:
                self._views.clear()
            self._views[at] = vm
        return vm

    def nonce(self, address: bytes, at: int | str | None = None) -> int:
        """Next nonce of an account by the state of a block (default: head)."""
        return int(self._state(at).get_nonce(address))

    def balance(self, address: bytes, at: int | str | None = None) -> int:
        """Wei of an account."""
        return int(self._state(at).get_balance(address))

    def code(self, address: bytes, at: int | str | None = None) -> bytes:
        """Code of an account."""
        return bytes(self._state(at).get_code(address))

    def _state(self, at: int | str | None) -> Any:
        return self._view(self.head.number if at is None else at).state

    def _execute(self, request: CallRequest, at: int | str, gas: int) -> Any:
        vm = self._view(at)
        state: Any = vm.state
        unsigned = vm.create_unsigned_transaction(
            nonce=state.get_nonce(request.sender),
            gas_price=0,
            gas=gas,
            to=CREATE_CONTRACT_ADDRESS if request.to is None else request.to,  # type: ignore[arg-type]
            value=request.value,
            data=request.data,
        )
        snapshot = state.snapshot()
        try:
            return state.apply_transaction(SpoofTransaction(unsigned, from_=request.sender))
        except ValidationError as error:
            raise RpcError(-32000, f"cannot be executed: {error}") from None
        finally:
            state.revert(snapshot)

    def call(self, request: CallRequest, at: int | str) -> bytes:
        """Run a call and forget its effects; returns its output.

        Raises:
            RpcError: code 3 with the revert bytes when the contract reverts, -32000 for any other failure.
        """
        computation = self._execute(request, at, min(request.gas, GAS_LIMIT))
        _raise_if_error(computation)
        return bytes(computation.output)

    def estimate_gas(self, request: CallRequest, at: int | str) -> int:
        """A gas limit with which the call succeeds: an eighth over what it uses before refunds.

        Each level of calls holds back 1/64 of the gas (EIP-150), which seven levels make 12 %; looking for the exact
        limit would execute everything several times, and execution is what a devnet spends its time on.

        Raises:
            RpcError: as `call`.
        """
        limit = min(request.gas, GAS_LIMIT)
        computation = self._execute(request, at, limit)
        _raise_if_error(computation)
        used: int = limit - computation.get_gas_remaining()
        return min(limit, used * 9 // 8 + 2_300)


def _raise_if_error(computation: Any) -> None:
    if not computation.is_error:
        return
    if isinstance(computation.error, Revert):
        raise RpcError(3, "execution reverted", "0x" + bytes(computation.output).hex())
    raise RpcError(-32000, f"execution failed: {type(computation.error).__name__}: {computation.error}")
