"""/admin: the scheduler's state, the prefix cache and the draining of workers, for operators."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from router.api.context import ApiContext
from router.api.decode import read_body
from router.api.errors import invalid
from router.api.reply import json_reply
from router.api.schema import DrainRequest

_MAX_PREFIXES = 1000


class AdminRoutes:
    """The guard has checked the key. A refusal of the scheduler comes back in OpenAI's shape."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context

    async def state(self, request: Request) -> Response:
        """Queue, running requests, replicas."""
        return json_reply(await self._context.client.admin("state"))

    async def cache(self, request: Request) -> Response:
        """Blocks and the hottest prefixes per replica; `?limit=` says how many."""
        given = request.query_params.get("limit", "20")
        if not given.isascii() or not given.isdigit() or not 1 <= int(given) <= _MAX_PREFIXES:
            raise invalid(
                f"Invalid value for 'limit': {given[:40]!r} is not a number from 1 to {_MAX_PREFIXES}.",
                param="limit",
            )
        return json_reply(await self._context.client.admin("cache", limit=int(given)))

    async def flush(self, request: Request) -> Response:
        """Drops every cached block that no request holds."""
        return json_reply(await self._context.client.admin("flush_cache"))

    async def drain(self, request: Request) -> Response:
        """Gives a worker nothing new any more, so that it can be taken away, or takes it back."""
        context = self._context
        body = await read_body(request.receive, context.config)
        wanted = context.decoder.decode(body, DrainRequest)
        return json_reply(await context.client.admin("drain_replica", address=wanted.address, on=wanted.on))

    async def check(self, request: Request) -> Response:
        """Proves the allocators' invariants; costs time in proportion to the pool."""
        return json_reply(await self._context.client.admin("check"))
