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
def make_engine(engine):
    """Makes engines of a test's own; a process has one at a time, so the shared one is closed and each ends the last."""
    from inference.vllm_engine import VllmEngine

    made = [engine]

    def make(**arguments):
        made[-1].close()
        made.append(VllmEngine(**arguments))
        return made[-1]

    yield make
    made[-1].close()
