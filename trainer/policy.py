"""Policy folders {config.json, model.safetensors} to torch models and back. Never pickle, never remote code.

Written folders are a function of the weights alone (sorted keys, no metadata, no library version), so that a content
hash of a folder is a hash of the policy. Neighbours: trainer.step trains what `load_model` returns.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from protocol.errors import ConfigError, Fault
from trainer.files import CONFIG, WEIGHTS, disk_errors, sync_directory, write_synced

#: Longest config.json that is parsed.
CONFIG_BYTES_MAX = 1 << 20


def read_config(folder: Path) -> dict[str, Any]:
    """Parse a folder's config.json, bounded.

    Raises:
        Fault: when it cannot be read.
        ConfigError: when it is too long or not a JSON object.
    """
    path = folder / CONFIG
    with disk_errors(f"reading {path}"):
        size = path.stat().st_size
        if size > CONFIG_BYTES_MAX:
            raise ConfigError(f"{path} has {size} bytes, limit {CONFIG_BYTES_MAX}")
        data = path.read_bytes()
    try:
        config = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise ConfigError(f"{path} names no model_type")
    return config


def read_hidden_size(folder: Path) -> int:
    """Hidden size of a policy, which fixes the length of short commitments."""
    hidden = read_config(folder).get("hidden_size")
    if not isinstance(hidden, int) or hidden < 1:
        raise ConfigError(f"{folder / CONFIG}: hidden_size is {hidden!r}, expected a positive integer")
    return hidden


def load_model(folder: Path, *, device: str = "cpu", dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Build a causal language model from a policy folder, in evaluation mode.

    Args:
        dtype: of the parameters in memory; the file's own type does not matter.

    Raises:
        Fault: when a file cannot be read or is damaged.
        ConfigError: when the weights are not those of the architecture.
    """
    fields = read_config(folder)
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    with disk_errors(f"reading {folder / WEIGHTS}"):
        data = (folder / WEIGHTS).read_bytes()
    try:
        tensors = load_tensors(data)
    except SafetensorError as error:
        raise Fault(f"{folder / WEIGHTS} is damaged: {error}; fetch the policy again") from None
    make: Callable[..., PreTrainedModel] = AutoModelForCausalLM.from_config
    model = make(config, dtype=dtype, trust_remote_code=False)
    problems = model.load_state_dict(tensors, strict=False)
    model.tie_weights()
    # Tied tensors are stored once; named_parameters() lists each only once, too.
    missing = sorted(set(problems.missing_keys) & {name for name, _ in model.named_parameters()})
    if missing or problems.unexpected_keys:
        odd = (missing or problems.unexpected_keys)[0]
        raise ConfigError(f"{folder}: tensor {odd} is {'missing' if missing else 'not part of the architecture'}")
    model.train(False)
    model.to(torch.device(device))  # type: ignore[arg-type]
    return model


def collect_tensors(model: PreTrainedModel, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name, tied ones once, contiguous on the CPU, optionally converted."""
    names = {name for name, _ in model.named_parameters()}
    parameters = {id(parameter) for parameter in model.parameters()}
    tensors = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name in names or id(tensor) not in parameters:
            kept = tensor.detach().to("cpu")
            tensors[name] = (kept.to(dtype) if dtype and kept.is_floating_point() else kept).contiguous()
    return tensors


def encode_tensors(tensors: dict[str, Tensor]) -> bytes:
    """Canonical safetensors bytes: sorted names, no metadata."""
    return save_tensors({name: tensors[name] for name in sorted(tensors)})


def encode_config(config: PreTrainedConfig) -> bytes:
    """Canonical config.json of a model, without the version of the library that wrote it."""
    fields = config.to_dict()
    for name in ("transformers_version", "_name_or_path"):
        fields.pop(name, None)
    return json.dumps(fields, sort_keys=True, indent=1).encode() + b"\n"


def write_policy(folder: Path, config: bytes, weights: bytes) -> None:
    """Write a policy folder durably. The folder must not exist; it is complete when this returns."""
    with disk_errors(f"writing {folder}"):
        folder.mkdir()
        write_synced(folder / CONFIG, config)
        write_synced(folder / WEIGHTS, weights)
        sync_directory(folder)
        sync_directory(folder.parent)
