"""The keystore: round trip, file mode, refusals, and that no secret leaks into text."""

import json
import os
import stat

import pytest
import zmq
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from eth_account import Account

from protocol.codec import Domain
from protocol.errors import ConfigError
from protocol.identity import verify_signature
from troth import keystore

FAST = 2**10
MASTER = bytes(range(32))
PINNED_ACCOUNT = "94b858549de7a2a897ddfe7546c956633ce92c8a"
PINNED_NETWORK = "26d36f5f3ae74d163ba11ff7f7cbea6c1952cd448ed4ed354bbb7a55c25cd633"
PINNED_CURVE = "a9330920b4e5d008510531f4aac8f3ae7cc4f1c48fd2e994d3b8703ed796ca7c"


def test_load_returns_the_created_keys(tmp_path):
    created = keystore.create(tmp_path / "k.json", "pass", scrypt_n=FAST)
    loaded = keystore.load(tmp_path / "k.json", "pass")
    assert loaded.ledger_secret == created.ledger_secret
    assert loaded.network.public == created.network.public
    assert loaded.curve_secret == created.curve_secret
    assert Account.from_key(loaded.ledger_secret).address.lower() == "0x" + loaded.account.hex()
    domain = Domain(1, bytes(20), bytes(32), "T")
    verify_signature(loaded.network.public, domain, b"body", created.network.sign(domain, b"body"))


def test_keys_are_pinned_to_the_master_secret():
    # A change of derivation would orphan everybody's stake: these come from MASTER = 00 01 .. 1f.
    keys = keystore.Keys(MASTER)
    assert keys.account.hex() == PINNED_ACCOUNT
    assert keys.network.public.hex() == PINNED_NETWORK
    assert keys.curve_public.hex() == PINNED_CURVE


def test_curve_keys_are_what_zeromq_and_x25519_derive():
    keys = keystore.Keys(MASTER)
    assert zmq.curve_public(keys.curve_secret_z85) == keys.curve_public_z85
    other = X25519PrivateKey.generate()
    mine = X25519PrivateKey.from_private_bytes(keys.curve_secret).exchange(other.public_key())
    assert mine == other.exchange(X25519PublicKey.from_public_bytes(keys.curve_public))


def test_file_is_readable_by_its_owner_only_even_with_an_open_umask(tmp_path):
    old = os.umask(0)
    try:
        keystore.create(tmp_path / "k.json", "pass", scrypt_n=FAST)
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "k.json").stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["k.json"]


def test_existing_file_is_never_overwritten(tmp_path):
    keystore.create(tmp_path / "k.json", "pass", scrypt_n=FAST)
    before = (tmp_path / "k.json").read_bytes()
    with pytest.raises(ConfigError, match="never overwritten"):
        keystore.create(tmp_path / "k.json", "other", scrypt_n=FAST)
    assert (tmp_path / "k.json").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["k.json"]


def test_wrong_password(tmp_path):
    keystore.create(tmp_path / "k.json", "pass", scrypt_n=FAST)
    with pytest.raises(ConfigError, match="wrong password"):
        keystore.load(tmp_path / "k.json", "pas")


def test_secrets_are_in_no_text(tmp_path):
    keys = keystore.create(tmp_path / "k.json", "pass", scrypt_n=FAST, master=MASTER)
    with pytest.raises(ConfigError) as caught:
        keystore.load(tmp_path / "k.json", "wrong-password")
    shown = repr(keys) + str(keys) + str(caught.value) + (tmp_path / "k.json").read_text()
    for secret in (MASTER, keys.ledger_secret, keys.curve_secret):
        assert secret.hex() not in shown
    assert "wrong-password" not in shown
    assert keys.curve_secret_z85.decode() not in shown


def test_file_that_others_can_read_is_refused(tmp_path):
    keystore.create(tmp_path / "k.json", "pass", scrypt_n=FAST)
    (tmp_path / "k.json").chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        keystore.load(tmp_path / "k.json", "pass")


def test_edited_address_is_refused(tmp_path):
    path = tmp_path / "k.json"
    keystore.create(path, "pass", scrypt_n=FAST)
    shown = json.loads(path.read_text())
    shown["address"] = "00" * 20
    path.write_text(json.dumps(shown))
    with pytest.raises(ConfigError, match="another key"):
        keystore.load(path, "pass")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"{}",
        b"\xff\xfe",
        b"[" * 10_000,
        b'{"crypto": 3}',
        b'{"crypto": {"kdf": "scrypt", "kdfparams": {"n": 1073741824, "r": 8, "p": 1}}, "version": 3}',
        b'{"crypto": {"kdf": "scrypt", "kdfparams": {"n": 1024, "r": 8, "p": 1}}, "version": 3}',
        b'{"crypto": {"kdf": "pbkdf2", "kdfparams": {"c": 10}}, "version": 3}',
        b" " * 20_000,
    ],
)
def test_files_that_are_no_keystores_are_refused_with_their_path(tmp_path, content):
    path = tmp_path / "k.json"
    path.touch(mode=0o600)
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"k\.json"):
        keystore.load(path, "pass")


def test_missing_file(tmp_path):
    with pytest.raises(ConfigError, match="no keystore"):
        keystore.load(tmp_path / "k.json", "pass")


@pytest.mark.parametrize("scrypt_n", [2**9, 2**10 + 1, 2**21])
def test_work_factor_is_bounded(tmp_path, scrypt_n):
    with pytest.raises(ConfigError, match="scrypt_n"):
        keystore.create(tmp_path / "k.json", "pass", scrypt_n=scrypt_n)


def test_empty_password_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="empty"):
        keystore.create(tmp_path / "k.json", "", scrypt_n=FAST)


def test_password_comes_from_environment_then_file_then_nowhere(tmp_path, monkeypatch):
    (tmp_path / "password").write_text("from file\nsecond line\n")
    monkeypatch.setenv("TROTH_PASSWORD_FILE", str(tmp_path / "password"))
    monkeypatch.delenv("TROTH_PASSWORD", raising=False)
    assert keystore.read_password() == "from file"
    monkeypatch.setenv("TROTH_PASSWORD", "direct")
    assert keystore.read_password() == "direct"
    monkeypatch.delenv("TROTH_PASSWORD")
    monkeypatch.setenv("TROTH_PASSWORD_FILE", str(tmp_path / "absent"))
    with pytest.raises(ConfigError, match="absent"):
        keystore.read_password()
    monkeypatch.delenv("TROTH_PASSWORD_FILE")
    monkeypatch.setattr("sys.stdin", open(os.devnull))  # noqa: PTH123, SIM115
    with pytest.raises(ConfigError, match="TROTH_PASSWORD"):
        keystore.read_password()
