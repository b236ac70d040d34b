"""Torch models to policy folders; models.policy reads them back. Never pickle.

Written folders are a function of the weights alone (sorted keys, no metadata, no library version), so that a content
hash of a folder is a hash of the policy. Neighbours: trainer.weights decides what is trained and written.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save as save_tensors
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from models.policy import CONFIG, WEIGHTS
from trainer.files import disk_errors, sync_directory, write_synced


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
    """Write the folder of a whole policy, see `write_files`."""
    write_files(folder, {CONFIG: config, WEIGHTS: weights})


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write a policy folder durably. The folder must not exist; it is complete when this returns."""
    with disk_errors(f"writing {folder}"):
        folder.mkdir()
        for name, data in files.items():
            write_synced(folder / name, data)
        sync_directory(folder)
        sync_directory(folder.parent)
