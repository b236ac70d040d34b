"""One calibration from a policy folder to a profile, its record and its picture. troth.cli.calibrate is the command."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

import environments
from models.policy import read_config, read_tensors
from protocol.codec import PROTOCOL_VERSION
from protocol.errors import ConfigError
from protocol.ports import SampleRequest
from protocol.task import PROFILE_DTYPES, Environment, ProofProfile
from shardcast.folder import hash_folder
from troth.calibrate.alternatives import make_alternatives
from troth.calibrate.choose import FIND_ROLLOUTS, MARGIN, NULL_RATIO, Choice, choose_profile, list_unfound, require_rows
from troth.calibrate.measure import Progress, Terms, make_rollouts, measure_pairs, score_rollouts
from troth.calibrate.pairs import Pair, count_rollouts, make_pairs, select_pairs
from troth.calibrate.picture import format_picture
from troth.calibrate.prompts import make_requests
from troth.calibrate.statistics import Observed, summarise_all
from troth.network import LINKS

#: Packages whose versions decide what is computed.
_PACKAGES = ("torch", "transformers", "numpy")
#: Seeds of the two sets of requests are this far apart.
_ALTERNATIVES_SEED = 1 << 32


class Options(NamedTuple):
    """What a user asks for; see `troth calibrate --help`.

    Attributes:
        rollouts: of each pair.
        alternative_rollouts: of each alternative.
        pairs / alternatives: names, none for all.
        prompts: sources of prompts, see `make_requests`.
        args: arguments of the environments among them.
    """

    model: Path
    name: str
    dtype: str
    rollouts: int
    alternative_rollouts: int
    pairs: tuple[str, ...]
    alternatives: tuple[str, ...]
    prompts: tuple[str, ...]
    args: str
    threads: int
    seed: int
    terms: Terms
    command: str


class Calibration(NamedTuple):
    """The result: a profile, the record beside it, and an SVG picture."""

    profile: ProofProfile
    measured: dict[str, Any]
    picture: str


def run_calibration(options: Options, tell: Progress) -> Calibration:
    """Measure a model and choose a profile for it.

    Raises:
        ConfigError: for options that name nothing, too few rollouts, or when no profile would find anything.
        Fault: when the policy cannot be run.
    """
    if options.dtype not in PROFILE_DTYPES:
        raise ConfigError(f"dtype is {options.dtype!r}, expected one of {', '.join(PROFILE_DTYPES)}")
    if not options.model.is_dir():
        raise ConfigError(f"{options.model} is no folder: a policy folder holds config.json and model.safetensors")
    model = describe_model(options.model)
    known = make_pairs(options.dtype, options.threads, with_vllm=options.terms.vllm_python is not None)
    pairs = select_pairs(known, options.pairs)
    accepted_makers = [pair.maker for pair in pairs if pair.is_accepted]
    if not accepted_makers:
        raise ConfigError("no accepted pair is among --pairs: limits are taken from accepted ones")
    require_rows(sum(count_rollouts(maker, options.rollouts) for maker in accepted_makers), len(accepted_makers))
    if options.terms.vllm_python is None:
        tell("pairs with vllm are left out: --vllm-python names no interpreter")
    honest = measure_pairs(options.model, pairs, _make_requests(options, options.rollouts, 0), options.terms, tell)
    accepted = {pair.name: honest[pair.name] for pair in pairs if pair.is_accepted}
    others = _measure_alternatives(options, known[0], tell)
    choice = choose_profile(
        options.name, options.dtype, accepted, others, topk=options.terms.topk, chunk=options.terms.chunk
    )
    for name in list_unfound(choice.alternatives):
        tell(f"{name} is not found: neither by single checks nor within {FIND_ROLLOUTS} audited rollouts")
    title = f"{options.name}: {model['family']}, {model['parameters']:,} parameters, {options.dtype}"
    measured = _record(options, model, pairs, honest, choice)
    return Calibration(choice.profile, measured, format_picture(choice.profile, accepted, others, title))


def _make_requests(options: Options, number: int, offset: int) -> list[SampleRequest]:
    return make_requests(
        options.prompts,
        number,
        vocab=int(read_config(options.model)["vocab_size"]),
        folder=options.model,
        args=options.args,
        seed=options.seed + offset,
    )


def _measure_alternatives(options: Options, pair: Pair, tell: Progress) -> dict[str, Observed]:
    """Rollouts of other policies under the honest prefill of the first pair. Their folders are gone afterwards."""
    requests = _make_requests(options, options.alternative_rollouts, _ALTERNATIVES_SEED)
    names = [name for name in options.prompts if name in environments.ENTRIES]
    environment = None
    if names:
        spec = Environment(names[0], options.args, environments.content_hash(names[0], options.args))
        environment = environments.load(spec, [options.model])
    results = {}
    with tempfile.TemporaryDirectory() as work:
        chosen = list(options.alternatives) or None
        made = make_alternatives(options.model, Path(work), chosen, options.seed, environment=environment)
        for name, folder in made:
            rollouts = make_rollouts(folder, pair.maker, requests, options.terms)
            found = score_rollouts(options.model, pair.prefill, requests, rollouts, options.terms)
            tell(f"{name}: differing share {found.shares.mean():.6f}, {found.misses.sum()} misses")
            results[name] = found
    return results


def describe_model(folder: Path) -> dict[str, Any]:
    """What a policy is, for the record. Raises `Fault` when it is none."""
    config = read_config(folder)
    return {
        "policy": hash_folder(folder, links=LINKS).hex(),
        "family": config["model_type"],
        "parameters": sum(tensor.numel() for _, tensor in read_tensors(folder)),
        "hidden": config.get("hidden_size", 0),
        "layers": config.get("num_hidden_layers", 0),
        "vocab": config.get("vocab_size", 0),
    }


def _record(
    options: Options, model: dict[str, Any], pairs: list[Pair], honest: Mapping[str, Observed], choice: Choice
) -> dict[str, Any]:
    accepted = [honest[pair.name] for pair in pairs if pair.is_accepted]
    rows = [
        {
            "name": pair.name,
            "accepted": pair.is_accepted,
            "made": " ".join(str(value) for value in pair.maker[:-1]),
            "prefill": " ".join(str(value) for value in pair.prefill),
            **summarise_all(honest[pair.name]),
        }
        for pair in pairs
    ]
    return {
        "command": options.command,
        "rows": sum(one.num_rollouts for one in accepted),
        "tokens": sum(len(one.gaps) for one in accepted),
        "prompts": list(options.prompts),
        "temperature": options.terms.temperature,
        "max_tokens": options.terms.max_tokens,
        "seed": options.seed,
        "model": model,
        "machine": _describe_machine(),
        "versions": {
            "protocol": str(PROTOCOL_VERSION),
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in _PACKAGES},
        },
        "chosen": {
            "margin": MARGIN,
            "null_ratio": NULL_RATIO,
            "share_bet_for": choice.share_bet.alternative,
            "ties_bet_for": choice.ties_bet.alternative,
            "not_found": list(list_unfound(choice.alternatives)),
        },
        "pairs": rows,
        "alternatives": choice.alternatives,
    }


def _describe_machine() -> dict[str, Any]:
    """The kind of machine; nothing that names this one."""
    return {
        "system": sys.platform,
        "processor": platform.machine(),
        "instructions": str(torch.backends.cpu.get_cpu_capability()),
        "cores": os.cpu_count() or 0,
    }
