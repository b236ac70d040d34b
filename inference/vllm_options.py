"""What vLLM is built with: the operator's options, the environment it is imported in, sizes, and what is refused first.

Nothing of a policy folder reaches vLLM but the fields of a checked config.json and the tensors, both through
models.policy: no tokenizer, no generation defaults, no quantisation, no code. Importing this module imports neither vllm
nor torch.
Neighbours: inference.vllm_runtime builds, inference.memory counts.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from inference.memory import compute_kv_bytes, estimate_memory, read_free_bytes, require_free
from protocol.errors import ConfigError, Fault

#: Longest sequence when neither the settings nor the policy limit it further.
MODEL_LEN_MAX = 32_768
#: Keys and values held on a CPU when the settings do not say.
KV_BYTES_AUTO = 1 << 30
#: vLLM's block on a CPU, in tokens, and blocks it keeps for itself.
BLOCK_TOKENS, BLOCKS_SPARE = 128, 2

#: Must hold in this process: states are caught in the V1 runner, and a scheduler in another process could not be asked.
_REQUIRED = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_V2_MODEL_RUNNER": "0"}
#: What an operator may set otherwise.
_DEFAULTS = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "HF_HUB_OFFLINE": "1",
}


@dataclass(frozen=True)
class VllmOptions:
    """What an operator chooses; see docs/engines.md.

    Attributes:
        tensor_parallel_size / pipeline_parallel_size: devices that share one model.
        gpu_memory_utilization: share of a GPU's memory for weights and KV cache.
        max_num_seqs: rows decoded together.
        max_model_len: longest prompt with its completion, in tokens; 0: what the policy allows, at most 32,768.
        enforce_eager: no CUDA graphs; always so on a CPU.
        kv_cache_gib: size of the KV cache; 0: on a GPU what `gpu_memory_utilization` leaves, on a CPU at most 1 GiB.
    """

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    gpu_memory_utilization: float = 0.9
    max_num_seqs: int = 256
    max_model_len: int = 0
    enforce_eager: bool = False
    kv_cache_gib: float = 0.0

    @property
    def num_workers(self) -> int:
        """Devices that share the model."""
        return self.tensor_parallel_size * self.pipeline_parallel_size


def require_vllm(device: str) -> None:
    """Import vLLM, with the environment it needs.

    Raises:
        ConfigError: when it is not installed, cannot be imported, or is a build for another kind of device.
    """
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            "compute.engine is vllm, but vllm is not installed: pip install -e '.[vllm]' for CUDA, make venv-vllm for a "
            'CPU, or set compute.engine to "torch"'
        )
    os.environ.update(_REQUIRED)
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import vllm.v1.engine.llm_engine  # noqa: F401  # the rest, which building needs and which takes seconds
            from vllm.platforms import current_platform
    except ImportError as error:
        raise ConfigError(
            f"compute.engine is vllm, but vllm cannot be imported: {error}; see docs/engines.md"
        ) from error
    _mend_search()
    if current_platform.device_type != device.partition(":")[0]:
        raise ConfigError(
            f"compute.device is {device!r}, but the installed vllm is built for {current_platform.device_type!r}: "
            "install the other build or change compute.device"
        )


def _mend_search() -> None:
    """Let vLLM be built in a process that has loaded numba, as sampling and commitments do.

    Its CPU backend looks for a kernel in `vars()` of every object of every module, and ends with an AttributeError at the
    one of llvmlite that answers to `__dict__` with something else than a dict.
    """
    try:
        from vllm.triton_utils import dispatcher
    except ImportError:  # a vLLM without this search
        return

    def read_vars(value: Any) -> Mapping[str, Any]:
        found = vars(value)
        return found if isinstance(found, Mapping) else {}

    dispatcher.vars = read_vars


def make_config(fields: dict[str, Any]) -> dict[str, Any]:
    """The config.json that vLLM is given: the policy's own, with its architecture named by its model type.

    Raises:
        Fault: for a policy that is quantised or no causal language model.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if "quantization_config" in fields:
        raise Fault("config.json asks for quantised weights: policies are whole-precision weights")
    named = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(fields["model_type"])
    if not isinstance(named, str):
        raise Fault(f"config.json: model_type {fields['model_type']!r} is no causal language model of transformers")
    return {**fields, "architectures": [named]}


def compute_model_len(config: dict[str, Any], options: VllmOptions) -> int:
    """Longest sequence in tokens. Raises `Fault` when the settings ask for more than the policy has positions."""
    limit = config.get("max_position_embeddings")
    limit = limit if isinstance(limit, int) and limit > 0 else MODEL_LEN_MAX
    if options.max_model_len > limit:
        raise Fault(f"compute.vllm.max_model_len is {options.max_model_len}, the policy has {limit} positions")
    return options.max_model_len or min(limit, MODEL_LEN_MAX)


def compute_kv_size(config: dict[str, Any], options: VllmOptions, device: str, dtype: str) -> int | None:
    """Bytes of the KV cache; None when vLLM takes what is left of a GPU.

    By itself a CPU gets what all rows need at full length, at most 1 GiB, at least one row.
    """
    if options.kv_cache_gib:
        return int(options.kv_cache_gib * 2**30)
    if device != "cpu":
        return None
    row_blocks = -(-compute_model_len(config, options) // BLOCK_TOKENS)
    block_bytes = compute_kv_bytes(config, dtype=dtype, tokens=BLOCK_TOKENS)
    wanted = min(options.max_num_seqs * row_blocks * block_bytes, KV_BYTES_AUTO)
    return max(wanted, row_blocks * block_bytes) + BLOCKS_SPARE * block_bytes


def require_memory(config: dict[str, Any], options: VllmOptions, device: str, dtype: str, *, is_built: bool) -> None:
    """Refuse a policy that cannot fit, before anything is allocated for it.

    In main memory a policy is held once more for a moment: as the reference its loading is compared with.

    Args:
        is_built: a vLLM for this architecture holds its memory already; only the reference is to come.

    Raises:
        Fault: with what is needed and what is free.
    """
    todo = "use a smaller compute.vllm.kv_cache_gib, more devices, or another task"
    kv_bytes = compute_kv_size(config, options, device, dtype) or 0
    need = estimate_memory(config, dtype=dtype, batch_tokens=1)
    is_here = device == "cpu" and not is_built
    here = need.swap_bytes + kv_bytes if is_here else need.weights_bytes
    require_free(here, read_free_bytes(), "vllm: the policy (weights, reference copy, KV cache)", todo)
    if device != "cpu" and not is_built:
        import torch

        per_device = need.weights_bytes // options.num_workers + kv_bytes
        require_free(per_device, torch.cuda.mem_get_info()[0], "vllm: a GPU's weights and KV cache", todo)


@contextlib.contextmanager
def faults(what: str) -> Iterator[None]:
    """Turn whatever vLLM raises into a `Fault`; our own errors pass."""
    try:
        yield
    except (Fault, ConfigError):
        raise
    except Exception as error:  # vLLM raises asserts, ValueErrors, pydantic's and torch's errors alike
        text = " ".join(str(error).split())[:500]
        raise Fault(f"vllm: {what} failed: {type(error).__name__}: {text}") from error
