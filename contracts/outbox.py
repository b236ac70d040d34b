"""The durable outbox: what this account wants from the ledger, and the exact bytes it has signed for it.

An intent walks queued -> signed -> sent -> included -> final (or reverted). Guarantees, across `kill -9` at any point:
an intent is on disk before `submit` returns; a transaction's bytes are on disk before they are sent; two intents never
share a nonce; a second transaction for one intent exists only under the same nonce (a replacement), or after the first
can no longer be mined. SQLite in WAL mode with synchronous=FULL, held by one process. No network here: `contracts.sender`
moves intents along.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from protocol.errors import ConfigError, Fault

QUEUED, SIGNED, SENT, INCLUDED, FINAL, REVERTED = "queued", "signed", "sent", "included", "final", "reverted"
ACTIVE = (QUEUED, SIGNED, SENT, INCLUDED)

INTENT_CHARS_MAX = 256

_DAMAGED = "restore the file or move it away, and wait until nothing of this account is pending on the chain"

_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS intents (
    seq INTEGER PRIMARY KEY,
    intent TEXT NOT NULL UNIQUE,
    target BLOB NOT NULL,
    calldata BLOB NOT NULL,
    spend TEXT NOT NULL,
    state TEXT NOT NULL,
    nonce INTEGER UNIQUE,
    block_number INTEGER NOT NULL DEFAULT 0,
    block_hash BLOB,
    error TEXT NOT NULL DEFAULT ''
) STRICT;
CREATE INDEX IF NOT EXISTS by_state ON intents (state);
CREATE TABLE IF NOT EXISTS attempts (
    hash BLOB PRIMARY KEY,
    seq INTEGER NOT NULL REFERENCES intents (seq),
    nonce INTEGER NOT NULL,
    raw BLOB NOT NULL,
    gas INTEGER NOT NULL,
    fee_cap INTEGER NOT NULL,
    tip_cap INTEGER NOT NULL,
    signed_at INTEGER NOT NULL
) STRICT;
CREATE INDEX IF NOT EXISTS by_intent ON attempts (seq);
"""


class Intent(NamedTuple):
    """One row of the outbox.

    Attributes:
        target: contract address, 20 bytes.
        spend: token units that the target will take from us, and for which it needs an allowance; 0 for most calls.
        nonce: of the current attempts; None while queued.
        block_number, block_hash: of inclusion.
        error: why it was reverted.
    """

    seq: int
    intent: str
    target: bytes
    calldata: bytes
    spend: int
    state: str
    nonce: int | None
    block_number: int
    block_hash: bytes | None
    error: str


class Attempt(NamedTuple):
    """A signed transaction for an intent; fees are wei per gas."""

    hash: bytes
    seq: int
    nonce: int
    raw: bytes
    gas: int
    fee_cap: int
    tip_cap: int
    signed_at: int


class Outbox:
    """The outbox of one account on one chain.

    Args:
        path: database file; created with mode 0600.

    Raises:
        ConfigError: when another process holds it, or it is not an outbox.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        try:
            self._db = sqlite3.connect(path, timeout=0.5, isolation_level=None)
        except sqlite3.Error as error:
            raise ConfigError(f"outbox {path} cannot be opened: {error}") from None
        try:
            # Exclusive: two processes that allocate nonces from one key would overwrite each other's transactions.
            self._db.execute("PRAGMA locking_mode=EXCLUSIVE")
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
            self._db.execute("PRAGMA foreign_keys=ON")
            self._db.executescript(f"BEGIN EXCLUSIVE;{_SCHEMA}COMMIT;")
        except sqlite3.OperationalError as error:
            self._db.close()
            if "locked" in str(error):
                raise ConfigError(
                    f"outbox {path} is in use by another process of this account: stop it, or give this one its own directory"
                ) from None
            raise ConfigError(f"outbox {path} cannot be opened: {error}") from None
        except (sqlite3.DatabaseError, UnicodeDecodeError) as error:  # it quotes the damage, which need not be text
            self._db.close()
            raise ConfigError(f"outbox {path} is not a database: {error}; move it away") from None

    def close(self) -> None:
        """Release the file."""
        self._db.close()

    @contextmanager
    def _write(self) -> Iterator[sqlite3.Connection]:
        """One durable transaction. A full disk is our fault and changes nothing."""
        try:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise
        except sqlite3.IntegrityError:
            raise
        except (sqlite3.Error, UnicodeDecodeError) as error:
            raise Fault(f"outbox {self._path} cannot be written: {error}; nothing was sent for it") from None

    def bind(self, **facts: str) -> None:
        """Tie the outbox to an account, chain and genesis, or check that it is tied to these.

        Raises:
            ConfigError: naming both values; its nonces would be wrong elsewhere.
        """
        with self._write() as db:
            for key, value in facts.items():
                row = db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
                if row is None:
                    db.execute("INSERT INTO meta VALUES (?, ?)", (key, value))
                elif row[0] != value:
                    raise ConfigError(
                        f"outbox {self._path} belongs to {key} {row[0]}, this is {key} {value}: use another directory, "
                        "or move the file away when that chain is gone"
                    )

    # -- intents

    def submit(self, intent: str, target: bytes, calldata: bytes, spend: int = 0) -> bool:
        """Make an intent durable. Returns False, and changes nothing, when one of this name exists."""
        if not 0 < len(intent) <= INTENT_CHARS_MAX:
            raise ConfigError(f"intent name has {len(intent)} characters, expected 1 to {INTENT_CHARS_MAX}")
        if self.get(intent) is not None:
            return False
        with self._write() as db:
            db.execute(
                "INSERT INTO intents (intent, target, calldata, spend, state) VALUES (?, ?, ?, ?, ?)",
                (intent, target, calldata, str(spend), QUEUED),
            )
        return True

    def get(self, intent: str) -> Intent | None:
        """The intent of this name."""
        rows = self._select("WHERE intent = ?", (intent,))
        return rows[0] if rows else None

    def active(self) -> list[Intent]:
        """Everything not yet final or reverted, oldest first."""
        return self._select("WHERE state IN (?, ?, ?, ?) ORDER BY seq", ACTIVE)

    def _select(self, where: str, values: tuple[object, ...]) -> list[Intent]:
        rows = self._read(
            "SELECT seq, intent, target, calldata, spend, state, nonce, block_number, block_hash, error FROM intents "
            + where,
            values,
        )
        try:
            return [Intent._make((*row[:4], int(row[4]), *row[5:])) for row in rows]
        except ValueError:
            raise Fault(f"outbox {self._path} is damaged: {_DAMAGED}") from None

    def _read(self, query: str, values: tuple[object, ...] = ()) -> list[tuple[Any, ...]]:
        """All rows of a query. Raises `Fault` when the file is damaged: a guess at nonces could spend twice."""
        try:
            return self._db.execute(query, values).fetchall()
        except (sqlite3.Error, UnicodeDecodeError) as error:
            raise Fault(f"outbox {self._path} cannot be read: {error}; {_DAMAGED}") from None

    # -- transactions

    def next_nonce(self, chain_pending: int) -> int:
        """The nonce for a new transaction: after everything we signed and everything the node has seen."""
        [(highest,)] = self._read("SELECT max(nonce) FROM intents")
        return max(chain_pending, -1 if highest is None else highest + 1)

    def attempts(self, seq: int) -> list[Attempt]:
        """All transactions ever signed for an intent, oldest first."""
        rows = self._read(
            "SELECT hash, seq, nonce, raw, gas, fee_cap, tip_cap, signed_at FROM attempts WHERE seq = ? ORDER BY rowid",
            (seq,),
        )
        return [Attempt(*row) for row in rows]

    def record_signed(
        self, seq: int, nonce: int, tx_hash: bytes, raw: bytes, *, gas: int, fee_cap: int, tip_cap: int
    ) -> None:
        """Store a signed transaction before anybody sees it; also for a replacement under the same nonce."""
        with self._write() as db:
            db.execute(
                "INSERT INTO attempts VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (tx_hash, seq, nonce, raw, gas, fee_cap, tip_cap, int(time.time())),
            )
            self._update(db, seq, (QUEUED, SIGNED, SENT), state=SIGNED, nonce=nonce)

    def record_sent(self, seq: int) -> None:
        """The node has, or has had, the newest transaction."""
        with self._write() as db:
            self._update(db, seq, (SIGNED, SENT), state=SENT)

    def record_included(self, seq: int, block_number: int, block_hash: bytes) -> None:
        """One of the transactions is in a block that may still be orphaned."""
        with self._write() as db:
            self._update(
                db, seq, (SIGNED, SENT, INCLUDED), state=INCLUDED, block_number=block_number, block_hash=block_hash
            )

    def record_orphaned(self, seq: int) -> None:
        """The block of inclusion is gone: the same bytes are sent again."""
        with self._write() as db:
            self._update(db, seq, (INCLUDED,), state=SIGNED, block_number=0, block_hash=None)

    def record_lost(self, seq: int) -> None:
        """The nonce went to a transaction that is not ours, for good: the intent is to be signed afresh."""
        with self._write() as db:
            self._update(db, seq, (SIGNED, SENT, INCLUDED), state=QUEUED, nonce=None, block_number=0, block_hash=None)

    def record_final(self, seq: int) -> None:
        """The inclusion is as deep as the finality depth asks."""
        with self._write() as db:
            self._update(db, seq, (INCLUDED,), state=FINAL)

    def record_reverted(self, seq: int, error: str) -> None:
        """The contract refused it: in a simulation, when it has no nonce, or for good in a block."""
        with self._write() as db:
            self._update(db, seq, (QUEUED, INCLUDED), state=REVERTED, error=error[:1024])

    def _update(self, db: sqlite3.Connection, seq: int, allowed: tuple[str, ...], **values: object) -> None:
        columns = ", ".join(f"{column} = ?" for column in values)
        marks = ", ".join("?" for _ in allowed)
        cursor = db.execute(
            f"UPDATE intents SET {columns} WHERE seq = ? AND state IN ({marks})", (*values.values(), seq, *allowed)
        )
        if cursor.rowcount != 1:
            raise Fault(f"outbox row {seq} is not in state {' or '.join(allowed)}: cannot become {values.get('state')}")
