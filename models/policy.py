"""Policy folders into torch modules: `config.json` and `model.safetensors`, never code, never pickle.

A folder holds whole weights, or an adapter and a link to the folder of the whole weights it belongs to (`models.adapter`);
whoever loads one need not know which: what comes out are the merged weights. Every tensor of the model must come from the
file and every tensor of the file must be used; a tied output head is the one exception. Loading is all that roles share:
the node decodes, the verifier prefills and the trainer differentiates by code of their own. `read_tensors` gives the same
weights to engines that build their models themselves.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from models.adapter import WEIGHTS, get_base, is_adapter, merge_update, read_updates
from protocol.errors import Fault

__all__ = ["CONFIG", "WEIGHTS", "load_model", "read_config", "read_hidden_size", "read_tensors"]

CONFIG = "config.json"
CONFIG_BYTES_MAX = 1 << 20
#: How far a rough count of a configuration's weights may exceed the file's before nothing is allocated for it.
SIZE_RATIO_MAX = 4
SIZE_FREE = 1 << 20
#: Most layers: each takes tens of kilobytes and a millisecond to build, however small its weights are.
LAYERS_MAX = 1024
#: Functions of torch, torch.nn.init and transformers.initialization that fill a tensor at random, and take their time.
DRAWS = frozenset(
    [
        "normal_",
        "uniform_",
        "trunc_normal_",
        "kaiming_normal_",
        "kaiming_uniform_",
        "xavier_normal_",
        "xavier_uniform_",
        "orthogonal_",
    ]
)


def read_config(folder: Path) -> dict[str, Any]:
    """Parse the config.json of a policy (of an adapter's base), bounded.

    Raises:
        Fault: when it is missing, too long, not a JSON object, names no architecture, or names code.
    """
    path = get_base(folder) / CONFIG
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


def _require_size(config: Any, num_weights: int) -> None:
    """Refuse a configuration that asks for far more memory than its weights account for. Raises `Fault`."""
    hidden, layers = int(config.hidden_size), int(config.num_hidden_layers)
    if layers > LAYERS_MAX:
        raise Fault(f"config.json has {layers} layers, limit {LAYERS_MAX}")
    implied = int(config.vocab_size) * hidden + 4 * layers * hidden * hidden
    if min(hidden, layers) < 1 or implied > SIZE_RATIO_MAX * num_weights + SIZE_FREE:
        raise Fault(f"config.json implies about {implied} weights, the file holds {num_weights}")


def read_tensors(folder: Path) -> Iterator[tuple[str, Any]]:
    """The weights of a policy one by one, (name, torch tensor on the CPU), ascending by name; no model is built.

    Tensors have the type of the file, those that an adapter changes are float32. Only one is in memory at a time, and
    an adapter is checked in full before the first.

    Raises:
        Fault: when a file is missing or damaged, or an adapter does not fit its base.
    """
    from safetensors import SafetensorError, safe_open

    updates = read_updates(folder) if is_adapter(folder) else {}
    path = get_base(folder) / WEIGHTS
    try:
        with safe_open(path, framework="pt") as file:
            for name in sorted(file.keys()):
                tensor = file.get_tensor(name)
                yield name, merge_update(tensor, updates[name]) if name in updates else tensor
    except (OSError, SafetensorError) as error:
        raise Fault(f"{path} cannot be read: {error}") from None


def _build(config: Any, dtype: Any) -> Any:
    """A model of this configuration with parameters of `dtype` whose values are whatever memory held.

    Safe beside other threads, which the ways of transformers are not: `no_init_weights` swaps the functions of
    `torch.nn.init` for the whole process, and two that overlap leave them swapped, so that every model drawn afterwards
    is uninitialised memory; building in another type than float32 changes the process's default type meanwhile.
    """
    import torch
    from torch.overrides import TorchFunctionMode
    from transformers import AutoModelForCausalLM

    class Undrawn(TorchFunctionMode):  # a mode is of this thread alone
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            if getattr(func, "__name__", "") in DRAWS:
                return kwargs["tensor"] if "tensor" in kwargs else args[0]
            return func(*args, **kwargs)

    make: Any = AutoModelForCausalLM.from_config
    # Every weight is overwritten by the caller, or the folder refused; drawing them first takes most of the time.
    with Undrawn():
        model = make(config, dtype=torch.float32, trust_remote_code=False)
    for parameter in model.parameters():  # not model.to: tables of positions stay in the type they were computed in
        parameter.data = parameter.data.to(dtype)
    return model


def load_model(folder: Path, *, device: str = "cpu", dtype: str = "float32") -> Any:
    """Build a causal language model from a policy folder, in evaluation mode.

    Args:
        folder: holds `config.json` and `model.safetensors`, or an adapter and a link to such a folder.
        device: torch device, for example "cpu" or "cuda:0".
        dtype: torch dtype of parameters in memory, for example "float32"; the file's own does not matter.

    Raises:
        Fault: when a file is missing, malformed, or does not fit the other. Nothing is initialised at random instead.
    """
    import torch
    from transformers import AutoConfig

    fields = read_config(folder)
    try:
        config = AutoConfig.for_model(fields.pop("model_type"), **fields)
        tensors = dict(read_tensors(folder))
        _require_size(config, sum(tensor.numel() for tensor in tensors.values()))
        model = _build(config, getattr(torch, dtype)).to(device)
        keys = model.load_state_dict(tensors, strict=False)
    except Fault:
        raise
    except Exception as error:  # a stranger wrote this file, and every architecture has its own ways to choke on one
        raise Fault(
            f"policy folder {folder} is not a usable model: {type(error).__name__}: {error}; weights do not fit "
            "config.json, or a file is damaged"
        ) from None
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    missing = sorted(set(keys.missing_keys) - tied)
    if missing or keys.unexpected_keys:
        raise Fault(
            f"policy folder {folder}: weights do not fit config.json: {len(missing)} tensors missing {missing[:3]}, "
            f"{len(keys.unexpected_keys)} unknown {keys.unexpected_keys[:3]}"
        )
    if is_adapter(folder):
        require_linear(model, read_updates(folder))
    if tied:
        model.tie_weights()
    return model.eval()


def require_linear(model: Any, names: Iterable[str]) -> None:
    """Check that weights which an adapter changes are those of plain linear layers that nothing else shares.

    An adapter on an embedding, or on a layer that stores its weight transposed, means something else to every library.

    Raises:
        Fault: naming the first that is not.
    """
    import torch

    tied = getattr(model, "all_tied_weights_keys", None) or {}
    shared = {*tied, *tied.values()}
    for name in names:
        module = model.get_submodule(name.removesuffix(".weight"))
        if type(module) is not torch.nn.Linear or name in shared:
            raise Fault(
                f"{name} belongs to a {type(module).__name__}{' with tied weights' if name in shared else ''}: adapters are "
                "for linear layers of their own, such as q_proj"
            )
