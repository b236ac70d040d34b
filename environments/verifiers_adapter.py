"""Tasksets for the `verifiers` package (0.4, its v1 interface): single questions whose rewards are functions of the answer.

Arguments: `taskset` (name of an installed distribution that requires verifiers), `size` (so many of its tasks, the first ones),
`config` (the taskset's own options), and those of environments.text. A task is asked as its system prompt and its prompt, and
scored offline, as the package's own replay does it: without a runtime, tools, judges or hooks. A taskset that needs
any of these is refused, with what it needs. A task cannot name functions to import (`config.task`), and only distributions
that the participant installed for verifiers are ever imported.

Rewards are a package's own code: `troth env check` shows whether they are deterministic before a task is published.
Scoring that fails, or takes longer than `SCORE_S_MAX`, is a `Fault`.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import inspect
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as LateError
from itertools import islice
from pathlib import Path
from typing import Any

from environments.arguments import Field, read_arguments
from environments.files import Kind
from environments.text import (
    TEXT_FIELDS,
    TextEnvironment,
    TextOptions,
    list_text_files,
    make_codec,
    read_options,
    read_text_sources,
    to_micro,
)
from protocol.errors import ConfigError, Fault

SIZE_MAX = 1_000_000
SCORE_S_MAX = 60.0
#: Options of every taskset that a task may not set: they name files, or functions to import.
REFUSED_OPTIONS = ("id", "system_prompt", "task")

_FIELDS = {
    "taskset": Field(str, low=1, high=100),
    "size": Field(int, 1000, low=1, high=SIZE_MAX),
    "config": Field(dict, {}),
    **TEXT_FIELDS,
}
_NAME = re.compile(r"[A-Za-z0-9]+(?:[-_.][A-Za-z0-9]+)*")


def find_distribution(name: str) -> importlib.metadata.Distribution:
    """The installed distribution of a taskset. Raises `ConfigError` unless it is one that requires verifiers."""
    try:
        if not _NAME.fullmatch(name):
            raise importlib.metadata.PackageNotFoundError(name)
        found = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(
            f"verifiers: taskset {name!r} is not installed: pip install the package it comes in"
        ) from None
    required = {
        re.split(r"[^A-Za-z0-9_.-]", requirement, maxsplit=1)[0].lower() for requirement in found.requires or ()
    }
    if "verifiers" not in required:
        raise ConfigError(f"verifiers: {name!r} is installed, but is no taskset: it does not require verifiers")
    return found


class Tasks:
    """The questions of one taskset; see `environments.text.Questions`.

    Args:
        taskset: name of its distribution.
        size: how many tasks are taken; fewer when there are fewer.
        config: options of the taskset.

    Raises:
        ConfigError: when it is not installed, refuses its options, or needs more than an answer to score one.
    """

    def __init__(self, taskset: str, *, size: int, config: Mapping[str, Any]) -> None:
        self._name = taskset
        self._tasks: list[Any] = list(islice(_load(taskset, config), size))
        if not self._tasks:
            raise ConfigError(f"verifiers: taskset {taskset} has no tasks")
        for task in self._tasks:
            _require_offline(taskset, task)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="verifiers")

    @property
    def num_questions(self) -> int:
        return len(self._tasks)

    def question(self, index: int) -> str:
        """The system prompt, if there is one, and the prompt."""
        data = self._tasks[index].data
        return "\n\n".join(part for part in (data.system_prompt, data.prompt_text) if part)

    def known_answer(self, index: int) -> str | None:
        """The task's `answer`, where it has such a text."""
        answer = getattr(self._tasks[index].data, "answer", None)
        return answer if isinstance(answer, str) else None

    def grade(self, index: int, answer: str) -> int:
        """The task's own rewards, weighted and added. Raises `Fault` when scoring fails or takes too long."""
        where = f"verifiers {self._name} task {index}"
        # A loop of its own, in a thread of its own: whoever asks may be inside of one.
        try:
            score = self._pool.submit(asyncio.run, _score(self._tasks[index], answer)).result(SCORE_S_MAX)
        except LateError:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="verifiers")
            raise Fault(f"{where} was not scored in {SCORE_S_MAX:g} s") from None
        except Exception as error:  # a package's own code: whatever it raises, nobody is to blame
            raise Fault(f"{where} cannot be scored: {error!r}") from error
        return to_micro(where, score)


def _load(name: str, config: Mapping[str, Any]) -> Any:
    """The taskset, which yields tasks."""
    find_distribution(name)
    for option in REFUSED_OPTIONS:
        if option in config:
            raise ConfigError(f"verifiers: option {option} names files or functions: a task cannot bring either")
    try:
        from verifiers.v1.configs.taskset import TasksetConfig
        from verifiers.v1.utils.generic import concrete_type
        from verifiers.v1.utils.loaders import taskset_class
    except ImportError as error:
        raise ConfigError(f"environment verifiers needs the verifiers package: {error}") from None
    made = taskset_class(name)
    options = (concrete_type(made, TasksetConfig) or TasksetConfig)(**config, id=name)
    taskset = made(options)
    if made.toolsets(options):
        raise ConfigError(f"verifiers: taskset {name} needs tools, which are not part of a rollout here")
    return taskset


def _require_offline(name: str, task: Any) -> None:
    """Refuse a task whose rewards are no function of the answer. Raises `ConfigError`."""
    from verifiers.v1.task import Task

    kind, rewards = type(task), task.hooks("reward")
    needs = [
        hook
        for hook in ("setup", "finalize", "stage_verifier", "score")
        if getattr(kind, hook) is not getattr(Task, hook)
    ]
    needs += ["container"] if kind.NEEDS_CONTAINER else []
    needs += ["tools"] if kind.toolsets(task.config) else []
    needs += ["judges"] if task.plugged_judges() else []
    needs += [f"runtime in {hook.__name__}" for hook in rewards if "runtime" in inspect.signature(hook).parameters]
    needs += ["skills"] if task.data.skills else []
    if not isinstance(task.data.prompt, str) or not task.data.prompt:
        needs.append("a prompt that is not one text")
    if needs or not rewards:
        text = ", ".join(needs) or "has no reward function"
        raise ConfigError(f"verifiers: taskset {name} cannot be used offline: task {task.data.idx} needs {text}")


async def _score(task: Any, answer: str) -> float:
    """Score one answer as the reply to the task's prompt."""
    from verifiers.v1.configs.agent import AgentConfig
    from verifiers.v1.graph import MessageNode
    from verifiers.v1.trace import AgentInfo, Trace, TraceTask
    from verifiers.v1.types import AssistantMessage, SystemMessage, UserMessage

    data = task.data
    messages = [UserMessage(content=data.prompt), AssistantMessage(content=answer)]
    if data.system_prompt:
        messages.insert(0, SystemMessage(content=data.system_prompt))
    trace = Trace(
        task=TraceTask(type=type(task).__name__, data=data, key=task.key, hash=task.hash),
        agent=AgentInfo(config=AgentConfig()),
        nodes=[
            MessageNode(message=message, parent=at - 1 if at else None, sampled=at == len(messages) - 1)
            for at, message in enumerate(messages)
        ],
        is_completed=True,
        ok=True,
        stop_condition="agent_completed",
    )
    await task.score(trace)
    unscored = [name for name, reward in trace.rewards.items() if reward is None]
    if unscored:
        raise Fault(f"rewards {unscored} were not computed")
    return float(trace.reward)


def _read(args: Mapping[str, Any]) -> tuple[dict[str, Any], TextOptions]:
    table = read_arguments("verifiers", args, _FIELDS)
    return table, read_options("verifiers", table)


def make(args: Mapping[str, Any], files: Mapping[str, bytes]) -> TextEnvironment:
    """Environment of task arguments; see the module's head. Raises `ConfigError`."""
    table, options = _read(args)
    tasks = Tasks(table["taskset"], size=table["size"], config=table["config"])
    return TextEnvironment(tasks, make_codec(options, files), options)


def list_files(args: Mapping[str, Any]) -> dict[str, Kind]:
    """The tokenizer, if one is named. Raises `ConfigError`."""
    return list_text_files(_read(args)[1])


def read_sources(args: Mapping[str, Any]) -> list[tuple[str, bytes]]:
    """What decides prompts and rewards: this file, all files of the taskset's distribution, versions, and the text modules."""
    table, options = _read(args)
    found = find_distribution(table["taskset"])
    files = [file for file in found.files or () if ".dist-info" not in str(file) and file.suffix != ".pyc"]
    return [
        ("verifiers_adapter.py", Path(__file__).read_bytes()),
        *((str(file), Path(str(file.locate())).read_bytes()) for file in sorted(files, key=str)),
        ("version", found.version.encode()),
        ("verifiers", importlib.metadata.version("verifiers").encode()),
        *read_text_sources(options),
    ]
