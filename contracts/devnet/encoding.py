"""Chain objects as JSON-RPC shows them. Quantities are minimal hex, data is full hex (Ethereum JSON-RPC specification)."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from contracts.devnet.blocks import BlockRecord, TxRecord


def quantity(value: int) -> str:
    """A number as 0x hex without leading zeros."""
    return hex(value)


def data(value: bytes) -> str:
    """Bytes as 0x hex."""
    return "0x" + value.hex()


class LogEntry(NamedTuple):
    """A log in the index: what filters look at, and its finished JSON."""

    block_number: int
    address: bytes
    topics: tuple[bytes, ...]
    json: msgspec.Raw


def encode_logs(block: BlockRecord) -> list[LogEntry]:
    """The logs of a block, encoded once: they are asked for by every participant."""
    entries = []
    for record in block.transactions:
        for offset, log in enumerate(record.logs):
            topics = tuple(topic.to_bytes(32, "big") for topic in log.topics)
            shown = {
                "address": data(log.address),
                "topics": [data(topic) for topic in topics],
                "data": data(log.data),
                "blockNumber": quantity(block.number),
                "blockHash": data(block.hash),
                "transactionHash": data(record.hash),
                "transactionIndex": quantity(record.index),
                "logIndex": quantity(record.first_log_index + offset),
                "removed": False,
            }
            entries.append(LogEntry(block.number, bytes(log.address), topics, msgspec.Raw(msgspec.json.encode(shown))))
    return entries


def encode_transaction(
    tx: Any, tx_hash: bytes, sender: bytes, record: TxRecord | None, block: BlockRecord | None
) -> Any:
    """A transaction; `record` and `block` are None while it waits."""
    shown: dict[str, Any] = {
        "hash": data(tx_hash),
        "from": data(sender),
        "to": data(bytes(tx.to)) if tx.to else None,
        "nonce": quantity(tx.nonce),
        "gas": quantity(tx.gas),
        "value": quantity(tx.value),
        "input": data(bytes(tx.data)),
        "type": quantity(getattr(tx, "type_id", None) or 0),
        "chainId": quantity(tx.chain_id),
        "v": quantity(tx.y_parity),
        "r": quantity(tx.r),
        "s": quantity(tx.s),
        "blockNumber": quantity(block.number) if block else None,
        "blockHash": data(block.hash) if block else None,
        "transactionIndex": quantity(record.index) if record else None,
    }
    if getattr(tx, "type_id", None) == 2:
        shown["maxFeePerGas"] = quantity(tx.max_fee_per_gas)
        shown["maxPriorityFeePerGas"] = quantity(tx.max_priority_fee_per_gas)
        shown["gasPrice"] = quantity(record.gas_price if record else tx.max_fee_per_gas)
        shown["accessList"] = [
            {"address": data(address), "storageKeys": [data(key.to_bytes(32, "big")) for key in keys]}
            for address, keys in tx.access_list
        ]
    else:
        shown["gasPrice"] = quantity(tx.gas_price)
    return shown


def encode_block(block: BlockRecord, full: bool) -> Any:
    """A block with its transactions or their hashes."""
    header = block.header
    return {
        "number": quantity(block.number),
        "hash": data(block.hash),
        "parentHash": data(header.parent_hash),
        "nonce": data(header.nonce),
        "sha3Uncles": data(header.uncles_hash),
        "logsBloom": data(header.bloom.to_bytes(256, "big")),
        "transactionsRoot": data(header.transaction_root),
        "stateRoot": data(header.state_root),
        "receiptsRoot": data(header.receipt_root),
        "miner": data(header.coinbase),
        "difficulty": "0x0",
        "totalDifficulty": "0x0",
        "extraData": data(header.extra_data),
        "mixHash": data(header.mix_hash),
        "size": "0x0",
        "gasLimit": quantity(header.gas_limit),
        "gasUsed": quantity(header.gas_used),
        "timestamp": quantity(header.timestamp),
        "baseFeePerGas": quantity(header.base_fee_per_gas),
        "uncles": [],
        "transactions": [
            encode_transaction(r.tx, r.hash, r.sender, r, block) if full else data(r.hash) for r in block.transactions
        ],
    }


def encode_receipt(record: TxRecord, block: BlockRecord, logs: list[LogEntry]) -> Any:
    """A receipt; `logs` are those of the whole block."""
    own = logs[record.first_log_index : record.first_log_index + len(record.logs)]
    return {
        "transactionHash": data(record.hash),
        "transactionIndex": quantity(record.index),
        "blockHash": data(block.hash),
        "blockNumber": quantity(block.number),
        "from": data(record.sender),
        "to": data(bytes(record.tx.to)) if record.tx.to else None,
        "cumulativeGasUsed": quantity(record.cumulative_gas),
        "gasUsed": quantity(record.gas_used),
        "effectiveGasPrice": quantity(record.gas_price),
        "contractAddress": data(record.created) if record.created else None,
        "logs": [entry.json for entry in own],
        "logsBloom": "0x" + "00" * 256,
        "type": quantity(getattr(record.tx, "type_id", None) or 0),
        "status": quantity(record.status),
    }
