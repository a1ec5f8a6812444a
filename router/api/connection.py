"""One client's HTTP connection: uvicorn's own, with bounds on a request's head and an ear for its end."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

MAX_HEAD_BYTES = 256 * 1024
"""Request line and headers. Approximate: it is looked at once per read from the socket."""
HEAD_TIMEOUT_S = 75.0
"""How long a client that owes us a request's head, from its first byte or from connecting, may take."""

_ERROR = b'{"error":{"message":"%b","type":"invalid_request_error","param":null,"code":"%b"}}'
_TOO_LARGE = _ERROR % (
    b"The request's headers are larger than %d bytes." % MAX_HEAD_BYTES,
    b"headers_too_large",
)
_NOT_HTTP = _ERROR % (b"The request is not valid HTTP/1.1.", b"invalid_http")


class Connection(HttpToolsProtocol):
    """What uvicorn leaves open:

    * When a connection with pipelined requests is lost, it tells the latest of them only. The one that runs
      would generate to its end, and write to a closed socket.
    * Bytes that are no HTTP are answered in plain text, also in the midst of an answer that still runs.
    * A head may be of any size and take any time, so that clients could fill the memory and the table of
      open files without ever sending a request.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._unanswered: deque[RequestResponseCycle] = deque()
        self._n_head_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None
        """Set while a head is awaited."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)
        for cycle in self._unanswered:
            cycle.disconnected = True
            cycle.message_event.set()
        self._unanswered.clear()

    def data_received(self, data: bytes) -> None:
        awaited = self._head_timer is not None
        super().data_received(data)
        if awaited and self._head_timer is not None and not self.transport.is_closing():
            self._n_head_bytes += len(data)
            if self._n_head_bytes > MAX_HEAD_BYTES:
                self._refuse(b"431 Request Header Fields Too Large", _TOO_LARGE)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._await_head()

    def on_headers_complete(self) -> None:
        self._stop_timer()
        before = self.cycle
        super().on_headers_complete()
        if self.cycle is not before:
            self._unanswered.append(self.cycle)

    def on_response_complete(self) -> None:
        if self._unanswered:
            self._unanswered.popleft()
        super().on_response_complete()

    def _await_head(self) -> None:
        self._n_head_bytes = 0
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._head_is_late)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        """A client with an answer under way keeps it: it may have begun its next request early."""
        self._head_timer = None
        if self._unanswered:
            self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._head_is_late)
        else:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """uvicorn's name for what it does with bytes that are no HTTP."""
        self._refuse(b"400 Bad Request", _NOT_HTTP)

    def _refuse(self, status: bytes, body: bytes) -> None:
        """Ends the connection; says why unless that would land in the midst of an answer."""
        if not self._unanswered:
            self.transport.write(
                b"HTTP/1.1 %b\r\nconnection: close\r\n"
                b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body)
            )
        self.transport.close()
