"""The forward pass of Llama-shaped decoders (Llama, SmolLM, Mistral, Qwen2, Qwen3) over a `KvPool`, written for short steps.

At small sizes a step's cost is the number of tensor operations, at large sizes the bytes it moves. So projections that read
the same input are one matrix (the model's own parameters become views of it: no second copy is held), queries that share a
key head meet it without repeating it, a norm is four operations, and no module is called. The arithmetic is that of the
model transformers builds, up to the rounding of fp32; in narrower types also the places where it rounds. `LlamaForward.of`
gives None for any model it does not cover, and inference.engine compares every policy with the model's own pass at load.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import nn

from inference.forward import States
from inference.kv_pool import Feed, KvPool, make_mask

#: Attention of one layer, by its number: [tokens, query, key and value heads, width] to [tokens, heads x width].
_Attend = Callable[[int, torch.Tensor], torch.Tensor]
_FAMILIES = {"llama", "mistral", "qwen2", "qwen3"}
#: Rotary tables that depend on the position alone, so that they can be computed once.
_ROPE_TYPES = {"default", "linear", "llama3", "yarn"}


class _Linear(NamedTuple):
    weight: torch.Tensor
    bias: torch.Tensor | None
    transposed: torch.Tensor

    @classmethod
    def of(cls, weight: torch.Tensor, bias: torch.Tensor | None) -> _Linear:
        return cls(weight, bias, weight.detach().t())

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """residual + self(x). One operation in fp32; narrower types round the product first, as the model does."""
        if self.bias is None and x.dtype == torch.float32:
            return torch.addmm(residual, x, self.transposed)
        return residual + self(x)


class _Layer(NamedTuple):
    norm_before: torch.Tensor
    qkv: _Linear
    norm_heads: torch.Tensor | None
    out: _Linear
    norm_between: torch.Tensor
    gate_up: _Linear
    down: _Linear


def _fuse(modules: list[nn.Linear]) -> _Linear:
    """One matrix whose rows are the modules' in order; the modules go on with views of it."""
    with torch.no_grad():
        weight = torch.cat([module.weight.data for module in modules])
        biases = [module.bias.data for module in modules if module.bias is not None]
        bias = torch.cat(biases) if biases else None
        row = 0
        for module in modules:
            rows = slice(row, row + module.out_features)
            module.weight = nn.Parameter(weight[rows], requires_grad=False)
            if bias is not None:
                module.bias = nn.Parameter(bias[rows], requires_grad=False)
            row += module.out_features
    return _Linear.of(weight, bias)


class LlamaForward:
    """See `inference.forward.Forward`. Made by `of`."""

    def __init__(self, model: Any) -> None:
        self._config, decoder = model.config, model.model
        attention = decoder.layers[0].self_attn
        self._width = int(attention.head_dim)
        self._heads = attention.q_proj.out_features // self._width
        self._kv_heads = attention.k_proj.out_features // self._width
        self._scale = float(attention.scaling)
        self._eps = float(self._config.rms_norm_eps)
        self._rotary = decoder.rotary_emb
        self._embedding = decoder.embed_tokens.weight
        self._norm = decoder.norm.weight
        self._head = _Linear.of(model.lm_head.weight, model.lm_head.bias)
        self._layers = [self._take(layer) for layer in decoder.layers]
        self._dtype, self._device = self._embedding.dtype, self._embedding.device
        self._tables = torch.empty(0, 2, 1, self._width)
        self._eps_norms: dict[int, torch.Tensor] = {}
        if self._dtype == torch.float32:
            self._layers = [self._scale_norms(layer) for layer in self._layers]
            self._norm = self._norm * self._norm.shape[-1] ** 0.5

    @classmethod
    def of(cls, model: Any) -> LlamaForward | None:
        """The forward pass of a model, None when its family or its options are not covered here."""
        config = model.config
        kinds = set(getattr(config, "layer_types", None) or ("full_attention",))
        rope = getattr(config, "rope_parameters", None) or {}
        windowed = config.model_type == "mistral" and config.sliding_window is not None
        if (
            config.model_type not in _FAMILIES
            or config.hidden_act != "silu"
            or kinds != {"full_attention"}
            or windowed
            or rope.get("rope_type", "default") not in _ROPE_TYPES
            or model.dtype not in (torch.float32, torch.bfloat16, torch.float16)
        ):
            return None
        return cls(model)

    def _take(self, layer: Any) -> _Layer:
        attention, feed = layer.self_attn, layer.mlp
        norms = None
        if hasattr(attention, "q_norm"):
            heads = [attention.q_norm.weight] * self._heads + [attention.k_norm.weight] * self._kv_heads
            norms = torch.stack(heads).detach()
        return _Layer(
            norm_before=layer.input_layernorm.weight.detach(),
            qkv=_fuse([attention.q_proj, attention.k_proj, attention.v_proj]),
            norm_heads=norms,
            out=_Linear.of(attention.o_proj.weight, attention.o_proj.bias),
            norm_between=layer.post_attention_layernorm.weight.detach(),
            gate_up=_fuse([feed.gate_proj, feed.up_proj]),
            down=_Linear.of(feed.down_proj.weight, feed.down_proj.bias),
        )

    def _scale_norms(self, layer: _Layer) -> _Layer:
        """Norm weights times sqrt(width), as `_normalise` takes them in fp32."""
        heads = layer.norm_heads
        return layer._replace(
            norm_before=layer.norm_before * layer.norm_before.shape[-1] ** 0.5,
            norm_between=layer.norm_between * layer.norm_between.shape[-1] ** 0.5,
            norm_heads=None if heads is None else heads * heads.shape[-1] ** 0.5,
        )

    def _normalise(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """RMS norm over the last axis: x / sqrt(mean(x^2) + eps) * weight.

        In fp32 as x / hypot(|x|, sqrt(width eps)) * (weight sqrt(width)), which is the same in half the operations.
        """
        width = x.shape[-1]
        if x.dtype == torch.float32:
            floor = self._eps_norms.get(width)
            if floor is None:
                floor = self._eps_norms[width] = torch.tensor((width * self._eps) ** 0.5, device=x.device)
            length: torch.Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
            return (x / length.hypot_(floor)).mul_(weight)
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self._eps)
        rounded: torch.Tensor = weight * wide.to(x.dtype)
        return rounded

    def _rotate(self, heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """Rotary position embedding in place; `heads` is [tokens, heads, width], the others [tokens, 1, width]."""
        swapped = torch.roll(heads, self._width // 2, -1)
        if heads.dtype == torch.float32:
            heads.mul_(cos).addcmul_(swapped, sin)
        else:
            heads.mul_(cos).add_(swapped.mul_(sin))

    def _tables_for(self, num_columns: int) -> torch.Tensor:
        """cos and sin by position, [columns, 2, 1, width]; the first half of sin is negated, as rotate_half negates."""
        if len(self._tables) < num_columns:
            positions = torch.arange(num_columns, device=self._device)[None]
            like = torch.zeros(1, 1, 1, dtype=self._dtype, device=self._device)
            cos, sin = (table[0].clone() for table in self._rotary(like, position_ids=positions))
            sin[:, : self._width // 2].neg_()
            self._tables = torch.stack((cos, sin), 1)[:, :, None]
        return self._tables

    def __call__(self, pool: KvPool, feed: Feed) -> States:
        """See `Forward`. Padding behind a row's last token is masked from all that is real and overwritten later."""
        if not pool.planes:
            pool.add_plane(len(self._layers), 2 * self._kv_heads, self._width, self._dtype)
        num_rows, num_new = feed.tokens.shape
        columns = pool.clamp(feed.starts[:, None] + np.arange(num_new))
        tables = self._tables_for(pool.num_columns).index_select(0, pool.to_device(columns.reshape(-1)))
        cos, sin = tables.unbind(1)
        cells = self._find_cells(pool, feed.slots, columns)
        attend = self._open(pool, feed, columns)
        x = self._embedding.index_select(0, pool.to_device(feed.tokens.reshape(-1)))
        for index, layer in enumerate(self._layers):
            qkv = layer.qkv(self._normalise(x, layer.norm_before)).view(len(x), -1, self._width)
            rotated = qkv[:, : self._heads + self._kv_heads]
            if layer.norm_heads is not None:
                rotated.copy_(self._normalise(rotated, layer.norm_heads))
            self._rotate(rotated, cos, sin)
            new = qkv[:, self._heads :].reshape(-1, self._width)
            pool.lines[index].index_copy_(0, cells, new)
            x = layer.out.add_to(x, attend(index, qkv))
            gate, up = layer.gate_up(self._normalise(x, layer.norm_between)).chunk(2, -1)
            x = layer.down.add_to(x, F.silu(gate).mul_(up))
        if num_new > 1:
            x = x.index_select(0, pool.to_device(np.arange(num_rows) * num_new + feed.counts - 1))
        hidden = self._normalise(x, self._norm)
        return States(self._head(hidden), hidden)

    def _find_cells(self, pool: KvPool, slots: NDArray[np.int64], columns: NDArray[np.int64]) -> torch.Tensor:
        """Where a plane seen as [rows x heads x columns, width] takes each new token's keys and values."""
        heads = np.arange(2 * self._kv_heads)
        lines = (slots[:, None] * len(heads) + heads) * pool.num_columns
        return pool.to_device((lines[:, None] + columns[:, :, None]).reshape(-1))

    def _open(self, pool: KvPool, feed: Feed, columns: NDArray[np.int64]) -> _Attend:
        """The attention of this feed: a function of the layer's number and its queries, keys and values."""
        num_rows, num_new = columns.shape
        heads, kv_heads, width, scale = self._heads, self._kv_heads, self._width, self._scale
        attention, grouped = F.scaled_dot_product_attention, heads != kv_heads

        def attend_fresh(index: int, qkv: torch.Tensor) -> torch.Tensor:
            rows = qkv.view(num_rows, num_new, -1, width).transpose(1, 2)
            query, key, value = torch.split(rows, [heads, kv_heads, kv_heads], 1)
            mixed = attention(query, key, value, is_causal=True, scale=scale, enable_gqa=grouped)
            return mixed.transpose(1, 2).reshape(-1, heads * width)

        if num_new > 1 and not feed.starts.any():
            return attend_fresh
        mask = None
        if num_new > 1 or (feed.starts != feed.starts[0]).any():
            mask = make_mask(pool.to_device(columns), feed.columns, self._dtype)
        plane = pool.planes[0]
        views = pool.select(plane, feed).unbind(0) if pool.is_prefix(feed.slots) else None

        def attend_stored(index: int, qkv: torch.Tensor) -> torch.Tensor:
            stored = views[index] if views is not None else pool.select(plane[index : index + 1], feed)[0]
            key, value = stored.chunk(2, 1)
            if num_new == 1:  # queries that share a key are the rows of one small matrix product
                query = qkv[:, :heads].view(num_rows, kv_heads, -1, width)
                return attention(query, key, value, attn_mask=mask, scale=scale).reshape(num_rows, -1)
            query = qkv.view(num_rows, num_new, -1, width)[:, :, :heads].transpose(1, 2)
            mixed = attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=grouped)
            return mixed.transpose(1, 2).reshape(-1, heads * width)

        return attend_stored
