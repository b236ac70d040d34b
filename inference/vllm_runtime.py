"""One vLLM engine in this process: built for an architecture, given weights, run to the end of a batch of requests.

vLLM's V1 engine core runs in process; its workers are in process too unless several devices share the model. Sampling is
ours (inference.vllm_noise), states are caught in the workers (inference.vllm_worker). What vLLM raises reaches the caller
as a `Fault`; after one that came out of a step nobody knows what the scheduler still holds, so `Runtime.broken` is set and
the owner builds a new one.

Neighbours: inference.vllm_engine owns a runtime and decides what is loaded. Not run on a GPU here.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from inference.vllm_options import VllmOptions, compute_kv_size, compute_model_len, faults
from models.policy import CONFIG
from protocol.errors import Fault
from protocol.ports import Generation, SampleRequest


@dataclass
class _Row:
    """One completion in the making. `tokens` counts the environment's answers too, `bits` only sampled tokens."""

    request: SampleRequest
    tokens: list[int] = field(default_factory=list)
    bits: list[NDArray[np.uint16]] = field(default_factory=list)


class Terms(NamedTuple):
    """How a batch is sampled; `vocab_size` ids may be sampled, `stops` end a completion or its turn."""

    temperature: float
    max_tokens: int
    stops: frozenset[int]
    vocab_size: int


class Runtime:
    """See the module.

    Args:
        config: of `make_config`.
        device / dtype / threads: as in the settings.

    A process has one at a time, because vLLM's process groups are global: a new one closes the one before it.

    Attributes:
        broken: a step failed; nobody knows what is held.
        closed: nothing is held any more.

    Raises:
        Fault: when vLLM cannot be built for the architecture.
    """

    _open: Runtime | None = None

    def __init__(self, config: dict[str, Any], options: VllmOptions, *, device: str, dtype: str, threads: int) -> None:
        import torch

        self.close_open()
        self.config, self.broken, self.closed = config, False, False
        self._llm: Any = None
        self.model_len = compute_model_len(config, options)
        self._num_workers = options.num_workers
        self._numbers = itertools.count()
        torch.set_num_threads(threads)
        try:
            with faults("building the engine"), warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
                warnings.simplefilter("ignore")
                (Path(folder) / CONFIG).write_text(json.dumps(config))
                self._llm = _build(folder, self._arguments(config, options, device, dtype))
                self._rpc("troth_watch")
        except BaseException:
            with contextlib.suppress(Fault):  # the first failure is the one to tell
                self.close()
            raise
        Runtime._open = self

    def _arguments(self, config: dict[str, Any], options: VllmOptions, device: str, dtype: str) -> dict[str, Any]:
        """What vLLM is built with. Weights are put in afterwards, through the same door as every later policy's."""
        return {
            "dtype": dtype,
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "generation_config": "vllm",
            "enforce_eager": options.enforce_eager or device == "cpu",
            "tensor_parallel_size": options.tensor_parallel_size,
            "pipeline_parallel_size": options.pipeline_parallel_size,
            "gpu_memory_utilization": options.gpu_memory_utilization,
            "kv_cache_memory_bytes": compute_kv_size(config, options, device, dtype),
            "max_model_len": self.model_len,
            "max_num_seqs": options.max_num_seqs,
            "enable_prefix_caching": True,
            "async_scheduling": False,  # the noise needs every token before the next is drawn
            "disable_log_stats": True,
            "worker_extension_cls": "inference.vllm_worker.WorkerExtension",
            "logits_processors": ["inference.vllm_noise:GumbelNoise"],
        }

    def _rpc(self, method: str, *arguments: Any) -> list[Any]:
        replies: list[Any] = self._llm.collective_rpc(method, args=arguments)
        return replies

    @classmethod
    def close_open(cls) -> None:
        """Close the runtime of this process, whoever built it. Raises `Fault`."""
        if cls._open is not None:
            cls._open.close()

    def close(self) -> None:
        """Give back memory and process groups, so that another runtime can be built."""
        from vllm.distributed import cleanup_dist_env_and_memory

        if self.closed:
            return
        self.closed = True
        if self is Runtime._open:
            Runtime._open = None
        with faults("closing the engine"):
            if self._llm is not None:
                self._llm.engine_core.shutdown()
            cleanup_dist_env_and_memory()

    # Weights

    def load(self, folder: Path) -> None:
        """Replace the weights and forget every cached prefix.

        Raises:
            Fault: when vLLM cannot; what is loaded then is unknown.
        """
        with faults("loading weights"):
            self._rpc("troth_load", str(folder.resolve()))
            if not self._llm.reset_prefix_cache():
                raise Fault("vllm: the prefix cache could not be reset: it still serves the old policy")

    def compare(self, folder: Path) -> int:
        """Compare what is loaded with a policy folder, tensor by tensor; returns how many tensors could be compared.

        Raises:
            Fault: naming tensors that are not the folder's.
        """
        if self._num_workers > 1:
            return 0  # every rank holds a part of each tensor; the log-probabilities are what proves them
        with faults("comparing weights"):
            [result] = self._rpc("troth_compare", str(folder.resolve()))
        if result.different:
            raise Fault(
                f"vllm: {len(result.different)} tensors are not those of {folder} after loading: {result.different[:3]}"
            )
        return int(result.same)

    def measure_logprobs(self, tokens: Sequence[int]) -> NDArray[np.float64]:
        """Log-probabilities of the tokens of a sequence from the second on, at temperature 1: float64 [len(tokens) - 1].

        One short request per token: vLLM's own prompt log-probabilities need a C++ compiler at run time.
        """
        from vllm import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
        targets: dict[str, int] = {}
        try:
            with faults("measuring log-probabilities"):
                for end in range(1, len(tokens)):
                    targets[self._submit(list(tokens[:end]), params)] = int(tokens[end])
                self._rpc("troth_measure", targets)
                while self._llm.has_unfinished_requests():
                    self._step()
                found: dict[str, float] = {}
                for reply in self._rpc("troth_take_logprobs"):
                    found.update(reply)
                self._rpc("troth_forget")
        except BaseException:
            self._abort(list(targets))
            raise
        if len(found) < len(targets):
            raise Fault(f"vllm: {len(targets)} log-probabilities were asked for, {len(found)} measured")
        return np.array([found[name] for name in targets], dtype=np.float64)

    # Generation

    def complete(self, requests: Sequence[SampleRequest], terms: Terms) -> list[Generation]:
        """Complete every request; results in their order.

        Raises:
            Fault: when vLLM fails (then `broken` is set) or an environment does.
        """
        rows = [_Row(request) for request in requests]
        running: dict[str, tuple[str, _Row]] = {}
        try:
            for row in rows:
                self._start(row, terms, running)
            while running:
                done = [output for output in self._step() if output.finished]
                states = self._take([running[output.request_id][0] for output in done])
                for output in done:
                    name, row = running.pop(output.request_id)
                    if self._absorb(row, output, states.get(name), terms):
                        self._start(row, terms, running)
        except BaseException:
            self._abort([name for name, _ in running.values()])
            raise
        return [Generation(tuple(row.tokens), np.concatenate(row.bits)) for row in rows]

    def _start(self, row: _Row, terms: Terms, running: dict[str, tuple[str, _Row]]) -> None:
        """Submit a row, or what is left of it behind an answer of the environment."""
        number = f"row-{next(self._numbers)}"
        with faults("submitting a request"):
            params = self._make_params(row, terms)
            running[number] = self._submit([*row.request.prompt, *row.tokens], params, number), row

    def _make_params(self, row: _Row, terms: Terms) -> Any:
        """Greedy to vLLM; what is drawn, and how, is in `extra_args` for inference.vllm_noise."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        done = len(row.tokens)
        return SamplingParams(
            temperature=0.0,
            max_tokens=terms.max_tokens - done,
            stop_token_ids=sorted(terms.stops),
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args={"troth": [row.request.key, done, terms.temperature, terms.vocab_size]},
        )

    def _absorb(self, row: _Row, output: Any, states: Any, terms: Terms) -> bool:
        """Take a finished request's tokens and states; returns whether the row goes on behind the environment's answer."""
        made = output.outputs[0]
        tokens = [int(token) for token in made.token_ids]
        if made.finish_reason not in ("stop", "length") or not tokens:
            raise Fault(f"vllm: a request ended by {made.finish_reason!r} with {len(tokens)} tokens")
        if states is None or states.positions.tolist() != list(range(len(tokens))):
            self.broken = True
            held = [] if states is None else states.positions.tolist()
            raise Fault(f"vllm: {len(tokens)} tokens were sampled, states were caught at positions {held[:8]}")
        row.tokens += tokens
        row.bits.append(states.bits)
        if tokens[-1] not in terms.stops or row.request.respond is None or len(row.tokens) >= terms.max_tokens:
            return False
        answer = row.request.respond(row.tokens)
        if len(row.tokens) + len(answer) >= terms.max_tokens:
            raise Fault(f"an answer of {len(answer)} tokens leaves no room: limit {terms.max_tokens} tokens in all")
        row.tokens += answer
        return bool(answer)

    def _submit(self, tokens: list[int], params: Any, number: str = "") -> str:
        """Returns vLLM's own name of the request, which is the workers'."""
        from vllm.inputs.engine import tokens_input

        name: str = self._llm.add_request(number or f"row-{next(self._numbers)}", tokens_input(tokens), params)
        return name

    def _step(self) -> list[Any]:
        try:
            with faults("generation"):
                outputs: list[Any] = self._llm.step()
                return outputs
        except BaseException:
            self.broken = True
            raise

    def _take(self, names: list[str]) -> dict[str, Any]:
        """States of finished requests. The last pipeline stage has them, all its tensor ranks the same."""
        joined: dict[str, Any] = {}
        if names:
            with faults("reading states"):
                for reply in self._rpc("troth_take", names):
                    joined.update(reply)
        return joined

    def _abort(self, names: list[str]) -> None:
        """After a failure: leave nothing running and no state behind, else count as broken."""
        try:
            self._llm.abort_request(names, internal=True)
            self._rpc("troth_forget")
        except Exception:  # whatever it is, the runtime is not used again
            self.broken = True


def _build(folder: str, arguments: dict[str, Any]) -> Any:
    from vllm import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    return LLMEngine.from_engine_args(EngineArgs(model=folder, **arguments))
