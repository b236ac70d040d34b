"""New policies in a running vLLM: what is loaded is proved, and nothing is generated with anything else.

Each public failure of in-place reloading is replayed twice: the engine is right, and with the repair or the reset taken
away it notices.
"""

from __future__ import annotations

import json

import pytest

from inference import vllm_options, vllm_worker
from inference.engine import TorchEngine
from inference.vllm_options import VllmOptions
from protocol.errors import Fault
from tests.support.adapters import make_adapter
from tests.support.forge import edit_weights
from tests.vllm.kit import make_family, make_requests, require_replayable, require_same, run

REQUESTS = make_requests(40, [4, 300, 25, 9])


@pytest.fixture(scope="module", params=["llama-tied-gqa", "llama"], ids=["tied", "untied"])
def pair(request, tmp_path_factory):
    """Two policies of one architecture."""
    directory = tmp_path_factory.mktemp("reload")
    return [make_family(directory / f"v{seed}", request.param, 50 + seed) for seed in (0, 1)]


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tied")
    return [make_family(directory / f"v{seed}", "llama-tied-gqa", 60 + seed) for seed in (0, 1)]


def run_torch(folder):
    engine = TorchEngine()
    engine.load(folder)
    return run(engine, REQUESTS)


def test_reload_returns_old_weights(engine, pair):
    """Public symptom, tied and untied: after each of several reloads in one vLLM the tokens are the loaded policy's."""
    expected = [run_torch(folder) for folder in pair]
    assert [one.tokens for one in expected[0]] != [one.tokens for one in expected[1]]
    engine.load(pair[0])
    runtime = engine._runtime
    for version in (0, 1, 0, 1):
        engine.load(pair[version])
        require_same(run(engine, REQUESTS), expected[version])
        require_replayable(pair[version], REQUESTS, expected[version])
    assert engine._runtime is runtime


def test_a_small_step_is_seen(engine, tmp_path, pair):
    """A policy that differs by one part in 100,000 in one matrix is another policy."""
    near = edit_weights(pair[0], tmp_path / "near", lambda name, w: w * (1 + 1e-5) if "down_proj" in name else w)
    engine.load(pair[0])
    engine._runtime.compare(pair[0])
    with pytest.raises(Fault, match="2 tensors are not those"):
        engine._runtime.compare(near)
    engine.load(near)
    engine._runtime.compare(near)


def test_an_old_output_head_is_found(engine, tied, monkeypatch):
    """The tied head is not packed again: loading notices, cannot put the old policy back into a head it does not
    trust, and generates nothing until a policy loads."""
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    engine.load(tied[0])
    with monkeypatch.context() as patch:
        patch.setattr(UnquantizedEmbeddingMethod, "process_weights_after_loading", lambda self, layer: None)
        with pytest.raises(Fault, match=r"1 tensors are not those .*lm_head"):
            engine.load(tied[1])
    engine.load(tied[1])
    require_replayable(tied[1], REQUESTS, run(engine, REQUESTS))


def test_the_probe_finds_an_old_output_head_too(engine, tied, monkeypatch):
    """Without the comparison of tensors, as with several devices, the log-probabilities tell."""
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    engine.load(tied[0])
    with monkeypatch.context() as patch:
        patch.setattr(UnquantizedEmbeddingMethod, "process_weights_after_loading", lambda self, layer: None)
        patch.setattr(type(engine._runtime), "compare", lambda self, folder: 0)
        with pytest.raises(Fault, match="differs from a torch prefill"):
            engine.load(tied[1])
    engine.load(tied[0])


@pytest.mark.parametrize("part", ["q_proj", "v_proj", "up_proj", "o_proj", "input_layernorm", "embed_tokens"])
def test_a_tensor_that_was_not_loaded_is_found(engine, tied, monkeypatch, part):
    """Every reload leaves one kind of tensor as it was."""
    engine.load(tied[0])
    read = vllm_worker.read_tensors
    old = dict(read(tied[0]))

    def read_stale(folder):
        for name, tensor in read(folder):
            yield name, old[name] if part in name else tensor

    runtime = engine._runtime
    monkeypatch.setattr(vllm_worker, "read_tensors", read_stale)
    runtime.load(tied[1])
    monkeypatch.setattr(vllm_worker, "read_tensors", read)
    with pytest.raises(Fault, match="not those of"):
        runtime.compare(tied[1])
    engine.load(tied[0])


def test_the_prefix_cache_serves_the_old_policy(engine, tied):
    """Public symptom: blocks of a prompt cached under the old weights are used under the new ones."""
    engine.load(tied[0])
    run(engine, REQUESTS)
    engine.load(tied[1])
    require_same(run(engine, REQUESTS), run_torch(tied[1]))


def test_a_prefix_cache_that_stays_would_be_seen_by_verifiers(engine, tied, monkeypatch):
    """What the reset is worth: with it taken away, the same run is refused."""
    engine.load(tied[0])
    run(engine, REQUESTS)
    monkeypatch.setattr(engine._runtime._llm, "reset_prefix_cache", lambda: True)
    engine.load(tied[1])
    with pytest.raises(AssertionError, match="gap"):
        require_replayable(tied[1], REQUESTS, run(engine, REQUESTS))
    monkeypatch.setattr(engine._runtime._llm, "reset_prefix_cache", lambda: False)
    with pytest.raises(Fault, match="prefix cache could not be reset"):
        engine.load(tied[1])


def test_a_damaged_policy_leaves_the_old_one_in_use(engine, tied, tmp_path):
    engine.load(tied[0])
    runtime = engine._runtime
    broken = edit_weights(tied[1], tmp_path / "broken", lambda name, w: w[:-1] if "down_proj" in name else w)
    with pytest.raises(Fault, match="not a usable model"):
        engine.load(broken)
    assert engine._runtime is runtime
    require_same(run(engine, REQUESTS), run_torch(tied[0]))


def test_numbers_that_are_not_finite(engine, tied, tmp_path):
    engine.load(tied[0])
    poisoned = edit_weights(tied[1], tmp_path / "nan", lambda name, w: w * float("nan") if "o_proj" in name else w)
    with pytest.raises(Fault, match="not finite"):
        engine.load(poisoned)
    require_same(run(engine, REQUESTS), run_torch(tied[0]))


def test_a_load_that_fails_half_way(engine, tied, monkeypatch):
    """Half of the new weights are in place when reading fails: the old policy is put back and proved."""
    engine.load(tied[0])
    read = vllm_worker.read_tensors

    def read_half(folder):
        for number, item in enumerate(read(folder)):
            if folder == tied[1].resolve() and number == 8:
                raise Fault("the disk is gone")
            yield item

    monkeypatch.setattr(vllm_worker, "read_tensors", read_half)
    with pytest.raises(Fault, match="disk is gone"):
        engine.load(tied[1])
    require_same(run(engine, REQUESTS), run_torch(tied[0]))
    with monkeypatch.context() as patch:
        patch.setattr(vllm_worker, "read_tensors", lambda folder: iter(()))
        with pytest.raises(Fault):
            engine.load(tied[1])
        with pytest.raises(Fault, match="no policy is loaded"):
            run(engine, REQUESTS)


def test_vllm_fails_in_the_middle_of_a_batch(engine, tied, monkeypatch):
    """The batch is a fault; the next one starts with a new vLLM and the same policy."""
    engine.load(tied[0])
    llm, steps = engine._runtime._llm, []

    def fail_later():
        steps.append(1)
        if len(steps) > 3:
            raise RuntimeError("out of   device memory")
        return []

    monkeypatch.setattr(llm, "step", fail_later)
    with pytest.raises(Fault, match="vllm: generation failed: RuntimeError: out of device memory"):
        run(engine, REQUESTS)
    require_same(run(engine, REQUESTS), run_torch(tied[0]))


def test_two_engines_of_one_process_take_turns(engine, make_engine, tied):
    """As when a node goes from one task to the next: the second closes the first's vLLM; the first, if it is used again,
    builds its own again, with its own policy."""
    engine.load(tied[0])
    other = make_engine(options=VllmOptions(max_num_seqs=8))
    other.load(tied[1])
    require_same(run(other, REQUESTS), run_torch(tied[1]))
    require_same(run(engine, REQUESTS), run_torch(tied[0]))
    require_same(run(other, REQUESTS), run_torch(tied[1]))


def test_a_vllm_that_cannot_be_built_leaves_nothing_behind(make_engine, tied):
    """A KV cache below one sequence is vLLM's own complaint; the next vLLM of the process is built as if it were the first."""
    cramped = make_engine(options=VllmOptions(kv_cache_gib=1e-5))
    with pytest.raises(Fault, match="vllm: building the engine failed: "):
        cramped.load(tied[0])
    with pytest.raises(Fault, match="no policy is loaded"):
        run(cramped, REQUESTS)
    roomy = make_engine()
    roomy.load(tied[0])
    require_same(run(roomy, REQUESTS), run_torch(tied[0]))


def test_an_adapter_is_merged(engine, tied, tmp_path):
    """A policy of a LoRA task: the base's tensors with the adapter's added, in the vLLM that runs the base."""
    engine.load(tied[0])
    runtime = engine._runtime
    for seed in (1, 2):
        folder = make_adapter(tmp_path / f"adapter-{seed}", tied[0], seed)
        engine.load(folder)
        made = run(engine, REQUESTS)
        require_same(made, run_torch(folder))
        require_replayable(folder, REQUESTS, made)
        with pytest.raises(AssertionError, match="gap"):
            require_replayable(tied[0], REQUESTS, made)
    assert engine._runtime is runtime


def test_out_of_memory_is_known_before_anything_is_allocated(make_engine, tied, monkeypatch):
    """Public symptom: a model that cannot fit is noticed while it is loaded. Here before, with both numbers."""
    engine = make_engine(options=VllmOptions(kv_cache_gib=10_000))
    with pytest.raises(Fault, match=r"needs 10,240,\d\d\d\.\d MiB of memory, [\d,.]+ MiB are free"):
        engine.load(tied[0])
    assert engine._runtime is None
    small = make_engine()
    monkeypatch.setattr(vllm_options, "read_free_bytes", lambda: 1 << 20)
    with pytest.raises(Fault, match=r"1\.0 MiB are free"):
        small.load(tied[0])
    assert small._runtime is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised"),
        ({"auto_map": {"AutoModel": "x.Y"}}, "names code"),
        ({"model_type": "bert-of-strangers"}, "no causal language model"),
    ],
)
def test_configurations_that_vllm_never_sees(engine, tied, tmp_path, change, said):
    folder = edit_weights(tied[0], tmp_path / "strange", lambda name, w: w)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(Fault, match=said):
        engine.load(folder)
