"""A small task on a `MemoryChain` with real participants: sort-N, a tiny model, quick rounds.

`make_model` writes a policy folder; `make_spec` a valid task over it; `Scenario` registers accounts, publishes the task and
gives each account its ledger. Used by role tests; roles themselves are injected by the tests.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import environments
from protocol.codec import PROTOCOL_VERSION, encode
from protocol.identity import NetworkKey
from protocol.ledger import calls, events
from protocol.ledger.state import Task
from protocol.ports import Environment, IntentStatus
from protocol.presets import MINIMAL, PROFILE_FP32
from protocol.task import Environment as EnvironmentSpec
from protocol.task import Sampling, TaskSpec, validate_spec
from tests.support.twins import MemoryBlobs, MemoryChain, MemoryLedger, MemoryPolicies, hash_policy

STAKE = 10**9
ARGS = '{"digits":4}'


def make_model(
    folder: Path,
    seed: int,
    *,
    vocab: int = 32,
    hidden: int = 64,
    layers: int = 2,
    scale: float = 4.0,
    tie: bool = False,
) -> Path:
    """Write a random Llama policy folder; `scale` widens its matrices so that its distributions are peaked."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=tie,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(scale)
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    tensors = {name: tensor for name, tensor in model.state_dict().items() if not (tie and name == "lm_head.weight")}
    save_file(tensors, folder / "model.safetensors")
    return folder


def make_account(name: str) -> bytes:
    """A 20-byte account derived from a name."""
    return hashlib.sha256(name.encode()).digest()[:20]


def make_key(name: str) -> NetworkKey:
    """A network key derived from a name."""
    return NetworkKey(hashlib.sha256(b"network/" + name.encode()).digest())


def make_spec(folder: Path, **changes: Any) -> TaskSpec:
    """A valid sort-4 task whose base policy is `folder`; `changes` replace fields of the spec."""
    fields: dict[str, Any] = {
        "version": PROTOCOL_VERSION,
        "name": "sort-4",
        "base_policy": hash_policy(folder),
        "base_manifest": bytes(32),
        "environment": EnvironmentSpec("sort", ARGS, environments.content_hash("sort", ARGS)),
        "licence_data": "CC0-1.0",
        "licence_model": "Apache-2.0",
        "sampling": Sampling(1000, 6, (1,)),
        "group_size": 4,
        "groups_per_round": 8,
        "slots_max": 8,
        "max_staleness": 4,
        "profile": PROFILE_FP32,
        "schedule": MINIMAL.schedule,
        "economics": MINIMAL.economics,
        "verifiers_per_round": 3,
        "trainer": make_account("trainer"),
        "token": bytes(20),
    }
    spec = TaskSpec(**{**fields, **changes})
    validate_spec(spec)
    return spec


class Scenario:
    """A published task and its world.

    Attributes:
        chain / blobs / policies: shared by all participants.
        task_id: id of the published task; round 0 starts `start_delay_blocks` after it.
        environment: the task's, loaded through the registry.
    """

    def __init__(self, directory: Path, spec: TaskSpec, folder: Path) -> None:
        self.directory = directory
        self.spec = spec
        self.chain = MemoryChain()
        self.blobs = MemoryBlobs()
        self.policies = MemoryPolicies(directory / "policies")
        self.environment: Environment = environments.load(spec.environment)
        self._intents: dict[bytes, dict[str, IntentStatus]] = {}
        self.chain.state.block_number = 1
        self.chain.mempool.append((make_account("initiator"), calls.Publish(encode(spec), 10**12), lambda *_: None))
        self.chain.advance()
        self.task_id = next(iter(self.chain.state.tasks))
        self.policies.bind_base(self.task_id, folder)

    @property
    def task(self) -> Task:
        """The task as the chain itself knows it."""
        return self.chain.state.tasks[self.task_id]

    def register(self, name: str, role: events.Role) -> MemoryLedger:
        """Register and stake `name` (at most once); returns a new connection that shares the account's outbox."""
        account = make_account(name)
        if account not in self.chain.state.participants:
            call = calls.Register(role, make_key(name).public, b"", STAKE)
            self.chain.mempool.append((account, call, lambda *_: None))
            self.chain.advance()
        return MemoryLedger(self.chain, account, self._intents.setdefault(account, {}))

    def call(self, name: str, call: calls.Call) -> str:
        """Have `name` make a call in a block of its own; returns the contract's error, empty when it went through."""
        said: list[str] = []
        self.chain.mempool.append((make_account(name), call, lambda status, block, error: said.append(error)))
        self.chain.advance()
        return said[0]

    def record_policy(self, version: int, folder: Path) -> None:
        """Record a policy as the trainer and have two relays attest it at once."""
        self.policies.folders[self.task_id, version] = folder
        names = (hash_policy(folder), bytes(32), bytes(32), bytes(32))
        self.chain.emit(events.PolicyRecorded(self.task_id, version, *names))
        for relay in ("relay-a", "relay-b"):
            self.chain.emit(events.PolicyAttested(self.task_id, version, make_account(relay)))
