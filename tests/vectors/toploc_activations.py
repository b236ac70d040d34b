"""The activations that tests/vectors/toploc.json is about, rebuilt from SHA-256 alone.

Provenance of the JSON file is in its own `provenance` field: proofs and comparison results came from the reference
library. Every case is free of ties among the entries that matter, since the reference leaves the order of ties open.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


def load_cases() -> list[dict[str, Any]]:
    cases: list[dict[str, Any]] = json.loads((Path(__file__).parent / "toploc.json").read_text())["cases"]
    return cases


def _words(label: str, count: int) -> NDArray[np.uint32]:
    """SHA-256 of "label|0", "label|1", ... as little-endian uint32 words."""
    blocks = (hashlib.sha256(f"{label}|{i}".encode()).digest() for i in range(-(-count // 8)))
    return np.frombuffer(b"".join(blocks), dtype="<u4")[:count]


def activations(case: dict[str, Any]) -> NDArray[np.uint16]:
    """bf16 bit patterns [tokens, hidden]: a faint background, and topk + 40 distinct large magnitudes a chunk."""
    rows, hidden, seed = case["tokens"], case["hidden"], case["seed"]
    noise = _words(f"{seed}|background", rows * hidden)
    bits = (0x3000 + noise % 0x0F00).astype(np.uint16) | ((noise >> 31).astype(np.uint16) << 15)
    per_chunk = case["chunk"] * hidden
    for number, start in enumerate(range(0, rows * hidden, per_chunk)):
        size = min(per_chunk, rows * hidden - start)
        large = min(size, case["topk"] + 40)
        where = np.argsort(_words(f"{seed}|order|{number}", size), kind="stable")[:large]
        signs = (_words(f"{seed}|sign|{number}", large) & 1).astype(np.uint16) << 15
        bits[start + where] = (0x4080 + 2 * np.arange(large)).astype(np.uint16) | signs
    return bits.reshape(rows, hidden)


def perturbed(case: dict[str, Any], how: str) -> NDArray[np.uint16]:
    """What a verifier may hold instead: `same`, `ulp`, `sign`, `half` or `other`."""
    if how == "other":
        return activations({**case, "seed": case["seed"] + "x"})
    bits = activations(case)
    large = (bits & 0x7FFF) >= 0x4080
    if how == "ulp":
        bits[large] += 1
    elif how == "half":
        bits[large] -= 0x80
    elif how == "sign":
        bits ^= 0x8000
    return bits
