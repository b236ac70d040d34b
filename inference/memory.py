"""How much memory a policy takes to generate with: from its config.json before anything is fetched, and what is free here.

Loads no torch. The weights are counted exactly for Llama-shaped decoders (Llama, SmolLM, Qwen2, Qwen3, Mistral) and, with
experts, for their mixture forms; another architecture that uses the same names is counted like them. The engine bounds
what it allocates by the constants below, so the estimate holds however many requests there are.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from protocol.errors import ConfigError, Fault

#: Fields of a config.json that an estimate reads.
SIZE_FIELDS = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "tie_word_embeddings",
    "attention_bias",
    "mlp_bias",
    "num_experts",
    "num_local_experts",
    "moe_intermediate_size",
)
#: Tokens fed in one forward pass, prompts included.
FORWARD_TOKENS_MAX = 4096
#: Logits (rows times vocabulary) of one step, and rows decoded together.
STEP_LOGITS_MAX = 1 << 24
ROWS_MAX = 1024
#: Scores (rows times vocabulary) sampled from in one call.
SAMPLE_SCORES_MAX = 1 << 21

_DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
#: Bytes a score costs while it is sampled from: its float32 copy, its noise and the words the noise is made of.
_SCORE_BYTES = 128


class MemoryNeed(NamedTuple):
    """Bytes a policy takes on the device that generates.

    Attributes:
        weights_bytes: the parameters. While a policy replaces another, both are held.
        kv_bytes: keys and values of `batch_tokens` tokens.
        activations_bytes: what a forward pass and sampling take besides, at most.
    """

    weights_bytes: int
    kv_bytes: int
    activations_bytes: int

    @property
    def total_bytes(self) -> int:
        """To load a policy where none is loaded, and generate with it."""
        return sum(self)

    @property
    def swap_bytes(self) -> int:
        """To load a policy while the one before it stays usable, and generate with either."""
        return self.total_bytes + self.weights_bytes


def _field(config: dict[str, Any], name: str, default: int | None = None) -> int:
    """A positive integer of a configuration. Raises `Fault`."""
    value = config.get(name)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 1 << 40:
        raise Fault(f"config.json: {name} is {value!r}, expected a positive integer")
    return value


def compute_dtype_bytes(dtype: str) -> int:
    """Bytes of one number. Raises `ConfigError` for a type that policies are not run in."""
    if dtype not in _DTYPE_BYTES:
        raise ConfigError(f"dtype is {dtype!r}, expected one of {', '.join(_DTYPE_BYTES)}")
    return _DTYPE_BYTES[dtype]


class _Shape(NamedTuple):
    """The sizes of a decoder that its memory follows from."""

    vocab: int
    hidden: int
    layers: int
    queries: int
    keys: int
    inner: int

    @classmethod
    def of(cls, config: dict[str, Any]) -> _Shape:
        hidden, heads = _field(config, "hidden_size"), _field(config, "num_attention_heads")
        width = _field(config, "head_dim", max(1, hidden // heads))
        return cls(
            vocab=_field(config, "vocab_size"),
            hidden=hidden,
            layers=_field(config, "num_hidden_layers"),
            queries=heads * width,
            keys=_field(config, "num_key_value_heads", heads) * width,
            inner=_field(config, "intermediate_size", 4 * hidden),
        )


def _count_layer(config: dict[str, Any], shape: _Shape) -> int:
    """Parameters of one decoder layer."""
    hidden, queries, keys = shape.hidden, shape.queries, shape.keys
    family, biased = config.get("model_type"), bool(config.get("attention_bias"))
    attention = 2 * hidden * queries + 2 * hidden * keys
    attention += queries + 2 * keys if biased or family == "qwen2" else 0
    attention += hidden if biased else 0
    attention += 2 * (queries // _field(config, "num_attention_heads")) if family in ("qwen3", "qwen3_moe") else 0
    named = "num_experts" if config.get("num_experts") else "num_local_experts"
    if config.get(named):
        experts, inner = _field(config, named), _field(config, "moe_intermediate_size", shape.inner)
        feed = experts * (3 * hidden * inner + hidden)
    else:
        feed = 3 * hidden * shape.inner + (2 * shape.inner + hidden if config.get("mlp_bias") else 0)
    return attention + feed + 2 * hidden


def count_parameters(config: dict[str, Any]) -> int:
    """Parameters of a policy, a tied output head counted once. Raises `Fault` when a size is missing or no size."""
    shape = _Shape.of(config)
    tables = 1 if config.get("tie_word_embeddings") else 2
    return tables * shape.vocab * shape.hidden + shape.layers * _count_layer(config, shape) + shape.hidden


def estimate_memory(config: dict[str, Any], *, dtype: str, batch_tokens: int) -> MemoryNeed:
    """Memory of a policy on the device that generates.

    Args:
        config: the fields of its config.json.
        dtype: name of the type of weights and activations, for example "bfloat16".
        batch_tokens: tokens whose keys and values are held at once (the engine's `batch_tokens_max`).

    Raises:
        Fault: when the configuration names no usable sizes.
        ConfigError: when the dtype is none that policies are run in.
    """
    size, shape = compute_dtype_bytes(dtype), _Shape.of(config)
    kv = compute_kv_bytes(config, dtype=dtype, tokens=batch_tokens)
    widest = 6 * shape.hidden + 2 * (shape.queries + 2 * shape.keys) + 3 * shape.inner
    rows = max(1, min(compute_rows_max(shape.vocab), batch_tokens))
    logits = (
        rows * shape.vocab * (size + 4) + min(rows * shape.vocab, max(SAMPLE_SCORES_MAX, shape.vocab)) * _SCORE_BYTES
    )
    forward = min(FORWARD_TOKENS_MAX, max(1, batch_tokens)) * widest * size
    return MemoryNeed(count_parameters(config) * size, kv, forward + logits)


def compute_rows_max(vocab_size: int) -> int:
    """Rows that one step carries at most, 1 at least."""
    return max(1, min(ROWS_MAX, STEP_LOGITS_MAX // vocab_size))


def compute_kv_bytes(config: dict[str, Any], *, dtype: str, tokens: int) -> int:
    """Keys and values of `tokens` tokens in every layer, in bytes. Raises like `estimate_memory`."""
    shape = _Shape.of(config)
    return 2 * shape.layers * shape.keys * tokens * compute_dtype_bytes(dtype)


def _read_int(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def read_free_bytes(root: Path = Path("/")) -> int | None:
    """Main memory this process can still take without swapping; None where the system does not say (not Linux).

    The lower of what the machine has available and what the control group's limit leaves.

    Args:
        root: where proc and sys are mounted.
    """
    free: list[int] = []
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    free += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    group = root / "sys/fs/cgroup"
    for limit_name, used_name in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        limit, used = _read_int(group / limit_name), _read_int(group / used_name)
        if limit is not None and used is not None:
            free.append(max(0, limit - used))
    return min(free) if free else None


def require_free(needed: int, free: int | None, what: str, todo: str) -> None:
    """Refuse to allocate what does not fit. Unknown free memory refuses nothing.

    Raises:
        Fault: with both numbers, in MiB.
    """
    if free is not None and needed > free:
        raise Fault(f"{what} needs {needed / 2**20:,.1f} MiB of memory, {free / 2**20:,.1f} MiB are free: {todo}")
