"""The HTTP application: routes on one side, the scheduler's client on the other."""

from __future__ import annotations

import time
from collections.abc import Callable

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from checkpoint.chat_template import ChatTemplate
from checkpoint.tokenizer import Tokenizer
from router.api.admin import AdminRoutes
from router.api.chat import ChatEndpoint
from router.api.completions import CompletionsEndpoint
from router.api.config import ApiConfig
from router.api.context import ApiContext
from router.api.embeddings import EmbeddingsRoute
from router.api.errors import error_value
from router.api.guard import Guard
from router.api.health import HealthRoutes
from router.api.info import InfoRoutes
from router.api.keys import ApiKeys
from router.api.models import ModelRoutes
from router.api.openapi import OpenApiRoute
from router.api.page.live import LiveEndpoint
from router.api.page.routes import PageRoutes
from router.api.reply import json_reply
from router.api.responses.endpoint import ResponsesEndpoint
from router.api.text_model import text_model
from router.api.tgi.generate import GenerateEndpoint, InvocationsEndpoint, Mode
from router.api.tgi.tokens import TgiTokenRoutes
from router.api.tokens import TokenRoutes
from router.ipc.client import SchedulerClient
from router.ipc.messages import ErrorInfo
from settings.tracing import Tracing


def create_app(
    *,
    client: SchedulerClient,
    config: ApiConfig,
    tokenizer: Tokenizer | None,
    chat_template: ChatTemplate | None = None,
    clock: Callable[[], float] = time.monotonic,
    tracing: Tracing | None = None,
) -> Starlette:
    """Serves requests for as long as `client` lives; doesn't close it. The shared `ApiContext` is at
    `app.state.context`: without a tokenizer its `loaded` is to be set later. Raises ConfigError for a file of
    keys that can't be read."""
    text = None if tokenizer is None else text_model(config, tokenizer, chat_template)
    context = ApiContext(client=client, config=config, text=text, clock=clock, tracing=tracing)
    keys = ApiKeys(config, clock=clock)
    middleware = [Middleware(Guard, context=context, keys=keys, clock=clock)]
    if config.cors_allow_origin:
        cors = Middleware(
            CORSMiddleware,
            allow_origins=list(config.cors_allow_origin),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id"],
        )
        middleware.insert(0, cors)
    app = Starlette(
        routes=_routes(context),
        middleware=middleware,
        exception_handlers={404: _no_route, 405: _wrong_method},
    )
    app.state.context = context
    return app


def _routes(context: ApiContext) -> list[Route]:
    health, info, admin = HealthRoutes(context), InfoRoutes(context), AdminRoutes(context)
    tokens, models = TokenRoutes(context), ModelRoutes(context, created=int(time.time()))
    page = PageRoutes(health)
    return [
        Route("/v1/chat/completions", ChatEndpoint(context), methods=["POST"]),
        Route("/v1/completions", CompletionsEndpoint(context), methods=["POST"]),
        Route("/v1/responses", ResponsesEndpoint(context), methods=["POST"]),
        Route("/v1/embeddings", EmbeddingsRoute(context).embed, methods=["POST"]),
        Route("/v1/models", models.list, methods=["GET"]),
        Route("/v1/models/{name:path}", models.one, methods=["GET"]),
        Route("/generate", GenerateEndpoint(context, mode=Mode.WHOLE), methods=["POST"]),
        Route("/generate_stream", GenerateEndpoint(context, mode=Mode.STREAM), methods=["POST"]),
        Route("/", GenerateEndpoint(context, mode=Mode.EITHER), methods=["POST"]),
        Route("/invocations", InvocationsEndpoint(context), methods=["POST"]),
        Route("/chat_tokenize", TgiTokenRoutes(context).chat_tokenize, methods=["POST"]),
        Route("/", page.index, methods=["GET"]),
        Route("/page/{name}", page.file, methods=["GET"]),
        Route("/ping", health.ready, methods=["GET"]),
        Route("/health", health.ready, methods=["GET"]),
        Route("/health/ready", health.ready, methods=["GET"]),
        Route("/health/live", health.live, methods=["GET"]),
        Route("/openapi.json", OpenApiRoute().describe, methods=["GET"]),
        Route("/info", info.info, methods=["GET"]),
        Route("/metrics", info.metrics, methods=["GET"]),
        Route("/tokenize", tokens.tokenize, methods=["POST"]),
        Route("/detokenize", tokens.detokenize, methods=["POST"]),
        Route("/admin/state", admin.state, methods=["GET"]),
        Route("/admin/live", LiveEndpoint(context), methods=["GET"]),
        Route("/admin/cache", admin.cache, methods=["GET"]),
        Route("/admin/cache/flush", admin.flush, methods=["POST"]),
        Route("/admin/replicas/drain", admin.drain, methods=["POST"]),
        Route("/admin/check", admin.check, methods=["POST"]),
    ]


async def _no_route(request: Request, error: Exception) -> Response:
    info = ErrorInfo(
        status=404,
        type="invalid_request_error",
        message=f"There is no route {request.method} {request.url.path[:200]}.",
        code="unknown_url",
    )
    return json_reply(error_value(info), status=404)


async def _wrong_method(request: Request, error: Exception) -> Response:
    allowed = (getattr(error, "headers", None) or {}).get("Allow", "")
    info = ErrorInfo(
        status=405,
        type="invalid_request_error",
        message=f"{request.url.path[:200]} does not take {request.method}; it takes {allowed}.",
        code="method_not_allowed",
    )
    errors = request.scope["exchange"].errors
    return Response(
        errors.body(info),
        status_code=errors.status(info),
        media_type="application/json",
        headers={"allow": allowed},
    )
