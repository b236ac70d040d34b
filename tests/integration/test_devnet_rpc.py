"""The devnet as web3.py and as a stranger see it: block rhythm, mempool, JSON-RPC answers and errors, rewinding."""

import asyncio
import json
import os
import random
import socket
import subprocess
import sys

import aiohttp
import pytest
from devnet_support import devnet, rpc_call, until
from eth_account import Account
from web3 import AsyncHTTPProvider, AsyncWeb3, Web3
from web3.exceptions import Web3RPCError

from contracts.abi import LedgerAbi
from contracts.artifacts import load_artifact
from contracts.deploy import Deployment
from contracts.devnet.server import BATCH_MAX, REQUEST_BYTES_MAX, answer_bytes
from contracts.jsonrpc import HttpRpc, RpcError
from protocol.errors import ConfigError
from troth.devnet import start_devnet


def transfer(world, key, nonce, *, tip=10**9, cap=10**10, value=1, gas=30_000, chain_id=None):
    signed = key.sign_transaction(
        {
            "type": 2,
            "chainId": chain_id or world.deployment.chain_id,
            "nonce": nonce,
            "to": "0x" + "11" * 20,
            "value": value,
            "gas": gas,
            "maxFeePerGas": cap,
            "maxPriorityFeePerGas": tip,
        }
    )
    return "0x" + bytes(signed.raw_transaction).hex()


def transfer_of(block):
    """The raw bytes of a block's first transaction."""
    return "0x" + block.transactions[0].tx.encode().hex()


async def funded_key(world):
    key = Account.create()
    await world.fund(bytes.fromhex(key.address[2:]))
    return key


def send(world, raw):
    return world.server.methods.call("eth_sendRawTransaction", [raw])


def refusal(call, *args):
    with pytest.raises(RpcError) as caught:
        call(*args)
    return caught.value


def test_blocks_come_from_the_tick_and_from_nothing_else(tmp_path):
    async def scenario():
        async with devnet(tmp_path, block_seconds=0) as world:
            key = await funded_key(world)
            before = world.chain.head.number
            for nonce in (2, 1, 0):
                send(world, transfer(world, key, nonce))
            assert world.chain.head.number == before
            world.mine()
            mined = world.chain.head.transactions
            assert [record.tx.nonce for record in mined] == [0, 1, 2]
            world.mine()
            assert world.chain.head.transactions == ()

    asyncio.run(scenario())


def test_ticking_devnet_mines_empty_blocks(tmp_path):
    async def scenario():
        async with devnet(tmp_path, block_seconds=0.02) as world:
            start = world.chain.head.number
            await until(lambda: world.chain.head.number >= start + 5)

    asyncio.run(scenario())


def test_gap_in_nonces_waits_until_it_is_filled(tmp_path):
    async def scenario():
        async with devnet(tmp_path, block_seconds=0) as world:
            key = await funded_key(world)
            late = send(world, transfer(world, key, 1))
            world.mine()
            assert world.server.methods.call("eth_getTransactionReceipt", [late]) is None
            send(world, transfer(world, key, 0))
            world.mine()
            assert len(world.chain.head.transactions) == 2

    asyncio.run(scenario())


def test_mempool_refusals_use_the_words_clients_know(tmp_path):
    async def scenario():
        async with devnet(tmp_path, block_seconds=0) as world:
            key = await funded_key(world)
            raw = transfer(world, key, 0)
            send(world, raw)
            assert "already known" in refusal(send, world, raw).message
            cheap = transfer(world, key, 0, value=2, tip=10**9 + 1)
            assert "replacement transaction underpriced" in refusal(send, world, cheap).message
            replacement = send(world, transfer(world, key, 0, value=2, tip=2 * 10**9, cap=2 * 10**10))
            world.mine()
            assert [data.hash.hex() for data in world.chain.head.transactions] == [replacement[2:]]
            assert "already known" in refusal(send, world, transfer_of(world.chain.head)).message
            assert "nonce too low" in refusal(send, world, raw).message
            assert "insufficient funds" in refusal(send, world, transfer(world, key, 1, value=10**30)).message
            assert "intrinsic gas too low" in refusal(send, world, transfer(world, key, 1, gas=20_000)).message
            assert "exceeds block gas limit" in refusal(send, world, transfer(world, key, 1, gas=10**8)).message
            assert "invalid chain id" in refusal(send, world, transfer(world, key, 1, chain_id=1)).message
            assert "higher than" in refusal(send, world, transfer(world, key, 1, tip=10**11)).message
            assert len(world.chain.pool) == 0

    asyncio.run(scenario())


def test_mempool_is_bounded_per_sender(tmp_path):
    async def scenario():
        async with devnet(tmp_path, block_seconds=0) as world:
            key = await funded_key(world)
            for nonce in range(256):
                send(world, transfer(world, key, nonce, cap=2 * 10**9))
            assert "txpool is full" in refusal(send, world, transfer(world, key, 256)).message

    asyncio.run(scenario())


def test_web3_reads_what_it_wrote(tmp_path):
    """web3.py is an independent reader: its formatters and receipt logic must accept every answer."""

    async def scenario():
        async with devnet(tmp_path, block_seconds=0.02) as world:
            key = Account.create()
            address = bytes.fromhex(key.address[2:])
            await world.fund(address, 500)
            w3 = AsyncWeb3(AsyncHTTPProvider(world.server.url))
            assert await w3.eth.chain_id == world.deployment.chain_id
            token = w3.eth.contract(
                address=Web3.to_checksum_address(world.deployment.token), abi=load_artifact("DevToken").abi
            )
            assert await token.functions.balanceOf(key.address).call() == 500
            other = Web3.to_checksum_address("0x" + "22" * 20)
            call = token.functions.transfer(other, 120)
            built = await call.build_transaction(
                {"from": key.address, "nonce": await w3.eth.get_transaction_count(key.address)}
            )
            assert built["maxFeePerGas"] > built["maxPriorityFeePerGas"]
            tx_hash = await w3.eth.send_raw_transaction(key.sign_transaction(built).raw_transaction)
            receipt = await w3.eth.wait_for_transaction_receipt(tx_hash, timeout=20, poll_latency=0.05)
            assert receipt["status"] == 1
            assert 0 < receipt["gasUsed"] <= built["gas"]
            moved = token.events.Transfer().process_receipt(receipt)
            assert [entry["args"]["value"] for entry in moved] == [120]
            block = await w3.eth.get_block(receipt["blockNumber"], full_transactions=True)
            assert block["hash"] == receipt["blockHash"]
            assert block["transactions"][receipt["transactionIndex"]]["hash"] == tx_hash
            assert (await w3.eth.get_block(block["hash"]))["number"] == block["number"]
            assert (await w3.eth.get_transaction(tx_hash))["blockNumber"] == block["number"]
            logs = await w3.eth.get_logs(
                {"address": token.address, "fromBlock": block["number"], "toBlock": block["number"]}
            )
            assert [entry["transactionHash"] for entry in logs] == [tx_hash]
            by_topic = await w3.eth.get_logs({"fromBlock": 0, "topics": [None, "0x" + "00" * 32]})
            assert [entry["data"][-2:].hex() for entry in by_topic] == [(500).to_bytes(2, "big").hex()]
            history = await w3.eth.fee_history(4, "latest", [50])
            assert len(history["baseFeePerGas"]) == len(history["gasUsedRatio"]) + 1
            poor = Account.create()
            unfunded = poor.sign_transaction({**built, "from": poor.address, "nonce": 0}).raw_transaction
            with pytest.raises(Web3RPCError, match="insufficient funds"):
                await w3.eth.send_raw_transaction(unfunded)
            await w3.provider.disconnect()

    asyncio.run(scenario())


def test_revert_carries_code_3_and_the_contract_error(tmp_path):
    async def scenario():
        async with devnet(tmp_path, block_seconds=0) as world:
            token = world.deployment.token
            call = {"to": "0x" + token.hex(), "data": "0xa9059cbb" + "00" * 31 + "01" + "00" * 31 + "05"}
            for method in ("eth_call", "eth_estimateGas"):
                error = refusal(world.server.methods.call, method, [call])
                assert error.code == 3
                assert LedgerAbi().describe_error(bytes.fromhex(error.data[2:])).startswith("ERC20InvalidSender(")

    asyncio.run(scenario())


def test_pending_simulation_sees_the_next_block(tmp_path):
    """A beacon of the head can be recorded in the next block, not in the head's own."""

    async def scenario():
        async with devnet(tmp_path, block_seconds=0) as world:
            head = world.chain.head.number
            payload = Web3.keccak(text="record(uint64)")[:4].hex() + head.to_bytes(32, "big").hex()
            call = {"to": "0x" + world.deployment.beacons.hex(), "data": "0x" + payload}
            assert world.server.methods.call("eth_call", [call, "pending"]) == "0x"
            assert refusal(world.server.methods.call, "eth_call", [call, "latest"]).code == 3

    asyncio.run(scenario())


def test_log_queries_are_bounded(tmp_path, monkeypatch):
    async def scenario():
        async with devnet(tmp_path, block_seconds=0) as world:
            methods = world.server.methods
            for _ in range(4):
                methods.call("devnet_mint", ["0x" + "33" * 20, 7])
                world.mine()
            head = world.chain.head.number
            many = ["0x" + bytes([i]).hex() * 20 for i in range(17)]
            assert refusal(methods.call, "eth_getLogs", [{"address": many}]).code == -32602
            assert refusal(methods.call, "eth_getLogs", [{"topics": [None] * 5}]).code == -32602
            wanted = {"fromBlock": hex(head - 3), "toBlock": hex(head)}
            monkeypatch.setattr("contracts.devnet.methods.LOG_RESULTS_MAX", 4)
            assert len(methods.call("eth_getLogs", [wanted])) == 4
            monkeypatch.setattr("contracts.devnet.methods.LOG_RESULTS_MAX", 3)
            assert refusal(methods.call, "eth_getLogs", [wanted]).code == -32005
            monkeypatch.setattr("contracts.devnet.methods.LOG_BLOCKS_MAX", 3)
            assert refusal(methods.call, "eth_getLogs", [wanted]).code == -32005

    asyncio.run(scenario())


MALFORMED = [
    (b"", -32700),
    (b"{", -32700),
    (b"\xff\xfe\x00", -32700),
    (b"[" * 8_000, -32700),
    (b"[" * 100_000, -32600),
    (b'{"a":' * 100_000, -32600),
    (b"[]", -32600),
    (b"3", -32600),
    (b'"eth_chainId"', -32600),
    (b"{}", -32600),
    (b'{"id": {}, "method": "eth_chainId"}', -32600),
    (b'{"id": 1, "method": 7}', -32600),
    (b'{"id": 1, "method": "eth_chainId", "params": {}}', -32600),
    (b'{"id": 1, "method": "eth_chainId", "params": [1, 2, 3]}', -32602),
    (b'{"id": 1, "method": "__init__", "params": []}', -32601),
    (b'{"id": 1, "method": "mine", "params": []}', -32601),
    (b'{"id": 1, "method": "eth_getBalance", "params": []}', -32602),
    (b'{"id": 1, "method": "eth_getBalance", "params": ["0x11"]}', -32602),
    (b'{"id": 1, "method": "eth_getBalance", "params": [null]}', -32602),
    (b'{"id": 1, "method": "eth_getBlockByNumber", "params": ["0x-1", false]}', -32602),
    (b'{"id": 1, "method": "eth_getBlockByNumber", "params": [[], false]}', -32602),
    (b'{"id": 1, "method": "eth_call", "params": [{"to": "0x1122"}]}', -32602),
    (b'{"id": 1, "method": "eth_call", "params": ["0x"]}', -32602),
    (b'{"id": 1, "method": "eth_getLogs", "params": [{"fromBlock": {}}]}', -32602),
    (b'{"id": 1, "method": "eth_feeHistory", "params": ["0x0"]}', -32602),
    (b'{"id": 1, "method": "devnet_fund", "params": ["0x1111111111111111111111111111111111111111", -5]}', -32602),
    (b'{"id": 1, "method": "devnet_reorg", "params": [1000]}', -32602),
    (b'{"id": 1, "method": "eth_sendRawTransaction", "params": ["0x02"]}', -32000),
    (b'{"id": 1, "method": "eth_sendRawTransaction", "params": ["02"]}', -32602),
]


def test_malformed_requests_get_json_rpc_errors(tmp_path):
    async def scenario():
        async with devnet(tmp_path, block_seconds=0) as world:
            for body, code in MALFORMED:
                answer = json.loads(answer_bytes(world.server.methods, body))
                assert answer["error"]["code"] == code, body[:80]
                assert "Traceback" not in answer["error"]["message"]

    asyncio.run(scenario())


def test_n5_random_bytes_never_stop_the_service(tmp_path):
    """N = 600 mutations of a valid batch and raw noise over the socket, while an honest client is answered."""
    seed = int.from_bytes(os.urandom(4), "big")
    rng = random.Random(seed)
    valid = json.dumps(
        [
            {"jsonrpc": "2.0", "id": 1, "method": "eth_getLogs", "params": [{"fromBlock": "0x0", "topics": [None]}]},
            {"jsonrpc": "2.0", "id": 2, "method": "eth_call", "params": [{"to": "0x" + "11" * 20, "data": "0x00"}]},
            {"jsonrpc": "2.0", "id": 3, "method": "eth_sendRawTransaction", "params": ["0x02f8"]},
        ]
    ).encode()

    async def scenario():
        async with devnet(tmp_path) as world, aiohttp.ClientSession() as session, HttpRpc(world.server.url) as honest:
            for _ in range(600):
                body = bytearray(valid)
                for _ in range(rng.randint(1, 6)):
                    body[rng.randrange(len(body))] = rng.randrange(256)
                async with session.post(world.server.url, data=bytes(body)) as response:
                    assert response.status == 200, f"seed {seed}"
                    answers = json.loads(await response.read())
                    for answer in answers if isinstance(answers, list) else [answers]:
                        assert answer.get("error", {}).get("code") != -32603, f"seed {seed}: {bytes(body)!r}"
            for _ in range(50):
                _, writer = await asyncio.open_connection("127.0.0.1", world.server.port)
                writer.write(rng.randbytes(200))
                writer.close()
            assert int(await honest.call("eth_chainId"), 16) == world.deployment.chain_id

    asyncio.run(scenario())


def test_nested_input_ends_in_an_error_whatever_is_imported():
    """py_ecc and py-evm raise the recursion limit so far that nested JSON would overflow the C stack of any process."""
    code = (
        "import msgspec, contracts.client, contracts.devnet.chain, troth.keystore, web3\n"
        "try: msgspec.json.decode(b'[' * 500_000)\n"
        "except RecursionError: print('refused')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "refused\n")


def test_oversized_request_and_batch_are_refused(tmp_path):
    async def scenario():
        async with devnet(tmp_path) as world, aiohttp.ClientSession() as session:
            async with session.post(world.server.url, data=b" " * (REQUEST_BYTES_MAX + 1)) as response:
                assert json.loads(await response.read())["error"]["code"] == -32600
            batch = [{"id": n, "method": "eth_chainId"} for n in range(BATCH_MAX + 1)]
            async with session.post(world.server.url, json=batch) as response:
                assert "batch" in json.loads(await response.read())["error"]["message"]
            async with session.post(world.server.url, json=batch[:-1]) as response:
                assert len(json.loads(await response.read())) == BATCH_MAX

    asyncio.run(scenario())


def test_busy_port_names_the_port_and_what_to_do(tmp_path):
    async def scenario():
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            with pytest.raises(ConfigError, match=rf"port {port} .* in use.*--port"):
                await start_devnet("127.0.0.1", port, 0, tmp_path)
        assert not (tmp_path / "deployment.json").exists()

    asyncio.run(scenario())


def test_deployment_file_and_method_agree_and_contracts_know_each_other(tmp_path):
    async def scenario():
        async with devnet(tmp_path) as world:
            assert Deployment.load(tmp_path / "deployment.json") == world.deployment
            shown = await rpc_call(world.server.url, "devnet_deployment")
            assert Deployment.from_json(shown, "rpc") == world.deployment
            for name in ("token", "beacons", "registry", "court", "book"):
                code = await rpc_call(world.server.url, "eth_getCode", shown[name])
                assert len(code) > 100
            ledger = await world.funded()
            assert await ledger.view("registry", "court") == (world.deployment.court,)
            assert await ledger.view("court", "book") == (world.deployment.book,)
            assert await ledger.view("book", "registry") == (world.deployment.registry,)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("content", "names"),
    [("{}", "chain_id"), ("[]", "object"), ("nonsense", "cannot be read"), ('{"chain_id": 1, "block": 0}', "token")],
)
def test_bad_deployment_file_is_refused(tmp_path, content, names):
    (tmp_path / "deployment.json").write_text(content)
    with pytest.raises(ConfigError, match=names):
        Deployment.load(tmp_path / "deployment.json")


@pytest.mark.parametrize("keep", [True, False])
def test_reorg_orphans_blocks_and_their_logs(tmp_path, keep):
    async def scenario():
        async with devnet(tmp_path, block_seconds=0) as world:
            methods = world.server.methods
            world.mine(5)
            methods.call("devnet_mint", ["0x" + "33" * 20, 7])
            world.mine()
            old = world.chain.head
            everything = [{"fromBlock": hex(old.number), "toBlock": "latest"}]
            assert len(methods.call("eth_getLogs", everything)) == 1
            methods.call("devnet_reorg", [2, keep])
            assert methods.call("eth_blockNumber", []) == hex(old.number - 2)
            assert methods.call("eth_getTransactionReceipt", ["0x" + old.transactions[0].hash.hex()]) is None
            assert methods.call("eth_getBlockByHash", ["0x" + old.hash.hex()]) is None
            world.mine(2)
            assert world.chain.head.number == old.number
            assert world.chain.head.hash != old.hash
            logs = methods.call("eth_getLogs", [{"fromBlock": hex(old.number - 1), "toBlock": "latest"}])
            assert len(logs) == (1 if keep else 0)

    asyncio.run(scenario())
