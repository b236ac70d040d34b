"""`troth policy evaluate`: policies of one environment, whole and as adapters, which find its files in their base."""

from __future__ import annotations

import hashlib
import json

import pytest

from environments.files import MissingFile
from tests.support.adapters import make_adapter
from tests.support.scenario import make_model
from tests.support.tokenizer import make_tokenizer_json
from troth.commands import policy_evaluate

ARGS = json.dumps(
    {
        "config": {"max_digits": 1, "max_terms": 2, "min_digits": 1, "min_terms": 2},
        "dataset": "chain_sum",
        "held_out": 6,
        "size": 20,
        "template": "{question} ",
        "tokenizer": hashlib.sha256(make_tokenizer_json()).hexdigest(),
    },
    sort_keys=True,
    separators=(",", ":"),
)


@pytest.fixture
def base(tmp_path):
    folder = make_model(tmp_path / "base", 0, vocab=400)
    (folder / "tokenizer.json").write_bytes(make_tokenizer_json())
    return folder


def evaluate(*folders):
    return policy_evaluate([*folders], "reasoning_gym", ARGS, max_tokens=4, stop_token=2, samples=2)


def test_an_adapter_alone_is_enough(base, tmp_path):
    adapter = make_adapter(tmp_path / "adapter", base, 1)
    (alone,), both = evaluate(adapter), evaluate(base, adapter)
    assert (alone["prompts"], alone["samples"]) == (6, 2)
    assert 0 <= alone["reward"] <= 1
    assert alone == both[1]  # the same noise whatever else is evaluated
    assert [row["folder"] for row in both] == [str(base), str(adapter)]


def test_without_the_tokenizer_it_says_which_file_it_looked_for(base):
    (base / "tokenizer.json").unlink()
    with pytest.raises(MissingFile, match=json.loads(ARGS)["tokenizer"]):
        evaluate(base)
