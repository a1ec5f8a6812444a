"""An answer as server-sent events, written from the scheduler's callbacks without a task per token."""

from __future__ import annotations

import asyncio
import types
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Protocol

import structlog
from starlette.types import Message, Receive

from router.api.choice import Choice, LogprobEntry
from router.api.errors import error_headers, internal
from router.api.exchange import Exchange
from router.api.flusher import Flusher
from router.api.job import Job
from router.ipc.messages import ErrorInfo

SSE_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
DONE = b"data: [DONE]\n\n"

_log = structlog.get_logger("quire.api")


class StreamFormat(Protocol):
    """Turns what happens into events: `data: …` with an empty line after it, as bytes."""

    def opening(self, choice: Choice) -> bytes:
        """Before the choice's first text; may be empty."""
        ...

    def delta(self, choice: Choice, text: str, entries: list[LogprobEntry]) -> bytes: ...

    def closing(self, choice: Choice) -> bytes:
        """Tells the choice's finish reason."""
        ...

    def usage(self) -> bytes:
        """The event with no choices that tells the usage."""
        ...

    @property
    def done(self) -> bytes:
        """What ends a stream; may be empty."""
        ...


class SseStream:
    """The response begins with the first token (or failure), so that an error before it has its own status.
    While the client is slow its text gathers in the choices: memory is bounded by the answer's length."""

    def __init__(
        self,
        *,
        exchange: Exchange,
        job: Job,
        format: StreamFormat,
        flusher: Flusher,
        on_end: Callable[[], None],
    ) -> None:
        self._exchange = exchange
        self._send = exchange.send
        self._job = job
        self._format = format
        self._flusher = flusher
        self._on_end = on_end
        self._queued = False
        self._begun = False
        self._ended = False
        self._opened: set[int] = set()
        self._closed: set[int] = set()
        self._outbox: deque[Message] = deque()
        self._blocked: asyncio.Task[None] | None = None
        self._clock = job.clock

    async def run(self, receive: Receive) -> None:
        """Submits the job and returns when the response is complete or the client has gone. Raises
        RefusedError when nothing was sent yet."""
        try:
            await self._job.submit(self._notify)
            while (await receive())["type"] != "http.disconnect":
                pass
        finally:
            if not self._ended:
                self._exchange.disconnected = True
                self._end()
            if self._blocked is not None:
                self._blocked.cancel()

    def interrupt(self, info: ErrorInfo) -> None:
        """Ends the stream from our side (shutdown)."""
        if not self._ended:
            self._fail(info, done=True)

    # ---- events ----

    def _notify(self, choice: Choice) -> None:
        if not self._queued:
            self._queued = True
            self._flusher.add(self)

    def flush(self) -> None:
        self._queued = False
        if self._ended or self._blocked is not None:
            return
        try:
            self._write_events()
        except Exception:  # a fault of ours must not reach the other streams of the batch
            _log.exception("stream failed", request_id=self._exchange.request_id)
            if not self._ended:
                self._fail(internal())

    def _write_events(self) -> None:
        job, format = self._job, self._format
        error = job.error
        if error is not None and not self._begun:
            self._fail(error)
            return
        parts: list[bytes] = []
        n_closed = len(self._closed)
        for choice in job.choices:
            index = choice.index
            if not choice.n_tokens or index in self._closed:
                continue
            if index not in self._opened:
                self._opened.add(index)
                parts.append(format.opening(choice))
            text = choice.take()
            entries = choice.take_entries() if choice.entries else []
            if text or entries:
                parts.append(format.delta(choice, text, entries))
            if choice.finish is not None:
                self._closed.add(index)
                parts.append(format.closing(choice))
        if not self._begun and self._opened:
            self._begin()
        if self._opened:
            job.last_token_s = self._clock()
        if error is not None:
            self._write(b"".join(parts))
            self._fail(error)
        elif len(self._closed) == len(job.choices) > n_closed:
            if job.params.include_usage:
                parts.append(format.usage())
            parts.append(format.done)
            self._write(b"".join(parts), last=True)
            self._end()
        elif parts:
            self._write(b"".join(parts))

    def _begin(self) -> None:
        self._begun = True
        self._job.first_token_s = self._clock()
        self._put(self._exchange.start_message(200, SSE_HEADERS))

    def _fail(self, info: ErrorInfo, *, done: bool = False) -> None:
        self._exchange.error_type = info.code or info.type
        errors = self._exchange.errors
        body = errors.body(info)
        if self._begun:
            self._write(b"data: " + body + b"\n\n" + (self._format.done if done else b""), last=True)
        else:
            self._begun = True
            self._put(self._exchange.start_message(errors.status(info), error_headers(info)))
            self._write(body, last=True)
        self._end()

    def _end(self) -> None:
        self._ended = True
        self._job.cancel()
        self._on_end()

    # ---- writing ----

    def _write(self, body: bytes, *, last: bool = False) -> None:
        if body or last:
            self._put({"type": "http.response.body", "body": body, "more_body": not last})

    def _put(self, message: Message) -> None:
        if self._blocked is not None:
            self._outbox.append(message)
            return
        coroutine = self._send(message)
        try:
            waiting_for = coroutine.send(None)  # type: ignore[attr-defined]  # every server's send is a coroutine
        except StopIteration:
            return
        except Exception as error:
            self._broken(error)
            return
        # The connection is full: the rest of this send is a task's, and text gathers until it is through.
        self._blocked = asyncio.ensure_future(_rest_of(coroutine, waiting_for))  # type: ignore[arg-type]
        self._blocked.add_done_callback(self._unblocked)

    def _unblocked(self, task: asyncio.Task[None]) -> None:
        self._blocked = None
        if task.cancelled():
            return
        error = task.exception()
        if error is not None:
            self._broken(error)
            return
        while self._outbox and self._blocked is None:
            self._put(self._outbox.popleft())
        if not self._ended and self._blocked is None:
            self.flush()

    def _broken(self, error: BaseException) -> None:
        """The server refused a message: the client is gone."""
        _log.debug("stream broken", request_id=self._exchange.request_id, error=repr(error))
        self._outbox.clear()
        if not self._ended:
            self._exchange.disconnected = True
            self._end()


async def _rest_of(coroutine: Coroutine[Any, Any, None], waiting_for: Any) -> None:
    await _resume(coroutine, waiting_for)


@types.coroutine
def _resume(coroutine: Coroutine[Any, Any, None], waiting_for: Any) -> Generator[Any, Any, None]:
    """Goes on with a coroutine that was started outside a task and has yielded what it waits for."""
    try:
        while True:
            try:
                value = yield waiting_for
            except BaseException as error:
                waiting_for = coroutine.throw(error)
            else:
                waiting_for = coroutine.send(value)
    except StopIteration:
        return
