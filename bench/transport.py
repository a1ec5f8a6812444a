"""How the load client speaks HTTP: an ordinary one on httpx, and a lean one for rates at which the
client itself would become what is measured. Both only note when bytes arrive; parsing comes later.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol, cast
from urllib.parse import urlsplit

import httpx

from bench.sse import Segment, dechunk

LAST_CHUNK = b"\r\n0\r\n\r\n"
"""Ends a chunked body. It can't occur inside an event stream of JSON, which holds no bare CR LF."""


@dataclass(slots=True)
class Exchange:
    """One request and the answer's bytes as they arrived."""

    start_s: float
    status: int = 0
    segments: list[Segment] = field(default_factory=list)
    chunked: bool = False
    """The segments still carry HTTP chunk framing."""
    error: str | None = None

    def body(self) -> Iterable[Segment]:
        return dechunk(self.segments) if self.chunked else self.segments


class Transport(Protocol):
    async def post(self, path: str, body: bytes) -> Exchange:
        """Sends JSON, returns when the answer has ended. Never raises for a failure of the connection
        or a time-out: `Exchange.error` says it."""
        ...

    async def close(self) -> None: ...


class HttpxTransport:
    """The ordinary transport."""

    def __init__(self, url: str, *, timeout_s: float, api_key: str | None = None) -> None:
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout_s = timeout_s
        self._client = httpx.AsyncClient(
            base_url=url,
            headers=headers,
            timeout=httpx.Timeout(None, connect=min(30.0, timeout_s)),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
        )

    async def post(self, path: str, body: bytes) -> Exchange:
        exchange = Exchange(start_s=time.perf_counter())
        try:
            async with (
                asyncio.timeout(self._timeout_s),
                self._client.stream(
                    "POST", path, content=body, headers={"content-type": "application/json"}
                ) as answer,
            ):
                exchange.status = answer.status_code
                async for data in answer.aiter_raw():
                    exchange.segments.append((time.perf_counter(), data))
        except TimeoutError:
            exchange.error = f"no complete answer within {self._timeout_s:g} s"
        except httpx.HTTPError as error:
            exchange.error = f"{type(error).__name__}: {error}"
        return exchange

    async def close(self) -> None:
        await self._client.aclose()


class _Connection(asyncio.Protocol):
    """One kept-alive connection that carries one exchange at a time."""

    __slots__ = ("_done", "_exchange", "_head", "_left", "_tail", "closed", "keep_alive", "transport", "used")

    def __init__(self) -> None:
        self.closed = False
        self.used = False
        self.keep_alive = True
        self.transport: asyncio.Transport | None = None
        self._exchange: Exchange | None = None
        self._done: asyncio.Future[None] | None = None
        self._head: bytes | None = b""
        self._left: int | None = None
        self._tail = b"\r\n"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is not derived from it

    async def exchange(self, request: bytes, exchange: Exchange, timeout_s: float) -> None:
        """Sends the request and fills the exchange until the answer has ended."""
        assert self.transport is not None
        loop = asyncio.get_running_loop()
        done = self._done = loop.create_future()
        self._exchange = exchange
        self._head, self._left, self._tail = b"", None, b"\r\n"  # the head ends with an empty line
        self.transport.write(request)
        timer = loop.call_later(timeout_s, self._fail, f"no complete answer within {timeout_s:g} s")
        try:
            await done
        finally:
            timer.cancel()
            self._exchange = self._done = None
            self.used = True

    def data_received(self, data: bytes) -> None:
        now_s = time.perf_counter()
        exchange = self._exchange
        if exchange is None:
            return
        if self._head is not None:
            self._head += data
            if (end := self._head.find(b"\r\n\r\n")) < 0:
                return
            data = self._head[end + 4 :]
            self._read_head(self._head[:end], exchange)
            self._head = None
            if not data and self._left != 0:
                return
        exchange.segments.append((now_s, data))
        if self._left is not None:
            self._left -= len(data)
            if self._left <= 0:
                self._finish()
        elif exchange.chunked:
            if len(data) < len(LAST_CHUNK):
                self._tail += data
                data = self._tail
            self._tail = data[-len(LAST_CHUNK) :]
            if self._tail == LAST_CHUNK:
                self._finish()

    def _read_head(self, head: bytes, exchange: Exchange) -> None:
        status_line, *lines = head.split(b"\r\n")
        exchange.status = int(status_line.split(b" ", 2)[1])
        for line in lines:
            name, _, value = line.partition(b":")
            name, value = name.strip().lower(), value.strip().lower()
            if name == b"transfer-encoding" and value == b"chunked":
                exchange.chunked = True
            elif name == b"content-length":
                self._left = int(value)
            elif name == b"connection" and value == b"close":
                self.keep_alive = False

    def _finish(self) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(None)

    def _fail(self, why: str) -> None:
        if self._exchange is not None and self._done is not None and not self._done.done():
            self._exchange.error = why
            self._done.set_result(None)
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        if self._exchange is None:
            return
        if self._head is None and self._left is None and not self._exchange.chunked and exc is None:
            self._finish()
        else:
            self._fail(f"connection lost: {exc or 'closed by the server'}")

    def close(self) -> None:
        self.closed = True
        if self.transport is not None:
            self.transport.close()


class LeanTransport:
    """HTTP/1.1 on bare asyncio: one time stamp and one list append per packet that arrives."""

    def __init__(self, url: str, *, timeout_s: float, api_key: str | None = None) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or parts.hostname is None:
            raise ValueError(f"--transport lean takes an http:// address, not {url!r}; use --transport httpx")
        self._host, self._port = parts.hostname, parts.port or 80
        self._base = parts.path.rstrip("/")
        self._timeout_s = timeout_s
        self._head = f"Host: {self._host}:{self._port}\r\nContent-Type: application/json\r\n"
        if api_key:
            self._head += f"Authorization: Bearer {api_key}\r\n"
        self._idle: list[_Connection] = []

    async def post(self, path: str, body: bytes) -> Exchange:
        head = f"POST {self._base}{path} HTTP/1.1\r\n{self._head}Content-Length: {len(body)}\r\n\r\n"
        request = head.encode() + body
        while True:
            exchange = Exchange(start_s=time.perf_counter())
            try:
                connection = self._take_idle() or await self._connect()
            except (OSError, TimeoutError) as error:
                exchange.error = f"can't connect to {self._host}:{self._port}: {error}"
                return exchange
            was_used = connection.used
            await connection.exchange(request, exchange, self._timeout_s)
            if exchange.error is None and connection.keep_alive and not connection.closed:
                self._idle.append(connection)
            else:
                connection.close()
            # A server may close an idle connection just when it is taken: such a request never began.
            if exchange.error is not None and was_used and exchange.status == 0 and "lost" in exchange.error:
                continue
            return exchange

    def _take_idle(self) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if not connection.closed:
                return connection
        return None

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(min(30.0, self._timeout_s)):
            _, connection = await loop.create_connection(_Connection, self._host, self._port)
        return connection

    async def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()


def open_transport(kind: str, url: str, *, timeout_s: float, api_key: str | None = None) -> Transport:
    """`kind` is "httpx" or "lean"."""
    if kind == "httpx":
        return HttpxTransport(url, timeout_s=timeout_s, api_key=api_key)
    if kind == "lean":
        return LeanTransport(url, timeout_s=timeout_s, api_key=api_key)
    raise ValueError(f"--transport {kind!r}: choose httpx or lean")
