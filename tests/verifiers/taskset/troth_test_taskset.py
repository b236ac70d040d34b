"""A taskset as people publish them, in variants that can and cannot be scored from an answer alone."""

from __future__ import annotations

import time

import verifiers.v1 as vf
from verifiers.v1.configs.taskset import TasksetConfig


class Config(TasksetConfig):
    kind: str = "plain"
    count: int = 20


class Data(vf.TaskData):
    answer: str


class Sum(vf.Task[Data]):
    @vf.reward(weight=0.75)
    async def right(self, trace: vf.Trace) -> float:
        if trace.last_reply == "fail":
            raise RuntimeError("a grader that fails")
        if trace.last_reply == "hang":
            time.sleep(3)
        return float(trace.last_reply.strip() == self.data.answer)

    @vf.reward(weight=0.25)
    async def short(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply) < 4)


class Boxed(Sum):
    @vf.reward
    async def passes(self, trace: vf.Trace, runtime: vf.Runtime) -> float:
        return 0.0


class Prepared(Sum):
    async def setup(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        return None


class Unpaid(vf.Task[Data]):
    pass


class Sums(vf.Taskset[Sum, Config]):
    def load(self):
        kind = {"plain": Sum, "runtime": Boxed, "setup": Prepared, "unpaid": Unpaid}[self.config.kind]
        for number in range(self.config.count):
            yield kind(Data(prompt=f"{number}+1=", system_prompt="Add.", answer=str(number + 1)), self.config.task)


__all__ = ["Sums"]
