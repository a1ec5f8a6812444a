"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from router.api.context import ApiContext
from router.api.reply import json_reply
from router.ipc.messages import ModelInfo


class ModelRoutes:
    def __init__(self, context: ApiContext, *, created: int) -> None:
        """`created`: Unix time told as the models' own."""
        self._context = context
        self._created = created

    async def list(self, request: Request) -> Response:
        model = self._context.model
        names = dict.fromkeys((model.model_id, *self._context.config.model_aliases))
        return json_reply({"object": "list", "data": [self._card(name, model) for name in names]})

    async def one(self, request: Request) -> Response:
        name = request.path_params["name"]
        return json_reply(self._card(name, self._context.check_model(name)))

    def _card(self, name: str, model: ModelInfo) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "quire",
            "root": model.model_id,
            "max_model_len": model.max_total_tokens,
        }
