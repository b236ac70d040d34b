"""Runs the engine pairs: makes rollouts, prefills them, and keeps the figures of `statistics` for each pair.

Rollouts of one maker are made once and prefilled by every prefill that is paired with it, so pairs of one maker share their
rollouts. Activations are never kept: a rollout is its tokens and commitments as soon as its batch is made.
Neighbours: troth.calibrate.pairs names what is run, troth.calibrate.vllm_child makes rollouts in another interpreter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from inference.engine import TorchEngine
from protocol.errors import ConfigError
from protocol.ports import SampleRequest
from protocol.toploc import build_proofs
from troth.calibrate.pairs import Maker, Pair, Prefill, count_rollouts
from troth.calibrate.statistics import Observed, join, observe
from troth.calibrate.vllm_child import make_with_vllm
from verifier.scorer import TorchScorer

#: No padded prefill is split by the scorer itself: what is scored together is decided here.
_BATCH_TOKENS = 1 << 20
#: Commitments are parsed by the protocol's own bound; what a profile asks for is chosen afterwards.
MODULUS_MIN = 32_769

Progress = Callable[[str], None]


class Terms(NamedTuple):
    """What all rollouts of a calibration have in common.

    Attributes:
        stop_tokens: ids that end a completion; none lets every completion run to `max_tokens`.
        topk / chunk: of the commitments.
        vllm_python: interpreter of an environment with vLLM; None where there is none.
    """

    temperature: float
    max_tokens: int
    stop_tokens: tuple[int, ...]
    topk: int
    chunk: int
    vllm_python: Path | None


class Made(NamedTuple):
    """Rollouts, one entry each in both lists."""

    completions: list[tuple[int, ...]]
    proofs: list[tuple[bytes, ...]]


def make_rollouts(folder: Path, maker: Maker, requests: Sequence[SampleRequest], terms: Terms) -> Made:
    """Rollouts of a policy with commitments, as a node would make them.

    Raises:
        Fault: when the policy cannot be run.
        ConfigError: when vLLM is asked for and not there.
    """
    if maker.engine == "vllm":
        if terms.vllm_python is None:
            raise ConfigError("pairs with vllm need --vllm-python: the interpreter of an environment with vLLM")
        return Made(*make_with_vllm(terms.vllm_python, folder, maker, requests, terms))
    engine = TorchEngine(dtype=maker.dtype, threads=maker.threads)
    engine.load(folder)
    made = Made([], [])
    for start in range(0, len(requests), maker.batch):
        lot = engine.generate(
            requests[start : start + maker.batch],
            temperature=terms.temperature,
            max_tokens=terms.max_tokens,
            stop_tokens=terms.stop_tokens,
        )
        made.completions.extend(one.tokens for one in lot)
        made.proofs.extend(build_proofs([one.hidden for one in lot], topk=terms.topk, chunk=terms.chunk))
    return made


class _Scorer(TorchScorer):
    """The verifier's scorer with a stated implementation of attention."""

    def __init__(self, prefill: Prefill) -> None:
        super().__init__(dtype=prefill.dtype, threads=prefill.threads, batch_tokens_max=_BATCH_TOKENS)
        self._attention = prefill.attention

    def load(self, folder: Path) -> None:
        """See `TorchScorer.load`."""
        super().load(folder)
        self._model.set_attn_implementation(self._attention)


def score_rollouts(
    folder: Path, prefill: Prefill, requests: Sequence[SampleRequest], made: Made, terms: Terms
) -> Observed:
    """Hold rollouts against the prefill of a policy. Raises `Fault` when it cannot be run."""
    scorer, parts = _Scorer(prefill), []
    scorer.load(folder)
    for start in range(0, len(requests), prefill.batch):
        part = slice(start, start + prefill.batch)
        scored = scorer.score(requests[part], made.completions[part], temperature=terms.temperature)
        parts.append(observe(made.proofs[part], scored, topk=terms.topk, chunk=terms.chunk, modulus_min=MODULUS_MIN))
    return join(parts)


def measure_pairs(
    folder: Path, pairs: Sequence[Pair], requests: Sequence[SampleRequest], terms: Terms, tell: Progress
) -> dict[str, Observed]:
    """What every pair gives, by its name; see `make_rollouts` and `score_rollouts`."""
    results: dict[str, Observed] = {}
    for maker in dict.fromkeys(pair.maker for pair in pairs):
        some = requests[: count_rollouts(maker, len(requests))]
        tell(f"making {len(some)} rollouts: {maker.engine}, batch {maker.batch}, {maker.dtype}")
        made = make_rollouts(folder, maker, some, terms)
        for pair in pairs:
            if pair.maker == maker:
                results[pair.name] = found = score_rollouts(folder, pair.prefill, some, made, terms)
                share, gap = found.shares.mean(), found.gaps.max()
                tell(f"{pair.name}: differing share {share:.6f}, {found.misses.sum()} misses, largest gap {gap:.6f}")
    return {pair.name: results[pair.name] for pair in pairs}
