"""Policy folders into torch modules: `config.json` and `model.safetensors`, never code, never pickle.

Every tensor of the model must come from the file and every tensor of the file must be used; a tied output head is the one
exception. Loading is all that roles share: the node decodes, the verifier prefills and the trainer differentiates by
code of their own.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from protocol.errors import Fault

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
CONFIG_BYTES_MAX = 1 << 20


def read_config(folder: Path) -> dict[str, Any]:
    """Parse a folder's config.json, bounded.

    Raises:
        Fault: when it is missing, too long, not a JSON object, names no architecture, or names code.
    """
    path = folder / CONFIG
    try:
        size = path.stat().st_size
        if size > CONFIG_BYTES_MAX:
            raise Fault(f"{path} has {size} bytes, limit {CONFIG_BYTES_MAX}")
        config = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise Fault(f"{path} cannot be read: {error}") from None
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise Fault(f"{path} names no model_type")
    if "auto_map" in config:
        raise Fault(f"{path} names code (auto_map): only architectures of the transformers package are loaded")
    return config


def read_hidden_size(folder: Path) -> int:
    """Hidden size of a policy, which fixes the length of short commitments. Raises `Fault`; loads no torch."""
    hidden = read_config(folder).get("hidden_size")
    if not isinstance(hidden, int) or hidden < 1:
        raise Fault(f"{folder / CONFIG}: hidden_size is {hidden!r}, expected a positive integer")
    return hidden


def load_model(folder: Path, *, device: str = "cpu", dtype: str = "float32") -> Any:
    """Build a causal language model from a policy folder, in evaluation mode.

    Args:
        folder: holds `config.json` and `model.safetensors`.
        device: torch device, for example "cpu" or "cuda:0".
        dtype: torch dtype of parameters in memory, for example "float32"; the file's own does not matter.

    Raises:
        Fault: when a file is missing, malformed, or does not fit the other. Nothing is initialised at random instead.
    """
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = read_config(folder)
    try:
        config = AutoConfig.for_model(fields.pop("model_type"), **fields)
        tensors = load_file(folder / WEIGHTS, device=device)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise Fault(f"policy folder {folder} cannot be read: {error}") from None
    make: Any = AutoModelForCausalLM.from_config
    model = make(config, dtype=getattr(torch, dtype), trust_remote_code=False)
    model.to(device)
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    try:
        keys = model.load_state_dict(tensors, strict=False)
    except RuntimeError as error:
        raise Fault(f"policy folder {folder}: weights do not fit config.json: {error}") from None
    missing = sorted(set(keys.missing_keys) - tied)
    if missing or keys.unexpected_keys:
        raise Fault(
            f"policy folder {folder}: weights do not fit config.json: {len(missing)} tensors missing {missing[:3]}, "
            f"{len(keys.unexpected_keys)} unknown {keys.unexpected_keys[:3]}"
        )
    if tied:
        model.tie_weights()
    return model.eval()
