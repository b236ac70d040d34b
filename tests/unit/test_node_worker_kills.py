"""kill -9 at random instants of a round: real processes, real disk. What comes out is byte for byte what would have."""

from __future__ import annotations

import json
import multiprocessing
import random
import signal
import time

import pytest

from tests.support import killable_node
from tests.support.scenario import make_model

#: Forks from a process that has imported everything once; each child is a process of its own.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["tests.support.killable_node"])
KILLS = 12
SEED = 20_240


def start(directory, base):
    child = FORKS.Process(target=killable_node.play, args=(directory, base))
    child.start()
    return child


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("models") / "base", 0)


@pytest.fixture(scope="module")
def reference(tmp_path_factory, base):
    """An undisturbed run: its bundle, and how long it works between its first part and its end, in seconds."""
    directory = tmp_path_factory.mktemp("reference")
    child = start(directory, base)
    child.join(60)
    assert child.exitcode == 0
    child = start(directory.with_name("timed"), base)
    began = wait_for_part(directory.with_name("timed"), child)
    child.join(60)
    return (directory / "delivered").read_bytes(), time.monotonic() - began


def wait_for_part(directory, child):
    """Until generation has begun: the first part of the round, or its bundle, is on disk."""
    deadline = time.monotonic() + 60
    while not list((directory / "node").glob("node-*/0.*")) and child.exitcode is None:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return time.monotonic()


def test_killed_at_random_instants_it_makes_the_same_bytes_and_one_root(tmp_path, base, reference):
    bundle, work_s = reference
    rng, killed, parts_left, rounds = random.Random(SEED), 0, 0, 0
    while killed < KILLS:
        directory = tmp_path / str(rounds)
        rounds += 1
        for _ in range(4):  # the same round, killed again and again
            child = start(directory, base)
            wait_for_part(directory, child)
            time.sleep(rng.uniform(0, work_s))
            child.kill()
            child.join(30)
            if child.exitcode == 0:
                break  # it was done before the shot
            assert child.exitcode == -signal.SIGKILL
            killed += 1
            parts_left += len(list((directory / "node").glob("node-*/0.*.part")))
        if not (directory / "delivered").exists():
            child = start(directory, base)
            child.join(60)
            assert child.exitcode == 0
        assert (directory / "delivered").read_bytes() == bundle
        lines = [json.loads(line) for line in (directory / "signed").read_text().splitlines()]
        assert len({root for _, root, _, _ in lines}) == 1, "a second root was signed"
    resumed = [int(line) for path in tmp_path.glob("*/events") for line in path.read_text().split()]
    assert parts_left > 0, "no kill hit a round in progress"
    assert max(resumed) > 0, "nothing was resumed"
