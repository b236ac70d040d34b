"""`troth demo-smollm`: SmolLM2-135M-Instruct learns to add and subtract on this machine, by the whole protocol.

The same processes as in `troth demo`, fewer of them: a chain, a relay, a trainer, three verifiers, two honest nodes, and one
node that never loads an adapter. Policies after the base are LoRA adapters. Before anything is started the base policy is
evaluated on the held-out questions; the time that takes on this machine, as busy as it is, sets the block time and the number
of rounds, and the run says how long it will be.
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from protocol.presets import MINIMAL
from troth.demo.plan import STAKE, Plan
from troth.smollm import TOKENIZER_SHA256

GROUP_SIZE = 8
GROUPS_PER_ROUND = 8
SLOTS = 4
MAX_TOKENS = 6
#: "\n" in the model's vocabulary: an answer is one line.
STOP_TOKEN = 198
HELD_OUT = 192
#: Tokens of one forward pass in training: what bounds the trainer's memory.
TOKENS_MAX = 512
RANK, MODULES = 8, ("q_proj", "v_proj")

EPOCH_ROUNDS = 4
ROUND_BLOCKS = 30
#: Before round 0, in which every participant fetches the base policy: whoever has not joined by then misses an epoch.
START_SECONDS = 120.0
#: Blocks of a round from its start to its verdict, and of the last settlement, with claims.
SETTLE_BLOCKS = 70
#: One round is this many times the work of the evaluation that is measured, shared by two cores.
ROUND_EVALUATIONS = 1.5
ROUND_SECONDS_MIN, ROUND_SECONDS_MAX = 75.0, 240.0
EPOCHS_MIN, EPOCHS_MAX = 2, 6
#: Rounds from which on the reward has to have grown.
ROUNDS_DEFAULT = 12
MINUTES_DEFAULT = 45.0
#: Participants with a model in memory, and what each was seen to need.
MEMORY_GB = 2.0

ENVIRONMENT: dict[str, Any] = {
    "config": {"max_digits": 2, "max_terms": 2, "min_digits": 1, "min_terms": 2},
    "dataset": "chain_sum",
    "held_out": HELD_OUT,
    "seed": 1,
    "size": 20_000,
    "template": "{question} ",
    "tokenizer": TOKENIZER_SHA256,
}


@dataclass(frozen=True)
class SmollmPlan(Plan):
    """One run; see `Plan`. `minutes` is what it may take from the measurement to the end."""

    epoch_rounds: ClassVar[int] = EPOCH_ROUNDS
    slots: ClassVar[int] = SLOTS
    poll_seconds: ClassVar[float] = 0.5
    command_seconds_max: ClassVar[float] = 1_800.0
    reward_gain_min: ClassVar[float] = 0.15
    held_out_min: ClassVar[int] = HELD_OUT
    is_measured_first: ClassVar[bool] = True
    samples: ClassVar[int] = 1
    entry: ClassVar[str] = "reasoning_gym"
    arguments: ClassVar[str] = json.dumps(ENVIRONMENT, sort_keys=True, separators=(",", ":"))
    max_tokens: ClassVar[int] = MAX_TOKENS
    stop_token: ClassVar[int] = STOP_TOKEN

    minutes: float = MINUTES_DEFAULT

    @property
    def settle_seconds_max(self) -> float:
        """See `Plan`: twice the blocks that it takes."""
        return 2 * SETTLE_BLOCKS * self.block_seconds + 60

    @property
    def seconds_ahead(self) -> float:
        """What the run will take from here, in seconds."""
        return (self.start_blocks + self.num_rounds * ROUND_BLOCKS + SETTLE_BLOCKS) * self.block_seconds

    @property
    def start_blocks(self) -> int:
        """Blocks from the task's publication to round 0."""
        return math.ceil(START_SECONDS / self.block_seconds)

    def fit(self, seconds: float) -> SmollmPlan:
        """Block time and number of rounds from what the evaluation of the base policy took on this machine."""
        round_seconds = min(max(ROUND_EVALUATIONS * seconds, ROUND_SECONDS_MIN), ROUND_SECONDS_MAX)
        block_seconds = round(round_seconds / ROUND_BLOCKS, 1)
        blocks = (self.minutes * 60 - START_SECONDS) / block_seconds - SETTLE_BLOCKS
        epochs = min(max(int(blocks // (ROUND_BLOCKS * EPOCH_ROUNDS)), EPOCHS_MIN), EPOCHS_MAX)
        default = epochs * EPOCH_ROUNDS >= ROUNDS_DEFAULT
        return dataclasses.replace(self, block_seconds=block_seconds, num_epochs=epochs, is_default_length=default)

    def describe_pace(self) -> str:
        """What to expect, for people."""
        models = len(self.participants) - 2  # all but initiator and relay hold a model
        return (
            f"a block every {self.block_seconds} s, {self.num_rounds} rounds of {ROUND_BLOCKS * self.block_seconds:.0f} s, "
            f"about {self.seconds_ahead / 60:.0f} minutes from here and {models * MEMORY_GB:.0f} GB of memory"
        )

    def base_command(self, folder: Path) -> list[str]:
        """See `Plan`."""
        return ["policy", "smollm", str(folder)]

    def describe_options(self) -> list[str]:
        """See `Plan`."""
        return ["--rank", str(RANK), "--modules", ",".join(MODULES)]

    def publish_options(self, base: Path) -> list[str]:
        """See `Plan`."""
        return ["--base", str(base)]

    def trainer_table(self) -> str:
        """See `Plan`. One optimiser step on all groups of a round."""
        return (
            f"learning_rate = 1e-3\nwarmup_steps = 2\ntotal_steps = {self.num_rounds}\nepochs = 1\n"
            f"minibatch_groups = 0\ngroups_min = {GROUPS_PER_ROUND}\ntokens_max = {TOKENS_MAX}"
        )

    def task_text(self, described: dict[str, Any]) -> str:
        """See `Plan`."""
        return write_task(self, **{name: described[name] for name in ("base_policy", "base_manifest", "trainer")})


def make_plan(seed: int, minutes: float, *, cheats: tuple[str, ...] = ("base-only",)) -> SmollmPlan:
    """The plan of a run that may take `minutes`; how many rounds that is follows from `SmollmPlan.fit`."""
    return SmollmPlan(seed, 2, cheats, EPOCHS_MAX, minutes=minutes)


def write_task(plan: SmollmPlan, *, base_policy: str, base_manifest: str, trainer: str) -> str:
    """The task file of a run."""
    economics = MINIMAL.economics
    slot_pay = GROUP_SIZE * (economics.reward_base + MAX_TOKENS * economics.reward_token)
    epoch_pay = EPOCH_ROUNDS * (GROUPS_PER_ROUND * slot_pay + 3 * economics.verifier_fee)
    lines = "\n".join(f"{name} = {_toml(value)}" for name, value in ENVIRONMENT.items())
    return f"""\
name = "smollm2-chain-sum"
preset = "minimal"
base_policy = "{base_policy}"
base_manifest = "{base_manifest}"
licence_data = "Apache-2.0"
licence_model = "Apache-2.0"
group_size = {GROUP_SIZE}
groups_per_round = {GROUPS_PER_ROUND}
slots_max = {SLOTS}
max_staleness = 4
trainer = "{trainer}"

[adapter]
rank = {RANK}
modules = {json.dumps(MODULES)}

[environment]
entry = "{plan.entry}"

[environment.args]
{lines}

[sampling]
temperature = 1.0
max_tokens = {MAX_TOKENS}
stop_tokens = [{STOP_TOKEN}]

[escrow]
deposit = {epoch_pay * plan.num_epochs + 100_003}

[schedule]
start_delay_blocks = {plan.start_blocks}
round_blocks = {ROUND_BLOCKS}
epoch_rounds = {EPOCH_ROUNDS}
num_epochs = {plan.num_epochs}
commit_blocks = 14
receipt_blocks = 5
finality_blocks = 1
verdict_commit_blocks = 20
verdict_reveal_blocks = 4

[economics]
audit_ppm = 250_000
probation_groups = 4
node_stake_min = {STAKE // 2_000}
"""


def _toml(value: Any) -> str:
    """A value of the environment's arguments in TOML: numbers and texts as in JSON, tables inline."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{name} = {_toml(inner)}" for name, inner in value.items()) + " }"
    return json.dumps(value)
