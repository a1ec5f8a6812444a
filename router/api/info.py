"""GET /info: the served model, the limits and every flag in force. GET /metrics: Prometheus text."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from router.api.context import ApiContext
from router.api.reply import json_reply
from router.api.version import VERSION
from router.ipc.client import RefusedError
from router.ipc.messages import ModelInfo

_EXPOSITION = "text/plain; version=0.0.4; charset=utf-8"


class InfoRoutes:
    def __init__(self, context: ApiContext) -> None:
        self._context = context

    async def info(self, request: Request) -> Response:
        state = self._context.client.state
        model = state.model
        value: dict[str, Any] = {
            "name": "quire",
            "version": VERSION,
            "ready": self._context.not_ready_reason is None,
            "reason": self._context.not_ready_reason or "",
            "replicas_live": state.n_replicas_live,
            "replicas_known": state.n_replicas_known,
        }
        if model is not None:
            value |= {
                "model_id": model.model_id,
                "vocab_size": model.vocab_size,
                "eos_token_ids": model.eos_token_ids,
                "chat_template": (
                    self._context.loaded is not None and self._context.loaded.template is not None
                ),
                "max_input_tokens": model.max_input_tokens,
                "max_total_tokens": model.max_total_tokens,
                "max_batch_total_tokens": model.max_batch_total_tokens,
                "max_batch_prefill_tokens": model.max_batch_prefill_tokens,
                "max_concurrent_requests": model.max_concurrent_requests,
                "block_size": model.block_size,
                "prefix_caching": model.prefix_caching,
                "prefix_caching_reason": model.prefix_caching_reason,
                "max_logprobs": model.max_logprobs,
                "features": model.features,
                "settings": model.settings,
            }
        return json_reply(value | self._as_tgi(model))

    def _as_tgi(self, model: ModelInfo | None) -> dict[str, Any]:
        """What TGI's clients read there and the fields above don't have."""
        config = self._context.config
        settings = {} if model is None else model.settings
        return {
            "model_sha": None,
            "model_dtype": settings.get("dtype"),
            "model_device_type": settings.get("device"),
            "model_pipeline_tag": "text-generation",
            "max_best_of": config.max_n,
            "max_stop_sequences": config.max_stop_sequences,
            "max_client_batch_size": config.max_prompts,
            "max_input_length": None if model is None else model.max_input_tokens,
            "router": "quire",
            "sha": None,
            "docker_label": None,
        }

    async def metrics(self, request: Request) -> Response:
        """This process's own and, while it can be reached, the scheduler's."""
        text = self._context.metrics.exposition()
        try:
            more = await self._context.client.admin("metrics")
        except RefusedError as error:
            more = f"# the scheduler's metrics are missing: {error}\n".encode()
        if isinstance(more, str):
            more = more.encode()
        return Response(text + more, media_type=_EXPOSITION)
