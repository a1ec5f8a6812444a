"""Stands before every route: request id, API key, the last word on errors, the access log."""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import Callable

import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.api.context import ApiContext
from router.api.errors import OPENAI_ERRORS, ApiError, internal, unavailable
from router.api.exchange import Exchange
from router.api.keys import ApiKeys
from router.api.tgi.errors import TGI_ERRORS, TGI_PATHS
from router.ipc.client import RefusedError
from router.ipc.messages import ErrorInfo

_REQUEST_ID = re.compile(rb"^[\x21-\x7e]{1,128}$")
_OPEN_PREFIX = "/health"
_PAGE_PREFIX = "/page/"
"""Of the page's files; with `GET /`, the page itself, they are the same for everybody."""
_READING = frozenset({"GET", "HEAD"})
_ADMIN_PREFIX = "/admin/"
_LOCAL_HOSTS = frozenset({"127.0.0.1", "::1", "localhost", "testclient"})
_QUIET = frozenset({"/health", "/health/live", "/health/ready", "/metrics"})

_log = structlog.get_logger("quire.access")


class Guard:
    """ASGI middleware. Puts an `Exchange` into the scope as "exchange"."""

    def __init__(
        self, app: ASGIApp, *, context: ApiContext, keys: ApiKeys, clock: Callable[[], float]
    ) -> None:
        self._app = app
        self._context = context
        self._clock = clock
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        exchange = Exchange(
            request_id=_request_id(headers),
            send=send,
            started_s=self._clock(),
            errors=TGI_ERRORS if scope["path"] in TGI_PATHS else OPENAI_ERRORS,
        )
        scope["exchange"] = exchange
        try:
            self._authorise(scope, headers)
            await self._app(scope, receive, _noting(exchange))
        except (ApiError, RefusedError) as error:
            info = error.info if isinstance(error, ApiError) else error.error
            if exchange.status is None:
                await exchange.fail(info)
        except asyncio.CancelledError:
            if not self._context.draining:
                raise
            # It was cut off by the shutdown, e.g. while its body still came.
            if exchange.status is None:
                await exchange.fail(unavailable("The server is shutting down.", retry_after_s=5.0).info)
        except Exception:
            _log.exception("request failed", request_id=exchange.request_id)
            if exchange.status is None:
                await exchange.fail(internal())
        finally:
            self._tell(scope, exchange)

    def _authorise(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        path: str = scope["path"]
        if path == _OPEN_PREFIX or path.startswith(_OPEN_PREFIX + "/"):
            return
        if scope["method"] in _READING and (path == "/" or path.startswith(_PAGE_PREFIX)):
            return
        if self._keys.required:
            given = _bearer(headers)
            if not self._keys.fits(given):
                what = "No API key was sent" if not given else "The API key is wrong"
                raise ApiError(
                    ErrorInfo(
                        status=401,
                        type="invalid_request_error",
                        message=f"{what}: send `Authorization: Bearer <key>`.",
                        code="invalid_api_key",
                    )
                )
        elif path.startswith(_ADMIN_PREFIX) and not (_is_local(scope) and _is_own_page(headers)):
            raise ApiError(
                ErrorInfo(
                    status=403,
                    type="invalid_request_error",
                    message="Admin routes answer other hosts, and pages of other sites, only when an API key"
                    " is set (--api-keys, --api-key-file).",
                    code="admin_needs_key",
                )
            )

    def _tell(self, scope: Scope, exchange: Exchange) -> None:
        path: str = scope["path"]
        route = getattr(scope.get("route"), "path", "unknown")
        status = exchange.status if exchange.status is not None else 499
        self._context.metrics.requests.labels(route, str(status)).inc()
        log = _log.debug if path in _QUIET else _log.info
        log(
            "request",
            request_id=exchange.request_id,
            method=scope["method"],
            path=path[:200],
            status=status,
            duration_s=round(self._clock() - exchange.started_s, 4),
            **{
                name: value
                for name, value in (
                    ("prompt_tokens", exchange.n_prompt_tokens),
                    ("output_tokens", exchange.n_output_tokens),
                    ("error", exchange.error_type),
                    ("disconnected", exchange.disconnected or None),
                )
                if value is not None
            },
        )


def _request_id(headers: dict[bytes, bytes]) -> str:
    """The client's own id if it is printable and short, else a fresh one."""
    given = headers.get(b"x-request-id", b"")
    return given.decode("latin-1") if _REQUEST_ID.match(given) else f"req-{uuid.uuid4().hex}"


def _bearer(headers: dict[bytes, bytes]) -> bytes:
    scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else b""


def _is_local(scope: Scope) -> bool:
    client = scope.get("client")
    return client is not None and client[0] in _LOCAL_HOSTS


def _is_own_page(headers: dict[bytes, bytes]) -> bool:
    """Whether no page of another site sends this: a browser on this host would, for any page that asks."""
    origin = headers.get(b"origin")
    return origin is None or origin.partition(b"://")[2] == headers.get(b"host", b"")


def _noting(exchange: Exchange) -> Send:
    """For routes that answer the ordinary way: notes the status, adds the request id."""

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = exchange.start_message(message["status"], message.get("headers", ()))
        await exchange.send(message)

    return send
