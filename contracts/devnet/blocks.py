"""Mined blocks and transactions as the devnet remembers them, and what a simulation asks for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from eth.abc import SignedTransactionAPI
from eth.constants import CREATE_CONTRACT_ADDRESS

from contracts.devnet.mempool import PendingTx

GAS_LIMIT = 30_000_000


@dataclass(frozen=True)
class TxRecord:
    """A mined transaction: where it stands, what it used, the contract it created (or None), its receipt's logs."""

    tx: SignedTransactionAPI
    hash: bytes
    sender: bytes
    index: int
    block_number: int
    status: int
    gas_used: int
    cumulative_gas: int
    gas_price: int
    created: bytes | None
    logs: tuple[Any, ...]
    first_log_index: int


@dataclass(frozen=True)
class BlockRecord:
    """A canonical block."""

    header: Any
    number: int
    hash: bytes
    transactions: tuple[TxRecord, ...]


class CallRequest(NamedTuple):
    """What eth_call and eth_estimateGas simulate. `to` is None for a contract creation."""

    sender: bytes
    to: bytes | None
    data: bytes
    value: int = 0
    gas: int = GAS_LIMIT


def fee_caps(tx: Any) -> tuple[int, int]:
    """(max fee, max priority fee) in wei per gas; both are the gas price in a legacy transaction."""
    fee_cap = getattr(tx, "max_fee_per_gas", None)
    if fee_cap is None:
        return tx.gas_price, tx.gas_price
    return fee_cap, tx.max_priority_fee_per_gas


def make_record(header: Any, taken: list[tuple[PendingTx, Any, Any]]) -> BlockRecord:
    """The record of a mined block; `taken` holds each transaction with its receipt and computation, in order."""
    records = []
    cumulative = num_logs = 0
    base_fee = header.base_fee_per_gas
    for index, (entry, receipt, computation) in enumerate(taken):
        creates = entry.tx.to == CREATE_CONTRACT_ADDRESS
        records.append(
            TxRecord(
                tx=entry.tx,
                hash=entry.hash,
                sender=entry.sender,
                index=index,
                block_number=header.block_number,
                status=0 if computation.is_error else 1,
                gas_used=receipt.gas_used - cumulative,
                cumulative_gas=receipt.gas_used,
                gas_price=min(entry.fee_cap, base_fee + entry.tip_cap),
                created=bytes(computation.msg.storage_address) if creates else None,
                logs=tuple(receipt.logs),
                first_log_index=num_logs,
            )
        )
        cumulative = receipt.gas_used
        num_logs += len(receipt.logs)
    return BlockRecord(header, header.block_number, header.hash, tuple(records))
