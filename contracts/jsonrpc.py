"""JSON-RPC 2.0 over HTTP to an Ethereum node: batches, bounded answers, and two kinds of failure.

`RpcError` is the node's answer (a revert, a refused transaction); `Unreachable` means that there was no usable answer,
so whether the node acted is unknown. Callers never see another exception. Neighbours: `contracts.follower` and
`contracts.sender` call it, `contracts.devnet` answers it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Protocol

import aiohttp
import msgspec

ANSWER_BYTES_MAX = 32 * 1024 * 1024
TIMEOUT_S = 10.0


class RpcError(Exception):
    """A JSON-RPC error response: `code` and `message` as real nodes give them, `data` for revert bytes (0x hex)."""

    def __init__(self, code: int, message: str, data: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.data = data

    @property
    def revert_data(self) -> bytes | None:
        """Bytes the contract reverted with; None when this is not a revert."""
        if isinstance(self.data, str) and self.data.startswith("0x"):
            try:
                return bytes.fromhex(self.data[2:])
            except ValueError:
                return None
        return b"" if self.code == 3 or "revert" in self.message else None


class Unreachable(Exception):
    """No usable answer: the connection, the HTTP status or the body is at fault."""


class Rpc(Protocol):
    """What the deployer and the client need of a node."""

    async def call(self, method: str, *params: Any) -> Any: ...

    async def batch(self, requests: Sequence[tuple[str, Sequence[Any]]]) -> list[Any]: ...


class HttpRpc:
    """A node behind an HTTP URL.

    Args:
        url: http(s) URL of the node.
        timeout_s: for one request or batch, connection included.
    """

    def __init__(self, url: str, timeout_s: float = TIMEOUT_S) -> None:
        self.url = url
        self._timeout_s = timeout_s
        self._ids = itertools.count(1)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> HttpRpc:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def call(self, method: str, *params: Any) -> Any:
        """Call one method.

        Raises:
            RpcError: the node answered with an error.
            Unreachable: there was no usable answer.
        """
        result = (await self.batch([(method, params)]))[0]
        if isinstance(result, RpcError):
            raise result
        return result

    async def batch(self, requests: Sequence[tuple[str, Sequence[Any]]]) -> list[Any]:
        """Call several methods in one round trip; each result stands in its request's place, errors as `RpcError`.

        Raises:
            Unreachable: there was no usable answer to the batch as a whole.
        """
        if not requests:
            return []
        calls = [
            {"jsonrpc": "2.0", "id": next(self._ids), "method": method, "params": list(params)}
            for method, params in requests
        ]
        answer = await self._post(msgspec.json.encode(calls if len(calls) > 1 else calls[0]))
        answers = answer if isinstance(answer, list) else [answer]
        by_id = {item["id"]: item for item in answers if isinstance(item, dict) and isinstance(item.get("id"), int)}
        if len(answers) == 1 and len(calls) > 1 and isinstance(answers[0], dict) and "error" in answers[0]:
            raise Unreachable(f"the node refused a batch of {len(calls)}: {_parse(answers[0])}")
        results = []
        for call in calls:
            item = by_id.get(call["id"])
            if item is None:
                raise Unreachable(f"the node did not answer {call['method']}")
            results.append(_parse(item))
        return results

    async def _post(self, body: bytes) -> Any:
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=self._timeout_s))
        try:
            async with self._session.post(
                self.url, data=body, headers={"Content-Type": "application/json"}
            ) as response:
                answer = await _read_bounded(response)
                if response.status >= 500 or response.status in (404, 429):
                    raise Unreachable(f"HTTP status {response.status}")
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise Unreachable(f"{type(error).__name__}: {error}") from None
        return decode_answer(answer)


def decode_answer(body: bytes) -> Any:
    """The JSON value of a response's body. Raises `Unreachable` when it is none."""
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        raise Unreachable("the answer is not JSON") from None


async def _read_bounded(response: aiohttp.ClientResponse) -> bytes:
    chunks, size = [], 0
    async for chunk in response.content.iter_chunked(1 << 16):
        size += len(chunk)
        if size > ANSWER_BYTES_MAX:
            response.close()
            raise Unreachable(f"the answer is longer than {ANSWER_BYTES_MAX} bytes")
        chunks.append(chunk)
    return b"".join(chunks)


def _parse(item: dict[str, Any]) -> Any:
    error = item.get("error")
    if error is None:
        return item.get("result")
    if not isinstance(error, dict):
        return RpcError(-32603, str(error)[:256])
    code, data = error.get("code"), error.get("data")
    return RpcError(
        code if isinstance(code, int) else -32603,
        str(error.get("message", ""))[:1024],
        data if isinstance(data, str) else None,
    )
