"""Generations under SIGKILL: at every system call of a write, a child process dies; what is left must be the old state or the
new one, complete, and a lineage that goes on from it must use no leaf twice. All of it for whole policies and for adapters."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
from pathlib import Path

import pytest

from protocol.errors import Fault
from trainer.checkpoint import KEEP, Generations, State

CALLS = ("open", "write", "fsync", "close", "rename", "replace", "unlink", "rmdir", "mkdir", "symlink")
POOL = [f"{number:064x}" for number in range(12)]


KINDS = {
    "whole": ("config.json", "model.safetensors"),
    "adapter": ("adapter_config.json", "adapter_model.safetensors"),
}
kind = "whole"


@pytest.fixture(autouse=True, params=KINDS)
def _kind(request):
    global kind
    kind = request.param


def make_state(version: int, leaves=(), consumed=None) -> State:
    return State(
        task="aa" * 32,
        version=version,
        adopted="",
        parent="bb" * 32,
        parent_lineage="cc" * 32,
        optimizer_before="dd" * 32,
        config_hash="ee" * 32,
        leaves=tuple(leaves),
        consumed=consumed or {},
        reward_micro=250_000,
        seed=0,
    )


def content(version: int) -> dict:
    """What a generation is written from, different for every version."""
    return {
        "policy": {name: f"{name} of {version}".encode() * 9 for name in KINDS[kind]},
        "optimizer": f"optimizer of {version}".encode() * 9,
        "base": Path("/base") if kind == "adapter" else None,
    }


def train_once(generations: Generations) -> None:
    """What the trainer does: from the newest generation, take the next two leaves that its lineage has not used."""
    newest = generations.load_newest()
    version = 0 if newest is None else newest.version + 1
    consumed = {} if newest is None else {**newest.state.consumed, newest.version: newest.state.leaves}
    used = set(itertools.chain.from_iterable(consumed.values()))
    leaves = [leaf for leaf in POOL if leaf not in used][:2]
    generations.write(make_state(version, leaves, consumed), **content(version))


def check(generations: Generations, versions: set[int]) -> None:
    """The newest generation is whole, one of `versions`, and its lineage used every leaf at most once."""
    newest = generations.load_newest()
    assert newest is not None
    assert newest.version in versions
    expected = content(newest.version)
    assert {name: (newest.policy / name).read_bytes() for name in KINDS[kind]} == expected["policy"]
    assert (newest.policy / "base").is_symlink() == (kind == "adapter")
    assert newest.read_optimizer() == expected["optimizer"]
    used = [*itertools.chain.from_iterable(newest.state.consumed.values()), *newest.state.leaves]
    assert used == POOL[: 2 * (newest.version + 1)]


def run_and_kill(root, call_number: int) -> bool:
    """Train once in a child that gets SIGKILL just before its n-th system call. False when it came to its end."""
    child = os.fork()
    if child == 0:
        counter = itertools.count()

        def wrap(real):
            def call(*args, **kwargs):
                if next(counter) == call_number:
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(*args, **kwargs)

            return call

        try:
            generations = Generations(root)
            for name in CALLS:
                setattr(os, name, wrap(getattr(os, name)))
            train_once(generations)
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


def test_T4_sigkill_at_every_boundary_of_a_write_loses_nothing(tmp_path):
    start = tmp_path / "start"
    for _ in range(3):
        train_once(Generations(start))
    boundaries = 0
    for number in itertools.count():
        root = tmp_path / f"{number}"
        shutil.copytree(start, root, symlinks=True)
        killed = run_and_kill(root, number)
        check(Generations(root), {2, 3} if killed else {3})
        # A second death while recovering, then a clean run.
        run_and_kill(root, number // 2)
        check(Generations(root), {2, 3, 4})
        train_once(Generations(root))
        check(Generations(root), {3, 4, 5})
        assert len(Generations(root).list_versions()) <= KEEP + 1
        shutil.rmtree(root)
        if not killed:
            break
        boundaries += 1
    assert boundaries > 40


def test_T4_the_first_generation_exists_completely_or_not_at_all(tmp_path):
    for number in itertools.count():
        root = tmp_path / f"{number}"
        if not run_and_kill(root, number):
            break
        newest = Generations(root).load_newest()
        assert newest is None or newest.version == 0
        train_once(Generations(root))
        check(Generations(root), {0, 1})


def test_the_last_two_generations_stay(tmp_path):
    generations = Generations(tmp_path)
    for _ in range(5):
        train_once(generations)
    assert generations.list_versions() == [3, 4]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "00000003", "00000003.complete", "00000004", "00000004.complete",
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["weights", "config", "optimizer.safetensors", "state.json"])
@pytest.mark.parametrize("damage", ["truncate", "flip", "remove"])
def test_a_damaged_generation_is_passed_over(tmp_path, name, damage):
    generations = Generations(tmp_path)
    for _ in range(2):
        train_once(generations)
    config, weights = KINDS[kind]
    path = tmp_path / "00000001" / {"config": f"policy/{config}", "weights": f"policy/{weights}"}.get(name, name)
    data = bytearray(path.read_bytes())
    if damage == "remove":
        path.unlink()
    elif damage == "truncate":
        path.write_bytes(data[:-1])
    else:
        data[3] ^= 1
        path.write_bytes(data)
    with pytest.raises(Fault):
        generations.load(1)
    check(generations, {0})


def test_a_generation_without_marker_does_not_exist(tmp_path):
    generations = Generations(tmp_path)
    for _ in range(2):
        train_once(generations)
    (tmp_path / "00000001.complete").unlink()
    check(generations, {0})
    train_once(generations)
    check(generations, {1})


def test_writing_an_older_version_ends_the_lineage_that_went_further(tmp_path):
    generations = Generations(tmp_path)
    for _ in range(4):
        train_once(generations)
    generations.write(make_state(1), **content(1))
    assert generations.list_versions() == [1]


def test_a_full_disk_is_a_fault_and_keeps_the_old_generation(tmp_path, monkeypatch):
    generations = Generations(tmp_path)
    train_once(generations)
    real, budget = os.write, [100]

    def write(descriptor, data):
        budget[0] -= len(data)
        if budget[0] < 0:
            raise OSError(28, "No space left on device")
        return real(descriptor, data)

    monkeypatch.setattr(os, "write", write)
    with pytest.raises(Fault, match="No space left"):
        train_once(generations)
    monkeypatch.undo()
    check(generations, {0})
    train_once(generations)
    check(generations, {1})
