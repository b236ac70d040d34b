"""Courts that all rollout and commitment adversaries share: models and honest work are made once per session."""

from __future__ import annotations

import pytest

from tests.support.forge import Court


@pytest.fixture(scope="session")
def court(tmp_path_factory):
    """One task, 56 nodes with two groups of four."""
    return Court(tmp_path_factory.mktemp("court"))


@pytest.fixture(scope="session")
def chunked_court(tmp_path_factory):
    """The same with two tokens per commitment, so that completions have up to three."""
    from msgspec.structs import replace

    from protocol.presets import PROFILE_FP32

    profile = replace(PROFILE_FP32, chunk=2, topk=64, exponent_mismatches_max=2)
    return Court(tmp_path_factory.mktemp("chunked"), profile=profile, name="chunked")
