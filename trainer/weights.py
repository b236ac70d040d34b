"""What a lineage trains and publishes: all weights of a policy, or a LoRA adapter on weights that stay as they are.

Both kinds offer the same to `trainer.step`: a model for the forward pass, the parameters that are trained (by the names that
checkpoints and audits use), the policy's files, and the policy of version 0 as a reference, which for an adapter is the
same model without it. An adapter is published in float32, exactly as it is trained: there is no rounding between the
optimiser's numbers and everybody else's.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor

from models.adapter import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    Shape,
    compute_layout,
    encode_adapter,
    encode_adapter_config,
    get_base,
    is_adapter,
    list_adapted,
    read_adapter_tensors,
    read_shapes,
    validate_adapter_folder,
)
from models.policy import CONFIG, WEIGHTS, load_model, require_linear
from protocol.adapter import Adapter
from protocol.errors import Fault
from trainer.policy import collect_tensors, encode_tensors


class Weights(Protocol):
    """See the module.

    Attributes:
        model: torch module called with input_ids.
        trained: parameters that the optimiser moves, by name.
        published_dtype: type in which they are published.
    """

    model: Any
    trained: dict[str, torch.nn.Parameter]
    published_dtype: torch.dtype

    def encode_policy(self) -> dict[str, bytes]:
        """Canonical files of the policy by name."""

    def reference(self) -> Any:
        """Context in which a model of policy version 0 is there, or None when there is none."""


class WholeWeights:
    """All weights of a policy.

    Args:
        folder: policy to start from.
        reference: folder of version 0, when it is needed.

    Raises:
        Fault: see `models.policy.load_model`.
    """

    def __init__(self, folder: Path, reference: Path | None, device: str) -> None:
        if is_adapter(folder):
            raise Fault(f"{folder} holds an adapter, the policies of this task are whole")
        self.model = load_model(folder, device=device)
        self.trained: dict[str, torch.nn.Parameter] = dict(self.model.named_parameters())
        self.published_dtype = _read_dtype(folder)
        self._config = (folder / CONFIG).read_bytes()
        self._reference = None if reference is None else load_model(reference, device=device)

    def encode_policy(self) -> dict[str, bytes]:
        """See `Weights.encode_policy`."""
        return {CONFIG: self._config, WEIGHTS: encode_tensors(collect_tensors(self.model, self.published_dtype))}

    @contextmanager
    def reference(self) -> Iterator[Any]:
        """See `Weights.reference`."""
        yield self._reference


class AdapterWeights:
    """A LoRA adapter, trained by peft on frozen base weights.

    Args:
        folder: an adapter to go on from, linked to its base, or the base itself: then A is drawn from `seed`, B is 0 and
            the policy is the base.
        base_policy: content hash of the base.

    Raises:
        Fault: the folder is no such adapter, or the base has no such modules.
    """

    def __init__(self, folder: Path, adapter: Adapter, base_policy: bytes, *, seed: int, device: str) -> None:
        from peft import LoraConfig, get_peft_model

        base = get_base(folder)
        layout = compute_layout(adapter, read_shapes(base))
        if is_adapter(folder):
            validate_adapter_folder(folder, adapter, base_policy)
            tensors = read_adapter_tensors(folder)
        else:
            tensors = make_initial_tensors(layout, base_policy, seed)
        bare = load_model(base, device=device)
        require_linear(bare, list_adapted(layout))
        config = LoraConfig(
            r=adapter.rank, lora_alpha=adapter.alpha, target_modules=list(adapter.modules), task_type="CAUSAL_LM"
        )
        # Random numbers that peft draws are overwritten below; the caller's generator is left as it was.
        with torch.random.fork_rng(devices=[]):
            self.model = get_peft_model(bare, config)
        found = {
            name.replace(".default.", "."): parameter
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad
        }
        if {name: tuple(parameter.shape) for name, parameter in found.items()} != layout:
            raise Fault(f"{base}: peft adapts other tensors than modules {list(adapter.modules)} have by their shapes")
        self.trained = {name: found[name] for name in layout}
        with torch.no_grad():
            for name, parameter in self.trained.items():
                parameter.copy_(torch.from_numpy(tensors[name].copy()))
        self.published_dtype = torch.float32
        self._config = encode_adapter_config(adapter, base_policy)

    def encode_policy(self) -> dict[str, bytes]:
        """See `Weights.encode_policy`."""
        tensors = {name: parameter.detach().cpu().numpy() for name, parameter in self.trained.items()}
        return {ADAPTER_CONFIG: self._config, ADAPTER_WEIGHTS: encode_adapter(tensors)}

    @contextmanager
    def reference(self) -> Iterator[Any]:
        """See `Weights.reference`: the same weights in memory, without the adapter."""
        with self.model.disable_adapter():
            yield self.model


def open_weights(
    folder: Path, adapter: Adapter, base_policy: bytes, *, reference: Path | None, seed: int, device: str
) -> Weights:
    """The kind of weights that a task trains. Raises `Fault`."""
    if adapter.rank:
        return AdapterWeights(folder, adapter, base_policy, seed=seed, device=device)
    return WholeWeights(folder, reference, device)


def make_initial_tensors(layout: dict[str, Shape], base_policy: bytes, seed: int) -> dict[str, NDArray[np.float32]]:
    """The adapter of version 0: B is 0; A is uniform in +-1 / sqrt(in), as peft draws it, but a function of its arguments
    on every machine, so that anybody can re-run the first step."""
    tensors: dict[str, NDArray[np.float32]] = {}
    for name, shape in layout.items():
        if ".lora_A." not in name:
            tensors[name] = np.zeros(shape, dtype=np.float32)
            continue
        digest = hashlib.sha256(
            b"adapter" + seed.to_bytes(8, "big", signed=True) + base_policy + name.encode()
        ).digest()
        bits = np.random.Philox(key=int.from_bytes(digest[:16], "big")).random_raw(math.prod(shape)) >> np.uint64(40)
        unit = bits.astype(np.float64) / 2.0**23 - 1.0
        tensors[name] = (unit.reshape(shape) / math.sqrt(shape[1])).astype(np.float32)
    return tensors


def _read_dtype(folder: Path) -> torch.dtype:
    """Type of the floating-point tensors in a policy's file."""
    tensors: dict[str, Tensor] = load_file(folder / WEIGHTS)
    return next((t.dtype for t in tensors.values() if t.is_floating_point()), torch.float32)
