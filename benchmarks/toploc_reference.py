"""The reference library `toploc` as `toploc.py` times it: its public functions, on tensors made before the clock starts.

It is given what it handles best: each chunk as one tensor to build from, the whole completion as one tensor to verify.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


class Reference:
    """One completion's activations as the reference takes them.

    Args:
        bits: bf16 bit patterns [tokens, hidden], tokens a multiple of `chunk`.
        threads: of torch's own operations. How many threads the reference itself starts follows the process's CPUs.
    """

    def __init__(self, bits: NDArray[np.uint16], *, topk: int, chunk: int, threads: int) -> None:
        import toploc
        import torch

        torch.set_num_threads(threads)
        self._library: Any = toploc
        self._topk, self._chunk = topk, chunk
        self._states = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
        self._parts = [part.reshape(-1) for part in self._states.split(chunk)]

    def build(self) -> list[bytes]:
        """Commitments, one a chunk."""
        proofs: list[bytes] = self._library.build_proofs_bytes(self._parts, 1, self._topk, skip_prefill=True)
        return proofs

    def verify(self, proofs: list[bytes]) -> list[tuple[int, float, float]]:
        """Exponent mismatches, mantissa error mean and median, a chunk."""
        results = self._library.verify_proofs_bytes(self._states, proofs, self._chunk, self._topk, skip_prefill=True)
        return [(one.exp_mismatches, one.mant_err_mean, one.mant_err_median) for one in results]
