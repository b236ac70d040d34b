"""The vLLM engine: protocol.ports.Engine over vLLM's V1 engine, with the same tokens as the embedded engine up to near-ties.

A policy counts as loaded once it is *proved*: every tensor that can be read back equals the folder's, and the
log-probabilities of a fixed prompt equal those of a plain torch prefill of the same folder. Until then nothing is
generated. When a policy cannot be loaded, the one before it is put back and proved in the same way; when that fails too,
or when vLLM fails in the middle of a batch, the engine refuses to generate, and what is asked of it next begins with a new
vLLM. A policy of another architecture gets a new vLLM at once.

Importing this module does not import vllm: a machine without it is told how to get it (`ConfigError`) when an engine is
made. Neighbours: inference.vllm_runtime, inference.vllm_options; inference.engine is the embedded engine. Not run on a GPU
here.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from inference.memory import compute_dtype_bytes
from inference.vllm_options import VllmOptions, make_config, require_memory, require_vllm
from inference.vllm_runtime import Runtime, Terms
from models.policy import load_model, read_config
from protocol.errors import Fault
from protocol.ports import Generation, SampleRequest

log = logging.getLogger("troth.inference")

#: Tokens of the prompt whose log-probabilities are compared.
PROBE_TOKENS = 16
#: Largest difference of a log-probability between vLLM and a torch prefill. Measured at 135M parameters: 2e-4 in float32,
#: 0.34 in bfloat16. So in float32 it finds a stale policy, in 16 bits only a wrong one; there the comparison of tensors, which
#: is exact, finds it.
PROBE_TOLERANCE = {"float32": 1e-3, "float64": 1e-3}
PROBE_TOLERANCE_16_BIT = 0.5


class _Policy(NamedTuple):
    """A policy that is or was loaded: its folder, vLLM's config.json for it, and its log-probabilities of the probe."""

    folder: Path
    config: dict[str, Any]
    logprobs: NDArray[np.float64]


class VllmEngine:
    """See the module.

    Args:
        device: "cpu" or "cuda", as the installed vllm was built.
        dtype: type of weights and activations, for example "float32" or "bfloat16".
        threads: CPU threads of torch in this process.
        vocab_size: tokens that may be sampled; the model's own vocabulary when None or larger (padded vocabularies).
        options: of the settings' table compute.vllm.

    Raises:
        ConfigError: when vllm is not installed or not for this device, or for an unknown dtype.
    """

    def __init__(
        self,
        device: str = "cpu",
        dtype: str = "float32",
        threads: int = 1,
        *,
        vocab_size: int | None = None,
        options: VllmOptions | None = None,
    ) -> None:
        compute_dtype_bytes(dtype)
        require_vllm(device)
        self._device, self._dtype, self._threads = device.partition(":")[0], dtype, threads
        self._vocab_size, self._options = vocab_size, options or VllmOptions()
        self._runtime: Runtime | None = None
        self._policy: _Policy | None = None

    @property
    def hidden_size(self) -> int:
        """Width of the loaded policy's last hidden state, 0 before the first load."""
        return 0 if self._policy is None else int(self._policy.config["hidden_size"])

    def load(self, folder: Path) -> None:
        """Load a policy folder and prove that it is what vLLM now runs.

        Raises:
            Fault: when the folder is not a usable policy, does not fit into memory, or vLLM does not run it after
                loading. The policy before it is in use again then, if it could be loaded; else nothing is generated.
        """
        config = make_config(read_config(folder))
        running = self._get_running()
        is_built = running is not None and running.config == config
        if not is_built:
            Runtime.close_open()  # what it holds is free then
        require_memory(config, self._options, self._device, self._dtype, is_built=is_built)
        wanted = _Policy(folder, config, self._compute_reference(folder, config))
        previous, self._policy = self._policy, None
        try:
            self._install(wanted)
        except Fault:
            self._restore(previous)
            raise
        self._policy = wanted

    def close(self) -> None:
        """Give back vLLM's memory; the next use builds it again."""
        runtime, self._runtime = self._runtime, None
        if runtime is not None:
            runtime.close()

    def generate(
        self,
        requests: Sequence[SampleRequest],
        *,
        temperature: float,
        max_tokens: int,
        stop_tokens: Sequence[int],
    ) -> list[Generation]:
        """Complete every request; results in the order of the requests.

        Args:
            temperature: above 0.
            max_tokens: longest completion.
            stop_tokens: ids that end a completion, or a turn of it, and are part of it.

        Raises:
            Fault: before a policy is loaded, for a prompt that the policy cannot take, when an environment's answer
                fails, or when vLLM does.
        """
        policy = self._policy
        if policy is None:
            raise Fault("no policy is loaded: nothing can be generated")
        vocab_size = int(policy.config["vocab_size"])
        runtime = self._get_running() or self._install(policy)
        for request in requests:
            _require_prompt(request.prompt, vocab_size, runtime.model_len - max_tokens)
        limit = min(self._vocab_size or vocab_size, vocab_size)
        stops = frozenset(token for token in stop_tokens if token < limit)
        try:
            return runtime.complete(requests, Terms(temperature, max_tokens, stops, limit))
        finally:
            if runtime.broken:
                self._discard()

    def _compute_reference(self, folder: Path, config: dict[str, Any]) -> NDArray[np.float64]:
        """Log-probabilities of the probe by a plain prefill in main memory, which also checks the folder as every other
        role does. The model is freed again."""
        import torch

        model = load_model(folder, dtype=self._dtype)
        prompt = torch.tensor([make_probe(int(config["vocab_size"]))])
        try:
            with torch.inference_mode():
                logits = model(input_ids=prompt, use_cache=False).logits[0, :-1].double()
        except RuntimeError as error:  # torch's own: out of memory, shapes that do not meet
            raise Fault(f"prefill of {folder} failed: {error}") from error
        logprobs: NDArray[np.float64] = logits.log_softmax(-1).gather(1, prompt[0, 1:, None])[:, 0].numpy()
        if not np.isfinite(logprobs).all():
            raise Fault(f"{folder} gives log-probabilities that are not finite: nothing can be sampled from it")
        return logprobs

    def _install(self, policy: _Policy) -> Runtime:
        """Have vLLM run a policy, and prove it. Raises `Fault`; what vLLM holds is unknown then, and discarded."""
        runtime = self._get_running()
        if runtime is not None and runtime.config != policy.config:
            self.close()
            runtime = None
        try:
            if runtime is None:
                runtime = self._runtime = Runtime(
                    policy.config, self._options, device=self._device, dtype=self._dtype, threads=self._threads
                )
            runtime.load(policy.folder)
            same = runtime.compare(policy.folder)
            found = runtime.measure_logprobs(make_probe(int(policy.config["vocab_size"])))
            worst = float(np.abs(found - policy.logprobs).max())
            limit = PROBE_TOLERANCE.get(self._dtype, PROBE_TOLERANCE_16_BIT)
            if not worst <= limit:
                raise Fault(
                    f"vllm does not run the policy in {policy.folder} after loading it: a log-probability differs from a "
                    f"torch prefill by {worst:.6f}, limit {limit}"
                )
        except BaseException:
            self._discard()
            raise
        log.info("vllm runs %s: %d tensors equal, log-probabilities within %.1e", policy.folder, same, worst)
        return runtime

    def _get_running(self) -> Runtime | None:
        """This engine's vLLM, if it is there; another engine of this process may have closed it."""
        return None if self._runtime is None or self._runtime.closed else self._runtime

    def _restore(self, previous: _Policy | None) -> None:
        """Put the policy before a failed one back, if there is one and its folder is still there."""
        if previous is None:
            return
        try:
            self._install(previous)
        except Fault as error:
            log.warning("the policy before could not be put back, nothing is generated until one is loaded: %s", error)
        else:
            self._policy = previous

    def _discard(self) -> None:
        """Drop a vLLM of which nobody knows what it holds; how it goes down does not matter any more."""
        try:
            self.close()
        except Fault as error:
            log.warning("%s", error)


def make_probe(vocab_size: int) -> list[int]:
    """A fixed prompt of `PROBE_TOKENS` ids, spread over the vocabulary."""
    return [(index * 7919 + 1) % vocab_size for index in range(PROBE_TOKENS)]


def _require_prompt(prompt: Sequence[int], vocab_size: int, length_max: int) -> None:
    if not prompt:
        raise Fault("a prompt is empty: there is no state to sample a first token from")
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        raise Fault(f"a prompt has ids outside 0 to {vocab_size - 1}: the policy does not fit the task's environment")
    if len(prompt) > length_max:
        raise Fault(
            f"a prompt of {len(prompt)} tokens leaves no room for its completion: limit {length_max} tokens; raise "
            "compute.vllm.max_model_len"
        )
