"""How fast would this machine generate with a model of that shape? A synthetic one is timed for a moment.

Weights are random: speed does not depend on them. Deep models are timed with one and with two layers, and the rest is
added in proportion, so that neither the memory nor the download of the real model is needed.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from inference.memory import estimate_memory, read_free_bytes
from models.policy import CONFIG, WEIGHTS
from protocol.errors import ConfigError, Fault
from protocol.ports import Engine, SampleRequest
from troth.engines import make_engine
from troth.settings import ComputeSettings

#: Models with no more layers are timed whole.
LAYERS_WHOLE_MAX = 4
PROMPT_TOKENS = 32
NEW_TOKENS_MAX = 24
SECONDS_MIN = 1.0
#: The synthetic model may take this share of the free memory.
MEMORY_SHARE = 0.5


class Speed(NamedTuple):
    """Sampled tokens per second, commitments not counted, and how that is known."""

    tokens_per_s: float
    how: str


def measure_speed(config: dict[str, Any], compute: ComputeSettings, *, rollouts: int, max_tokens: int) -> Speed:
    """Time a synthetic model.

    Args:
        config: fields of the policy's config.json.
        rollouts: completions generated together.
        max_tokens: longest completion of the task.

    Raises:
        Fault: when the shape cannot be built here, or takes too much memory even with two layers.
        ConfigError: when the engine cannot be had.
    """
    layers = config.get("num_hidden_layers")
    if not isinstance(layers, int) or layers < 1:
        raise Fault(f"config.json: num_hidden_layers is {layers!r}, expected a positive integer")
    tokens = min(max_tokens, NEW_TOKENS_MAX)
    if layers <= LAYERS_WHOLE_MAX:
        step_s = _time(config, compute, layers, rollouts, tokens)
        how = f"a synthetic model of {layers} layers, {rollouts} rollouts of {tokens} tokens"
    else:
        one, two = (_time(config, compute, count, rollouts, tokens) for count in (1, 2))
        step_s = one + (layers - 1) * max(two - one, 0.0)
        how = f"synthetic models of 1 and 2 layers taken to {layers}, {rollouts} rollouts of {tokens} tokens"
    return Speed(rollouts * tokens / max(step_s, 1e-9), how)


def _time(config: dict[str, Any], compute: ComputeSettings, layers: int, rollouts: int, tokens: int) -> float:
    """Seconds of one call of the engine, the quickest of as many as fit into `SECONDS_MIN`."""
    fields = {**config, "num_hidden_layers": layers}
    if isinstance(fields.get("layer_types"), list):
        fields["layer_types"] = fields["layer_types"][:layers]
    need = estimate_memory(fields, dtype=compute.dtype, batch_tokens=rollouts * (tokens + PROMPT_TOKENS)).total_bytes
    free = read_free_bytes()
    if free is not None and need > MEMORY_SHARE * free:
        raise Fault(
            f"a model of {layers} layers takes {need / 2**30:.2f} GiB of {free / 2**30:.2f} GiB free: not timed"
        )
    with tempfile.TemporaryDirectory(prefix="troth-speed-") as place:
        folder = Path(place)
        vocab = write_synthetic(folder, fields)
        engine = make_engine(compute, vocab)
        engine.load(folder)
        _generate(engine, vocab, 1, 2)  # what is done once is not counted
        best, until = float("inf"), time.monotonic() + SECONDS_MIN
        while time.monotonic() < until or best == float("inf"):
            started = time.monotonic()
            made = _generate(engine, vocab, rollouts, tokens)
            if made < rollouts * tokens // 2:
                raise Fault("the synthetic model stopped early: it tells nothing about speed")
            best = min(best, (time.monotonic() - started) * rollouts * tokens / made)
    return best


def _generate(engine: Engine, vocab: int, rollouts: int, tokens: int) -> int:
    requests = [
        SampleRequest(tuple((number * 7 + place) % vocab for place in range(PROMPT_TOKENS)), number)
        for number in range(rollouts)
    ]
    # The one stop token is drawn once in a vocabulary: completions run to their end.
    made = engine.generate(requests, temperature=1.0, max_tokens=tokens, stop_tokens=(vocab - 1,))
    return sum(len(one.tokens) for one in made)


def write_synthetic(folder: Path, fields: dict[str, Any]) -> int:
    """Write a policy folder of this shape with random weights; returns its vocabulary.

    Raises:
        Fault: when no model of these fields can be made.
    """
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    table = dict(fields)
    try:
        config = AutoConfig.for_model(table.pop("model_type"), **table)
        make: Any = AutoModelForCausalLM.from_config
        model = make(config, trust_remote_code=False)
    except (
        Exception
    ) as error:  # a stranger wrote these fields, and every architecture has its own ways to choke on them
        raise Fault(f"no model can be made of config.json: {type(error).__name__}: {error}") from None
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name not in tied}
    (folder / CONFIG).write_text(json.dumps(fields))
    save_file(tensors, folder / WEIGHTS)
    return int(config.vocab_size)


def check_given(tokens_per_s: float) -> Speed:
    """A speed the operator gave. Raises `ConfigError` when it is none."""
    if not tokens_per_s > 0:
        raise ConfigError(f"--tokens-per-second is {tokens_per_s}, expected more than 0")
    return Speed(tokens_per_s, "given")
