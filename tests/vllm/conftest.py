"""Tests of the vLLM engine, run by `make test-vllm`. Without vllm nothing here is imported."""

from __future__ import annotations

import importlib.util

import pytest

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]


def pytest_collection_modifyitems(items):
    for item in items:
        if "/tests/vllm/" in item.path.as_posix():
            item.add_marker(pytest.mark.vllm)


@pytest.fixture(scope="session")
def engine():
    """One engine for all tests that need none of their own: a new architecture takes seconds to build. Closed, it builds
    itself again when it is used."""
    from inference.vllm_engine import VllmEngine

    made = VllmEngine()
    yield made
    made.close()


@pytest.fixture
def make_engine():
    """Makes engines of a test's own; a process has one vLLM at a time, so the last one made or used runs."""
    from inference.vllm_engine import VllmEngine

    made = []

    def make(**arguments):
        made.append(VllmEngine(**arguments))
        return made[-1]

    yield make
    for one in made:
        one.close()
