"""Keys and values of the rows that are decoded together: a fixed number of rows, each a fixed number of columns wide.

A row's token at position p (prompt and completion counted together) lies in column p, whatever its neighbours do; what is
stored behind a row's own length is stale or never written, always finite, and masked by whoever reads it. Planes are
tensors [groups, rows, heads, columns, width]: a forward pass adds as many as its architecture asks for, and rows are
copied in all of them at once. The last column of the widest row is never real: the last token of a completion is not fed.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray


class Feed(NamedTuple):
    """Tokens that one forward pass adds to rows of a pool.

    Attributes:
        slots: int64 [n], the pool's rows, ascending where they are the first n.
        tokens: int64 [n, m], padded on the right.
        counts: int64 [n], real tokens of each row, 1 to m.
        starts: int64 [n], tokens of each row that the pool holds already.
    """

    slots: NDArray[np.int64]
    tokens: NDArray[np.int64]
    counts: NDArray[np.int64]
    starts: NDArray[np.int64]

    @property
    def columns(self) -> int:
        """Columns that the longest row fills afterwards."""
        return int((self.starts + self.counts).max())


class KvPool:
    """Storage of `num_rows` rows of `num_columns` tokens on one device.

    Attributes:
        planes: what forward passes store, each [groups, rows, heads, columns, width].
        lines: every group of every plane as [rows x heads x columns, width].
        attached: what a forward pass keeps with its planes; it must not refer to the pool.
    """

    def __init__(self, num_rows: int, num_columns: int, device: str) -> None:
        self.num_rows, self.num_columns, self.device = num_rows, num_columns, device
        self.planes: list[torch.Tensor] = []
        self.lines: list[torch.Tensor] = []
        self.attached: object = None

    def add_plane(self, groups: int, heads: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        """Allocate a plane of zeros: what is masked is multiplied by zero, so it has to be finite."""
        shape = (groups, self.num_rows, heads, self.num_columns, width)
        self.planes.append(torch.zeros(shape, dtype=dtype, device=self.device))
        self.lines += self.planes[-1].view(groups, -1, width).unbind(0)
        return self.planes[-1]

    def select(self, plane: torch.Tensor, feed: Feed) -> torch.Tensor:
        """The rows of a feed up to its last column, [groups, n, heads, columns, width]; a view for the first n rows."""
        if self.is_prefix(feed.slots):
            return plane[:, : len(feed.slots), :, : feed.columns]
        return plane[:, self.to_device(feed.slots), :, : feed.columns]

    @staticmethod
    def is_prefix(slots: NDArray[np.int64]) -> bool:
        """Whether slots are 0 to n - 1."""
        return bool(slots[-1] == len(slots) - 1 and (slots == np.arange(len(slots))).all())

    def clamp(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Columns to write positions to: padding past the end goes to the last column, which no row ever reads."""
        return np.minimum(positions, self.num_columns - 1)

    def copy_rows(self, sources: list[int], targets: list[int], num_columns: int) -> None:
        """Copy the first columns of rows onto other rows; no row is both a source and a target."""
        source, target = self.to_device(np.array(sources)), self.to_device(np.array(targets))
        for plane in self.planes:
            plane[:, target, :, :num_columns] = plane[:, source, :, :num_columns]

    def to_device(self, values: NDArray[np.int64]) -> torch.Tensor:
        """Copy an array to the pool's device."""
        tensor = torch.from_numpy(values)
        return tensor if self.device == "cpu" else tensor.to(self.device)


def make_mask(positions: torch.Tensor, num_columns: int, dtype: torch.dtype, window: int | None = None) -> torch.Tensor:
    """Additive mask [n, 1, m, columns] for queries at `positions` [n, m]: every column up to a query's own is open.

    Args:
        window: columns that a query sees, its own included; None for all.
    """
    columns = torch.arange(num_columns, device=positions.device)
    hidden = columns > positions[..., None]
    if window is not None:
        hidden |= columns <= positions[..., None] - window
    mask = torch.zeros(hidden.shape, dtype=dtype, device=positions.device)
    return mask.masked_fill_(hidden, float("-inf"))[:, None]
