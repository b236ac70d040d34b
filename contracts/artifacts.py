"""The compiled contracts as committed, and the order in which they are deployed.

`contracts/tools/build.js` writes `contracts/artifacts/*.json` from `contracts/src/`, byte for byte the same on every
machine; nothing at run time needs node or a compiler. Neighbours: `contracts.deploy` deploys them, `contracts.abi` encodes
calls and decodes logs by their ABI.
"""

from __future__ import annotations

import json
import re
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

from protocol.errors import ConfigError

#: Contracts in the order of their creation by one account. Three constructors name contracts that come later, by the
#: address CREATE will give them: `StakeRegistry(token, unbondBlocks, court)`, `Court(registry, book)`, and
#: `TaskBook(token, registry, beacons, court)`, which refuses to exist when any of these addresses is not what it claims.
#: `Canaries(registry, book)` reads the others and is named by none.
#: An existing ERC-20 takes the place of `DevToken` on a real chain; it must neither charge a fee nor rebase.
DEPLOY_ORDER = ("DevToken", "Beacons", "StakeRegistry", "Court", "TaskBook", "Canaries")

_NAME = re.compile(r"(test/)?[A-Za-z]\w*")


class Artifact(NamedTuple):
    """One compiled contract.

    Attributes:
        name: of the contract.
        abi: the JSON ABI; errors that bubble up from another contract are in that contract's ABI.
        bytecode: creation code, before constructor arguments.
        deployed_bytecode: run-time code with zeros where immutables go.
    """

    name: str
    abi: list[dict[str, Any]]
    bytecode: bytes
    deployed_bytecode: bytes


@cache
def load_artifact(name: str) -> Artifact:
    """Return the artifact of a contract; those under `test/` are hostile tokens and callers, in a source tree only.

    Raises:
        ConfigError: when there is no such artifact in this installation.
    """
    path = resources.files("contracts") / "artifacts" / f"{name}.json"
    if not _NAME.fullmatch(name) or not path.is_file():
        raise ConfigError(f"no contract artifact named {name!r}: run `make contracts`, or reinstall troth")
    content = json.loads(path.read_text())
    return Artifact(
        name=content["contractName"],
        abi=content["abi"],
        bytecode=bytes.fromhex(content["bytecode"].removeprefix("0x")),
        deployed_bytecode=bytes.fromhex(content["deployedBytecode"].removeprefix("0x")),
    )
