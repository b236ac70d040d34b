"""The ledger client over real HTTP and real contracts: calls, events, errors, approvals, order, and many at once."""

import asyncio
import os

import pytest
from devnet_support import devnet, small_task
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.abi import LOG_DATA_BYTES_MAX, LedgerAbi
from protocol.codec import encode
from protocol.errors import ConfigError, Fault
from protocol.ledger import calls, events
from protocol.task import compute_round_times, compute_terms

WAIT_S = 60
ABI = LedgerAbi()


async def done(ledger, intent, call):
    await ledger.submit(intent, call)
    return await ledger.wait(intent, WAIT_S)


async def drive(world, ledger, intent, call):
    """Mine a block after each poll, so that deadlines do not depend on how fast this machine is."""
    await ledger.submit(intent, call)
    for _ in range(20):
        await ledger.poll()
        if ledger.outcome(intent).status != "pending":
            break
        world.mine()
    return ledger.outcome(intent)


async def expect(ledger, intent, call):
    status = await done(ledger, intent, call)
    assert status.status == "final", status
    return status


async def reach(ledger, block):
    async with asyncio.timeout(WAIT_S):
        while ledger.state.block_number < block:
            await ledger.poll()
            await asyncio.sleep(0.02)


def test_a_round_from_registration_to_receipt(tmp_path):
    """Register, publish, join, beacon, commit, receipt, policy, attest, leave, cancel: what is sent is what is read."""

    async def scenario():
        async with devnet(tmp_path, block_seconds=0) as world:

            async def expect(ledger, intent, call):
                status = await drive(world, ledger, intent, call)
                assert status.status == "final", status

            node, relay, initiator = [await world.funded() for _ in range(3)]
            key = os.urandom(32)
            await expect(node, "register", calls.Register(events.Role.NODE, key, b"record", 1_000))
            await expect(relay, "register", calls.Register(events.Role.RELAY, os.urandom(32), b"", 1_000))
            spec = small_task(initiator.account, world.deployment.token)
            await expect(initiator, "publish", calls.Publish(encode(spec), 10**6))
            await node.poll()
            ((task, published),) = node.state.tasks.items()
            assert published.spec == spec
            assert published.deposit == 10**6
            assert published.initiator == initiator.account
            assert (await node.view("book", "termsOf", task))[0] == tuple(compute_terms(spec))
            participant = node.state.participants[node.account]
            assert (participant.network_key, participant.record, participant.bonded) == (key, b"record", 1_000)

            await expect(node, "join", calls.Join(task, 2))
            times = compute_round_times(spec.schedule, published.start_block, 0)
            world.mine(times.start - world.chain.head.number)
            await expect(node, "beacon", calls.RecordBeacon(times.start))
            assert node.state.beacons[times.start] == world.chain.blocks[times.start].hash
            root = os.urandom(32)
            await expect(node, "commit/0", calls.CommitRoot(task, 0, root, 2, spec.base_policy))
            committed = node.state.tasks[task].commitments[0][node.account]
            assert (committed.root, committed.leaves) == (root, 2)
            await relay.poll()
            await expect(relay, "receipt/0", calls.ReceiptBundles(task, 0, (node.account,)))
            assert relay.state.tasks[task].receipts[0] == {node.account: relay.account}

            policy = calls.RecordPolicy(task, 1, b"\x07" * 32, b"\x08" * 32, b"\x09" * 32, b"\x0a" * 32)
            await expect(initiator, "policy/1", policy)
            await expect(relay, "attest/1", calls.AttestPolicy(task, 1))
            assert list(relay.state.tasks[task].policies[1].attestations) == [relay.account]
            assert relay.state.tasks[task].policies[1].lineage == b"\x0a" * 32

            again = await drive(
                world, node, "commit/0/again", calls.CommitRoot(task, 0, b"\x01" * 32, 2, spec.base_policy)
            )
            assert again.status == "reverted"
            assert again.error == f"AlreadyCommitted(root=0x{root.hex()})"
            await expect(node, "leave", calls.Leave(task))
            await expect(initiator, "cancel", calls.Cancel(task))
            await node.poll()
            assert node.state.tasks[task].members[node.account][-1].to_epoch is not None
            assert node.state.tasks[task].cancelled_end is not None

    asyncio.run(scenario())


def test_two_replicas_hold_the_same_state(tmp_path):
    async def scenario():
        async with devnet(tmp_path) as world:
            first = await world.funded()
            await expect(first, "register", calls.Register(events.Role.NODE, os.urandom(32), b"r", 500))
            await expect(first, "stake", calls.AddStake(250))
            late = await world.funded()
            await expect(late, "register", calls.Register(events.Role.RELAY, os.urandom(32), b"r", 1))
            await reach(first, late.state.block_number)
            assert first.state.participants == late.state.participants

    asyncio.run(scenario())


def test_same_intent_twice_is_executed_once_and_its_events_come_once(tmp_path):
    async def scenario():
        async with devnet(tmp_path) as world:
            ledger = await world.funded()
            await ledger.submit("register", calls.Register(events.Role.NODE, os.urandom(32), b"", 100))
            await ledger.submit("register", calls.Register(events.Role.NODE, os.urandom(32), b"", 900))
            await ledger.wait("register", WAIT_S)
            await ledger.submit("register", calls.Register(events.Role.NODE, os.urandom(32), b"", 900))
            seen = await ledger.poll()
            for _ in range(5):
                seen += await ledger.poll()
                await asyncio.sleep(0.05)
            kinds = [type(logged.event).__name__ for logged in seen]
            assert kinds.count("ParticipantRegistered") == 1
            assert ledger.state.participants[ledger.account].bonded == 100
            # One approval and one registration.
            assert world.chain.nonce(ledger.account) == 2

    asyncio.run(scenario())


def test_refused_call_costs_no_nonce_and_says_why(tmp_path):
    async def scenario():
        async with devnet(tmp_path) as world:
            ledger = await world.funded()
            status = await done(ledger, "withdraw", calls.WithdrawStake())
            assert status.status == "reverted"
            assert status.error.startswith(("NothingUnbonding(", "WrongRole("))
            assert world.chain.nonce(ledger.account) == 0
            poor = await done(ledger, "register", calls.Register(events.Role.NODE, b"\x01" * 32, b"", 10**12))
            assert poor.error.startswith("ERC20InsufficientBalance(")
            assert str(10**12) in poor.error

    asyncio.run(scenario())


def test_calls_that_build_on_each_other_may_be_submitted_at_once(tmp_path):
    """Stake needs the registration, which needs its approval: none is refused because the one before is not mined yet."""

    async def scenario():
        async with devnet(tmp_path) as world:
            ledger = await world.funded()
            await ledger.submit("register", calls.Register(events.Role.NODE, os.urandom(32), b"", 100))
            await ledger.submit("stake", calls.AddStake(50))
            await ledger.submit("record", calls.SetRecord(b"new"))
            await ledger.submit("unbond", calls.StartUnbond(30))
            for intent in ("register", "stake", "record", "unbond"):
                assert (await ledger.wait(intent, WAIT_S)).status == "final"
            mine = ledger.state.participants[ledger.account]
            assert (mine.bonded, mine.unbonding, mine.record) == (120, 30, b"new")
            spent = await ledger.view("token", "allowance", ledger.account, world.deployment.registry)
            assert spent == (0,)

    asyncio.run(scenario())


def test_twenty_parallel_submits_from_one_key(tmp_path):
    async def scenario():
        async with devnet(tmp_path) as world:
            ledger = await world.funded()
            await expect(ledger, "register", calls.Register(events.Role.NODE, os.urandom(32), b"", 100))
            before = world.chain.nonce(ledger.account)

            async def one(number):
                await ledger.submit(f"unbond/{number}", calls.StartUnbond(1))
                return await ledger.wait(f"unbond/{number}", WAIT_S)

            results = await asyncio.gather(*(one(number) for number in range(20)))
            assert [status.status for status in results] == ["final"] * 20
            assert world.chain.nonce(ledger.account) == before + 20
            assert ledger.state.participants[ledger.account].unbonding == 20

    asyncio.run(scenario())


def test_transaction_that_fails_in_its_block_is_reverted_with_its_reason(tmp_path):
    """Two accounts' calls are good when simulated; the second finds the world changed when it is mined."""

    async def scenario():
        async with devnet(tmp_path, block_seconds=0) as world:
            ledger = await world.funded()
            register = calls.Register(events.Role.NODE, os.urandom(32), b"", 100)
            assert (await drive(world, ledger, "register", register)).status == "final"
            await ledger.submit("a", calls.StartUnbond(80))
            await ledger.submit("b", calls.StartUnbond(80))
            for _ in range(3):
                await ledger.poll()
                world.mine()
            await ledger.poll()
            assert ledger.outcome("a").status == "final"
            failed = ledger.outcome("b")
            assert failed.status == "reverted"
            assert failed.block_number > 0
            assert failed.error.startswith("UnbondTooMuch(amount=80, bonded=20")

    asyncio.run(scenario())


def test_account_without_ether_is_told_and_goes_on_when_funded(tmp_path, caplog):
    async def scenario():
        async with devnet(tmp_path) as world:
            ledger = world.client(os.urandom(32))
            world.server.methods.call("devnet_mint", ["0x" + ledger.account.hex(), 10**6])
            await asyncio.sleep(0.15)
            await ledger.submit("register", calls.Register(events.Role.NODE, os.urandom(32), b"", 100))
            with pytest.raises(Fault, match="stays in the outbox"):
                await ledger.wait("register", 1)
            assert sum("insufficient funds" in record.message for record in caplog.records) == 1
            await world.fund(ledger.account)
            assert (await ledger.wait("register", WAIT_S)).status == "final"

    asyncio.run(scenario())


def test_unknown_task_and_unfitting_values_are_refused_before_anything_is_sent(tmp_path):
    async def scenario():
        async with devnet(tmp_path) as world:
            ledger = await world.funded()
            with pytest.raises(ConfigError, match="not on this ledger"):
                await ledger.submit("challenge", calls.Challenge(b"\x01" * 32, 0))
            with pytest.raises(ConfigError, match="does not fit"):
                await ledger.submit("beacon", calls.RecordBeacon(2**64))
            with pytest.raises(ConfigError, match="cannot be published"):
                await ledger.submit("publish", calls.Publish(b"junk", 5))
            with pytest.raises(Fault, match="never submitted"):
                await ledger.wait("challenge", 1)
            assert ledger.outcome("beacon").status == "unknown"

    asyncio.run(scenario())


def test_every_call_has_a_function_with_its_fields():
    samples = {int: 1, bytes: b"\x01" * 32, bool: True}
    for kind in calls.Call.__subclasses__():
        if kind is calls.Publish:
            continue  # its terms come from a spec: see the round above
        fields = [samples.get(_plain(kind.__annotations__[name]), ()) for name in kind.__struct_fields__]
        call = kind(*fields)
        if kind is calls.Claim:
            call = kind(b"\x01" * 32, b"\x02" * 20, 5, (b"\x03" * 32,))
        if kind is calls.ConfirmCanary:
            call = kind(b"\x01" * 32, 1, b"\x02" * 20, True)
        contract, calldata = ABI.encode_call(call)
        assert contract in ("beacons", "registry", "book", "court", "canaries")
        assert len(calldata) >= 4


def _plain(annotation):
    return {"int": int, "bytes": bytes, "bool": bool}.get(str(annotation), tuple)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=400), st.integers(0, 4), st.integers(0, 40))
def test_l11_hostile_log_data_is_refused_and_nothing_else(data, extra_topics, which):
    """L11: pointers, lengths and counts in log data are a stranger's; decoding ends in an event, None or Fault."""
    known = sorted(ABI._events)
    topics = [known[which % len(known)]] + [data[:32].rjust(32, b"\x00")] * extra_topics
    try:
        event = ABI.decode_event(topics, data)
    except Fault:
        return
    assert isinstance(event, events.Event)


def test_l11_nested_pointers_do_not_amplify():
    """A dynamic array whose every element points back at a long one: refused by length, or decoded within bounds."""
    topic = next(t for t, codec in ABI._events.items() if codec.kind is events.SettlementPending)
    words = [32 * 5, 0, 0, 0, 0] + [2**40] + [0] * 50
    data = b"".join(word.to_bytes(32, "big") for word in words)
    with pytest.raises(Fault):
        ABI.decode_event([topic] + [bytes(32)] * 2, data)
    with pytest.raises(Fault, match="bytes of data"):
        ABI.decode_event([topic] + [bytes(32)] * 2, bytes(LOG_DATA_BYTES_MAX + 1))
