"""Who is where: participants' signed node records, read from the ledger and nowhere else.

The ledger is the bootstrap, so a peer cannot be shown a made-up network; a record that is malformed, not signed by the
registered network key, or made for another account counts as no record.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

from protocol.errors import Reject
from protocol.ledger.events import Role
from protocol.messages import NodeRecord, open_record
from protocol.ports import Ledger

log = logging.getLogger("troth.directory")


class Contact(NamedTuple):
    """A participant with a valid record."""

    account: bytes
    role: Role
    network_key: bytes
    curve_public: bytes
    endpoint: str


class Directory:
    """Contacts as of the ledger replica's last block. Records are parsed once each."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._parsed: dict[tuple[bytes, bytes], NodeRecord | None] = {}

    def _record(self, account: bytes, network_key: bytes, data: bytes) -> NodeRecord | None:
        key = (account, data)
        if key not in self._parsed:
            try:
                self._parsed[key] = open_record(
                    data,
                    account=account,
                    network_key=network_key,
                    chain_id=self._ledger.chain_id,
                    ledger=self._ledger.address,
                )
            except Reject as error:
                log.warning("record of 0x%s is not usable: %s", account.hex(), error)
                self._parsed[key] = None
        return self._parsed[key]

    def contacts(self, *roles: Role) -> list[Contact]:
        """Everybody with one of `roles` (all roles when none is given) except ourselves."""
        found = []
        for p in self._ledger.state.participants.values():
            if p.account == self._ledger.account or (roles and p.role not in roles):
                continue
            record = self._record(p.account, p.network_key, p.record)
            if record is not None:
                found.append(Contact(p.account, p.role, p.network_key, record.curve_public, record.endpoint))
        return found

    def servers(self, *roles: Role) -> list[Contact]:
        """Contacts that serve at an endpoint."""
        return [contact for contact in self.contacts(*roles) if contact.endpoint]

    def find_curve(self, curve_public: bytes) -> list[Contact]:
        """Everybody whose record names a CURVE key. Records are not proof of owning it, so anyone can name another's key:
        whoever acts on this looks for the contact that the message itself belongs to."""
        return [contact for contact in self.contacts() if contact.curve_public == curve_public]
