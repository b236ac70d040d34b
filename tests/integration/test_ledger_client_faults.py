"""Faults between the client and the chain: killed processes, lost replies, nodes that go away, reorganisations, wrong nodes."""

import asyncio
import os
import signal
import time
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web
from devnet_support import devnet

from contracts import client as client_module
from contracts import outbox as ob
from contracts import sender as sender_module
from contracts.client import EvmLedger
from contracts.jsonrpc import HttpRpc
from contracts.outbox import Outbox
from protocol.errors import ConfigError, Fault
from protocol.ledger import calls, events
from protocol.ledger.state import LedgerState

WAIT_S = 60


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch):
    """The same code with short pauses."""
    monkeypatch.setattr(sender_module, "REBROADCAST_S", 0.2)
    monkeypatch.setattr(client_module, "BACKOFF_S_MAX", 0.4)
    monkeypatch.setattr(client_module, "WAIT_POLL_S", 0.02)


async def register(ledger, stake=1_000):
    await ledger.submit("register", calls.Register(events.Role.NODE, os.urandom(32), b"", stake))
    assert (await ledger.wait("register", WAIT_S)).status == "final"


class Proxy:
    """Stands between client and devnet. `fault(body)` names what happens to a request: None, "lose_reply" or "drop"."""

    def __init__(self, target):
        self.target = target
        self.fault = lambda body: None
        self.port = 0
        self.seen = []
        self._runner = None

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    async def start(self):
        app = web.Application()
        app.router.add_post("/", self._handle)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()
        self.port = self._runner.addresses[0][1]

    async def stop(self):
        await self._runner.cleanup()

    async def _handle(self, request):
        body = await request.read()
        self.seen.append(body)
        fault = self.fault(body)
        answer = b""
        if fault != "drop":
            async with aiohttp.ClientSession() as session, session.post(self.target, data=body) as response:
                answer = await response.read()
        if fault is not None:
            request.transport.close()
            return web.Response(status=500)
        return web.Response(body=answer, content_type="application/json")


@asynccontextmanager
async def proxied(world):
    proxy = Proxy(world.server.url)
    await proxy.start()
    try:
        yield proxy
    finally:
        await proxy.stop()


# -- lost replies


@pytest.mark.parametrize(
    ("fault", "method"),
    [
        ("drop", b"eth_sendRawTransaction"),
        ("lose_reply", b"eth_sendRawTransaction"),
        ("lose_reply", b"eth_getTransactionReceipt"),
        ("lose_reply", b"eth_estimateGas"),
        ("lose_reply", b"eth_getLogs"),
    ],
)
def test_lost_reply_does_nothing_twice(tmp_path, fault, method):
    async def scenario():
        async with devnet(tmp_path) as world, proxied(world) as proxy:
            ledger = await world.funded(url=proxy.url)
            await register(ledger)
            nonce = world.chain.nonce(ledger.account)
            faults_left = 3

            def lose(body):
                nonlocal faults_left
                if method in body and faults_left:
                    faults_left -= 1
                    return fault
                return None

            proxy.fault = lose
            await ledger.submit("unbond", calls.StartUnbond(7))
            assert (await ledger.wait("unbond", WAIT_S)).status == "final"
            assert faults_left < 3
            assert world.chain.nonce(ledger.account) == nonce + 1
            assert ledger.state.participants[ledger.account].unbonding == 7
            raw = {attempt.raw for attempt in ledger._outbox.attempts(ledger._outbox.get("unbond").seq)}
            assert len(raw) == 1

    asyncio.run(scenario())


# -- kill -9

KILL_POINTS = [
    f"{moment} {step}"
    for step in ("submit", "record_signed", "send", "record_sent", "record_included", "record_final")
    for moment in ("before", "after")
]


def _kill_at(point, ledger):
    """Make this process die at a point of the second intent's way, as kill -9 would."""
    moment, step = point.split()

    def die():
        os.kill(os.getpid(), signal.SIGKILL)

    if step == "send":
        post = HttpRpc._post

        async def deadly_post(self, body):
            if b"eth_sendRawTransaction" not in body:
                return await post(self, body)
            if moment == "before":
                die()
            answer = await post(self, body)
            die()
            return answer

        HttpRpc._post = deadly_post
        return
    real = getattr(Outbox, step)

    def deadly(self, *args, **kwargs):
        if moment == "before":
            die()
        result = real(self, *args, **kwargs)
        die()
        return result

    setattr(Outbox, step, deadly)


def _in_child(work):
    """Run a coroutine function in a forked child; returns its exit status."""
    pid = os.fork()
    if pid == 0:
        try:
            asyncio.run(work())
            os._exit(0)
        except BaseException:
            import traceback

            traceback.print_exc()
            os._exit(1)
    return pid


async def _reap(pid):
    async with asyncio.timeout(WAIT_S):
        while True:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                return status
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("point", KILL_POINTS)
def test_kill_9_anywhere_executes_the_intent_exactly_once(tmp_path, point):
    async def scenario():
        async with devnet(tmp_path) as world:
            secret = os.urandom(32)
            ledger = world.client(secret, name="setup")
            await world.fund(ledger.account)
            await register(ledger)
            nonce = world.chain.nonce(ledger.account)
            url, deployment, path = world.server.url, world.deployment, tmp_path / "victim.sqlite"

            async def attempt(kill):
                victim = EvmLedger(url, deployment, secret, path)
                if kill:
                    _kill_at(point, victim)
                await victim.submit("unbond", calls.StartUnbond(7))
                status = await victim.wait("unbond", WAIT_S)
                assert status.status == "final", status
                assert victim.state.participants[victim.account].unbonding == 7

            status = await _reap(_in_child(lambda: attempt(True)))
            assert os.WIFSIGNALED(status), "the child survived its kill point"
            assert os.WTERMSIG(status) == signal.SIGKILL
            status = await _reap(_in_child(lambda: attempt(False)))
            assert status == 0
            assert world.chain.nonce(ledger.account) == nonce + 1
            mined = [
                record
                for block in world.chain.blocks
                for record in block.transactions
                if record.sender == ledger.account
            ]
            assert len([record for record in mined if record.tx.nonce >= nonce]) == 1

    asyncio.run(scenario())


def test_kill_9_between_approval_and_spending_call(tmp_path):
    async def scenario():
        async with devnet(tmp_path) as world:
            secret = os.urandom(32)
            account = world.client(secret, name="other").account
            await world.fund(account)
            url, deployment, path = world.server.url, world.deployment, tmp_path / "victim.sqlite"

            async def attempt(kill):
                victim = EvmLedger(url, deployment, secret, path)
                if kill:
                    _kill_at("after record_final", victim)  # the approval is the first to become final
                await victim.submit("register", calls.Register(events.Role.NODE, b"\x05" * 32, b"", 100))
                assert (await victim.wait("register", WAIT_S)).status == "final"

            status = await _reap(_in_child(lambda: attempt(True)))
            assert os.WIFSIGNALED(status)
            assert await _reap(_in_child(lambda: attempt(False))) == 0
            assert world.chain.nonce(account) == 2

    asyncio.run(scenario())


# -- a node that goes away


def test_node_down_at_start_and_later_loses_nothing_and_is_told_once(tmp_path, caplog):
    async def scenario():
        async with devnet(tmp_path) as world:
            proxy = Proxy(world.server.url)
            await proxy.start()
            await proxy.stop()
            ledger = await world.funded(url=proxy.url)
            await ledger.submit("register", calls.Register(events.Role.NODE, os.urandom(32), b"", 100))
            for _ in range(60):
                assert await ledger.poll() == []
                await asyncio.sleep(0.02)
            assert not ledger.reachable
            with pytest.raises(Fault, match="cannot be reached"):
                await ledger.wait("register", 0.2)
            assert _count(caplog, "cannot be reached") == 1
            await proxy.start()
            assert (await ledger.wait("register", WAIT_S)).status == "final"
            assert _count(caplog, "is back") == 1
            await proxy.stop()
            await ledger.submit("unbond", calls.StartUnbond(1))
            seen = await until_polled(ledger, lambda: not ledger.reachable)
            await proxy.start()
            assert (await ledger.wait("unbond", WAIT_S)).status == "final"
            assert _count(caplog, "cannot be reached") == 2
            assert _count(caplog, "is back") == 2
            kinds = [type(logged.event).__name__ for logged in seen + await ledger.poll()]
            assert kinds.count("ParticipantRegistered") == 1
            await proxy.stop()

    asyncio.run(scenario())


def _count(caplog, text):
    return sum(text in record.getMessage() for record in caplog.records)


async def until_polled(ledger, condition):
    seen = []
    async with asyncio.timeout(WAIT_S):
        while not condition():
            seen += await ledger.poll()
            await asyncio.sleep(0.02)
    return seen


def test_pauses_grow_but_stay_below_five_seconds(monkeypatch, tmp_path):
    monkeypatch.setattr(client_module, "BACKOFF_S_MAX", 5.0)

    async def scenario():
        async with devnet(tmp_path) as world:
            ledger = world.client(os.urandom(32))
            pauses = []
            for _ in range(40):
                ledger._went_away(ConnectionError("x"))
                pauses.append(ledger._retry_at - time.monotonic())
            assert pauses[0] < 0.21
            assert 2.0 < max(pauses) <= 5.0
            assert pauses[-1] > pauses[0]

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "answer", [b"", b"{}", b"[]", b"null", b"[" * 50_000, b'{"id":1,"result":{}}', b"<html>", b'{"error":1}']
)
def test_garbage_answers_are_an_unreachable_node(tmp_path, answer):
    async def garbage(request):
        await request.read()
        return web.Response(body=answer)

    async def scenario():
        async with devnet(tmp_path) as world:
            app = web.Application()
            app.router.add_post("/", garbage)
            runner = web.AppRunner(app)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            ledger = world.client(os.urandom(32), url=f"http://127.0.0.1:{runner.addresses[0][1]}")
            assert await ledger.poll() == []
            assert not ledger.reachable
            await runner.cleanup()

    asyncio.run(scenario())


# -- the wrong node


def test_wrong_chain_id_names_both(tmp_path):
    async def scenario():
        async with devnet(tmp_path) as world:
            world.deployment = type(world.deployment)(1, *[getattr(world.deployment, f) for f in FIELDS[1:]])
            ledger = world.client(os.urandom(32))
            with pytest.raises(ConfigError, match=r"chain 31337.*on 1"):
                await ledger.poll()

    asyncio.run(scenario())


FIELDS = ("chain_id", "block", "token", "beacons", "registry", "court", "book", "canaries")


def test_missing_contract_names_the_address(tmp_path):
    async def scenario():
        async with devnet(tmp_path) as world:
            values = {field: getattr(world.deployment, field) for field in FIELDS} | {"book": b"\x77" * 20}
            world.deployment = type(world.deployment)(**values)
            ledger = world.client(os.urandom(32))
            with pytest.raises(ConfigError, match="no contract at 0x7777"):
                await ledger.poll()

    asyncio.run(scenario())


def test_outbox_of_an_older_devnet_is_refused(tmp_path):
    """The restarted devnet has the same chain id and addresses; its nonces have nothing to do with the outbox's."""

    async def scenario():
        secret = os.urandom(32)
        async with devnet(tmp_path) as world:
            ledger = world.client(secret)
            await ledger.poll()
        await asyncio.sleep(1.1)  # genesis carries a timestamp in seconds
        async with devnet(tmp_path) as world:
            ledger = world.client(secret)
            with pytest.raises(ConfigError, match="belongs to genesis"):
                await ledger.poll()

    asyncio.run(scenario())


# -- reorganisations


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_l9_reorg_within_the_finality_depth_executes_once(tmp_path, keep, depth):
    """L9: the block of inclusion is orphaned, its transaction is kept or forgotten by the node."""

    async def scenario():
        async with devnet(tmp_path, block_seconds=0) as world:
            ledger = await world.funded(finality_depth=4)
            await ledger.submit("register", calls.Register(events.Role.NODE, os.urandom(32), b"", 100))
            await drive(world, ledger, "register")
            await ledger.submit("unbond", calls.StartUnbond(7))
            await ledger.poll()
            world.mine(depth)
            await ledger.poll()
            assert ledger._outbox.get("unbond").state == ob.INCLUDED
            world.server.methods.call("devnet_reorg", [depth, keep])
            await drive(world, ledger, "unbond")
            assert ledger.state.participants[ledger.account].unbonding == 7
            mine = [r for b in world.chain.blocks for r in b.transactions if r.sender == ledger.account]
            assert [record.tx.nonce for record in mine] == [0, 1, 2]
            assert len(ledger._outbox.attempts(ledger._outbox.get("unbond").seq)) == 1

    asyncio.run(scenario())


async def drive(world, ledger, intent):
    for _ in range(60):
        await ledger.poll()
        if ledger.outcome(intent).status != "pending":
            break
        world.mine()
        await asyncio.sleep(0.01)
    assert ledger.outcome(intent).status == "final"


def test_reorg_deeper_than_finality_rebuilds_the_replica(tmp_path, caplog):
    async def scenario():
        async with devnet(tmp_path, block_seconds=0) as world:
            ledger, other = await world.funded(), await world.funded()
            await ledger.submit("register", calls.Register(events.Role.NODE, os.urandom(32), b"", 100))
            await drive(world, ledger, "register")
            await other.submit("register", calls.Register(events.Role.RELAY, os.urandom(32), b"", 5))
            await drive(world, other, "register")
            await ledger.poll()
            assert other.account in ledger.state.participants
            block = other.outcome("register").block_number
            depth = world.chain.head.number - block + 1
            world.server.methods.call("devnet_reorg", [depth, False])
            assert await ledger.poll() == []
            world.mine(depth + 1)
            assert await ledger.poll() == []
            assert other.account not in ledger.state.participants
            assert ledger.account in ledger.state.participants
            assert _count(caplog, "was orphaned: rebuilding") == 1
            fresh = world.client(os.urandom(32))
            await fresh.poll()
            assert fresh.state == ledger.state
            assert isinstance(ledger.state, LedgerState)

    asyncio.run(scenario())


def test_events_of_the_new_branch_are_handed_out_after_a_reorg(tmp_path):
    async def scenario():
        async with devnet(tmp_path, block_seconds=0) as world:
            ledger = await world.funded()
            watcher = world.client(os.urandom(32))
            await ledger.submit("register", calls.Register(events.Role.NODE, os.urandom(32), b"", 100))
            await drive(world, ledger, "register")
            first = await watcher.poll()
            assert [type(logged.event) for logged in first] == [events.ParticipantRegistered]
            depth = world.chain.head.number - first[0].block_number + 1
            world.server.methods.call("devnet_reorg", [depth, True])
            world.mine(depth + 2)
            second = await watcher.poll()
            assert [type(logged.event) for logged in second] == [events.ParticipantRegistered]
            assert await watcher.poll() == []

    asyncio.run(scenario())


# -- nonces


def test_nonce_taken_by_another_wallet_is_signed_again_and_executed_once(tmp_path, caplog):
    async def scenario():
        async with devnet(tmp_path, block_seconds=0) as world:
            secret = os.urandom(32)
            ledger, thief = world.client(secret, name="a"), world.client(secret, name="b")
            await world.fund(ledger.account)
            await ledger.submit("register", calls.Register(events.Role.NODE, os.urandom(32), b"", 100))
            await drive(world, ledger, "register")
            await ledger.submit("unbond", calls.StartUnbond(7))
            ledger._sender._send_due = _nothing  # signed, and on its way to the node when the other wallet is faster
            await ledger.poll()
            assert ledger._outbox.get("unbond").state == ob.SIGNED
            await thief.submit("record", calls.SetRecord(b"thief"))
            await drive(world, thief, "record")
            del ledger._sender._send_due
            for _ in range(100):
                await ledger.poll()
                world.mine()
                await asyncio.sleep(0.01)
                if ledger.outcome("unbond").status == "final":
                    break
            assert ledger.state.participants[ledger.account].unbonding == 7
            assert _count(caplog, "went to another transaction") == 1
            assert len(ledger._outbox.attempts(ledger._outbox.get("unbond").seq)) == 2

    asyncio.run(scenario())


async def _nothing(*_):
    return None


def test_stuck_transaction_is_replaced_under_its_nonce_within_the_cap(tmp_path, monkeypatch):
    monkeypatch.setattr(sender_module, "REPLACE_S", -1)

    async def scenario():
        async with devnet(tmp_path, block_seconds=0) as world:
            ledger = await world.funded(fee_cap_wei_max=10 * 10**9)
            await ledger.submit("register", calls.Register(events.Role.NODE, os.urandom(32), b"", 100))
            await drive(world, ledger, "register")
            await ledger.submit("unbond", calls.StartUnbond(7))
            await ledger.poll()
            row = ledger._outbox.get("unbond")
            first = ledger._outbox.attempts(row.seq)[-1]
            await ledger._sender.step(first.fee_cap + 1, ledger._follower.cursor)
            attempts = ledger._outbox.attempts(row.seq)
            assert [attempt.nonce for attempt in attempts] == [first.nonce] * 2
            assert attempts[1].fee_cap > first.fee_cap * 1.1
            await ledger._sender.step(10**12, ledger._follower.cursor)
            for _ in range(20):
                await ledger._sender.step(10**12, ledger._follower.cursor)
            assert max(attempt.fee_cap for attempt in ledger._outbox.attempts(row.seq)) <= 10 * 10**9
            await drive(world, ledger, "unbond")
            assert ledger.state.participants[ledger.account].unbonding == 7
            mine = [r for b in world.chain.blocks for r in b.transactions if r.sender == ledger.account]
            assert [record.tx.nonce for record in mine] == [0, 1, 2]

    asyncio.run(scenario())


def test_second_client_on_one_outbox_is_refused(tmp_path):
    async def scenario():
        async with devnet(tmp_path) as world:
            secret = os.urandom(32)
            world.client(secret)
            with pytest.raises(ConfigError, match="in use by another process"):
                world.client(secret)

    asyncio.run(scenario())


def test_many_blocks_are_caught_up_in_ranges(tmp_path, monkeypatch):
    monkeypatch.setattr("contracts.follower.RANGE_BLOCKS_MAX", 8)
    monkeypatch.setattr("contracts.devnet.methods.LOG_BLOCKS_MAX", 5)

    async def scenario():
        async with devnet(tmp_path, block_seconds=0) as world:
            ledger = await world.funded()
            await ledger.submit("register", calls.Register(events.Role.NODE, os.urandom(32), b"", 100))
            await drive(world, ledger, "register")
            world.mine(60)
            fresh = world.client(os.urandom(32))
            seen = await fresh.poll()
            assert fresh.state.block_number == world.chain.head.number
            assert [type(logged.event) for logged in seen] == [events.ParticipantRegistered]

    asyncio.run(scenario())
