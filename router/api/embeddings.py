"""POST /v1/embeddings: answers clearly that there are none."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from router.api.context import ApiContext
from router.api.errors import invalid


class EmbeddingsRoute:
    def __init__(self, context: ApiContext) -> None:
        self._context = context

    async def embed(self, request: Request) -> Response:
        """Raises ApiError (400) always: the served model line generates text."""
        model = self._context.model
        raise invalid(
            f"{model.model_id} generates text: it gives no embeddings.", param="model", code="unsupported"
        )
