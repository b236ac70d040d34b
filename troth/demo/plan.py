"""The numbers of a demo run: who takes part, how long it lasts, what the task says.

`Plan` is the run of `troth demo`; another demo is a plan of its own (troth.demo.smollm) that says otherwise where it differs.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from protocol.errors import ConfigError
from protocol.presets import MINIMAL

#: Adversaries of the default run, by the name `troth node run --cheat` knows them by.
CHEATS = ("stale-policy", "false-reward", "token-editor", "sleeper")

BLOCK_SECONDS = 0.5
ROUND_BLOCKS = 6
EPOCH_ROUNDS = 8
EPOCHS_DEFAULT = 6
#: Start-up, the last settlement, claims and the final check, in seconds.
SECONDS_AROUND = 70.0

#: Warm-up of the model packages on an idle machine of two cores; what is still called normal; most that is adapted to.
WARM_UP_SECONDS = 9.0
WARM_UP_SECONDS_MAX = 14.0
SLOWER_MAX = 2.0

GROUPS_PER_ROUND = 35
GROUP_SIZE = 16
SLOTS = 14
STAKE = 20_000_000_000
REWARD_GAIN_MIN = 0.3
HELD_OUT_MIN = 1_000
SETTLE_SECONDS_MAX = 90.0


@dataclass(frozen=True)
class Plan:
    """One run.

    Attributes:
        slots: groups per round that every node declares.
        poll_seconds: between two looks of a role at the ledger.
        settle_seconds_max: after the last round, until everything is settled.
        command_seconds_max: longest that a command of the run may take.
        reward_gain_min / held_out_min: what a run of the default length must show, and on how many prompts.
        samples: completions of each held-out prompt in an evaluation.
        is_measured_first: whether the base policy is evaluated before anything is started, to tell the machine's pace.
        entry / arguments: the environment, as `troth policy evaluate` takes it.
        max_tokens / stop_token: of every completion.
    """

    epoch_rounds: ClassVar[int] = EPOCH_ROUNDS
    slots: ClassVar[int] = SLOTS
    poll_seconds: ClassVar[float] = 0.25
    command_seconds_max: ClassVar[float] = 120.0
    reward_gain_min: ClassVar[float] = REWARD_GAIN_MIN
    held_out_min: ClassVar[int] = HELD_OUT_MIN
    samples: ClassVar[int] = 2
    is_measured_first: ClassVar[bool] = False
    entry: ClassVar[str] = "sort"
    arguments: ClassVar[str] = '{"digits":4}'
    max_tokens: ClassVar[int] = 6
    stop_token: ClassVar[int] = 1

    seed: int
    num_nodes: int
    cheats: tuple[str, ...]
    num_epochs: int
    block_seconds: float = BLOCK_SECONDS
    #: Whether the run is of the default length, so that the reward has to grow by `REWARD_GAIN_MIN`.
    is_default_length: bool = True

    @property
    def participants(self) -> list[str]:
        """Names of all processes that hold a key, initiator first."""
        nodes = [f"node{i}" for i in range(self.num_nodes)]
        return ["initiator", "trainer", "relay", "verifier0", "verifier1", "verifier2", *nodes, *self.cheats]

    @property
    def nodes(self) -> list[str]:
        """Names of honest nodes and cheats."""
        return [name for name in self.participants if name.startswith("node") or name in self.cheats]

    @property
    def num_rounds(self) -> int:
        """Rounds of the whole task."""
        return self.num_epochs * self.epoch_rounds

    @property
    def settle_seconds_max(self) -> float:
        """See the class."""
        return SETTLE_SECONDS_MAX

    def fit(self, seconds: float) -> Plan:
        """The same run at the pace of this machine; `seconds` is what importing the model packages took."""
        return fit_plan(self, seconds)

    def describe_pace(self) -> str:
        """What to expect, for people."""
        return f"a block every {self.block_seconds} s, {self.num_rounds} rounds"

    def base_command(self, folder: Path) -> list[str]:
        """The `troth` command that makes the base policy."""
        return ["policy", "init", str(folder), "--seed", str(self.seed)]

    def describe_options(self) -> list[str]:
        """Options of `troth policy describe`."""
        return []

    def publish_options(self, base: Path) -> list[str]:
        """Options of `troth task publish`."""
        return []

    def trainer_table(self) -> str:
        """Lines of the trainer's [trainer] settings, besides its base policy."""
        return f"total_steps = {self.num_rounds}"

    def task_text(self, described: dict[str, Any]) -> str:
        """The task file, from what `troth policy describe` says."""
        return write_task(self, **{name: described[name] for name in ("base_policy", "base_manifest", "trainer")})


def make_plan(seed: int, num_nodes: int, cheats: str, minutes: float) -> Plan:
    """Turn command-line options into a plan.

    Raises:
        ConfigError: for an unknown adversary.
    """
    names = CHEATS if not cheats else tuple(name for name in cheats.split(",") if name and name != "none")
    for name in names:
        if name not in CHEATS:
            raise ConfigError(f"unknown cheat {name!r}: known are {', '.join(CHEATS)}, or none")
    if len(set(names)) != len(names):
        raise ConfigError("each cheat can take part once")
    epoch_seconds = EPOCH_ROUNDS * ROUND_BLOCKS * BLOCK_SECONDS
    epochs = EPOCHS_DEFAULT if not minutes else max(1, int((minutes * 60 - SECONDS_AROUND) / epoch_seconds))
    return Plan(seed, num_nodes, names, epochs, is_default_length=epochs >= EPOCHS_DEFAULT)


def fit_plan(plan: Plan, warm_up_seconds: float) -> Plan:
    """The same run at the pace of a slow or busy machine: longer blocks, fewer rounds, about the same time in all.

    Args:
        warm_up_seconds: what importing the model packages took, which is a fixed amount of work.
    """
    if warm_up_seconds <= WARM_UP_SECONDS_MAX:
        return plan
    slower = min(SLOWER_MAX, warm_up_seconds / WARM_UP_SECONDS)
    epochs = max(1, round(plan.num_epochs / slower))
    return dataclasses.replace(plan, num_epochs=epochs, block_seconds=round(BLOCK_SECONDS * slower, 2))


def write_task(plan: Plan, *, base_policy: str, base_manifest: str, trainer: str) -> str:
    """The task file of a run."""
    economics = MINIMAL.economics
    slot_pay = GROUP_SIZE * (economics.reward_base + 6 * economics.reward_token)
    epoch_pay = EPOCH_ROUNDS * (GROUPS_PER_ROUND * slot_pay + 3 * economics.verifier_fee)
    return f"""\
name = "sort-4"
preset = "minimal"
base_policy = "{base_policy}"
base_manifest = "{base_manifest}"
licence_data = "CC0-1.0"
licence_model = "Apache-2.0"
group_size = {GROUP_SIZE}
groups_per_round = {GROUPS_PER_ROUND}
slots_max = {SLOTS}
max_staleness = 4
trainer = "{trainer}"

[environment]
entry = "{plan.entry}"
args = {{ digits = 4 }}

[sampling]
temperature = 1.0
max_tokens = {plan.max_tokens}
stop_tokens = [{plan.stop_token}]

[escrow]
deposit = {epoch_pay * plan.num_epochs + 1_000_003}

[profile]
topk = 32
exponent_mismatches_max = 1

[schedule]
round_blocks = {ROUND_BLOCKS}
epoch_rounds = {EPOCH_ROUNDS}
num_epochs = {plan.num_epochs}

[economics]
audit_ppm = 50_000
node_stake_min = 10_000_000
"""
