"""One participant of the mesh: serves its store, fetches policies, leaves and reads letters.

    peer = Peer(store, secret, bind="tcp://0.0.0.0:7000", admit=is_registered, accept=check_letter)
    await peer.start()
    manifest = await peer.fetch_manifest(ledger_hash, addresses, trainer_key, domain)
    await peer.fetch(manifest, addresses)
    folder = store.assemble(manifest, target)

Without `bind` a peer only dials out, which is all a node behind NAT needs. Neighbours: `shardcast.server` answers,
`shardcast.client` asks, `shardcast.fetch` schedules.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Sequence

import zmq

from protocol.codec import Domain
from protocol.errors import ConfigError, Fault, Ignore, Reason, Reject, TrothError
from shardcast import wire
from shardcast.client import Address, Connection, Traffic
from shardcast.content import sha256
from shardcast.fetch import Fetch
from shardcast.mailbox import LETTER_BYTES_MAX
from shardcast.manifest import MANIFEST_BYTES_MAX, Manifest
from shardcast.server import Accept, EventSink, Server
from shardcast.sockets import Admission, curve_public, open_server
from shardcast.store import ShardStore
from shardcast.watch import ConnectionWatch

REQUEST_TIMEOUT_S = 10.0
FETCH_TIMEOUT_S = 60.0
RATE_PER_S = 4_000.0
BURST = 8_000.0
#: Idle connections beyond this are closed.
CONNECTIONS_MAX = 256


class Peer:
    """See the module's text.

    Args:
        store: what to serve and where shards go.
        secret: 32-byte CURVE secret key.
        bind: endpoint to listen on (port 0 or `*` chooses one), or None to only dial out.
        admit: whether a CURVE public key may connect to us.
        accept: decides about letters, may be async; raises Reject or Ignore, whose text goes to the sender. None: no mail.
        on_event: called with an event's name and fields: banned, strike, fetching, fetched, letter, refused, internal_error.
        request_timeout_s: longest wait for one answer.
        rate_per_s, burst: requests we take from one sender.

    Attributes:
        metrics: named counters (bytes_received, bytes_served, bytes_wasted, verify_failures, dropped, strikes ...).
        bytes_from: bytes received by CURVE key of the sender.
        banned: CURVE keys that sent wrong bytes; neither asked nor admitted while this object lives.
    """

    def __init__(
        self,
        store: ShardStore,
        secret: bytes,
        *,
        bind: str | None = None,
        admit: Callable[[bytes], bool] = lambda key: False,
        accept: Accept | None = None,
        on_event: EventSink = lambda name, fields: None,
        request_timeout_s: float = REQUEST_TIMEOUT_S,
        rate_per_s: float = RATE_PER_S,
        burst: float = BURST,
    ) -> None:
        self.store = store
        self.public_key = curve_public(secret)
        self.metrics: Counter[str] = Counter()
        self.bytes_from: defaultdict[bytes, int] = defaultdict(int)
        self.banned: set[bytes] = set()
        self._secret, self._bind = secret, bind
        self._admit, self._accept, self._on_event = admit, accept, on_event
        self._request_timeout_s, self._rate_per_s, self._burst = request_timeout_s, rate_per_s, burst
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._admission: Admission | None = None
        self._server: Server | None = None
        self._watch: ConnectionWatch | None = None
        self._endpoint = ""
        self._connections: dict[Address, Connection] = {}
        self._fetches: set[Fetch] = set()

    async def start(self) -> None:
        """Listen, when `bind` was given. Raises `ConfigError` when the endpoint cannot be used."""
        self._context = zmq.Context()
        if self._bind is None:
            return
        self._admission = Admission(self._context, self._is_admitted, self._on_refused)
        try:
            socket = open_server(self._context, self._secret, self._bind)
        except ConfigError:
            await self.stop()
            raise
        self._endpoint = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._watch = ConnectionWatch(
            socket, on_failed_handshake=self._on_failed_handshake, on_hoarder=self._on_hoarder
        )
        self._server = Server(
            socket,
            self.store,
            watch=self._watch,
            accept=self._accept,
            metrics=self.metrics,
            on_event=self._on_event,
            rate_per_s=self._rate_per_s,
            burst=self._burst,
        )

    async def stop(self) -> None:
        """Close every socket. Fetches under way end with their deadlines; cancel them first."""
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()
        if self._watch is not None:
            await self._watch.close()
        if self._server is not None:
            await self._server.close()
        if self._admission is not None:
            self._admission.close()
        self._server = self._watch = self._admission = None
        if self._context is not None:
            self._context.destroy(linger=0)
            self._context = None

    async def __aenter__(self) -> Peer:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.stop()

    @property
    def address(self) -> Address:
        """Where others reach us. Raises `ConfigError` without `bind`."""
        if not self._endpoint:
            raise ConfigError("this peer does not listen: give it an endpoint to bind")
        return Address(self._endpoint, self.public_key)

    # Policies

    async def fetch(
        self,
        manifest: Manifest,
        addresses: Sequence[Address],
        *,
        timeout_s: float = FETCH_TIMEOUT_S,
        historic: bool = False,
    ) -> None:
        """Fetch the shards of a verified manifest into the store, from all `addresses` at once.

        A fetch of a newer version of the same task stops this one, unless it is `historic` (an older version on purpose).

        Raises:
            Ignore: a newer version is being fetched.
            Fault: nobody delivered anything for `timeout_s` (lists what is missing), or our disk failed.
        """
        if not historic:
            for other in self._rivals(manifest):
                if other.manifest.version > manifest.version:
                    raise Ignore(f"version {other.manifest.version} is being fetched: {manifest.version} is not needed")
                other.supersede(manifest.version)
        fetch = Fetch(
            manifest,
            self.store,
            self._usable(addresses),
            self._connection,
            timeout_s=timeout_s,
            request_timeout_s=self._request_timeout_s,
            metrics=self.metrics,
            on_event=self._on_event,
            on_ban=lambda address: self.banned.add(address.curve_key),
        )
        if not historic:
            self._fetches.add(fetch)
        try:
            await fetch.run()
        finally:
            self._fetches.discard(fetch)

    def _rivals(self, manifest: Manifest) -> list[Fetch]:
        return [
            fetch
            for fetch in self._fetches
            if (fetch.manifest.task, fetch.manifest.key) == (manifest.task, manifest.key)
            and fetch.manifest.version != manifest.version
        ]

    async def fetch_manifest(
        self,
        digest: bytes,
        addresses: Sequence[Address],
        key: bytes,
        domain: Domain,
        *,
        historic: bool = False,
        allowed_suffixes: Sequence[str] | None = None,
    ) -> Manifest:
        """Fetch the manifest whose hash the ledger lists, and accept it. See `ShardStore.admit_manifest`.

        Raises:
            Fault: no peer has it.
            Equivocation, Reject: it breaks a rule although the ledger lists it.
        """
        data = await self.get_blob(digest, addresses, size_max=MANIFEST_BYTES_MAX)
        return self.store.admit_manifest(
            data, key, domain, expected=digest, historic=historic, allowed_suffixes=allowed_suffixes
        )

    # Blobs and letters

    async def get_blob(
        self, digest: bytes, addresses: Sequence[Address], *, size_max: int = wire.BLOB_BYTES_MAX
    ) -> bytes:
        """A blob by its SHA-256. A peer that serves other bytes under it is banned. Raises `Fault` when no peer has it."""

        def verify(data: bytes) -> None:
            if sha256(data) != digest:
                raise Reject(
                    Reason.SHARD, "bytes do not match their hash", observed=sha256(data).hex(), limit=digest.hex()
                )

        return await self._first(wire.SPACE_CONTENT, digest, addresses, verify, size_max)

    async def get(
        self, key: bytes, addresses: Sequence[Address], *, verify: Callable[[bytes], Awaitable[None] | None]
    ) -> bytes:
        """The letter under `key`, from the first peer whose bytes pass `verify`.

        Args:
            verify: raises `Reject` for bytes that are not what belongs under this key.

        Raises:
            Fault: no peer has an acceptable letter; lists what each one said.
        """
        return await self._first(wire.SPACE_MAIL, key, addresses, verify, LETTER_BYTES_MAX)

    async def _first(
        self,
        space: int,
        key: bytes,
        addresses: Sequence[Address],
        verify: Callable[[bytes], Awaitable[None] | None],
        size_max: int,
    ) -> bytes:
        said = []
        candidates = self._usable(addresses)
        random.shuffle(candidates)  # spreads the load; not security
        for address in candidates:
            try:
                data = bytes(await self._connection(address).download(space, key, size_max=size_max))
            except TrothError as error:
                said.append(f"{address.endpoint}: {error}")
                continue
            try:
                verdict = verify(data)
                if verdict is not None:
                    await verdict
            except Reject as error:
                self._on_wrong_bytes(address, len(data), error, ban=space == wire.SPACE_CONTENT)
                said.append(f"{address.endpoint}: {error}")
                continue
            return data
        raise Fault(
            f"no peer has {key.hex()[:16]}: {'; '.join(said) or 'no usable address'}; retry, or give other peers"
        )

    def _on_wrong_bytes(self, address: Address, size: int, error: Reject, *, ban: bool) -> None:
        # A letter that fails its reader's check may be its author's fault: the relay is not banned for it.
        self.metrics["verify_failures"] += 1
        self.metrics["bytes_wasted"] += size
        if ban:
            self.banned.add(address.curve_key)
            self.metrics["peers_banned"] += 1
        fields = {"peer": address.curve_key.hex(), "endpoint": address.endpoint, "why": str(error)}
        self._on_event("banned" if ban else "bad_letter", fields)

    async def put(self, address: Address, key: bytes, data: bytes) -> None:
        """Leave a letter at a peer. Returns when it is accepted and durable there; repeating it is harmless.

        Raises:
            Reject, Ignore: the peer's reasons, in its words.
            Fault: the peer is full, broken, busy or silent: retry, or use another.
        """
        if len(key) != 32 or len(data) > LETTER_BYTES_MAX:
            raise ConfigError(
                f"letter has a {len(key)}-byte key and {len(data)} bytes: 32 and {LETTER_BYTES_MAX} allowed"
            )
        await self._connection(address).put(key, data)

    # Connections

    def _usable(self, addresses: Sequence[Address]) -> list[Address]:
        return [
            address for address in dict.fromkeys(addresses) if address.curve_key not in self.banned | {self.public_key}
        ]

    def _connection(self, address: Address) -> Connection:
        if self._context is None:
            raise ConfigError("this peer is not started: call start() first")
        known = self._connections.pop(address, None)
        if known is not None and known.stale and known.idle:
            known.close()
            known = None
        for other in list(self._connections.values()):
            if len(self._connections) < CONNECTIONS_MAX:
                break
            if other.idle:
                other.close()
                del self._connections[other.address]
        if known is None:
            traffic = Traffic(self.metrics, self.bytes_from)
            known = Connection(self._context, self._secret, address, traffic, timeout_s=self._request_timeout_s)
        self._connections[address] = known  # last in order: most recently used
        return known

    def _is_admitted(self, key: bytes) -> bool:
        return key not in self.banned and self._admit(key)

    def _on_refused(self, key: bytes, why: str) -> None:
        self.metrics["refused_keys"] += 1
        self._on_event("refused", {"peer": key.hex(), "why": why})

    def _on_failed_handshake(self, event: int, value: int) -> None:
        self.metrics["failed_handshakes"] += 1
        self._on_event("failed_handshake", {"event": event, "value": value})

    def _on_hoarder(self) -> None:
        self.metrics["hoarders_cut"] += 1
        self._on_event("hoarder_cut", {})
