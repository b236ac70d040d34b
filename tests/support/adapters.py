"""Adapter folders on small models, as a trainer would have written them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from models.adapter import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    compute_layout,
    encode_adapter,
    encode_adapter_config,
    link_base,
    read_shapes,
)
from protocol.adapter import Adapter

TERMS = Adapter(4, 8, ("q_proj", "v_proj"))
BASE_POLICY = bytes(range(32))


def make_adapter(
    folder: Path,
    base: Path,
    seed: int,
    *,
    terms: Adapter = TERMS,
    base_policy: bytes = BASE_POLICY,
    scale: float = 0.3,
) -> Path:
    """Write an adapter with random A and B of about `scale`, linked to `base`."""
    rng = np.random.default_rng(seed)
    layout = compute_layout(terms, read_shapes(base))
    tensors = {name: (scale * rng.standard_normal(shape)).astype(np.float32) for name, shape in layout.items()}
    folder.mkdir(parents=True)
    (folder / ADAPTER_CONFIG).write_bytes(encode_adapter_config(terms, base_policy))
    (folder / ADAPTER_WEIGHTS).write_bytes(encode_adapter(tensors))
    link_base(folder, base)
    return folder
