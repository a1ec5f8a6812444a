"""The common course of chat and completions: read, prepare, run, answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import structlog
from starlette.types import Receive, Scope, Send

from router.api.context import ApiContext
from router.api.decode import ClientGoneError, read_body
from router.api.errors import JSON_HEADERS, ApiError, internal
from router.api.exchange import Exchange, Header
from router.api.job import Job
from router.api.sse import SseStream, StreamFormat
from router.api.trace import traced
from router.api.unary import Unary
from router.ipc.client import RefusedError

_log = structlog.get_logger("quire.api")


class AnswerFormat(StreamFormat, Protocol):
    def whole(self) -> bytes:
        """The answer to a request without `stream`."""
        ...

    def headers(self) -> Sequence[Header]:
        """Of the whole answer, beside the usual ones."""
        ...


class GenerationEndpoint:
    """An ASGI app; a subclass prepares the job and its format."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context

    async def prepare(self, body: bytes, exchange: Exchange) -> tuple[Job, AnswerFormat]:
        """Raises ApiError for whatever is wrong with the request."""
        raise TypeError(f"{type(self).__name__} does not say how to prepare a job")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange: Exchange = scope["exchange"]
        with traced(self._context.tracing, exchange, scope):
            await self._serve(exchange, receive)

    async def _serve(self, exchange: Exchange, receive: Receive) -> None:
        try:
            body = await read_body(receive, self._context.config)
            job, format = await self.prepare(body, exchange)
            exchange.n_prompt_tokens = job.n_prompt_tokens
            await self._answer(job, format, exchange, receive)
        except ClientGoneError:
            exchange.disconnected = True
        except (ApiError, RefusedError) as error:
            await exchange.fail(error.info if isinstance(error, ApiError) else error.error)
        except Exception:
            _log.exception("request failed", request_id=exchange.request_id)
            if exchange.status is None:
                await exchange.fail(internal())

    async def _answer(self, job: Job, format: AnswerFormat, exchange: Exchange, receive: Receive) -> None:
        if job.params.stream:
            await self._stream(job, format, exchange, receive)
            return
        unary = Unary(job)
        self._context.begin(unary)
        try:
            await unary.run(receive)
            body = format.whole()
            await exchange.respond(200, body, (JSON_HEADERS, *format.headers()))
        except ClientGoneError:
            exchange.disconnected = True
        finally:
            self._context.end(unary)
            self._finish(job, exchange)

    async def _stream(self, job: Job, format: AnswerFormat, exchange: Exchange, receive: Receive) -> None:
        stream = SseStream(
            exchange=exchange,
            job=job,
            format=format,
            flusher=self._context.flusher,
            on_end=lambda: self._context.end(stream),
        )
        self._context.begin(stream)
        try:
            await stream.run(receive)
        finally:
            self._context.end(stream)
            self._finish(job, exchange)

    def _finish(self, job: Job, exchange: Exchange) -> None:
        exchange.n_output_tokens = job.n_output_tokens
        self._context.metrics.observe_answer(
            job, arrived_s=exchange.started_s, disconnected=exchange.disconnected
        )
