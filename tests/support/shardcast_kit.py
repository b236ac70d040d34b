"""Peers, policies and hostile stores for the shardcast tests, and a process that serves or fetches.

    python -m tests.support.shardcast_kit serve ROOT INDEX DELAY_S
    python -m tests.support.shardcast_kit fetch ROOT INDEX MANIFEST_HASH ENDPOINT KEY [ENDPOINT KEY ...]

Each process prints one JSON object a line: first its address or nothing, then every event.
"""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import zmq

from protocol.identity import NetworkKey
from shardcast.folder import build_manifest
from shardcast.manifest import Manifest, manifest_domain
from shardcast.peer import Address, Peer
from shardcast.sockets import open_client, open_server
from shardcast.store import ShardStore

TRAINER = NetworkKey(b"\x07" * 32)
TASK = b"\x11" * 32
DOMAIN = manifest_domain(31337, b"\x22" * 20, TASK)
SHARD = 4096
REPOSITORY = Path(__file__).parents[2]


def curve_secret(index: int) -> bytes:
    """CURVE secret key number `index`."""
    return random.Random(index).randbytes(32)


def make_folder(folder: Path, seed: int = 1, num_shards: int = 24) -> Path:
    """A policy folder of two files; the larger has `num_shards` shards, the last one short."""
    rng = random.Random(seed)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"seed": seed}))
    (folder / "model.safetensors").write_bytes(rng.randbytes(num_shards * SHARD - 100))
    return folder


def make_manifest(folder: Path, version: int = 1, **kwargs: Any) -> Manifest:
    """The folder's manifest, signed by the trainer."""
    return build_manifest(folder, TRAINER, DOMAIN, version=version, shard_size=SHARD, **kwargs)


def fill(store: ShardStore, manifest: Manifest, folder: Path) -> ShardStore:
    """Put a policy and its manifest into a store."""
    store.add_folder(manifest, folder)
    store.admit_manifest(manifest.data, TRAINER.public, DOMAIN, expected=manifest.hash)
    return store


class Events(list[tuple[str, dict[str, Any]]]):
    """An event sink that remembers."""

    def __call__(self, name: str, fields: dict[str, Any]) -> None:
        self.append((name, fields))

    def named(self, name: str) -> list[dict[str, Any]]:
        """Fields of the events called `name`."""
        return [fields for known, fields in self if known == name]


def make_peer(store: ShardStore, index: int, *, listen: bool = True, **kwargs: Any) -> Peer:
    """A peer on loopback that admits everybody unless told otherwise."""
    kwargs.setdefault("admit", lambda key: True)
    kwargs.setdefault("request_timeout_s", 20.0)
    return Peer(store, curve_secret(index), bind="tcp://127.0.0.1:*" if listen else None, **kwargs)


class MutatingStore(ShardStore):
    """Serves what `mutate(digest, offset, data)` makes of each chunk, like a peer that forges or withholds."""

    def __init__(self, root: Path, mutate: Callable[[bytes, int, bytes], bytes]) -> None:
        super().__init__(root)
        self._mutate = mutate

    def read(self, digest: bytes, offset: int, length: int) -> tuple[int, bytes]:
        size, data = super().read(digest, offset, length)
        return size, self._mutate(digest, offset, data)


class SlowStore(ShardStore):
    """Takes `delay_s` for every chunk, so that a transfer can be interrupted in the middle."""

    def __init__(self, root: Path, delay_s: float) -> None:
        super().__init__(root)
        self._delay_s = delay_s

    def read(self, digest: bytes, offset: int, length: int) -> tuple[int, bytes]:
        time.sleep(self._delay_s)
        return super().read(digest, offset, length)


async def until(condition: Callable[[], bool]) -> None:
    """Wait until `condition()`; pytest's own timeout ends a wait that never does."""
    while not condition():
        await asyncio.sleep(0.002)


@asynccontextmanager
async def raw_client(peer: Peer, index: int) -> AsyncIterator[zmq.Socket[bytes]]:
    """An admitted CURVE DEALER connection that can send any bytes."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = open_client(context, curve_secret(index), peer.address.endpoint, peer.public_key)
    try:
        yield socket
    finally:
        context.destroy(linger=0)


async def receive(socket: zmq.Socket[bytes]) -> list[bytes]:
    """The next message on a raw socket."""
    while not socket.poll(0):
        await asyncio.sleep(0.002)
    return socket.recv_multipart()


@asynccontextmanager
async def raw_server(
    index: int, answer: Callable[[list[bytes]], Awaitable[list[list[bytes]]]]
) -> AsyncIterator[Address]:
    """A hostile CURVE server: `answer(frames)` returns the messages it sends back to whoever wrote."""
    from shardcast.sockets import Admission, curve_public

    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    admission = Admission(context, lambda key: True, lambda key, why: None)
    socket = open_server(context, curve_secret(index), "tcp://127.0.0.1:*")

    async def serve() -> None:
        while True:
            routing_id, *frames = await receive(socket)
            for message in await answer(frames):
                socket.send_multipart([routing_id, *message])

    task = asyncio.create_task(serve())
    try:
        yield Address(socket.getsockopt_string(zmq.LAST_ENDPOINT), curve_public(curve_secret(index)))
    finally:
        task.cancel()
        admission.close()
        context.destroy(linger=0)


# Processes


def spawn(*arguments: object) -> subprocess.Popen[str]:
    """Start this module as a process."""
    command = [sys.executable, "-u", "-m", "tests.support.shardcast_kit", *map(str, arguments)]
    return subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)


def next_line(process: subprocess.Popen[str]) -> dict[str, Any]:
    """The next JSON line of a process. Fails when it ended."""
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, f"process ended with {process.wait()}"
    parsed: dict[str, Any] = json.loads(line)
    return parsed


def spawn_server(root: Path, index: int, delay_s: float = 0.0) -> tuple[subprocess.Popen[str], Address]:
    """A process that serves the store at `root`."""
    process = spawn("serve", root, index, delay_s)
    line = next_line(process)
    return process, Address(line["endpoint"], bytes.fromhex(line["key"]))


def _print(name: str, fields: dict[str, Any]) -> None:
    print(json.dumps({"event": name, **fields}), flush=True)


async def _serve(root: Path, index: int, delay_s: float) -> None:
    with SlowStore(root, delay_s) as store:
        async with make_peer(store, index, accept=lambda sender, key, data: None) as peer:
            print(json.dumps({"endpoint": peer.address.endpoint, "key": peer.public_key.hex()}), flush=True)
            await asyncio.Event().wait()


async def _fetch(root: Path, index: int, digest: bytes, addresses: Sequence[Address]) -> None:
    with ShardStore(root) as store:
        async with make_peer(store, index, listen=False) as peer:
            manifest = await peer.fetch_manifest(digest, addresses, TRAINER.public, DOMAIN)
            job = asyncio.create_task(peer.fetch(manifest, addresses))
            while not job.done():
                _print("progress", {"held": len(manifest.shards) - len(store.missing(manifest))})
                await asyncio.sleep(0.005)
            await job


def main(arguments: list[str]) -> None:
    """Entry point of the processes."""
    command, root, index, *rest = arguments
    if command == "serve":
        asyncio.run(_serve(Path(root), int(index), float(rest[0])))
    else:
        pairs = zip(rest[1::2], rest[2::2], strict=True)
        addresses = [Address(endpoint, bytes.fromhex(key)) for endpoint, key in pairs]
        asyncio.run(_fetch(Path(root), int(index), bytes.fromhex(rest[0]), addresses))


if __name__ == "__main__":
    main(sys.argv[1:])
