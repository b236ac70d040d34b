"""An adapter as a plain model: the merged weights in a folder of their own, for software that knows nothing of adapters."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from models.adapter import BASE, get_base, is_adapter, link_base, read_updates
from models.policy import CONFIG, WEIGHTS, load_model, read_tensors
from protocol.errors import ConfigError, Fault
from trainer.policy import encode_tensors, write_files


def merge_policy(folder: Path, target: Path, *, base: Path | None = None, dtype: str = "") -> dict[str, object]:
    """Write the policy of an adapter folder as whole weights, with everything else that its base policy's folder holds.

    Args:
        target: a new folder.
        base: folder of the base policy, linked to `folder` when given; needed where it is not linked yet.
        dtype: torch type of the written weights; "" keeps the base policy's, tensor by tensor. Only float32 is exactly
            what nodes and verifiers compute with.

    Returns:
        What was written: number of tensors, how many of them the adapter changes, bytes of weights.

    Raises:
        ConfigError: when the target exists, the folder holds no adapter, or the type is unknown.
        Fault: when the adapter does not fit its base, or the disk failed.
    """
    if target.exists():
        raise ConfigError(f"{target} exists: choose another folder or remove it")
    if not is_adapter(folder):
        raise ConfigError(f"{folder} holds no adapter: there is nothing to merge")
    wanted = getattr(torch, dtype, None) if dtype else None
    if dtype and not (isinstance(wanted, torch.dtype) and wanted.is_floating_point):
        raise ConfigError(f"dtype is {dtype!r}, expected a torch floating-point type like float32 or bfloat16")
    if base is not None:
        link_base(folder, base)
    source = get_base(folder)
    load_model(folder)  # it is a usable policy, or nothing is written
    stored = {name: tensor.dtype for name, tensor in read_tensors(source)}
    tensors = {
        name: tensor.to(wanted or stored[name]) if tensor.is_floating_point() else tensor
        for name, tensor in read_tensors(folder)
    }
    weights = encode_tensors(tensors)
    try:
        write_files(target, {CONFIG: (source / CONFIG).read_bytes(), WEIGHTS: weights})
        for path in sorted(source.iterdir()):
            if path.name not in (CONFIG, WEIGHTS, BASE) and path.is_file() and not path.is_symlink():
                shutil.copyfile(path, target / path.name)
    except OSError as error:
        raise Fault(f"writing {target} failed: {error}") from None
    return {"folder": str(target), "tensors": len(tensors), "changed": len(read_updates(folder)), "bytes": len(weights)}
