"""The contracts' rules in memory: what a call does to the ledger, and when it is refused.

Money is not moved: stakes, deposits and payouts are numbers in events, claims are not proved, stake is not reserved and
never withdrawn. Everything else follows the contracts: roles, order, deadlines, first root wins, tallies by stake.
Neighbours: tests.support.twins gives each account its connection.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from protocol.canaries import compute_seal
from protocol.codec import tagged_hash
from protocol.ledger import calls, events
from protocol.ledger.state import ATTESTATIONS_NEEDED, LedgerState, Task, apply
from protocol.merkle import keccak
from protocol.rounds import get_end_round, get_epoch, get_num_epochs, get_times
from protocol.settlement import get_epoch_deadline
from protocol.task import compute_epoch_pay_max, compute_leaf_pay_max, decode_spec
from protocol.verdict import compute_verdict_commitment

CHAIN_ID = 31_337
ADDRESS = bytes.fromhex("b0" * 20)


class RevertedError(Exception):
    """A contract error with its values."""


def _require(condition: bool, error: str) -> None:
    if not condition:
        raise RevertedError(error)


class MemoryChain:
    """One chain that any number of accounts share. Nothing happens until `advance` mines a block.

    Args:
        auto_beacons: record every round's start and audit beacon in the block after it, before any other call.
    """

    def __init__(self, *, chain_id: int = CHAIN_ID, address: bytes = ADDRESS, auto_beacons: bool = True) -> None:
        self.chain_id = chain_id
        self.address = address
        self.auto_beacons = auto_beacons
        self.state = LedgerState()
        self.logs: list[events.Logged] = []
        self.mempool: list[tuple[bytes, calls.Call, Callable[[str, int, str], None]]] = []
        self._tallies: dict[tuple[bytes, int, int], dict[bytes, tuple[bytes, int]]] = {}
        self._upheld: dict[tuple[bytes, int, int], dict[bytes, tuple[bool, int]]] = {}
        self._attempts: dict[tuple[bytes, int], int] = {}
        self._seals: dict[bytes, tuple[int, int] | None] = {}  # bond and block; None: opened
        self._opened: dict[tuple[bytes, int, bytes], set[bytes]] = {}

    @property
    def block_number(self) -> int:
        """The newest block."""
        return self.state.block_number

    def block_hash(self, number: int) -> bytes:
        """Hash of a block: a function of its number and the chain."""
        return tagged_hash("memory-block", self.chain_id.to_bytes(8, "big"), number.to_bytes(8, "big"))

    def emit(self, event: events.Event) -> None:
        """Append an event to the newest block. Tests may call it to write history without contract checks."""
        index = sum(log.block_number == self.block_number for log in self.logs[-2048:])
        self.logs.append(events.Logged(self.block_number, index, event))
        apply(self.state, self.logs[-1])

    def advance(self, blocks: int = 1) -> None:
        """Mine blocks: the first takes all pending calls in order of submission."""
        for _ in range(blocks):
            self.state.block_number += 1
            if self.auto_beacons:
                self._record_due_beacons()
            pending, self.mempool = self.mempool, []
            for sender, call, done in pending:
                try:
                    for event in self._execute(sender, call):
                        self.emit(event)
                    done("final", self.block_number, "")
                except RevertedError as error:
                    done("reverted", self.block_number, str(error))

    def _record_due_beacons(self) -> None:
        number = self.block_number - 1
        for task in self.state.tasks.values():
            for index in range(get_end_round(task)):
                times = get_times(task, index)
                if times.start > number:
                    break
                if number in (times.start, times.audit_block) and number not in self.state.beacons:
                    self.emit(events.BeaconRecorded(number, self.block_hash(number)))

    def _execute(self, sender: bytes, call: calls.Call) -> list[events.Event]:
        handler: Callable[[bytes, Any], list[events.Event]] = getattr(self, f"_{type(call).__name__}")
        return handler(sender, call)

    def _task(self, task: bytes) -> Task:
        found = self.state.tasks.get(task)
        _require(found is not None, f"UnknownTask({task.hex()})")
        assert found is not None
        return found

    def _role(self, sender: bytes, *roles: events.Role, stake_min: int = 0) -> int:
        participant = self.state.participants.get(sender)
        _require(participant is not None and participant.role in roles, f"WrongRole({sender.hex()})")
        assert participant is not None
        _require(participant.bonded >= stake_min, f"StakeBelowMinimum({participant.bonded}, {stake_min})")
        return participant.bonded

    def _before(self, deadline: int, name: str) -> None:
        _require(self.block_number <= deadline, f"{name}({self.block_number}, {deadline})")

    def _after(self, block: int, name: str) -> None:
        _require(self.block_number > block, f"{name}({self.block_number}, {block})")

    # StakeRegistry and Beacons

    def _Register(self, sender: bytes, call: calls.Register) -> list[events.Event]:
        _require(sender not in self.state.participants, f"AlreadyRegistered({sender.hex()})")
        return [events.ParticipantRegistered(sender, call.role, call.network_key, call.record, call.amount)]

    def _SetRecord(self, sender: bytes, call: calls.SetRecord) -> list[events.Event]:
        _require(sender in self.state.participants, f"NotRegistered({sender.hex()})")
        return [events.RecordChanged(sender, call.record)]

    def _AddStake(self, sender: bytes, call: calls.AddStake) -> list[events.Event]:
        _require(sender in self.state.participants, f"NotRegistered({sender.hex()})")
        who = self.state.participants[sender]
        return [events.StakeChanged(sender, who.bonded + call.amount, who.unbonding)]

    def _StartUnbond(self, sender: bytes, call: calls.StartUnbond) -> list[events.Event]:
        who = self.state.participants[sender]
        _require(call.amount <= who.bonded, f"InsufficientStake({who.bonded}, {call.amount})")
        return [events.StakeChanged(sender, who.bonded - call.amount, who.unbonding + call.amount)]

    def _RecordBeacon(self, sender: bytes, call: calls.RecordBeacon) -> list[events.Event]:
        number = call.block_number
        known = self.block_number - 256 <= number < self.block_number
        _require(known or number in self.state.beacons, f"BlockHashUnavailable({number}, {self.block_number})")
        return [] if number in self.state.beacons else [events.BeaconRecorded(number, self.block_hash(number))]

    # TaskBook

    def _Publish(self, sender: bytes, call: calls.Publish) -> list[events.Event]:
        spec = decode_spec(call.spec)
        needed = compute_epoch_pay_max(spec)
        _require(call.deposit >= needed, f"DepositBelowOneEpoch({call.deposit}, {needed})")
        task = keccak(self.address + sender + len(self.state.tasks).to_bytes(8, "big") + keccak(call.spec))
        start = self.block_number + spec.schedule.start_delay_blocks
        return [
            events.TaskPublished(task, sender, start, call.deposit, call.spec),
            events.PolicyRecorded(task, 0, spec.base_policy, spec.base_manifest, bytes(32), bytes(32)),
        ]

    def _TopUp(self, sender: bytes, call: calls.TopUp) -> list[events.Event]:
        return [events.TaskToppedUp(call.task, self._task(call.task).deposit + call.amount)]

    def _next_epoch(self, task: Task) -> int:
        if self.block_number < task.start_block:
            return 0
        schedule = task.spec.schedule
        return (self.block_number - task.start_block) // (schedule.round_blocks * schedule.epoch_rounds) + 1

    def _Join(self, sender: bytes, call: calls.Join) -> list[events.Event]:
        task = self._task(call.task)
        self._role(sender, events.Role.NODE, stake_min=task.spec.economics.node_stake_min)
        _require(1 <= call.slots <= task.spec.slots_max, f"SlotsOutOfRange({call.slots}, {task.spec.slots_max})")
        return [events.NodeJoined(call.task, sender, call.slots, self._next_epoch(task))]

    def _Leave(self, sender: bytes, call: calls.Leave) -> list[events.Event]:
        return [events.NodeLeft(call.task, sender, self._next_epoch(self._task(call.task)))]

    def _CommitRoot(self, sender: bytes, call: calls.CommitRoot) -> list[events.Event]:
        task, times = self._task(call.task), get_times(self._task(call.task), call.round)
        epoch = get_epoch(task, call.round)
        joined = [
            m
            for m in task.members.get(sender, [])
            if m.from_epoch <= epoch and (m.to_epoch is None or epoch < m.to_epoch)
        ]
        _require(bool(joined), f"NotJoined({sender.hex()}, {epoch})")
        self._role(sender, events.Role.NODE, stake_min=task.spec.economics.node_stake_min)
        _require(call.round < get_end_round(task), f"RoundPastEnd({call.round})")
        _require(times.start in self.state.beacons, f"BeaconMissing({times.start})")
        self._before(times.commit_deadline, "CommitTooLate")
        _require(1 <= call.leaves <= joined[-1].slots, f"LeavesOutOfRange({call.leaves}, {joined[-1].slots})")
        first = task.commitments.get(call.round, {}).get(sender)
        _require(first is None, f"AlreadyCommitted({first.root.hex() if first else ''})")
        return [events.RootCommitted(call.task, call.round, sender, call.root, call.leaves, call.policy)]

    def _ReceiptBundles(self, sender: bytes, call: calls.ReceiptBundles) -> list[events.Event]:
        task, times = self._task(call.task), get_times(self._task(call.task), call.round)
        self._role(sender, events.Role.RELAY)
        self._after(times.start, "ReceiptTooEarly")
        self._before(times.receipt_deadline, "ReceiptTooLate")
        for account in call.accounts:
            _require(account in task.commitments.get(call.round, {}), f"NotCommitted({account.hex()})")
        known = task.receipts.get(call.round, {})
        new = tuple(dict.fromkeys(account for account in call.accounts if account not in known))
        return [events.BundlesReceipted(call.task, call.round, sender, new)] if new else []

    def _RecordPolicy(self, sender: bytes, call: calls.RecordPolicy) -> list[events.Event]:
        task = self._task(call.task)
        _require(sender == task.spec.trainer, f"NotTrainer({sender.hex()})")
        _require(call.version == len(task.policies), f"WrongVersion({call.version}, {len(task.policies)})")
        return [
            events.PolicyRecorded(call.task, call.version, call.policy, call.manifest, call.batch_root, call.lineage)
        ]

    def _AttestPolicy(self, sender: bytes, call: calls.AttestPolicy) -> list[events.Event]:
        task = self._task(call.task)
        self._role(sender, events.Role.RELAY, events.Role.VERIFIER)
        _require(call.version < len(task.policies), f"UnknownVersion({call.version})")
        attested = task.policies[call.version].attestations
        if len(attested) >= ATTESTATIONS_NEEDED:
            return []
        _require(sender not in attested, f"AlreadyAttested({call.version})")
        return [events.PolicyAttested(call.task, call.version, sender)]

    def _Claim(self, sender: bytes, call: calls.Claim) -> list[events.Event]:
        due = call.cumulative - self._task(call.task).claimed.get(call.account, 0)
        _require(due > 0, f"NothingToClaim({call.account.hex()})")
        return [events.Claimed(call.task, call.account, due, call.cumulative)]

    def _ClaimMany(self, sender: bytes, call: calls.ClaimMany) -> list[events.Event]:
        claimed = self._task(call.task).claimed
        pairs = zip(call.accounts, call.cumulatives, strict=True)
        due = [(account, total) for account, total in pairs if total > claimed.get(account, 0)]
        return [events.Claimed(call.task, a, total - claimed.get(a, 0), total) for a, total in due]

    def _Cancel(self, sender: bytes, call: calls.Cancel) -> list[events.Event]:
        task = self._task(call.task)
        _require(sender == task.initiator, f"NotInitiator({sender.hex()})")
        return [events.TaskCancelled(call.task, self._next_epoch(task) * task.spec.schedule.epoch_rounds)]

    # Court

    def _verifier(self, sender: bytes, task: Task) -> int:
        return self._role(sender, events.Role.VERIFIER, stake_min=task.spec.economics.verifier_stake_min)

    def _CommitVerdict(self, sender: bytes, call: calls.CommitVerdict) -> list[events.Event]:
        task, times = self._task(call.task), get_times(self._task(call.task), call.round)
        self._verifier(sender, task)
        _require(times.audit_block in self.state.beacons, f"BeaconMissing({times.audit_block})")
        self._before(times.verdict_commit_deadline, "VerdictTooLate")
        _require(sender not in task.verdict_commits.get(call.round, {}), "VerdictAlreadyCommitted()")
        return [events.VerdictCommitted(call.task, call.round, sender, call.commitment)]

    def _RevealVerdict(self, sender: bytes, call: calls.RevealVerdict) -> list[events.Event]:
        task, times = self._task(call.task), get_times(self._task(call.task), call.round)
        self._after(times.verdict_commit_deadline, "RevealTooEarly")
        self._before(times.verdict_reveal_deadline, "RevealTooLate")
        _require(sender not in task.reveals.get(call.round, {}), "AlreadyRevealed()")
        opened = compute_verdict_commitment(
            task=call.task,
            round_index=call.round,
            verifier=sender,
            rows=call.rows,
            report=call.report,
            salt=call.salt,
        )
        _require(task.verdict_commits.get(call.round, {}).get(sender) == opened, "CommitmentMismatch()")
        return [events.VerdictRevealed(call.task, call.round, sender, call.rows, call.report)]

    # Canaries

    def _SealCanary(self, sender: bytes, call: calls.SealCanary) -> list[events.Event]:
        _require(call.seal_hash not in self._seals, f"SealTaken({call.seal_hash.hex()})")
        self._seals[call.seal_hash] = (call.bond, self.block_number)
        return [events.CanarySealed(call.seal_hash, sender, call.bond)]

    def _OpenCanary(self, sender: bytes, call: calls.OpenCanary) -> list[events.Event]:
        task, times = self._task(call.task), get_times(self._task(call.task), call.round)
        _require(call.round < get_end_round(task), f"PastTheEnd({call.round})")
        self._after(times.verdict_reveal_deadline, "TooEarly")
        self._before(times.opening_deadline, "TooLate")
        sealed = compute_seal(task=call.task, round_index=call.round, node=sender, salt=call.salt)
        _require(self._seals.get(sealed) is not None, f"NothingSealed({sealed.hex()})")
        bond, block = self._seals[sealed]
        _require(block < times.audit_block, f"SealedTooLate({block}, {times.audit_block})")
        self._seals[sealed] = None
        opened = (call.task, call.round, sender)
        if opened in self._opened:
            return []
        self._opened[opened] = set()
        return [events.CanaryOpened(call.task, call.round, sender, block, bond)]

    def _ConfirmCanary(self, sender: bytes, call: calls.ConfirmCanary) -> list[events.Event]:
        task, times = self._task(call.task), get_times(self._task(call.task), call.round)
        self._before(times.confirm_deadline, "TooLate")
        voters = self._opened.get((call.task, call.round, call.node))
        _require(voters is not None, f"NotOpened({call.node.hex()})")
        self._verifier(sender, task)
        assert voters is not None
        _require(sender not in voters, f"AlreadyConfirmed({sender.hex()})")
        voters.add(sender)
        return [events.CanaryVoted(call.task, call.round, call.node, sender, call.defective)]

    # Court: settlements

    def _verifier_stake(self) -> int:
        return sum(p.bonded for p in self.state.participants.values() if p.role == events.Role.VERIFIER)

    def _VoteSettlement(self, sender: bytes, call: calls.VoteSettlement) -> list[events.Event]:
        task, epoch = self._task(call.task), call.epoch
        stake = self._verifier(sender, task)
        final = task.final
        expected = 0 if final is None else final.epoch + 1
        _require(epoch == expected and epoch < get_num_epochs(task), f"WrongEpoch({epoch}, {expected})")
        _require(epoch not in task.settlements, f"SettlementExists({epoch})")
        self._after(get_epoch_deadline(task, epoch), "SettlementTooEarly")
        tally = self._tallies.setdefault((call.task, epoch, self._attempts.get((call.task, epoch), 0)), {})
        _require(sender not in tally, "AlreadyVoted()")
        packed = (
            call.root
            + call.paid_total.to_bytes(32, "big")
            + call.burned_total.to_bytes(32, "big")
            + b"".join(call.slashed)
        )
        settlement = keccak(call.task + epoch.to_bytes(32, "big") + packed)
        tally[sender] = (settlement, stake)
        emitted: list[events.Event] = [events.SettlementVoted(call.task, epoch, sender, settlement, stake)]
        total = sum(weight for vote, weight in tally.values() if vote == settlement)
        if total * 3 >= self._verifier_stake() * 2:
            end = self.block_number + task.spec.schedule.challenge_blocks
            emitted.append(
                events.SettlementPending(
                    call.task, epoch, call.root, call.paid_total, call.burned_total, call.slashed, end
                )
            )
        return emitted

    def _Challenge(self, sender: bytes, call: calls.Challenge) -> list[events.Event]:
        task = self._task(call.task)
        pending = task.settlements.get(call.epoch)
        _require(sender in self.state.participants, f"NotRegistered({sender.hex()})")
        _require(pending is not None and not pending.final and not pending.challenged, "NothingToChallenge()")
        assert pending is not None
        self._before(pending.challenge_end, "ChallengeTooLate")
        end = self.block_number + task.spec.schedule.challenge_blocks
        bond = task.spec.economics.challenge_bond
        return [events.SettlementChallenged(call.task, call.epoch, sender, bond, end)]

    def _VoteChallenge(self, sender: bytes, call: calls.VoteChallenge) -> list[events.Event]:
        task = self._task(call.task)
        stake = self._verifier(sender, task)
        pending = task.settlements.get(call.epoch)
        _require(pending is not None and pending.challenged and not pending.final, "NotChallenged()")
        assert pending is not None
        self._before(pending.vote_end, "VoteTooLate")
        votes = self._upheld.setdefault((call.task, call.epoch, self._attempts.get((call.task, call.epoch), 0)), {})
        _require(sender not in votes, "AlreadyVoted()")
        votes[sender] = (call.uphold, stake)
        return []

    def _Finalize(self, sender: bytes, call: calls.Finalize) -> list[events.Event]:
        task, key = self._task(call.task), (call.task, call.epoch)
        pending = task.settlements.get(call.epoch)
        _require(pending is not None and not pending.final, "NothingPending()")
        assert pending is not None
        self._after(max(pending.challenge_end, pending.vote_end), "FinalizeTooEarly")
        if pending.challenged:
            votes = self._upheld.get((*key, self._attempts.get(key, 0)), {})
            upheld = sum(stake for uphold, stake in votes.values() if uphold)
            if upheld * 3 < self._verifier_stake() * 2:
                self._attempts[key] = self._attempts.get(key, 0) + 1
                return [events.SettlementVoided(call.task, call.epoch)]
        emitted: list[events.Event] = []
        for account in pending.slashed:
            who, bps = self.state.participants[account], task.spec.economics.slash_bps
            bonded, unbonding = who.bonded * bps // 10_000, who.unbonding * bps // 10_000
            emitted.append(events.Slashed(account, call.task, bonded + unbonding))
            emitted.append(events.StakeChanged(account, who.bonded - bonded, who.unbonding - unbonding))
        totals = (pending.root, pending.paid_total, pending.burned_total)
        return [*emitted, events.SettlementFinal(call.task, call.epoch, *totals)]

    def _Close(self, sender: bytes, call: calls.Close) -> list[events.Event]:
        task, final = self._task(call.task), self._task(call.task).final
        _require(not task.closed, "AlreadyClosed()")
        last_epoch = get_num_epochs(task) - 1
        settled = final is not None and final.epoch >= last_epoch
        timeout = get_epoch_deadline(task, last_epoch) + task.spec.schedule.timeout_blocks
        _require(settled or self.block_number > timeout, f"CloseTooEarly({self.block_number}, {timeout})")
        done = -1 if final is None else final.epoch
        paid, burned = (final.paid_total, final.burned_total) if final else (0, 0)
        leaves = sum(
            task.commitments[index][account].leaves
            for index, receipts in task.receipts.items()
            for account in receipts
            if get_epoch(task, index) > done
        )
        extra = min(leaves * compute_leaf_pay_max(task.spec), task.deposit - paid - burned)
        return [events.TaskClosed(call.task, task.deposit - paid - burned - extra, burned + extra)]
