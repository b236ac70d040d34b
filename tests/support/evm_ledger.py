"""The real contracts on py-evm, one transaction per block, seen through the shared vocabulary of calls and events.

`fresh_ledger` yields a ledger with one account of each kind registered and takes everything back afterwards, so tests share
one deployment. A refused call is tried on the pending block and mines nothing, so deadlines can be probed at +-1 block.
Neighbours: `contracts.artifacts` (what is deployed), `tests.support.evm_codec` (what logs become).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

os.environ.setdefault("ETH_HASH_BACKEND", "pysha3")

from eth_abi.abi import encode
from eth_tester import EthereumTester, PyEVMBackend
from eth_tester.exceptions import TransactionFailed
from eth_utils import to_checksum_address

from contracts.artifacts import load_artifact
from contracts.deploy import compute_create_address
from protocol.ledger import events
from protocol.ledger.events import Event, Role
from protocol.merkle import compute_root
from protocol.settlement import compute_claim, compute_leaves
from protocol.task import Terms
from tests.support.evm_codec import Codec, RevertedError, abi_types, revert_data

_FEES = {"gas": 8_000_000, "max_fee_per_gas": 10**10, "max_priority_fee_per_gas": 1}
MONEY = 10**12
STAKE = 1_000
BURN_ADDRESS = bytes.fromhex("dead".rjust(40, "0"))

#: Accounts by name; the first verifiers have 40, 30 and 30 % of the stake.
NAMES = (
    "deployer", "initiator", "trainer", "node", "node2", "relay", "verifier", "verifier2", "verifier3", "stranger",
)  # fmt: skip
VERIFIERS = ("verifier", "verifier2", "verifier3")
ROLES = {
    "trainer": (Role.TRAINER, 0),
    "node": (Role.NODE, STAKE),
    "node2": (Role.NODE, STAKE),
    "relay": (Role.RELAY, STAKE),
    "verifier": (Role.VERIFIER, 4 * STAKE),
    "verifier2": (Role.VERIFIER, 3 * STAKE),
    "verifier3": (Role.VERIFIER, 3 * STAKE),
}

#: Epochs of two rounds of four blocks. A round's data deadlines reach past the next round's start.
TERMS = Terms(
    start_delay_blocks=5,
    round_blocks=4,
    epoch_rounds=2,
    num_epochs=3,
    commit_blocks=6,
    receipt_blocks=4,
    finality_blocks=1,
    verdict_commit_blocks=3,
    verdict_reveal_blocks=2,
    challenge_blocks=4,
    timeout_blocks=10,
    slots_max=4,
    slash_bps=5_000,
    leaf_pay_max=100,
    epoch_pay_max=1_000,
    node_stake_min=STAKE,
    verifier_stake_min=STAKE,
    challenge_bond=50,
    trainer=bytes(20),
    base_policy=b"\x01" * 32,
    base_manifest=b"\x02" * 32,
)
#: The shortest unbonding time that `TERMS` allow: one epoch (8), deadlines (21), two challenge windows (8).
UNBOND_BLOCKS = 37
DEPOSIT = 3_500
SPEC = b"a task"


class EvmLedger:
    """The deployed contracts. Accounts are named by `NAMES`, or given as 20 bytes.

    Args:
        token: artifact of the token of stake, escrow and bonds.
        chain_id: of another chain than eth-tester's own.
        first_nonce: of the deployer; another one gives the contracts other addresses.
    """

    def __init__(self, token: str = "DevToken", *, chain_id: int | None = None, first_nonce: int = 0) -> None:
        self.tester = EthereumTester(PyEVMBackend())
        if chain_id is not None:
            self.tester.backend.chain.chain_id = chain_id
        addresses = [bytes.fromhex(address[2:]) for address in self.tester.get_accounts()]
        self.accounts: dict[str, bytes] = dict(zip(NAMES, addresses, strict=True))
        self.contracts: dict[str, tuple[str, bytes]] = {}
        self.token = token
        self.codec = Codec(
            [
                load_artifact(n)
                for n in (token, "Beacons", "StakeRegistry", "Court", "TaskBook", "Canaries", "test/Reenterer")
            ]
        )
        for nonce in range(first_nonce):
            self.create(f"spare{nonce}", "Beacons")
        court, book = (compute_create_address(self.accounts["deployer"], first_nonce + n) for n in (3, 4))
        self.create("token", token)
        self.create("beacons", "Beacons")
        self.create("registry", "StakeRegistry", self.address("token"), UNBOND_BLOCKS, court)
        self.create("court", "Court", self.address("registry"), book)
        self.create("book", "TaskBook", *(self.address(n) for n in ("token", "registry", "beacons", "court")))
        self.create("canaries", "Canaries", self.address("registry"), self.address("book"))
        assert (self.address("court"), self.address("book")) == (court, book)
        for name in NAMES[1:]:
            self.fund(name)

    def create(self, name: str, artifact: str, *arguments: Any) -> bytes:
        """Deploy a contract and know it by `name`, as an account too."""
        art = load_artifact(artifact)
        inputs = next((entry["inputs"] for entry in art.abi if entry["type"] == "constructor"), [])
        code = art.bytecode + encode(abi_types(inputs), arguments)
        receipt = self._mine(
            {"from": to_checksum_address(self.accounts["deployer"]), "data": "0x" + code.hex(), **_FEES}
        )
        self.contracts[name] = (art.name, bytes.fromhex(receipt["contract_address"][2:]))
        return self.address(name)

    def fund(self, who: str | bytes, amount: int = MONEY) -> None:
        """Mint tokens to an account and let the contracts take them."""
        self.send("deployer", "token", "mint", self.address(who), amount)
        if isinstance(who, str) and who in self.accounts:
            for spender in ("registry", "court", "book", "canaries"):
                self.send(who, "token", "approve", self.address(spender), 2**256 - 1)

    def address(self, who: str | bytes) -> bytes:
        """Address of a named contract or account."""
        if isinstance(who, bytes):
            return who
        return self.contracts[who][1] if who in self.contracts else self.accounts[who]

    @property
    def block(self) -> int:
        """The block the next transaction will be in."""
        return int(self.tester.get_block_by_number("latest")["number"]) + 1

    def mine_until(self, block: int) -> None:
        """Mine empty blocks until the next transaction will be in `block`."""
        assert block >= self.block, f"block {block} is over: the next is {self.block}"
        if block > self.block:
            self.tester.mine_blocks(block - self.block)

    def data(self, contract: str, function: str, *arguments: Any) -> bytes:
        """A call as bytes."""
        return self.codec.call_data(self.contracts[contract][0], function, arguments)

    def send(self, who: str, contract: str, function: str, *arguments: Any) -> list[Event]:
        """Make a call in a block of its own and return what it emitted, tokens' own events left out.

        Raises:
            RevertedError: when it fails; then nothing is mined.
        """
        self.call(who, contract, function, *arguments)
        receipt = self._mine(self._transaction(who, contract, self.data(contract, function, *arguments)))
        return [event for event in map(self.codec.event, receipt["logs"]) if event is not None]

    def call(self, who: str, contract: str, function: str, *arguments: Any) -> Any:
        """Try a call on the pending block; nothing is mined.

        Raises:
            RevertedError: with the contract's error.
        """
        transaction = self._transaction(who, contract, self.data(contract, function, *arguments))
        try:
            output = self.tester.call(transaction, "pending")
        except TransactionFailed as error:
            raise self.codec.error(revert_data(error)) from None
        raw = bytes.fromhex(output[2:]) if isinstance(output, str) else bytes(output)
        return self.codec.result(self.contracts[contract][0], function, raw) if raw else None

    def view(self, contract: str, function: str, *arguments: Any) -> Any:
        """Read from the pending block."""
        return self.call("deployer", contract, function, *arguments)

    def error(self, who: str, contract: str, function: str, *arguments: Any) -> tuple[Any, ...]:
        """The error a call is refused with: name and values."""
        try:
            self.call(who, contract, function, *arguments)
        except RevertedError as error:
            return (error.name, *error.values)
        raise AssertionError(f"{who} may {function}{arguments} in block {self.block}, and should not")

    def send_in_one_block(self, *calls: tuple[str, str, str, tuple[Any, ...]]) -> list[int]:
        """Make calls of different senders in one block, in this order. Returns 1 for each that succeeded, else 0."""
        self.tester.disable_auto_mine_transactions()
        hashes = [
            self.tester.send_transaction(self._transaction(who, contract, self.data(contract, function, *arguments)))
            for who, contract, function, arguments in calls
        ]
        self.tester.mine_block()
        self.tester.enable_auto_mine_transactions()
        receipts = [self.tester.get_transaction_receipt(h) for h in hashes]
        assert len({receipt["block_number"] for receipt in receipts}) == 1
        return [receipt["status"] for receipt in receipts]

    def balance(self, who: str | bytes) -> int:
        """Tokens of an account."""
        return int(self.view("token", "balanceOf", self.address(who)))

    def terms(self, **changes: Any) -> Terms:
        """`TERMS` with this ledger's trainer, and changes."""
        return TERMS._replace(**({"trainer": self.accounts["trainer"]} | changes))

    def publish(self, deposit: int = DEPOSIT, **changes: Any) -> bytes:
        """Publish a task by the initiator."""
        published = self.send("initiator", "book", "publish", self.terms(**changes), SPEC, deposit)[0]
        assert isinstance(published, events.TaskPublished)
        return published.task

    def times(self, task: bytes, round_index: int) -> tuple[int, ...]:
        """Block numbers of a round: start, commit, receipt, audit, verdict commit, verdict reveal."""
        times: tuple[int, ...] = self.view("book", "openRound", task, round_index)[0:6]
        return times

    def record_beacon(self, block: int) -> None:
        """Record the hash of a block, once it is over."""
        self.mine_until(max(self.block, block + 1))
        self.send("stranger", "beacons", "record", block)

    def commit(self, task: bytes, round_index: int, who: str = "node", leaves: int = 1) -> None:
        """Record the round's beacon and commit a root of a node that has joined."""
        self.record_beacon(self.times(task, round_index)[0])
        self.send(who, "book", "commit", task, round_index, b"\x33" * 32, leaves, b"\x01" * 32)

    def vote(
        self,
        task: bytes,
        epoch: int,
        earnings: dict[bytes, int],
        *,
        burned: int = 0,
        slashed: Sequence[bytes] = (),
        voters: Sequence[str] = VERIFIERS[:2],
    ) -> None:
        """Vote for a settlement, as soon as everything about the epoch is said."""
        self.mine_until(max(self.block, self.view("book", "lastConfirmOf", task, epoch) + 1))
        for voter in voters:
            arguments = settlement(task, epoch, earnings, burned=burned, slashed=slashed)
            self.send(voter, "court", "voteSettlement", *arguments)

    def finalize(self, task: bytes, epoch: int) -> list[Event]:
        """Wait for the windows of a pending settlement and finalize it."""
        _, challenge_end, vote_end, _, _ = self.view("court", "pendingOf", task)
        self.mine_until(max(self.block, challenge_end + 1, vote_end + 1))
        return self.send("stranger", "court", "finalize", task, epoch)

    def settle(self, task: bytes, epoch: int, earnings: dict[bytes, int], **rest: Any) -> None:
        """Vote for a settlement and make it final."""
        self.vote(task, epoch, earnings, **rest)
        self.finalize(task, epoch)

    def _transaction(self, who: str, contract: str, data: bytes) -> dict[str, Any]:
        sender, to = to_checksum_address(self.accounts[who]), to_checksum_address(self.contracts[contract][1])
        return {"from": sender, "to": to, "data": "0x" + data.hex(), **_FEES}

    def _mine(self, transaction: dict[str, Any]) -> dict[str, Any]:
        receipt: dict[str, Any] = self.tester.get_transaction_receipt(self.tester.send_transaction(transaction))
        assert receipt["status"] == 1, "a transaction failed that the pending block had accepted"
        return receipt


def settlement(
    task: bytes, epoch: int, earnings: dict[bytes, int], *, burned: int = 0, slashed: Sequence[bytes] = ()
) -> tuple[Any, ...]:
    """Arguments of `voteSettlement` for cumulative earnings."""
    root = compute_root(compute_leaves(task, earnings)) if earnings else bytes(32)
    return task, epoch, root, sum(earnings.values()), burned, tuple(slashed)


def claim(task: bytes, earnings: dict[bytes, int], account: bytes) -> tuple[Any, ...]:
    """Arguments of `claim`."""
    return task, account, *compute_claim(task, earnings, account)


def register_all(ledger: EvmLedger) -> None:
    """Register the accounts of `ROLES`."""
    for name, (role, stake) in ROLES.items():
        ledger.send(name, "registry", "register", int(role), ledger.accounts[name].rjust(32, b"k"), b"record", stake)


@cache
def _shared_ledger() -> EvmLedger:
    ledger = EvmLedger()
    register_all(ledger)
    return ledger


def fresh_ledger() -> Iterator[EvmLedger]:
    """Yield the shared ledger with `ROLES` registered, and undo afterwards what a test did."""
    ledger = _shared_ledger()
    snapshot, known = ledger.tester.take_snapshot(), dict(ledger.contracts)
    yield ledger
    ledger.tester.enable_auto_mine_transactions()
    ledger.tester.revert_to_snapshot(snapshot)
    ledger.contracts = known
