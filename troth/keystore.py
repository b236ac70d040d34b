"""The keystore: one encrypted 32-byte master secret per participant, from which all keys are derived.

The file is an Ethereum keyfile (Web3 Secret Storage, version 3: scrypt, AES-128-CTR, MAC) around the master secret. It is
not the ledger key itself, so other wallets must not import it. Secrets never appear in a message, a repr or an argument.
Neighbours: `protocol.identity` derives, `troth.cli` asks for passwords.
"""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import secrets
import sys
from pathlib import Path
from typing import Any

import zmq
import zmq.utils.z85
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from eth_keyfile.keyfile import create_keyfile_json, decode_keyfile_json

from contracts.signing import Account
from protocol.errors import ConfigError
from protocol.identity import NetworkKey, derive_ledger_secret, derive_secret

KEYSTORE_BYTES_MAX = 16 * 1024

#: scrypt work factor. A file may ask for at most the last: a hostile one could demand all memory.
SCRYPT_N = 2**15
SCRYPT_N_MIN = 2**10
SCRYPT_N_MAX = 2**20

PASSWORD_VARIABLE = "TROTH_PASSWORD"
PASSWORD_FILE_VARIABLE = "TROTH_PASSWORD_FILE"


class Keys:
    """A participant's keys, derived from its master secret.

    Attributes:
        network: Ed25519 key that signs messages.
        account: ledger account, 20 bytes.
        ledger_secret: secp256k1 secret of the account, 32 bytes.
        curve_secret / curve_public: X25519 transport key, 32 bytes each.
        curve_secret_z85 / curve_public_z85: the same as ZeroMQ takes them, 40 characters.
    """

    def __init__(self, master: bytes) -> None:
        self.network = NetworkKey.from_master(master)
        self.ledger_secret = derive_ledger_secret(master)
        self.account = bytes.fromhex(Account.from_key(self.ledger_secret).address[2:])
        self.curve_secret = derive_secret(master, "curve")
        public = X25519PrivateKey.from_private_bytes(self.curve_secret).public_key()
        self.curve_public = public.public_bytes(Encoding.Raw, PublicFormat.Raw)
        self.curve_secret_z85 = zmq.utils.z85.encode(self.curve_secret)
        self.curve_public_z85 = zmq.utils.z85.encode(self.curve_public)

    def __repr__(self) -> str:
        return f"Keys(account=0x{self.account.hex()}, network={self.network.public.hex()})"


def create(path: Path, password: str, *, scrypt_n: int = SCRYPT_N, master: bytes | None = None) -> Keys:
    """Make a new keystore file of mode 0600 and return its keys.

    Args:
        scrypt_n: work factor, a power of two; lower than the default only where the money is worthless.
        master: the secret to store, 32 bytes; None draws a new one.

    Raises:
        ConfigError: when the file exists (it may hold the only copy of a key), or cannot be written.
    """
    if not password:
        raise ConfigError("an empty password does not protect a key: choose one")
    if not SCRYPT_N_MIN <= scrypt_n <= SCRYPT_N_MAX or scrypt_n & (scrypt_n - 1):
        raise ConfigError(f"scrypt_n is {scrypt_n}, expected a power of two from {SCRYPT_N_MIN} to {SCRYPT_N_MAX}")
    secret = secrets.token_bytes(32) if master is None else master
    keys = Keys(secret)
    shown = create_keyfile_json(secret, password.encode(), kdf="scrypt", iterations=scrypt_n)
    # The derived address of a keyfile is that of the ledger account, so a person can tell files apart.
    shown["address"] = keys.account.hex()
    _write_new(path, json.dumps(shown, indent=1).encode() + b"\n")
    return keys


def _write_new(path: Path, content: bytes) -> None:
    """Write a file that must not exist, whole or not at all, readable by its owner only."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"directory {path.parent} of the keystore cannot be made: {error.strerror}") from None
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            # link, unlike rename, fails when the name is taken: two creators cannot overwrite each other.
            os.link(temporary, path)
        finally:
            with contextlib.suppress(FileNotFoundError):
                temporary.unlink()
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
    except FileExistsError:
        raise ConfigError(f"keystore {path} exists and is never overwritten: choose another path") from None
    except OSError as error:
        raise ConfigError(f"keystore {path} cannot be written: {error.strerror}") from None


def load(path: Path, password: str) -> Keys:
    """Decrypt a keystore.

    Raises:
        ConfigError: when the file is missing, not a keystore, readable by others, or the password is wrong.
    """
    shown = _read(path)
    try:
        secret = decode_keyfile_json(shown, password.encode())
    except (ValueError, KeyError, TypeError, AttributeError, NotImplementedError, OverflowError) as error:
        if "MAC mismatch" in str(error):
            raise ConfigError(f"wrong password for keystore {path}") from None
        raise ConfigError(f"{path} is not a keystore of version 3: {type(error).__name__}") from None
    if len(secret) != 32:
        raise ConfigError(f"{path} holds a secret of {len(secret)} bytes, expected 32")
    keys = Keys(secret)
    if shown.get("address") not in (None, keys.account.hex()):
        raise ConfigError(f"{path} holds another key than its address says: was it edited, or made by another program?")
    return keys


def _read(path: Path) -> dict[str, Any]:
    try:
        status = path.stat()
        if status.st_mode & 0o077:
            raise ConfigError(f"keystore {path} can be read by others: run `chmod 600 {path}`")
        if status.st_size > KEYSTORE_BYTES_MAX:
            raise ConfigError(f"{path} has {status.st_size} bytes, a keystore has at most {KEYSTORE_BYTES_MAX}")
        shown = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ConfigError(f"no keystore at {path}: create one with `troth keys new`") from None
    except OSError as error:
        raise ConfigError(f"keystore {path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise ConfigError(f"{path} is not a keystore: it is not JSON") from None
    crypto = shown.get("crypto") if isinstance(shown, dict) else None
    parameters = crypto.get("kdfparams") if isinstance(crypto, dict) and crypto.get("kdf") == "scrypt" else None
    bounded = isinstance(parameters, dict) and all(
        isinstance(parameters.get(name), int) and 0 < parameters[name] <= limit
        for name, limit in (("n", SCRYPT_N_MAX), ("r", 8), ("p", 8))
    )
    if not bounded:
        raise ConfigError(f"{path} is not a keystore of ours: expected scrypt with n up to {SCRYPT_N_MAX}")
    return shown  # type: ignore[no-any-return]


def read_password(*, confirm: bool = False) -> str:
    """The keystore password: from TROTH_PASSWORD, the file TROTH_PASSWORD_FILE names, or a prompt on a terminal.

    Args:
        confirm: ask twice, for a new keystore.

    Raises:
        ConfigError: when there is none of these, or the two answers differ.
    """
    if (direct := os.environ.get(PASSWORD_VARIABLE)) is not None:
        return direct
    if (name := os.environ.get(PASSWORD_FILE_VARIABLE)) is not None:
        try:
            with Path(name).open() as file:
                return file.readline(4096).rstrip("\r\n")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{PASSWORD_FILE_VARIABLE} names {name}, which cannot be read: {error}") from None
    if not sys.stdin.isatty():
        raise ConfigError(
            f"no password for the keystore: set {PASSWORD_VARIABLE} or {PASSWORD_FILE_VARIABLE}, or use a terminal"
        )
    password = getpass.getpass("keystore password: ")
    if confirm and getpass.getpass("again: ") != password:
        raise ConfigError("the two passwords differ: try again")
    return password
