"""Top entries of activations where they live: of a state on a device only what commitments depend on travels to the host.

For 32 rows of 5,120 states that is 1.3 KB of indices and values instead of 328 KB. The entries are exactly those that
protocol.toploc finds on the host; `build_proofs` and `match_proofs` there take the result in place of activations.
"""

from __future__ import annotations

import numpy as np
import torch

from protocol.errors import Fault
from protocol.polynomial import NON_FINITE
from protocol.toploc import TopEntries, compute_sizes, join_top_entries

#: Entries whose 64-bit keys are made at once: 256 MB on the device.
_KEYS_MAX = 1 << 25


def find_top_entries(states: torch.Tensor, *, topk: int, chunk: int, whose: str = "the engine's") -> TopEntries:
    """Top entries of a completion's chunks, found on the device of its states.

    Args:
        states: [num_tokens, hidden], any floating dtype and device; rounded to bf16, nearest even.
        topk: entries per chunk.
        chunk: tokens per commitment.
        whose: whose activations these are, for the message.

    Raises:
        Fault: when an activation is not finite.
    """
    rows, hidden = states.shape
    sizes = compute_sizes(rows, hidden, topk=topk, chunk=chunk)
    bits = states.detach().to(torch.bfloat16).contiguous().view(torch.int16)
    whole, parts = rows // chunk, []
    step = max(1, _KEYS_MAX // (chunk * hidden))
    for first in range(0, whole, step):
        batch = bits[first * chunk : min(first + step, whole) * chunk].view(-1, chunk * hidden)
        parts.append(_find_top(batch, sizes[0], whose))
    if whole * chunk < rows:
        parts.append(_find_top(bits[whole * chunk :].view(1, -1), sizes[-1], whose))
    return join_top_entries(rows, hidden, parts)


def _find_top(bits: torch.Tensor, k: int, whose: str) -> tuple[np.ndarray, np.ndarray]:
    """Indices int64 and bit patterns uint16 [chunks, k] of int16 patterns [chunks, n].

    Keys order by magnitude and then by lower index, and no two are equal: what `topk` returns does not depend on how a device
    breaks ties. A magnitude that is not finite is larger than all that are, so it is enough to look at the top.
    """
    n = bits.shape[1]
    keys = (bits & 0x7FFF).to(torch.int64) << 32
    keys += torch.arange(n - 1, -1, -1, dtype=torch.int64, device=bits.device)
    indices = keys.topk(k, dim=1, sorted=False).indices
    values = bits.gather(1, indices).cpu().numpy().view(np.uint16)
    if ((values & 0x7F80) == 0x7F80).any():
        raise Fault(NON_FINITE.format(whose=whose))
    return indices.cpu().numpy(), values
