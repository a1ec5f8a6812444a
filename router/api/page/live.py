"""GET /admin/live: the engine as server-sent events, for the page and for whoever likes to watch."""

from __future__ import annotations

import asyncio
import contextlib

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from router.api.context import ApiContext
from router.api.errors import ApiError, invalid
from router.api.exchange import Exchange
from router.api.page.feed import LiveFeed, Watcher
from router.api.sse import SSE_HEADERS

_MAX_REPLICA_DIGITS = 9


class LiveEndpoint:
    """An ASGI app. `?replica=` names the id of the replica to tell in full."""

    def __init__(self, context: ApiContext, *, feed: LiveFeed | None = None) -> None:
        self.feed = LiveFeed(context) if feed is None else feed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange: Exchange = scope["exchange"]
        try:
            replica = _replica_of(Request(scope))
            if scope["method"] == "HEAD":
                await exchange.respond(200, b"", SSE_HEADERS)
                return
            watcher = self.feed.join(replica)
        except ApiError as error:
            await exchange.fail(error.info)
            return
        gone = asyncio.create_task(_close_when_gone(receive, watcher))
        try:
            await exchange.send(exchange.start_message(200, SSE_HEADERS))
            while (event := await watcher.next()) is not None:
                await exchange.send({"type": "http.response.body", "body": event, "more_body": True})
            await exchange.send({"type": "http.response.body", "body": b"", "more_body": False})
        except OSError:  # servers may say so when the client is gone
            exchange.disconnected = True
        finally:
            self.feed.leave(watcher)
            gone.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await gone


async def _close_when_gone(receive: Receive, watcher: Watcher) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    watcher.close()


def _replica_of(request: Request) -> int:
    given = request.query_params.get("replica", "0")
    if not given.isascii() or not given.isdigit() or len(given) > _MAX_REPLICA_DIGITS:
        raise invalid(
            f"Invalid value for 'replica': {given[:40]!r} is not the id of a replica.", param="replica"
        )
    return int(given)
