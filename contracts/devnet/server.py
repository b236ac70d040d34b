"""HTTP in front of the devnet: JSON-RPC 2.0 with bounded requests and batches, and the tick that mines.

A stranger's bytes get a JSON-RPC error, never a traceback and never a dropped service. One event loop runs the server
and the miner, so no method ever sees half a block. Neighbours: `contracts.devnet.methods` (what is answered),
`troth.devnet` (starts it).
"""

from __future__ import annotations

import asyncio
import errno
import logging
from typing import Any

import msgspec
from aiohttp import web

from contracts.devnet.methods import Methods
from contracts.jsonrpc import RpcError
from protocol.errors import ConfigError

log = logging.getLogger(__name__)

REQUEST_BYTES_MAX = 2 * 1024 * 1024
BATCH_MAX = 64

#: Most brackets in a request, hence its deepest nesting; a full batch of log queries has a tenth of it.
BRACKETS_MAX = 8_192

_decoder = msgspec.json.Decoder()
_encoder = msgspec.json.Encoder()


def _error(request_id: Any, error: RpcError) -> dict[str, Any]:
    body: dict[str, Any] = {"code": error.code, "message": error.message}
    if error.data is not None:
        body["data"] = error.data
    return {"jsonrpc": "2.0", "id": request_id, "error": body}


def _answer(methods: Methods, request: Any) -> dict[str, Any]:
    if not isinstance(request, dict):
        return _error(None, RpcError(-32600, "invalid request: expected an object"))
    request_id = request.get("id")
    if not isinstance(request_id, (str, int, float, type(None))):
        return _error(None, RpcError(-32600, "invalid request: id must be a string or a number"))
    name, params = request.get("method"), request.get("params", [])
    if not isinstance(name, str) or not isinstance(params, list) or len(params) > 8:
        return _error(request_id, RpcError(-32600, "invalid request: expected method and a list of params"))
    try:
        return {"jsonrpc": "2.0", "id": request_id, "result": methods.call(name, params)}
    except RpcError as error:
        return _error(request_id, error)
    except Exception:
        log.exception("method %s failed", name[:64])
        return _error(request_id, RpcError(-32603, "internal error"))


def answer_bytes(methods: Methods, body: bytes) -> bytes:
    """Answer one request or batch; always returns a JSON-RPC response."""
    if body.count(b"[") + body.count(b"{") > BRACKETS_MAX:
        return _encoder.encode(_error(None, RpcError(-32600, f"invalid request: more than {BRACKETS_MAX} brackets")))
    try:
        request = _decoder.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return _encoder.encode(_error(None, RpcError(-32700, "parse error: the body is not JSON")))
    if not isinstance(request, list):
        return _encoder.encode(_answer(methods, request))
    if not 0 < len(request) <= BATCH_MAX:
        text = f"invalid batch: {len(request)} requests, expected 1 to {BATCH_MAX}"
        return _encoder.encode(_error(None, RpcError(-32600, text)))
    return _encoder.encode([_answer(methods, item) for item in request])


class DevnetServer:
    """Serves `methods` over HTTP and mines a block every `block_seconds`.

    Args:
        host, port: where to listen; port 0 takes a free one (see `port` after `start`).
        block_seconds: the tick; 0 mines nothing by itself (tests call `methods.mine`).
    """

    def __init__(self, methods: Methods, host: str, port: int, block_seconds: float) -> None:
        self.methods = methods
        self.host = host
        self.port = port
        self._block_seconds = block_seconds
        self._runner: web.AppRunner | None = None
        self._ticker: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        """Where clients connect."""
        return f"http://{self.host}:{self.port}"

    async def start(self) -> None:
        """Listen and start the tick.

        Raises:
            ConfigError: when the port is taken or the address is not ours.
        """
        app = web.Application(client_max_size=REQUEST_BYTES_MAX)
        app.router.add_post("/", self._handle)
        self._runner = web.AppRunner(app, access_log=None, handle_signals=False)
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, self.host, self.port).start()
        except OSError as error:
            await self._runner.cleanup()
            if error.errno == errno.EADDRINUSE:
                raise ConfigError(
                    f"port {self.port} on {self.host} is in use: stop what listens there, or pass another --port"
                ) from None
            raise ConfigError(f"cannot listen on {self.host}:{self.port}: {error.strerror or error}") from None
        self.port = self._runner.addresses[0][1]
        if self._block_seconds > 0:
            self._ticker = asyncio.create_task(self._tick(), name="devnet-miner")

    async def stop(self) -> None:
        """Stop mining and close the port."""
        if self._ticker is not None:
            self._ticker.cancel()
            await asyncio.gather(self._ticker, return_exceptions=True)
        if self._runner is not None:
            await self._runner.cleanup()

    async def run_forever(self) -> None:
        """Run until cancelled, or until the miner fails, whose error is raised."""
        if self._ticker is None:
            await asyncio.Event().wait()
        else:
            await self._ticker

    async def _handle(self, request: web.Request) -> web.Response:
        try:
            body = await request.read()
        except web.HTTPRequestEntityTooLarge:
            text = f"request too large: limit {REQUEST_BYTES_MAX} bytes"
            answer = _encoder.encode(_error(None, RpcError(-32600, text)))
            return web.Response(body=answer, status=413, content_type="application/json")
        return web.Response(body=answer_bytes(self.methods, body), content_type="application/json")

    async def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time() + self._block_seconds
        while True:
            await asyncio.sleep(max(0.0, due - loop.time()))
            # Keep the rhythm after a slow block, but do not mine a burst to catch up: deadlines are blocks.
            due = max(due + self._block_seconds, loop.time())
            self.methods.mine(seconds_max=max(1.0, self._block_seconds))
