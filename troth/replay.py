"""`troth replay`: a verdict done again from public data, or from a case with no network at all.

Both ways end in the same function over the same values: the ledger's events, folded; the sealed bundle; the round's policy. A
node and a third party run the same. Neighbours: troth.facts and troth.case are the files, verifier.replay does the work.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import environments
from contracts.abi import LedgerAbi
from contracts.client import EvmLedger
from contracts.follower import Follower
from contracts.jsonrpc import HttpRpc, Unreachable
from protocol.errors import ConfigError, Fault, Reason, Reject
from protocol.ledger.events import Logged
from protocol.ledger.state import Task, apply
from protocol.messages import compute_bundle_key
from protocol.ports import Environment
from protocol.rounds import get_round_policy
from protocol.verdict import Row
from troth.case import OpenCase, open_case, write_case
from troth.connect import pick_task
from troth.environment_files import load_environment
from troth.explain import parse_rollout
from troth.facts import Replica, encode_facts, open_facts
from troth.network import Reader
from troth.settings import RoleSettings
from verifier.explain import Rollout
from verifier.replay import Replay, replay


class CasePolicies:
    """`PolicyStore` that has version 0 of a case and nothing else: where an environment finds its files."""

    def __init__(self, base: Path | None) -> None:
        self._base = base

    async def fetch(self, task: bytes, version: int) -> Path:
        """See `PolicyStore.fetch`."""
        if version or self._base is None:
            raise Fault(f"the case does not hold policy version {version}, whose files its environment needs")
        return self._base

    async def publish(self, task: bytes, version: int, parent: int, folder: Path) -> tuple[bytes, bytes]:
        """A case publishes nothing."""
        raise Fault("a case is read, nothing is published from it")


async def read_events(ledger: EvmLedger, settings: RoleSettings) -> list[Logged]:
    """Everything the ledger's contracts emitted, in order. Raises `Fault` when the node is away."""
    try:
        async with HttpRpc(settings.ledger.rpc) as rpc:
            follower = Follower(rpc, LedgerAbi(), ledger.deployment, apply, settings.ledger.finality_blocks)
            return await follower.poll()
    except Unreachable as error:
        raise Fault(f"no ledger node at {settings.ledger.rpc}: {error}") from None


async def replay_rollout(
    settings: RoleSettings, ledger: EvmLedger, text: str, *, save: Path | None = None, link: bool = False
) -> dict[str, Any]:
    """Replay a rollout's verdict from the ledger, relays and peers; write a case where asked to.

    Raises:
        ConfigError: the rollout's name makes no sense on this ledger, or the case cannot be written.
        Fault: the round's policy cannot be had.
    """
    wanted, rollout = parse_rollout(text)
    if save is not None and save.exists():
        raise ConfigError(f"{save} is there already: name a folder that is not")
    picked = pick_task(ledger, wanted)
    if picked is None:
        raise ConfigError(f"no task {wanted!r} on this ledger")
    block_number, events = ledger.state.block_number, await read_events(ledger, settings)
    facts = encode_facts(
        events, chain_id=ledger.chain_id, ledger=ledger.address, task=picked, block_number=block_number
    )
    replica = open_facts(facts)
    task, policy = replica.task, get_round_policy(replica.task, rollout.round_index)
    if policy is None:
        raise ConfigError(f"round {rollout.round_index} has no policy yet")
    async with Reader(ledger, Path(settings.directory) / "explain") as reader:
        own = [Path(folder) for folder in settings.environment_folders]
        environment = await load_environment(task, reader.policies, own)
        folder = await reader.policies.fetch(task.task, policy.version)
        base = await reader.policies.fetch(task.task, 0) if needs_base(task, policy.version) else None
        try:
            data = await reader.blobs.get(compute_bundle_key(task.task, rollout.round_index, rollout.account))
        except Fault:
            data = None
    if save is not None:
        write_case(
            save,
            rollout,
            facts=facts,
            bundle=data,
            policy=folder,
            policy_hash=policy.policy,
            base=base,
            link=link,
        )
    return run(settings, replica, rollout, data, environment, folder)


async def replay_case(settings: RoleSettings, directory: Path) -> tuple[OpenCase, dict[str, Any]]:
    """Replay a case; nothing is asked of any network.

    Raises:
        ConfigError: the folder is no case, or its environment is not installed here.
        Reject: something in it is not what it says.
    """
    case = open_case(directory)
    own = [Path(folder) for folder in settings.environment_folders]
    # A stranger may have chosen the environment's arguments: one that could ask for any work is tried first.
    environment = await load_environment(case.replica.task, CasePolicies(case.base), own, tried=True)
    return case, run(settings, case.replica, case.rollout, case.bundle, environment, case.policy)


def compare_facts(case: OpenCase, ledger: EvmLedger, events: Iterable[Logged]) -> None:
    """Check that a case's facts are what a ledger says up to the case's block.

    Raises:
        ConfigError: the ledger is another one, or not as far as the case.
        Reject: the facts are not this ledger's.
    """
    facts = case.replica.facts
    if (facts.chain_id, facts.ledger) != (ledger.chain_id, ledger.address):
        raise ConfigError(
            f"the case is of ledger 0x{facts.ledger.hex()} on chain {facts.chain_id}, this one is 0x{ledger.address.hex()} "
            f"on chain {ledger.chain_id}: connect to the case's"
        )
    if facts.block_number > ledger.state.block_number:
        raise ConfigError(
            f"the case was made at block {facts.block_number}, this ledger is at {ledger.state.block_number}"
        )
    own = encode_facts(
        events, chain_id=facts.chain_id, ledger=facts.ledger, task=facts.task, block_number=facts.block_number
    )
    if own != case.facts:
        raise Reject(
            Reason.MALFORMED,
            f"the case's facts are not what this ledger says up to block {facts.block_number}",
            observed=f"{len(case.facts)} bytes, {len(facts.events)} events",
            limit=f"{len(own)} bytes",
            todo="believe the ledger: the case was made up, or made on a chain that was reorganised",
        )


def needs_base(task: Task, version: int) -> bool:
    """Whether version 0 belongs into a case besides the round's policy."""
    return bool(version and task.spec.adapter.rank) or bool(environments.needs_files(task.spec.environment))


def run(
    settings: RoleSettings,
    replica: Replica,
    rollout: Rollout,
    data: bytes | None,
    environment: Environment,
    folder: Path,
) -> dict[str, Any]:
    """Prefill with the profile's own type and put everything into plain data."""
    from models.policy import read_hidden_size
    from verifier.scorer import TorchScorer

    spec, facts = replica.task.spec, replica.facts
    compute = settings.compute
    scorer = TorchScorer(compute.device, spec.profile.dtype, compute.threads, vocab_size=environment.vocab_size)
    scorer.load(folder)
    done = replay(
        replica.state,
        replica.task,
        rollout,
        data,
        environment=environment,
        scorer=scorer,
        hidden=read_hidden_size(folder),
        chain_id=facts.chain_id,
        ledger=facts.ledger,
    )
    return describe(replica, rollout, done)


def describe(replica: Replica, rollout: Rollout, done: Replay) -> dict[str, Any]:
    """A replay for `--json` and for people."""
    facts = replica.facts
    return {
        "task": facts.task.hex(),
        "round": rollout.round_index,
        "account": "0x" + rollout.account.hex(),
        "slot": rollout.slot,
        "sample": rollout.sample,
        "chain": facts.chain_id,
        "ledger": "0x" + facts.ledger.hex(),
        "block": facts.block_number,
        "dtype": replica.task.spec.profile.dtype,
        "checks": [check._asdict() for check in done.checks],
        "tokens": [token._asdict() for token in done.tokens],
        "chunks": [chunk._asdict() for chunk in done.chunks],
        "verdict": _describe_row(done.row),
        "finding": done.finding,
        "committee": [
            {"verifier": "0x" + verifier.hex(), "row": _describe_row(row)} for verifier, row in done.committee.items()
        ],
        "outcome": _describe_row(done.outcome),
        "agrees": done.agrees,
    }


def _describe_row(row: Row | None) -> dict[str, Any] | None:
    if row is None:
        return None
    reason = {int(one): one.name.lower() for one in Reason}.get(row.reason, "" if not row.reason else str(row.reason))
    return {
        "status": row.status.name.lower(),
        "reason": reason,
        "groups": row.groups,
        "tokens": row.tokens,
        "audited": row.audited,
        "evidence_nats": row.evidence / 256,
    }
