"""A GGUF file of a Llama-shaped model as configuration, weights and tokenizer: how models that ship as GGUF become policies.

Quantised blocks are expanded by the `gguf` package (not needed for anything else, and imported only here); everything is a
function of the file alone, so two people who convert one file get one policy hash. Rotary weights are stored by GGUF in
another order of rows than by transformers, and are put back. What this module does not know (another architecture,
another tokenizer, a tensor it cannot name) is an error and never a guess.
Neighbours: models.policy loads what was converted; troth.smollm writes the folder.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from protocol.errors import ConfigError, Fault

#: How tokens of the types "control" and "user defined" are numbered in GGUF.
_CONTROL, _USER_DEFINED = 3, 4

#: Pre-tokenizers that are known here: what splits the text before the byte-level BPE, beside its own pattern.
_SPLITS_DIGITS = {"gpt-2": False, "smollm": True}

_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = re.compile(r"blk\.([0-9]{1,4})\.([a-z_]{1,32})\.weight", re.ASCII)


class GgufModel(NamedTuple):
    """A converted model.

    Attributes:
        config: fields of config.json.
        weights: float32 arrays by their name in transformers; the output head is absent when it is tied.
        tokenizer: tokenizer.json of the `tokenizers` package.
    """

    config: dict[str, Any]
    weights: dict[str, NDArray[np.float32]]
    tokenizer: str


def read_gguf(path: Path) -> GgufModel:
    """Convert a GGUF file.

    Raises:
        ConfigError: when the `gguf` package is not installed.
        Fault: when the file is damaged, or is of a kind that this module does not know.
    """
    try:
        import gguf
    except ImportError as error:
        raise ConfigError(
            f"reading a GGUF file needs the gguf package ({error}): pip install --no-deps -r requirements/smollm.txt"
        ) from None
    try:
        reader = gguf.GGUFReader(str(path))
        fields = {name: field.contents() for name, field in reader.fields.items()}
    except Exception as error:  # the package raises whatever its numpy views raise
        raise Fault(f"{path} cannot be read as GGUF: {type(error).__name__}: {error}") from None
    try:
        config = _make_config(fields, tied=all(tensor.name != "output.weight" for tensor in reader.tensors))
        weights = {}
        for tensor in reader.tensors:
            name = rename_tensor(tensor.name)
            values = np.array(gguf.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
            for end, heads in (("q_proj.weight", "num_attention_heads"), ("k_proj.weight", "num_key_value_heads")):
                if name.endswith(end):
                    values = unpermute(values, int(config[heads]))
            weights[name] = np.ascontiguousarray(values)
        return GgufModel(config, weights, make_tokenizer(fields))
    except KeyError as error:
        raise Fault(f"{path} has no field {error}") from None
    except (TypeError, ValueError) as error:
        raise Fault(f"{path} does not hold what its fields say: {error}") from None


def rename_tensor(name: str) -> str:
    """The name of a GGUF tensor in transformers. Raises `Fault` for one that is not known."""
    if name in _TENSORS:
        return _TENSORS[name]
    found = _LAYER.fullmatch(name)
    if found is None or found[2] not in _LAYER_TENSORS:
        raise Fault(f"GGUF tensor {name!r} is none of a Llama-shaped model's: this file cannot be converted")
    return f"model.layers.{int(found[1])}.{_LAYER_TENSORS[found[2]]}.weight"


def unpermute(values: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Rows of a rotary projection [heads * size, in] from interleaved pairs back to two halves per head."""
    rows, width = values.shape
    return values.reshape(heads, rows // heads // 2, 2, width).swapaxes(1, 2).reshape(rows, width)


def _shortest(value: float) -> float:
    """A float32 of the file as the shortest decimal that means it: 1e-05 and not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _make_config(fields: dict[str, Any], *, tied: bool) -> dict[str, Any]:
    if fields["general.architecture"] != "llama":
        raise Fault(f"the file's architecture is {fields['general.architecture']!r}, expected llama")
    hidden, heads = int(fields["llama.embedding_length"]), int(fields["llama.attention.head_count"])
    head_dim = int(fields.get("llama.rope.dimension_count", hidden // heads))
    if any(name.startswith("llama.rope.scaling") for name in fields):
        raise Fault("the file scales its rotary embedding, which is not supported here")
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": int(fields["tokenizer.ggml.bos_token_id"]),
        "dtype": "bfloat16",
        "eos_token_id": int(fields["tokenizer.ggml.eos_token_id"]),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": int(fields["llama.feed_forward_length"]),
        "max_position_embeddings": int(fields["llama.context_length"]),
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_hidden_layers": int(fields["llama.block_count"]),
        "num_key_value_heads": int(fields["llama.attention.head_count_kv"]),
        "pad_token_id": int(fields["tokenizer.ggml.padding_token_id"]),
        "rms_norm_eps": _shortest(fields["llama.attention.layer_norm_rms_epsilon"]),
        "rope_parameters": {"rope_theta": _shortest(fields["llama.rope.freq_base"]), "rope_type": "default"},
        "tie_word_embeddings": tied,
        "use_cache": True,
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
    }


def make_tokenizer(fields: dict[str, Any]) -> str:
    """tokenizer.json of a byte-level BPE as GGUF's metadata describes it.

    Args:
        fields: the file's metadata by name; reads those that begin with `tokenizer.ggml.`.

    Raises:
        Fault: for another kind of tokenizer, or a pre-tokenizer that is not known here.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    kind, split = fields["tokenizer.ggml.model"], fields.get("tokenizer.ggml.pre", "gpt-2")
    if kind != "gpt2" or split not in _SPLITS_DIGITS:
        raise Fault(f"the file's tokenizer is {kind!r} split by {split!r}, expected gpt2 split by gpt-2 or smollm")
    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    if len(set(tokens)) != len(tokens) or len(types) != len(tokens):
        raise Fault("the file's vocabulary names a token twice, or its types do not match it")
    merges = [tuple(line.split(" ")) for line in fields["tokenizer.ggml.merges"]]
    model: Any = models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=merges)
    tokenizer = Tokenizer(model)
    byte_level = pre_tokenizers.ByteLevel(
        add_prefix_space=bool(fields.get("tokenizer.ggml.add_space_prefix", False)), use_regex=True
    )
    parts = [pre_tokenizers.Digits(individual_digits=True)] if _SPLITS_DIGITS[split] else []
    pre_tokenizer: Any = pre_tokenizers.Sequence([*parts, byte_level])
    decoder: Any = decoders.ByteLevel()
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizer, decoder
    for wanted, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        added: list[Any] = [
            AddedToken(token, normalized=False, special=special)
            for token, found in zip(tokens, types, strict=True)
            if found == wanted
        ]
        tokenizer.add_special_tokens(added) if special else tokenizer.add_tokens(added)
    return str(tokenizer.to_str(pretty=False)) + "\n"
