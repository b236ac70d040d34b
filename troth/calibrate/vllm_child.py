"""Rollouts by vLLM, made in a process of an interpreter that has it: requests in, tokens and commitments out.

Both files are msgspec with bounds, read back by the same schema, so nothing of the other environment is imported here.
`python -m troth.calibrate.vllm_child REQUESTS RESULT` is that process; nobody else calls it.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from protocol.errors import ConfigError, Fault
from protocol.ports import SampleRequest
from troth.calibrate.pairs import Maker

if TYPE_CHECKING:
    from troth.calibrate.measure import Terms

TIMEOUT_S = 4 * 3600
#: Largest result that is read, in bytes.
RESULT_BYTES_MAX = 1 << 30
_ERROR_CHARS = 800


class _Job(msgspec.Struct, frozen=True, array_like=True):
    """What the child is asked for; see `Terms` and `Maker`."""

    folder: str
    dtype: str
    threads: int
    batch: int
    temperature: float
    max_tokens: int
    stop_tokens: list[int]
    topk: int
    chunk: int
    prompts: list[list[int]]
    keys: list[int]


class _Result(msgspec.Struct, frozen=True, array_like=True):
    """One entry per request in both lists."""

    completions: list[list[int]]
    proofs: list[list[bytes]]


def make_with_vllm(
    python: Path, folder: Path, maker: Maker, requests: Sequence[SampleRequest], terms: Terms
) -> tuple[list[tuple[int, ...]], list[tuple[bytes, ...]]]:
    """Completions and commitments of vLLM, run by another interpreter.

    Raises:
        ConfigError: when the interpreter is not there.
        Fault: when the child fails or gives something else than was asked for.
    """
    if not python.is_file():
        raise ConfigError(f"--vllm-python {python} is not there: make venv-vllm makes .venv-vllm/bin/python")
    job = _Job(
        str(folder.resolve()),
        maker.dtype,
        maker.threads,
        maker.batch,
        terms.temperature,
        terms.max_tokens,
        list(terms.stop_tokens),
        terms.topk,
        terms.chunk,
        [list(request.prompt) for request in requests],
        [request.key for request in requests],
    )
    with tempfile.TemporaryDirectory() as work:
        given, result = Path(work) / "requests", Path(work) / "result"
        given.write_bytes(msgspec.msgpack.encode(job))
        command = [str(python.absolute()), "-m", __name__, str(given), str(result)]
        try:
            done = subprocess.run(
                command, capture_output=True, timeout=TIMEOUT_S, check=False, cwd=Path(__file__).parents[2]
            )
        except subprocess.TimeoutExpired:
            raise Fault(f"{python} made no rollouts in {TIMEOUT_S} s: ask for fewer with --rollouts") from None
        if done.returncode or not result.is_file():
            text = done.stderr.decode(errors="replace").strip()[-_ERROR_CHARS:]
            raise Fault(f"{python} could not make rollouts with vLLM (exit {done.returncode}): {text}")
        found = _read(result)
    if len(found.completions) != len(requests) or len(found.proofs) != len(requests):
        raise Fault(f"{python} made {len(found.completions)} rollouts, expected {len(requests)}")
    return [tuple(tokens) for tokens in found.completions], [tuple(proofs) for proofs in found.proofs]


def _read(path: Path) -> _Result:
    if path.stat().st_size > RESULT_BYTES_MAX:
        raise Fault(f"rollouts of vLLM take {path.stat().st_size} bytes, limit {RESULT_BYTES_MAX}")
    try:
        return msgspec.msgpack.decode(path.read_bytes(), type=_Result)
    except msgspec.MsgspecError as error:
        raise Fault(f"rollouts of vLLM cannot be read: {error}") from None


def main(given: Path, result: Path) -> None:
    """Make what a job asks for; runs where vLLM is installed."""
    from inference.vllm_engine import VllmEngine
    from inference.vllm_options import VllmOptions
    from protocol.toploc import build_proofs

    job = msgspec.msgpack.decode(given.read_bytes(), type=_Job)
    engine = VllmEngine(dtype=job.dtype, threads=job.threads, options=VllmOptions(max_num_seqs=job.batch))
    engine.load(Path(job.folder))
    requests = [SampleRequest(tuple(prompt), key) for prompt, key in zip(job.prompts, job.keys, strict=True)]
    completions: list[list[int]] = []
    proofs: list[list[bytes]] = []
    lot = 16 * job.batch  # vLLM batches by itself; states of a lot are in memory together
    for start in range(0, len(requests), lot):
        made = engine.generate(
            requests[start : start + lot],
            temperature=job.temperature,
            max_tokens=job.max_tokens,
            stop_tokens=job.stop_tokens,
        )
        completions += [list(one.tokens) for one in made]
        proofs += [list(one) for one in build_proofs([m.hidden for m in made], topk=job.topk, chunk=job.chunk)]
    result.write_bytes(msgspec.msgpack.encode(_Result(completions, proofs)))
    engine.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
