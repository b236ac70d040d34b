"""LoRA policy folders: what files they hold, byte for byte, and how an adapter is merged into its base.

    adapter_config.json          canonical; peft's fields, and `base_policy`, the content hash of version 0, in hexadecimal
    adapter_model.safetensors    float32 A and B of every adapted module, in the order of their names, no metadata
    base                         link to the base policy's folder: made here, never fetched, no part of the content

Given the task's terms and the base policy, every byte of both files is known in advance except the numbers themselves, so a
stranger's adapter is compared, not parsed: names, shapes, order, sizes and JSON either are these or are refused. Only
finite numbers pass. What is read before that is bounded by what the base policy implies. No torch is imported at the top.

An adapted weight is W + (alpha / rank) * B @ A, computed in float64 and rounded once to float32: the order in which a library
adds up does not show, so a node and a verifier merge to the same bits. Neighbours: models.policy loads merged models.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from protocol.adapter import Adapter, validate_adapter
from protocol.errors import ConfigError, Fault

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
#: Name of the link to the base policy inside an adapter's folder.
BASE = "base"
#: File of the whole weights in the base policy's folder.
WEIGHTS = "model.safetensors"
CONFIG_BYTES_MAX = 8192
#: How peft names the tensors of a causal language model: this, the module's path, then one of the suffixes.
_PREFIX, _SUFFIX_A, _SUFFIX_B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"
_WEIGHT = ".weight"

Shape = tuple[int, ...]


class Update(NamedTuple):
    """The adapter of one module: A float32 [rank, in], B float32 [out, rank], and alpha / rank."""

    a: NDArray[np.float32]
    b: NDArray[np.float32]
    scale: float


def is_adapter(folder: Path) -> bool:
    """Whether a policy folder holds an adapter rather than whole weights."""
    return (folder / ADAPTER_CONFIG).exists()


def get_base(folder: Path) -> Path:
    """Folder of the whole weights under a policy: the base of an adapter, else the folder itself.

    Raises:
        Fault: when an adapter's base is not there, or is an adapter itself.
    """
    if not is_adapter(folder):
        return folder
    base = folder / BASE
    if not base.is_dir():
        raise Fault(f"{folder} holds an adapter without a base policy: link the folder of policy version 0 as {base}")
    if is_adapter(base):
        raise Fault(f"{base} is an adapter: the base of an adapter must hold whole weights")
    return base


def link_base(folder: Path, base: Path) -> None:
    """Make (or correct) the link from an adapter's folder to its base policy.

    Raises:
        Fault: when something that is not a link stands in its place, or the disk failed.
    """
    link, target = folder / BASE, base.resolve()
    try:
        if link.is_symlink():
            if link.resolve() == target:
                return
            link.unlink()
        link.symlink_to(target, target_is_directory=True)
    except OSError as error:
        raise Fault(f"linking {link} to {target} failed: {error}; remove what is in the way") from None


def encode_adapter_config(adapter: Adapter, base_policy: bytes) -> bytes:
    """The one adapter_config.json of an adapter. `peft` reads it; it passes over `base_policy` with a warning."""
    fields: dict[str, Any] = {
        "alpha_pattern": {},
        "base_model_name_or_path": None,
        "base_policy": base_policy.hex(),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "lora_alpha": adapter.alpha,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": adapter.rank,
        "rank_pattern": {},
        "target_modules": list(adapter.modules),
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": False,
    }
    return json.dumps(fields, sort_keys=True, indent=1).encode() + b"\n"


def read_adapter_config(folder: Path) -> tuple[Adapter, bytes]:
    """Terms of the adapter in a folder and the content hash of the base policy it belongs to.

    Raises:
        Fault: when the file is not exactly what `encode_adapter_config` writes.
    """
    path = folder / ADAPTER_CONFIG
    data = _read_bounded(path, CONFIG_BYTES_MAX)
    try:
        fields = json.loads(data)
        base_policy = bytes.fromhex(fields["base_policy"])
        adapter = Adapter(fields["r"], fields["lora_alpha"], tuple(fields["target_modules"]))
        validate_adapter(adapter)
        # 8.0 and true are equal to integers in Python, and would be written back as they came.
        canonical = type(adapter.rank) is type(adapter.alpha) is int and adapter.rank > 0 and len(base_policy) == 32
        canonical = canonical and data == encode_adapter_config(adapter, base_policy)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, ConfigError) as error:
        raise Fault(f"{path} does not describe an adapter: {type(error).__name__}: {error}") from None
    if not canonical:
        raise Fault(f"{path} is not in canonical form: it says more, less or other than an adapter's terms")
    return adapter, base_policy


def _read_bounded(path: Path, bytes_max: int) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(bytes_max + 1)
    except OSError as error:
        raise Fault(f"{path} cannot be read: {error.strerror}") from None
    if len(data) > bytes_max:
        raise Fault(f"{path} has more than {bytes_max} bytes, which is what it can need")
    return data


def read_shapes(folder: Path) -> dict[str, Shape]:
    """Shapes of the tensors of a whole policy by name, from the head of its file. Raises `Fault`."""
    from safetensors import SafetensorError, safe_open

    path = folder / WEIGHTS
    try:
        with safe_open(path, framework="numpy") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, ValueError) as error:
        raise Fault(f"{path} cannot be read: {error}") from None


def compute_layout(adapter: Adapter, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """Shapes of an adapter's tensors by name, in the order of its file.

    Args:
        shapes: of the base policy's tensors, see `read_shapes`.

    Raises:
        Fault: when a module is not in the base policy, is no matrix, or is too small for the rank.
    """
    layout: dict[str, Shape] = {}
    unused = set(adapter.modules)
    for name, shape in shapes.items():
        path = name.removesuffix(_WEIGHT)
        module = path.rpartition(".")[2]
        if path == name or module not in adapter.modules:
            continue
        if len(shape) != 2 or min(shape) < adapter.rank:
            raise Fault(f"{name} has shape {list(shape)}: an adapter of rank {adapter.rank} needs a larger matrix")
        unused.discard(module)
        layout[f"{_PREFIX}{path}{_SUFFIX_A}"] = (adapter.rank, shape[1])
        layout[f"{_PREFIX}{path}{_SUFFIX_B}"] = (shape[0], adapter.rank)
    if unused:
        known = sorted(
            {name.removesuffix(_WEIGHT).rpartition(".")[2] for name, shape in shapes.items() if len(shape) == 2}
        )
        raise Fault(
            f"the base policy has no module {', '.join(sorted(unused))}: its matrices are {', '.join(known)[:400]}"
        )
    return dict(sorted(layout.items()))


def encode_header(layout: Mapping[str, Shape]) -> bytes:
    """First bytes of adapter_model.safetensors: length and JSON header. The numbers follow, in the same order."""
    header: dict[str, Any] = {}
    end = 0
    for name, shape in layout.items():
        start, end = end, end + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def encode_adapter(tensors: Mapping[str, NDArray[np.float32]]) -> bytes:
    """adapter_model.safetensors of float32 tensors in the order of `compute_layout`."""
    layout = {name: tensor.shape for name, tensor in tensors.items()}
    parts = [np.ascontiguousarray(tensor, dtype="<f4").tobytes() for tensor in tensors.values()]
    return b"".join([encode_header(layout), *parts])


def compute_file_sizes(adapter: Adapter, base_policy: bytes, base: Path) -> dict[str, int]:
    """Names and exact sizes in bytes of the files of any adapter with these terms on a base policy. Raises `Fault`."""
    layout = compute_layout(adapter, read_shapes(base))
    numbers = 4 * sum(math.prod(shape) for shape in layout.values())
    return {
        ADAPTER_CONFIG: len(encode_adapter_config(adapter, base_policy)),
        ADAPTER_WEIGHTS: len(encode_header(layout)) + numbers,
    }


def read_adapter_tensors(folder: Path) -> dict[str, NDArray[np.float32]]:
    """The tensors of an adapter by name, in the order of its file.

    Raises:
        Fault: when the file is not exactly of the adapter's terms and its base, or a number is not finite.
    """
    adapter, _ = read_adapter_config(folder)
    layout = compute_layout(adapter, read_shapes(get_base(folder)))
    head = encode_header(layout)
    path = folder / ADAPTER_WEIGHTS
    data = _read_bounded(path, len(head) + 4 * sum(math.prod(shape) for shape in layout.values()))
    if not data.startswith(head):
        raise Fault(f"{path} does not fit its base policy: other tensors, shapes, order or type than its terms give")
    tensors: dict[str, NDArray[np.float32]] = {}
    start = len(head)
    for name, shape in layout.items():
        count = math.prod(shape)
        if len(data) < start + 4 * count:
            raise Fault(f"{path} ends within {name}: it has {len(data)} bytes")
        tensor = np.frombuffer(data, dtype="<f4", count=count, offset=start).reshape(shape)
        if not np.isfinite(tensor).all():
            raise Fault(f"{path}: {name} holds numbers that are not finite")
        tensors[name] = tensor
        start += 4 * count
    return tensors


def list_adapted(layout: Mapping[str, Shape]) -> list[str]:
    """Names of the base policy's tensors that an adapter of this layout changes."""
    paths = [name.removeprefix(_PREFIX).removesuffix(_SUFFIX_A) for name in layout if name.endswith(_SUFFIX_A)]
    return [path + _WEIGHT for path in paths]


def read_updates(folder: Path) -> dict[str, Update]:
    """The updates of an adapter by the name of the base tensor they change. Raises `Fault`."""
    adapter, _ = read_adapter_config(folder)
    tensors = read_adapter_tensors(folder)
    updates = {}
    for name in list_adapted({name: tensor.shape for name, tensor in tensors.items()}):
        path = _PREFIX + name.removesuffix(_WEIGHT)
        updates[name] = Update(tensors[path + _SUFFIX_A], tensors[path + _SUFFIX_B], adapter.alpha / adapter.rank)
    return updates


def merge_update(weight: Any, update: Update) -> Any:
    """An adapted weight: torch float32 [out, in], of a weight of any floating-point type.

    Raises:
        Fault: when the sum is not finite.
    """
    import torch

    # Copies: the arrays may be read-only views of the file.
    a, b = (torch.from_numpy(array.astype(np.float64)) for array in (update.a, update.b))
    merged = (weight.double() + (b @ a) * update.scale).float()
    if not torch.isfinite(merged).all():
        raise Fault("an adapted weight is not finite: the adapter's numbers are too large")
    return merged


def validate_adapter_folder(folder: Path, adapter: Adapter, base_policy: bytes) -> None:
    """Check that a folder holds a usable adapter with these terms on this base policy, which it links to.

    Raises:
        Fault: naming the first difference.
    """
    observed, base = read_adapter_config(folder)
    if (observed, base) != (adapter, base_policy):
        raise Fault(
            f"{folder} holds an adapter of rank {observed.rank}, alpha {observed.alpha}, modules {list(observed.modules)} on "
            f"{base.hex()[:16]}, expected rank {adapter.rank}, alpha {adapter.alpha}, modules {list(adapter.modules)} on "
            f"{base_policy.hex()[:16]}"
        )
    read_adapter_tensors(folder)
