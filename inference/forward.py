"""A forward pass of any transformers decoder over a `KvPool`: tokens in, logits and last hidden states out.

`ModuleForward` calls the model as transformers wrote it and gives it a `Cache` whose layers are planes of the pool, so any
architecture works whose attention takes a `Cache` of keys and values. inference.llama has the same interface for
the common shapes, with less work per step. Neighbours: inference.decode feeds both and knows neither.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from inference.kv_pool import Feed, KvPool, make_mask
from protocol.errors import Fault

#: Kinds of attention layers whose whole state is keys and values by position.
_LAYER_KINDS = {"full_attention", "sliding_attention"}


class States(NamedTuple):
    """What follows each row of a feed.

    Attributes:
        logits: [n, vocabulary] behind the last real token of each row.
        hidden: [n, hidden], the post-norm last hidden state that the logits come from.
    """

    logits: torch.Tensor
    hidden: torch.Tensor

    def select(self, rows: list[int]) -> States:
        """Some rows, in the order and as often as named."""
        index = torch.tensor(rows, device=self.logits.device)
        return States(self.logits.index_select(0, index), self.hidden.index_select(0, index))


class Forward(Protocol):
    """A policy's forward pass."""

    def __call__(self, pool: KvPool, feed: Feed) -> States:
        """Add a feed's tokens to the pool. One pool is used with one forward pass only."""
        ...


class _Window:
    """What the layers of one pass share. Empty between passes, so that nothing of it outlives its pool."""

    pool: KvPool
    feed: Feed
    rows: torch.Tensor
    positions: torch.Tensor

    def open(self, pool: KvPool, feed: Feed) -> None:
        """Take in a feed without padding."""
        self.pool, self.feed = pool, feed
        self.rows = pool.to_device(feed.slots)
        self.positions = pool.to_device(feed.starts[:, None] + np.arange(feed.tokens.shape[1]))

    def close(self) -> None:
        """Let go of pool and feed."""
        self.__dict__.clear()


class _PooledLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One attention layer's keys and values, as transformers asks for them."""

    def __init__(self, window: _Window) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._window = window

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate the layer's planes; both states are [n, heads, m, width]."""
        make = self._window.pool.add_plane
        self.keys = make(1, key_states.shape[1], key_states.shape[3], key_states.dtype)
        self.values = make(1, value_states.shape[1], value_states.shape[3], value_states.dtype)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the new states; returns all of the rows'."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        window, read = self._window, []
        for plane, new in ((self.keys, key_states), (self.values, value_states)):
            assert plane is not None
            plane[0][window.rows[:, None], :, window.positions] = new.transpose(1, 2)
            read.append(window.pool.select(plane, window.feed)[0])
        return read[0], read[1]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Columns a mask has to have, and its offset."""
        return self._window.feed.columns, 0

    def get_seq_length(self) -> int:
        """Tokens of the longest row before this feed."""
        return int(self._window.feed.starts.max())

    def get_max_length(self) -> int:
        """Columns of the pool."""
        return self._window.pool.num_columns


class _Captured:
    """Takes the output head's input: the post-norm last hidden state, whatever the architecture calls it.

    It knows no model: a model that its own hook refers back to is freed late, and memory holds a policy too many.
    """

    hidden: torch.Tensor | None = None

    def __call__(self, module: Any, inputs: tuple[torch.Tensor, ...]) -> None:
        self.hidden = inputs[0]


class ModuleForward:
    """The model's own forward pass.

    Args:
        model: a transformers causal language model.

    Raises:
        Fault: when layers keep a state that is no keys and values by position (recurrent or chunked ones).
    """

    def __init__(self, model: Any) -> None:
        self._model, self._config = model, model.config.get_text_config(decoder=True)
        self._kinds = set(getattr(self._config, "layer_types", None) or ())
        if self._kinds - _LAYER_KINDS:
            unknown = ", ".join(sorted(self._kinds - _LAYER_KINDS))
            raise Fault(
                f"layers of kind {unknown} keep a state that the engine cannot hold: only attention is supported"
            )
        self._captured, self._window = _Captured(), _Window()
        model.get_output_embeddings().register_forward_pre_hook(self._captured)

    def __call__(self, pool: KvPool, feed: Feed) -> States:
        """See `Forward`. Rows with equally many tokens go through the model together, so that nothing is padded."""
        if pool.attached is None:
            num_layers = int(self._config.num_hidden_layers)
            pool.attached = Cache(layers=[_PooledLayer(self._window) for _ in range(num_layers)])
        parts, order = [], []
        for count in np.unique(feed.counts).tolist():
            rows = np.flatnonzero(feed.counts == count)
            part = Feed(feed.slots[rows], feed.tokens[rows, :count], feed.counts[rows], feed.starts[rows])
            try:
                self._window.open(pool, part)
                parts.append(self._run(self._window))
            finally:
                self._window.close()
            order.append(rows)
        if len(parts) == 1:
            return parts[0]
        back = torch.from_numpy(np.argsort(np.concatenate(order))).to(pool.device)
        return States(*(torch.cat(tensors)[back] for tensors in zip(*parts, strict=True)))

    def _run(self, window: _Window) -> States:
        pool, feed = window.pool, window.feed
        output = self._model(
            input_ids=pool.to_device(feed.tokens),
            attention_mask=self._masks(window.positions, feed.columns),
            position_ids=window.positions,
            past_key_values=pool.attached,
            use_cache=True,
            logits_to_keep=1,
        )
        hidden, self._captured.hidden = self._captured.hidden, None
        if hidden is None:
            raise Fault("the policy's output head was not called: this architecture is not supported")
        return States(output.logits[:, -1], hidden[:, -1].clone())  # a view would hold the states of all positions

    def _masks(self, positions: torch.Tensor, num_columns: int) -> torch.Tensor | dict[str, torch.Tensor]:
        """The mask every layer takes, or one for each kind of layer."""
        dtype, window = self._model.dtype, getattr(self._config, "sliding_window", None)
        full = make_mask(positions, num_columns, dtype)
        if "sliding_attention" in self._kinds or (not self._kinds and window is not None):
            sliding = make_mask(positions, num_columns, dtype, window)
            return {"full_attention": full, "sliding_attention": sliding} if len(self._kinds) > 1 else sliding
        return full
