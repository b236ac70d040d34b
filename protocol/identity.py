"""Network identities: Ed25519 keys and the signatures made with them.

A participant has a ledger account (an EVM address) and one network key. Both, and the CURVE transport key, are derived
from one 32-byte master secret, so a keystore holds a single secret. Verification raises; it never returns a boolean.
"""

from __future__ import annotations

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from protocol.codec import Domain, signing_bytes
from protocol.errors import Reason, Reject

#: Order of the secp256k1 group; a ledger key is a number below it.
SECP256K1_ORDER = 0xFFFFFFFF_FFFFFFFF_FFFFFFFF_FFFFFFFE_BAAEDCE6_AF48A03B_BFD25E8C_D0364141


def derive_secret(master: bytes, purpose: str) -> bytes:
    """Derive a 32-byte secret from the master secret (HKDF-SHA256, purpose as info)."""
    return HKDF(SHA256(), 32, salt=b"troth/keys/1", info=purpose.encode()).derive(master)


def derive_ledger_secret(master: bytes) -> bytes:
    """The secp256k1 secret of the ledger account."""
    wide = HKDF(SHA256(), 48, salt=b"troth/keys/1", info=b"ledger").derive(master)
    return (int.from_bytes(wide, "big") % (SECP256K1_ORDER - 1) + 1).to_bytes(32, "big")


class NetworkKey:
    """An Ed25519 signing key."""

    def __init__(self, secret: bytes) -> None:
        self._key = Ed25519PrivateKey.from_private_bytes(secret)
        #: The 32-byte public key, which names this participant on the network.
        self.public: bytes = self._key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)

    @classmethod
    def from_master(cls, master: bytes) -> NetworkKey:
        """Derive the network key of a master secret."""
        return cls(derive_secret(master, "network"))

    def sign(self, domain: Domain, body: bytes) -> bytes:
        """Return the 64-byte signature of `body` under `domain`."""
        return self._key.sign(signing_bytes(domain, body))


def verify_signature(public: bytes, domain: Domain, body: bytes, signature: bytes) -> None:
    """Check an Ed25519 signature.

    Raises:
        Reject: `SIGNATURE` when the key or the signature is not valid for these bytes under this domain.
    """
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, signing_bytes(domain, body))
    except (InvalidSignature, ValueError):
        raise Reject(
            Reason.SIGNATURE,
            f"signature of {domain.kind} does not verify",
            observed=f"key {public.hex()[:16]}, chain {domain.chain_id}, task {domain.task.hex()[:16]}",
            todo="sign the canonical bytes under the same chain, ledger, task and message type",
        ) from None
