"""A task's environment whose files come with the base policy: nobody waits for it, everybody is told, and what cannot be had is
tried again later."""

from __future__ import annotations

import asyncio
import hashlib
import json
from types import SimpleNamespace

import pytest

import environments
import troth.environment_files as module
from protocol.errors import ConfigError, Fault
from protocol.task import Environment as EnvironmentSpec
from tests.support.tokenizer import make_tokenizer_json
from troth.environment_check import require_bounded
from troth.environment_files import EnvironmentFinder, load_environment

TOKENIZER = make_tokenizer_json()


def make_task(**more):
    args = json.dumps({"dataset": "leg_counting", "size": 9, **more}, sort_keys=True, separators=(",", ":"))
    spec = EnvironmentSpec("reasoning_gym", args, environments.content_hash("reasoning_gym", args))
    return SimpleNamespace(task=b"t" * 32, spec=SimpleNamespace(environment=spec))


def make_sort_task():
    spec = EnvironmentSpec("sort", "{}", environments.content_hash("sort", "{}"))
    return SimpleNamespace(task=b"s" * 32, spec=SimpleNamespace(environment=spec))


NEEDY = make_task(tokenizer=hashlib.sha256(TOKENIZER).hexdigest())


class Policies:
    """Serves one folder as version 0, when the gate is open."""

    def __init__(self, folder, error=None):
        self.folder, self.error, self.asked, self.gate = folder, error, [], asyncio.Event()

    async def fetch(self, task, version):
        self.asked.append((task, version))
        await self.gate.wait()
        if self.error:
            raise self.error
        return self.folder


def run(scenario):
    asyncio.run(asyncio.wait_for(scenario, 60))


async def settle(finder, task, policies, misfits=None):
    """Ask until there is an answer, as the role's loop does."""
    while (found := finder.get(task, policies, misfits or {})) is None:
        await asyncio.sleep(0.01)
    return found


def test_an_environment_without_files_is_there_at_once():
    async def scenario():
        policies, said = Policies(None), []
        finder = EnvironmentFinder([], lambda kind, fields: said.append(kind))
        assert finder.get(make_sort_task(), policies, {}).vocab_size == 32
        assert (policies.asked, said) == ([], [])

    run(scenario())


def test_files_of_the_base_policy_are_fetched_while_the_loop_goes_on(tmp_path):
    async def scenario():
        (tmp_path / "tokenizer.json").write_bytes(TOKENIZER)
        policies, said = Policies(tmp_path), []
        finder = EnvironmentFinder([tmp_path / "nowhere"], lambda kind, fields: said.append((kind, fields["reason"])))
        for _ in range(20):
            assert finder.get(NEEDY, policies, {}) is None
            await asyncio.sleep(0.01)
        assert policies.asked == [(b"t" * 32, 0)], "fetched once, however often it is asked for"
        assert [kind for kind, _ in said] == ["idle"]
        policies.gate.set()
        assert (await settle(finder, NEEDY, policies)).vocab_size == 400

    run(scenario())


def test_files_in_a_folder_of_ones_own_need_no_policy(tmp_path):
    async def scenario():
        (tmp_path / "t.json").write_bytes(TOKENIZER)
        policies = Policies(None)
        finder = EnvironmentFinder([tmp_path], lambda kind, fields: None)
        assert (await settle(finder, NEEDY, policies)).vocab_size == 400
        assert policies.asked == []

    run(scenario())


def test_a_base_policy_without_the_file_is_the_tasks_fault(tmp_path):
    async def scenario():
        policies = Policies(tmp_path)
        policies.gate.set()
        with pytest.raises(ConfigError, match="no tokenizer file"):
            await settle(EnvironmentFinder([], lambda kind, fields: None), NEEDY, policies)
        with pytest.raises(ConfigError, match="no tokenizer file"):
            await load_environment(NEEDY, policies, [])

    run(scenario())


def test_a_base_policy_that_cannot_be_had_leaves_the_turn_to_others_and_is_tried_again(tmp_path, monkeypatch):
    async def scenario():
        (tmp_path / "tokenizer.json").write_bytes(TOKENIZER)
        monkeypatch.setattr(module, "RETRY_SECONDS", 0.2)
        policies, said = Policies(tmp_path, Fault("nobody serves it")), []
        policies.gate.set()
        finder = EnvironmentFinder([], lambda kind, fields: said.append(fields["reason"]))
        assert not finder.is_waiting(NEEDY)
        with pytest.raises(Fault, match="nobody serves it"):
            await settle(finder, NEEDY, policies)
        assert finder.is_waiting(NEEDY)
        assert "nobody serves it" in said[-1]
        policies.error = None
        await asyncio.sleep(0.3)
        assert not finder.is_waiting(NEEDY)
        assert (await settle(finder, NEEDY, policies)).vocab_size == 400

    run(scenario())


def test_a_policy_that_does_not_fit_on_this_machine_refuses_the_task():
    async def scenario():
        policies = Policies(None, Fault("too large"))
        policies.gate.set()
        with pytest.raises(ConfigError, match="needs 900 GiB"):
            await settle(
                EnvironmentFinder([], lambda kind, fields: None), NEEDY, policies, {b"t" * 32: "needs 900 GiB"}
            )

    run(scenario())


def test_a_task_cannot_stall_a_participant_with_options_of_a_set(monkeypatch):
    """30 million terms make no prompt in any sensible time: the task is refused, and the loop goes on meanwhile."""
    limit = lambda spec, folders: require_bounded(spec, folders, seconds_max=8)  # noqa: E731
    monkeypatch.setattr(module, "require_bounded", limit)
    heavy = make_task(dataset="chain_sum", config={"max_terms": 30_000_000, "min_terms": 30_000_000})

    async def scenario():
        finder, turns, beats = EnvironmentFinder([], lambda kind, fields: None), 0, asyncio.Event()

        async def beat():
            nonlocal turns
            while not beats.is_set():
                turns += 1
                await asyncio.sleep(0.01)

        beating = asyncio.create_task(beat())
        with pytest.raises(ConfigError, match=r"hangs|more memory"):
            await settle(finder, heavy, Policies(None))
        beats.set()
        await beating
        assert turns > 50

    run(scenario())


def test_a_set_without_files_is_tried_and_made():
    async def scenario():
        assert (await settle(EnvironmentFinder([], lambda *_: None), make_task(), Policies(None))).vocab_size == 257

    run(scenario())
