"""Which engine a node generates with, from its settings. Heavy packages are imported here and not before.

Neighbours: inference.engine (torch), inference.vllm_engine (vllm), troth.settings.
"""

from __future__ import annotations

from protocol.ports import Engine
from troth.settings import ComputeSettings


def preload_engine(compute: ComputeSettings) -> None:
    """Import what the engine needs, which takes seconds.

    Raises:
        ConfigError: when it is not installed, or not for this device.
    """
    if compute.engine == "vllm":
        from inference.vllm_options import require_vllm

        require_vllm(compute.device)
    else:
        import inference.engine  # noqa: F401


def make_engine(compute: ComputeSettings, vocab_size: int | None) -> Engine:
    """The engine of a node; no policy is loaded yet.

    Args:
        vocab_size: tokens that may be sampled; None for all of the policy's.

    Raises:
        ConfigError: when the settings name an engine, device or dtype that is not there.
    """
    if compute.engine == "vllm":
        from inference.vllm_engine import VllmEngine
        from inference.vllm_options import VllmOptions

        options = VllmOptions(**compute.vllm.model_dump())
        return VllmEngine(compute.device, compute.dtype, compute.threads, vocab_size=vocab_size, options=options)
    from inference.engine import TorchEngine

    return TorchEngine(
        compute.device,
        compute.dtype,
        compute.threads,
        vocab_size=vocab_size,
        batch_tokens_max=compute.batch_tokens_max,
    )
