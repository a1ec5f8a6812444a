"""GET /health, /health/live, /health/ready: open to all, never behind a model's work."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from router.api.context import ApiContext
from router.api.reply import json_reply


class HealthRoutes:
    def __init__(self, context: ApiContext) -> None:
        self._context = context

    async def live(self, request: Request) -> Response:
        """This process answers."""
        return json_reply({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """200 when a request sent now would be served, else 503 with the reason."""
        state = self._context.client.state
        reason = self._context.not_ready_reason
        value = {
            "status": "ok" if reason is None else "unavailable",
            "reason": reason or "",
            "replicas_live": state.n_replicas_live,
            "replicas_known": state.n_replicas_known,
        }
        return json_reply(value, status=200 if reason is None else 503)
