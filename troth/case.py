"""A case: everything that a verdict on one rollout follows from, in one folder that needs no network.

    case.bin     which rollout, and the SHA-256 of everything else (`Case`)
    facts.bin    the ledger's events (troth.facts), the committee's revealed rows among them
    bundle.bin   the node's sealed bundle, as a relay served it; absent where none has it
    policy/      the round's policy, or a link to it; base/ version 0, where the policy or the environment needs it

A stranger may have made it, so nothing is used before it was bounded and checked: digests by case.bin, the bundle's signature
by the key that the facts register, policies by the content hashes that the facts record, file names by what a policy may hold.
What a case cannot prove alone is that its facts are those of a real ledger: `troth replay --case DIR --compare` asks one.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
from pathlib import Path
from typing import NamedTuple

from models.adapter import BASE, is_adapter, link_base
from protocol.codec import PROTOCOL_VERSION, Message, decode, encode
from protocol.errors import ConfigError, Fault, Reason, Reject
from protocol.messages import compute_bundle_bytes_max
from protocol.rounds import get_round_policy
from troth.facts import FACTS_BYTES_MAX, ROUNDS_MAX, Replica, open_facts
from troth.forms import validate_content
from troth.network import LINKS, POLICY_SUFFIXES, verify_policy
from verifier.explain import Rollout

CASE, FACTS, BUNDLE, POLICY = "case.bin", "facts.bin", "bundle.bin", "policy"
CASE_BYTES_MAX = 1024
#: Files and bytes of a policy in a case.
FILES_MAX = 256
POLICY_BYTES_MAX = 1 << 40


class Case(Message, frozen=True):
    """What a case is about. Made by anybody, read by anybody, never stale.

    Attributes:
        facts / bundle: SHA-256 of the files; `bundle` is empty where there is none.
        policy: content hash of the round's policy.
    """

    version: int
    round: int
    account: bytes
    slot: int
    sample: int
    facts: bytes
    bundle: bytes
    policy: bytes


class OpenCase(NamedTuple):
    """A case that was checked.

    Attributes:
        facts: the bytes of `replica`, to compare.
        bundle: None where no relay had one.
        policy: folder of the round's policy, ready to be loaded.
        base: folder of version 0; None where the case has none.
    """

    rollout: Rollout
    replica: Replica
    facts: bytes
    bundle: bytes | None
    policy: Path
    base: Path | None


def write_case(
    directory: Path,
    rollout: Rollout,
    *,
    facts: bytes,
    bundle: bytes | None,
    policy: Path,
    policy_hash: bytes,
    base: Path | None,
    link: bool,
) -> None:
    """Write a case into a new folder; it is complete when case.bin is there.

    Args:
        link: link to the policy's folders in place of copying them: for a case that stays on this machine.

    Raises:
        ConfigError: the folder is there already, or cannot be made.
    """
    try:
        directory.mkdir(parents=True)
        (directory / FACTS).write_bytes(facts)
        if bundle is not None:
            (directory / BUNDLE).write_bytes(bundle)
        for name, folder in ((POLICY, policy), (BASE, base)):
            if folder is None:
                continue
            if link:
                (directory / name).symlink_to(folder.resolve(), target_is_directory=True)
            else:
                shutil.copytree(folder, directory / name, ignore=shutil.ignore_patterns(*LINKS))
        digests = (hashlib.sha256(facts).digest(), b"" if bundle is None else hashlib.sha256(bundle).digest())
        case = Case(PROTOCOL_VERSION, *rollout, *digests, policy_hash)
        (directory / CASE).write_bytes(encode(case))
    except FileExistsError:
        raise ConfigError(f"{directory} is there already: name a folder that is not") from None
    except OSError as error:
        raise ConfigError(f"{directory} cannot be written: {error.strerror or error}") from None


def open_case(directory: Path) -> OpenCase:
    """Read and check a case.

    Raises:
        ConfigError: the folder is no case.
        Reject: something in it is not what it says.
    """
    if not (directory / CASE).is_file():
        raise ConfigError(f"{directory} is not a case: it has no {CASE}; make one with `troth replay ROLLOUT --save`")
    case = decode(Case, _read(directory / CASE, CASE_BYTES_MAX), bytes_max=CASE_BYTES_MAX)
    if case.version != PROTOCOL_VERSION:
        raise Reject(Reason.MALFORMED, "case version", observed=case.version, limit=PROTOCOL_VERSION)
    rollout = Rollout(case.round, case.account, case.slot, case.sample)
    if len(case.account) != 20 or not 0 <= case.round <= ROUNDS_MAX or min(case.slot, case.sample) < 0:
        raise Reject(Reason.MALFORMED, "case names no rollout", observed=str(rollout)[:200])
    facts = _read_digested(directory / FACTS, FACTS_BYTES_MAX, case.facts)
    replica = open_facts(facts)
    spec = replica.task.spec
    bundle = None
    if case.bundle:
        bytes_max = compute_bundle_bytes_max(spec, spec.slots_max) + 80
        bundle = _read_digested(directory / BUNDLE, bytes_max, case.bundle)
    record = get_round_policy(replica.task, case.round)
    if record is None or record.policy != case.policy:
        shown = "none" if record is None else record.policy.hex()[:16]
        raise Reject(
            Reason.STALE_POLICY, "case is about another policy than its facts", observed=case.policy.hex(), limit=shown
        )
    base = directory / BASE if (directory / BASE).exists() else None
    if base is not None:
        _verify_folder(base, spec.base_policy)
    return OpenCase(rollout, replica, facts, bundle, _open_policy(directory, replica, case.policy, base), base)


def _open_policy(directory: Path, replica: Replica, policy: bytes, base: Path | None) -> Path:
    """The policy's folder, checked, and where it is an adapter linked to the base of this case and no other."""
    folder, spec = directory / POLICY, replica.task.spec
    if not is_adapter(folder):
        _verify_folder(folder, policy)
        return folder
    if base is None:
        raise Reject(Reason.MALFORMED, f"case has an adapter but not its base policy: {directory / BASE} is missing")
    link = folder / BASE
    if not folder.is_symlink() and not link.is_symlink():
        link_base(folder, base)
    if link.resolve() != base.resolve():
        raise Reject(
            Reason.MALFORMED, f"{link} leads elsewhere than to {base}: remove it", observed=str(link.resolve())
        )
    _verify_folder(folder, policy)
    try:
        validate_content(spec, folder)
    except Fault as error:
        raise Reject(Reason.MALFORMED, f"policy of the case is not an adapter of its task: {error}") from None
    return folder


def _verify_folder(folder: Path, policy: bytes) -> None:
    """Names, number and size of a policy's files, then its content hash."""
    if not folder.is_dir():
        raise Reject(Reason.MALFORMED, f"case has no policy: {folder} is missing")
    names, total = [], 0
    for entry in os.scandir(folder):
        if entry.name in LINKS and entry.is_symlink():
            continue
        names.append(entry.name)
        status = entry.stat(follow_symlinks=False)
        total += status.st_size
        plain = stat.S_ISREG(status.st_mode) and entry.name.endswith(POLICY_SUFFIXES)
        if not plain or len(names) > FILES_MAX or total > POLICY_BYTES_MAX:
            raise Reject(
                Reason.MALFORMED,
                f"{folder} is not a policy's folder",
                observed=f"{entry.name[:64]}, {len(names)} files, {total} bytes",
                limit=f"plain files {', '.join(POLICY_SUFFIXES)}, {FILES_MAX} files, {POLICY_BYTES_MAX} bytes",
            )
    try:
        verify_policy(folder, policy)
    except Fault as error:
        raise Reject(Reason.MALFORMED, f"policy of the case is not the one its facts record: {error}") from None


def _read(path: Path, bytes_max: int) -> bytes:
    """At most `bytes_max` bytes of a plain file."""
    try:
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode) or status.st_size > bytes_max:
            raise Reject(
                Reason.MALFORMED,
                f"{path} is too long or not a plain file",
                observed=f"{status.st_size} bytes",
                limit=f"{bytes_max} bytes",
            )
        with path.open("rb") as file:
            return file.read(bytes_max + 1)
    except OSError as error:
        raise Reject(Reason.MALFORMED, f"{path} cannot be read: {error.strerror}") from None


def _read_digested(path: Path, bytes_max: int, digest: bytes) -> bytes:
    data = _read(path, bytes_max)
    observed = hashlib.sha256(data).digest()
    if observed != digest:
        raise Reject(
            Reason.MALFORMED,
            f"{path.name} is not the one this case was made with: it was changed, or mixed from two",
            observed=observed.hex()[:16],
            limit=digest.hex()[:16],
            todo="get the whole case again from who made it",
        )
    return data
