"""JSON-RPC methods of the devnet: parameters from strangers in, JSON values out.

Every parameter is parsed strictly and bounded; a fault in one raises `RpcError`, which the server turns into an error
response. Logs are indexed once per block, so a poll costs a binary search. Neighbours: `contracts.devnet.server`.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from typing import Any

import msgspec

from contracts.devnet.blocks import GAS_LIMIT, BlockRecord, CallRequest
from contracts.devnet.chain import DevChain
from contracts.devnet.encoding import (
    LogEntry,
    data,
    encode_block,
    encode_logs,
    encode_receipt,
    encode_transaction,
    quantity,
)
from contracts.devnet.params import matches, parse_addresses, parse_bytes, parse_quantity, parse_topics
from contracts.jsonrpc import RpcError
from contracts.signing import Account

#: Bounds of one eth_getLogs, with go-ethereum's error code so that clients halve their range.
LOG_BLOCKS_MAX = 10_000
LOG_RESULTS_MAX = 5_000
LOG_BYTES_MAX = 16 * 1024 * 1024

#: Most wei one devnet_fund gives (1,000 ether), and blocks one devnet_reorg orphans.
FUND_WEI_MAX = 10**21
REORG_DEPTH_MAX = 64

PRIORITY_FEE_WEI = 10**9


class Methods:
    """The methods by name: `call(name, params)` dispatches.

    Args:
        chain: the chain to serve.
        faucet_secret: key of the account that devnet_fund and devnet_mint spend from.
    """

    def __init__(self, chain: DevChain, faucet_secret: bytes) -> None:
        self.chain = chain
        self.faucet = Account.from_key(faucet_secret)
        self.deployment: dict[str, Any] | None = None
        self._logs: list[LogEntry] = []
        self._logs_by_block: dict[int, list[LogEntry]] = {}
        self._methods: dict[str, Callable[..., Any]] = {
            name.removeprefix("do_"): getattr(self, name) for name in dir(self) if name.startswith("do_")
        }

    def call(self, name: str, params: list[Any]) -> Any:
        """Run one method.

        Raises:
            RpcError: unknown method, bad parameters, or the method's own failure.
        """
        method = self._methods.get(name)
        if method is None:
            raise RpcError(-32601, f"the method {name[:64]} does not exist/is not available")
        try:
            return method(*params)
        except TypeError as error:
            if error.__traceback__ is not None and error.__traceback__.tb_next is None:
                raise RpcError(-32602, f"wrong number of parameters for {name}") from None
            raise

    def mine(self, seconds_max: float = 60.0) -> BlockRecord:
        """Mine a block and index its logs."""
        block = self.chain.mine(seconds_max)
        entries = encode_logs(block)
        self._logs_by_block[block.number] = entries
        self._logs.extend(entries)
        return block

    # -- parameters

    def _block(self, tag: Any) -> BlockRecord | None:
        """The block a tag or number names; None when there is none yet."""
        chain = self.chain
        if tag in ("latest", "safe", "finalized", "pending"):
            return chain.head
        number = 0 if tag == "earliest" else parse_quantity(tag, "block number")
        return chain.blocks[number] if number < len(chain.blocks) else None

    def _at(self, tag: Any) -> int | str:
        if tag == "pending":
            return "pending"
        if isinstance(tag, dict):
            tag = tag.get("blockNumber", tag.get("blockHash"))
            if isinstance(tag, str) and len(tag) == 66:
                number = self.chain.numbers.get(parse_bytes(tag, "block hash", 32))
                tag = quantity(number) if number is not None else quantity(2**63)
        block = self._block(tag)
        if block is None:
            raise RpcError(-32001, "header not found")
        return block.number

    def _request(self, call: Any) -> CallRequest:
        if not isinstance(call, dict):
            raise RpcError(-32602, "invalid call: expected an object")
        to = call.get("to")
        payload = call.get("input", call.get("data", "0x"))
        return CallRequest(
            sender=parse_bytes(call.get("from", data(bytes(20))), "from", 20),
            to=None if to in (None, "0x", "") else parse_bytes(to, "to", 20),
            data=parse_bytes(payload, "data"),
            value=parse_quantity(call.get("value", "0x0"), "value"),
            gas=parse_quantity(call.get("gas", quantity(GAS_LIMIT)), "gas"),
        )

    # -- methods

    def do_web3_clientVersion(self) -> str:
        return "troth-devnet/1 (py-evm)"

    def do_net_version(self) -> str:
        return str(self.chain.chain_id)

    def do_eth_chainId(self) -> str:
        return quantity(self.chain.chain_id)

    def do_eth_syncing(self) -> bool:
        return False

    def do_eth_accounts(self) -> list[str]:
        return []

    def do_eth_blockNumber(self) -> str:
        return quantity(self.chain.head.number)

    def do_eth_getBlockByNumber(self, tag: Any, full: Any = False) -> Any:
        block = self._block(tag)
        return None if block is None else encode_block(block, bool(full))

    def do_eth_getBlockByHash(self, block_hash: Any, full: Any = False) -> Any:
        number = self.chain.numbers.get(parse_bytes(block_hash, "block hash", 32))
        return None if number is None else encode_block(self.chain.blocks[number], bool(full))

    def do_eth_getBalance(self, address: Any, tag: Any = "latest") -> str:
        return quantity(self.chain.balance(parse_bytes(address, "address", 20), self._at(tag)))

    def do_eth_getCode(self, address: Any, tag: Any = "latest") -> str:
        return data(self.chain.code(parse_bytes(address, "address", 20), self._at(tag)))

    def do_eth_getTransactionCount(self, address: Any, tag: Any = "latest") -> str:
        account = parse_bytes(address, "address", 20)
        if tag == "pending":
            return quantity(self.chain.pool.next_nonce(account, self.chain.nonce(account)))
        return quantity(self.chain.nonce(account, self._at(tag)))

    def do_eth_gasPrice(self) -> str:
        return quantity(self.chain.next_base_fee + PRIORITY_FEE_WEI)

    def do_eth_maxPriorityFeePerGas(self) -> str:
        return quantity(PRIORITY_FEE_WEI)

    def do_eth_feeHistory(self, count: Any, newest: Any = "latest", percentiles: Any = None) -> Any:
        wanted = count if isinstance(count, int) else parse_quantity(count, "block count")
        last = self._block(newest)
        if last is None or not 1 <= wanted <= 1024:
            raise RpcError(-32602, "invalid fee history range: 1 to 1024 blocks that exist")
        first = max(0, last.number - wanted + 1)
        blocks = self.chain.blocks[first : last.number + 1]
        following = self.chain.blocks[last.number + 1 : last.number + 2]
        next_fee = following[0].header.base_fee_per_gas if following else self.chain.next_base_fee
        shown: dict[str, Any] = {
            "oldestBlock": quantity(first),
            "baseFeePerGas": [quantity(b.header.base_fee_per_gas) for b in blocks] + [quantity(next_fee)],
            "gasUsedRatio": [b.header.gas_used / b.header.gas_limit for b in blocks],
        }
        if isinstance(percentiles, list) and percentiles:
            shown["reward"] = [[quantity(PRIORITY_FEE_WEI)] * min(len(percentiles), 16) for _ in blocks]
        return shown

    def do_eth_call(self, call: Any, tag: Any = "latest") -> str:
        return data(self.chain.call(self._request(call), self._at(tag)))

    def do_eth_estimateGas(self, call: Any, tag: Any = "pending") -> str:
        return quantity(self.chain.estimate_gas(self._request(call), self._at(tag)))

    def do_eth_sendRawTransaction(self, raw: Any) -> str:
        return data(self.chain.add_raw(parse_bytes(raw, "transaction")))

    def do_eth_getTransactionByHash(self, tx_hash: Any) -> Any:
        wanted = parse_bytes(tx_hash, "transaction hash", 32)
        record = self.chain.transactions.get(wanted)
        if record is not None:
            return encode_transaction(
                record.tx, record.hash, record.sender, record, self.chain.blocks[record.block_number]
            )
        waiting = self.chain.pool.get(wanted)
        return None if waiting is None else encode_transaction(waiting.tx, waiting.hash, waiting.sender, None, None)

    def do_eth_getTransactionReceipt(self, tx_hash: Any) -> Any:
        record = self.chain.transactions.get(parse_bytes(tx_hash, "transaction hash", 32))
        if record is None:
            return None
        block = self.chain.blocks[record.block_number]
        return encode_receipt(record, block, self._logs_by_block[block.number])

    def do_eth_getLogs(self, query: Any) -> list[msgspec.Raw]:
        if not isinstance(query, dict):
            raise RpcError(-32602, "invalid filter: expected an object")
        if query.get("blockHash") is not None:
            number = self.chain.numbers.get(parse_bytes(query["blockHash"], "block hash", 32))
            if number is None:
                raise RpcError(-32001, "unknown block")
            first = last = number
        else:
            head = self.chain.head.number
            start, end = self._block(query.get("fromBlock", "latest")), self._block(query.get("toBlock", "latest"))
            first = head + 1 if start is None else start.number
            last = head if end is None else end.number
        if last - first >= LOG_BLOCKS_MAX:
            raise RpcError(-32005, f"query exceeds {LOG_BLOCKS_MAX} blocks: ask for a smaller range")
        addresses = parse_addresses(query.get("address"))
        topics = parse_topics(query.get("topics"))
        low = bisect.bisect_left(self._logs, first, key=lambda e: e.block_number)
        high = bisect.bisect_right(self._logs, last, key=lambda e: e.block_number)
        found, size = [], 0
        for entry in self._logs[low:high]:
            if (addresses and entry.address not in addresses) or not matches(entry.topics, topics):
                continue
            found.append(entry.json)
            size += len(entry.json)
            if len(found) > LOG_RESULTS_MAX or size > LOG_BYTES_MAX:
                raise RpcError(-32005, f"query returned more than {LOG_RESULTS_MAX} results: ask for a smaller range")
        return found

    def _faucet_send(self, to: bytes, wei: int, payload: bytes) -> str:
        sender = bytes.fromhex(self.faucet.address[2:])
        nonce = self.chain.pool.next_nonce(sender, self.chain.nonce(sender))
        request = CallRequest(sender, to, payload, wei)
        signed = self.faucet.sign_transaction(
            {
                "type": 2,
                "chainId": self.chain.chain_id,
                "nonce": nonce,
                "to": to,
                "value": wei,
                "data": payload,
                "gas": self.chain.estimate_gas(request, "pending"),
                "maxFeePerGas": 2 * self.chain.next_base_fee + 2 * PRIORITY_FEE_WEI,
                "maxPriorityFeePerGas": PRIORITY_FEE_WEI,
            }
        )
        return data(self.chain.add_raw(bytes(signed.raw_transaction)))

    def do_devnet_fund(self, address: Any, wei: Any) -> str:
        amount = wei if isinstance(wei, int) else parse_quantity(wei, "wei")
        if not 0 < amount <= FUND_WEI_MAX:
            raise RpcError(-32602, f"invalid wei: {amount}, expected 1 to {FUND_WEI_MAX}")
        return self._faucet_send(parse_bytes(address, "address", 20), amount, b"")

    def do_devnet_mint(self, address: Any, amount: Any) -> str:
        if self.deployment is None:
            raise RpcError(-32000, "no token is deployed on this devnet")
        units = amount if isinstance(amount, int) else parse_quantity(amount, "amount")
        if not 0 < units < 2**128:
            raise RpcError(-32602, f"invalid amount: {units}, expected 1 to 2^128 - 1")
        # mint(address,uint256), the open mint of contracts/src/DevToken.sol
        payload = (
            bytes.fromhex("40c10f19") + bytes(12) + parse_bytes(address, "address", 20) + units.to_bytes(32, "big")
        )
        return self._faucet_send(parse_bytes(self.deployment["token"], "token", 20), 0, payload)

    def do_devnet_deployment(self) -> Any:
        return self.deployment

    def do_devnet_reorg(self, depth: Any, keep_transactions: Any = True) -> str:
        if not isinstance(depth, int) or not 0 < depth <= REORG_DEPTH_MAX:
            raise RpcError(-32602, f"invalid depth: expected 1 to {REORG_DEPTH_MAX} blocks")
        self.chain.rewind(depth, keep_transactions=bool(keep_transactions))
        head = self.chain.head.number
        del self._logs[bisect.bisect_right(self._logs, head, key=lambda e: e.block_number) :]
        return quantity(head)
