"""What runs inside vLLM's workers: catch the states that tokens are sampled from, put new weights in place, compare them.

vLLM mixes `WorkerExtension` into its worker class by name, in the process of every rank, and the engine calls the methods
through `collective_rpc`. States are kept by request and position in the completion, as bf16 bits: a request that is
preempted and computed again, a chunk of a prompt, or another row in the batch cannot put a state in the wrong place.

Two traps of in-place reloading are closed here. With tied embeddings vLLM's CPU backend keeps the output head that it packed
from the *old* embedding: it is packed again. And loading reports success for tensors it never wrote: `troth_compare` reads
the file a second time and compares.

Neighbours: inference.vllm_runtime calls, models.policy reads the weights (an adapter's merged).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from models.policy import read_tensors
from protocol.toploc import to_bf16_bits

#: Columns of every matrix that `troth_compare` reads back through the layer's own arithmetic.
COLUMNS_MAX = 32


class States(NamedTuple):
    """States of one request: positions int64 [n] ascending, counted within the request, and bits uint16 [n, hidden]."""

    positions: NDArray[np.int64]
    bits: NDArray[np.uint16]


class Comparison(NamedTuple):
    """Loaded weights against a policy folder: how many tensors agree, the names of those that differ, and of those that
    this rank does not hold in a form that can be compared."""

    same: int
    different: list[str]
    unknown: list[str]


class WorkerExtension:
    """Mixed into vLLM's worker; all names start with `troth_` so that none of vLLM's is hidden."""

    model_runner: Any
    vllm_config: Any
    troth_states: dict[str, dict[int, NDArray[np.uint16]]]
    troth_targets: dict[str, int]
    troth_logprobs: dict[str, float]

    def troth_watch(self) -> None:
        """Catch states from now on. Called once after the worker is built."""
        runner, self.troth_states, self.troth_targets, self.troth_logprobs = self.model_runner, {}, {}, {}
        sample = runner.sample_tokens

        def sample_and_catch(grammar_output: Any) -> Any:
            if runner.execute_model_state is not None:
                self.troth_catch(runner.execute_model_state)
            return sample(grammar_output)

        runner.sample_tokens = sample_and_catch

    def troth_catch(self, step: Any) -> None:
        """Keep the states [rows, hidden] that the next tokens are sampled from: the output head's input. For requests
        that only measure, also the log-probability of the token they name, at temperature 1."""
        batch = self.model_runner.input_batch
        rows = batch.num_reqs
        bits = to_bf16_bits(step.sample_hidden_states[:rows].float().cpu().numpy())
        positions = batch.num_tokens_no_spec[:rows] - batch.num_prompt_tokens[:rows]
        partial = self.model_runner.discard_request_mask.np[:rows]  # inside a prompt: nothing is sampled there
        for row in np.flatnonzero(~partial).tolist():
            name = batch.req_ids[row]
            self.troth_states.setdefault(name, {})[int(positions[row])] = bits[row]
            if name in self.troth_targets and step.logits is not None:
                logprobs = step.logits[row].double().log_softmax(-1)
                self.troth_logprobs[name] = float(logprobs[self.troth_targets[name]])

    def troth_take(self, requests: list[str]) -> dict[str, States]:
        """Hand over and forget the states of requests; those that other ranks hold are absent."""
        taken = {}
        for request in requests:
            if found := self.troth_states.pop(request, None):
                positions = sorted(found)
                taken[request] = States(np.array(positions, dtype=np.int64), np.stack([found[p] for p in positions]))
        return taken

    def troth_measure(self, targets: dict[str, int]) -> None:
        """Measure the log-probability of a token, by request, where its first token is sampled."""
        self.troth_targets = targets

    def troth_take_logprobs(self) -> dict[str, float]:
        """Hand over and forget what was measured."""
        taken, self.troth_targets, self.troth_logprobs = self.troth_logprobs, {}, {}
        return taken

    def troth_forget(self) -> None:
        """Forget everything that was caught."""
        self.troth_states.clear()
        self.troth_take_logprobs()

    def troth_load(self, folder: str) -> None:
        """Replace the weights by those of a policy folder, in place."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

        with set_current_vllm_config(self.vllm_config):
            self.model_runner.reload_weights(weights_iterator=read_tensors(Path(folder)))
            for module in self.model_runner.get_model().modules():
                method = getattr(module, "quant_method", None)
                if isinstance(method, UnquantizedEmbeddingMethod):
                    method.process_weights_after_loading(module)

    def troth_compare(self, folder: str) -> Comparison:
        """Compare the loaded weights with a policy folder; see `_Comparer`. Only for workers that hold whole tensors."""
        config = self.vllm_config.model_config.hf_config
        comparer = _Comparer(self.model_runner.get_model(), tied=bool(config.tie_word_embeddings))
        with torch.inference_mode():
            for name, tensor in read_tensors(Path(folder)):
                comparer.add(name, tensor)
            return comparer.finish()


class _Comparer:
    """Compares tensor by tensor, without a tolerance.

    A linear layer's weights may be packed and gone, so they are read back through the layer: fed with unit vectors it
    answers with columns of its matrix, exactly, whatever the arithmetic. Layers that vLLM fuses (q, k and v; gate and up)
    are compared when their last part has come. Embeddings, norms and biases are compared as they are.

    Args:
        model: vLLM's module.
        tied: the output head is the embedding, which is then compared in both places.
    """

    def __init__(self, model: Any, *, tied: bool) -> None:
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

        self._modules: dict[str, Any] = dict(model.named_modules())
        heads = {name: module for name, module in self._modules.items() if isinstance(module, ParallelLMHead)}
        tables = {name for name, module in self._modules.items() if isinstance(module, VocabParallelEmbedding)}
        self._tables = tables - set(heads)
        self._tied_heads = heads if tied else {}
        fused = getattr(model, "packed_modules_mapping", {})
        self._fused = {part: (whole, parts) for whole, parts in fused.items() for part in parts}
        self._parts: dict[str, dict[str, torch.Tensor]] = {}
        self._same = 0
        self._different: list[str] = []
        self._unknown: list[str] = []

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Compare a tensor of the file, or keep what is needed of it until the others of its fused layer have come."""
        path, _, kind = name.rpartition(".")
        parent, _, leaf = path.rpartition(".")
        whole, parts = self._fused.get(leaf, (leaf, [leaf]))
        target = f"{parent}.{whole}" if parent else whole
        if path in self._tied_heads:
            return  # the embedding stands in its place, whatever the file says
        held = getattr(self._modules.get(target), kind, None)
        if held is None:
            self._unknown.append(name)
            return
        is_table = target in self._tables
        is_linear = tensor.dim() == 2 and kind == "weight" and not is_table
        kept = self._parts.setdefault(f"{target}.{kind}", {})
        kept[leaf] = _pick_columns(tensor) if is_linear else tensor
        if len(kept) < len(parts):
            return
        expected = torch.cat([kept[part] for part in parts])
        del self._parts[f"{target}.{kind}"]
        found = _read_columns(self._modules[target], tensor.shape[1]) if is_linear else held
        self._judge(f"{target}.{kind}", found, expected, len(parts))
        for head in self._tied_heads if is_table else ():
            found = _read_columns(self._modules[head], tensor.shape[1])
            self._judge(f"{head}.weight", found, _pick_columns(tensor), 1)

    def finish(self) -> Comparison:
        """The result; parts of a fused layer whose others never came are unknown."""
        return Comparison(self._same, self._different, self._unknown + sorted(self._parts))

    def _judge(self, name: str, found: torch.Tensor, expected: torch.Tensor, count: int) -> None:
        """Rows beyond the file's are vLLM's padding."""
        rounded = expected.to(device=found.device, dtype=found.dtype)
        if found.shape[0] >= rounded.shape[0] and torch.equal(found[: rounded.shape[0]], rounded):
            self._same += count
        else:
            self._different.append(name)


def _columns(width: int) -> torch.Tensor:
    """Indices of the columns of a matrix that are compared, spread evenly."""
    return torch.linspace(0, width - 1, min(width, COLUMNS_MAX), dtype=torch.float64).round().long()


def _pick_columns(matrix: torch.Tensor) -> torch.Tensor:
    """[out, in] to [out, columns]."""
    return matrix[:, _columns(matrix.shape[1])]


def _read_columns(module: Any, width: int) -> torch.Tensor:
    """The same columns of a loaded layer's matrix by way of unit vectors, [out, columns]."""
    columns = _columns(width)
    units = torch.zeros(len(columns), width, dtype=module.weight.dtype, device=module.weight.device)
    units[torch.arange(len(columns)), columns] = 1
    answer: torch.Tensor = module.quant_method.apply(module, units, None)
    return answer.T
