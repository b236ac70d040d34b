"""The verifier's judging process, put together: what it is started with, and what it makes environments and scorers from.

The verifier's own process loads no torch: it follows the ledger and moves bytes. `preload` starts the keeper ahead of the task,
since its imports take seconds. Neighbours: verifier.isolation talks to it, troth.workers hands it to the verifier.
"""

from __future__ import annotations

import importlib
import os
import socket
import sys
from pathlib import Path

import environments
from environments.files import MissingFile
from protocol.ports import Scorer
from protocol.task import Environment as EnvironmentSpec
from troth.settings import RoleSettings, VerifierSettings
from verifier.isolated_judge import Events, IsolatedJudge
from verifier.isolated_main import MakeEnvironment, serve
from verifier.isolated_wire import Limits, Setup
from verifier.isolation import Keeper
from verifier.quarantine import Quarantine

_ROOT = str(Path(__file__).parent.parent)
#: The network is cut off before anything is imported that starts threads.
_BOOT = (
    "import sys; sys.path.insert(0, sys.argv[1]); from verifier.isolated_layers import start_keeper; "
    "started = start_keeper(tuple(sys.argv[2].split(','))); from troth.judging import main; main(*started)"
)
#: Environment variables that the judging process gets: none that could hold a password.
_NAMES = frozenset(
    {"HOME", "LANG", "LD_LIBRARY_PATH", "PATH", "TMPDIR", "TOKENIZERS_PARALLELISM", "TZ", "XDG_CACHE_HOME"}
)
_PREFIXES = (
    "CUDA_", "GOMP_", "HIP_", "HSA_", "KMP_", "LC_", "MALLOC_", "MKL_", "NUMBA_", "NVIDIA_", "OMP_", "OPENBLAS_", "PYTORCH_",
    "ROCR_", "TORCH_",
)  # fmt: skip
#: Imported before the first worker is forked, so that none has to.
_HEAVY = (
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "verifier.scorer",
)


def make_keeper(settings: VerifierSettings, *, boot: str = _BOOT) -> Keeper:
    """The keeper of a verifier's judging process; it starts at once and is waited for when first needed.

    Args:
        boot: program of the keeper, given the package's folder and the ways to cut the network off.
    """
    methods = "namespace,filter,none" if settings.allow_network else "namespace,filter"
    own = os.environ.items()
    variables = {name: value for name, value in own if name in _NAMES or name.startswith(_PREFIXES)}
    variables = {"OPENBLAS_NUM_THREADS": "1", **variables, "HF_HUB_OFFLINE": "1"}
    return Keeper([sys.executable, "-P", "-c", boot, _ROOT, methods], variables)


def make_judge(
    keeper: Keeper, settings: RoleSettings, spec: EnvironmentSpec, directory: Path, events: Events
) -> IsolatedJudge:
    """What a verifier judges a task with.

    Args:
        directory: the verifier's own; quarantine is a folder in it.
    """
    compute, limits = settings.compute, settings.verifier
    folders = [Path(folder).absolute() for folder in settings.environment_folders]
    try:
        environments.require_files(spec, folders)
        needs_base = False
    except MissingFile:
        needs_base = True
    return IsolatedJudge(
        keeper=keeper,
        setup=Setup(spec, tuple(map(str, folders)), compute.device, compute.dtype, compute.threads),
        limits=Limits(limits.memory_mib << 20, limits.job_seconds * compute.threads, limits.job_seconds),
        quarantine=Quarantine(directory / "quarantine", limits.quarantine_mib << 20),
        needs_base=needs_base,
        events=events,
    )


def main(control: socket.socket, network: str, make_environment: MakeEnvironment = environments.load) -> None:
    """The keeper. Returns when the verifier is gone."""
    from protocol.kernels import kernels

    for module in _HEAVY:
        importlib.import_module(module)
    kernels.load()
    serve(make_environment, make_scorer, control, network)


def make_scorer(device: str, dtype: str, threads: int, vocab_size: int) -> Scorer:
    """The verifier's prefill; see verifier.scorer."""
    from verifier.scorer import TorchScorer

    return TorchScorer(device, dtype, threads, vocab_size=vocab_size)
