"""Policy folders into torch modules: `config.json` and `model.safetensors`, never code, never pickle.

Every tensor of the model must come from the file and every tensor of the file must be used; a tied output head is the one
exception. Neighbours: inference.engine swaps the result in.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from protocol.errors import Fault

CONFIG_BYTES_MAX = 1 << 20


def load_model(folder: Path, *, device: str, dtype: torch.dtype) -> Any:
    """Build a causal language model from a policy folder, in evaluation mode.

    Args:
        folder: holds `config.json` and `model.safetensors`.

    Raises:
        Fault: when a file is missing, malformed, or does not fit the other. Nothing is initialised at random instead.
    """
    config_path, weights_path = folder / "config.json", folder / "model.safetensors"
    try:
        size = config_path.stat().st_size
        if size > CONFIG_BYTES_MAX:
            raise Fault(f"{config_path} has {size} bytes, limit {CONFIG_BYTES_MAX}")
        table = json.loads(config_path.read_text())
        if "auto_map" in table:
            raise Fault(
                f"{config_path} names code (auto_map): only architectures of the transformers package are loaded"
            )
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        tensors = load_file(weights_path, device=device)
    except (OSError, ValueError, SafetensorError) as error:
        raise Fault(f"policy folder {folder} cannot be read: {error}") from error
    model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)  # type: ignore[no-untyped-call]
    model.to(device)
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    try:
        keys = model.load_state_dict(tensors, strict=False)
    except RuntimeError as error:
        raise Fault(f"policy folder {folder}: weights do not fit config.json: {error}") from error
    missing = sorted(set(keys.missing_keys) - tied)
    if missing or keys.unexpected_keys:
        raise Fault(
            f"policy folder {folder}: weights do not fit config.json: "
            f"{len(missing)} tensors missing {missing[:3]}, {len(keys.unexpected_keys)} unknown {keys.unexpected_keys[:3]}"
        )
    if tied:
        model.tie_weights()
    return model.eval()
