"""GET /openapi.json: the routes, with request bodies as the decoder reads them."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from router.api.responses.schema import ResponsesRequest
from router.api.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    DrainRequest,
    TokenizeRequest,
)
from router.api.tgi.schema import GenerateRequest, InputsTokenizeRequest
from router.api.version import VERSION

_REF = "#/components/schemas/{name}"
_OPEN = ("/health", "/ping")


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    path: str
    summary: str
    bodies: tuple[type[msgspec.Struct], ...] = ()
    """Of several the body is one."""
    method: str = "get"
    streams: bool = False
    style: str = "openai"
    parameter: str = ""


OPERATIONS = (
    Operation(
        path="/v1/chat/completions", summary="Chat", method="post", bodies=(ChatRequest,), streams=True
    ),
    Operation(
        path="/v1/completions",
        summary="Text completion",
        method="post",
        bodies=(CompletionRequest,),
        streams=True,
    ),
    Operation(
        path="/v1/responses",
        summary="Responses, stateless",
        method="post",
        bodies=(ResponsesRequest,),
        streams=True,
    ),
    Operation(path="/v1/models", summary="The served model under all its names"),
    Operation(path="/v1/models/{name}", summary="One model", parameter="name"),
    Operation(
        path="/tokenize",
        summary="Tokens of a text",
        method="post",
        bodies=(TokenizeRequest, InputsTokenizeRequest),
    ),
    Operation(path="/detokenize", summary="Text of tokens", method="post", bodies=(DetokenizeRequest,)),
    Operation(
        path="/generate", summary="Generate (TGI)", method="post", bodies=(GenerateRequest,), style="tgi"
    ),
    Operation(
        path="/generate_stream",
        summary="Generate, an event for each token (TGI)",
        method="post",
        bodies=(GenerateRequest,),
        streams=True,
        style="tgi",
    ),
    Operation(
        path="/",
        summary="Generate (TGI, older form)",
        method="post",
        bodies=(GenerateRequest,),
        streams=True,
        style="tgi",
    ),
    Operation(
        path="/invocations",
        summary="Generate, chat or complete (SageMaker)",
        method="post",
        bodies=(GenerateRequest, ChatRequest, CompletionRequest),
        streams=True,
        style="tgi",
    ),
    Operation(
        path="/chat_tokenize",
        summary="Tokens of a chat (TGI)",
        method="post",
        bodies=(ChatRequest,),
        style="tgi",
    ),
    Operation(path="/info", summary="Model, limits and settings in force"),
    Operation(path="/health", summary="Whether a request sent now would be served"),
    Operation(path="/health/live", summary="Whether this process answers"),
    Operation(path="/health/ready", summary="As /health"),
    Operation(path="/ping", summary="As /health (SageMaker)"),
    Operation(path="/metrics", summary="Prometheus text"),
    Operation(path="/admin/state", summary="Queue, running requests, replicas"),
    Operation(path="/admin/live", summary="The engine, once a second", streams=True),
    Operation(path="/admin/cache", summary="Blocks and the hottest prefixes"),
    Operation(path="/admin/cache/flush", method="post", summary="Drops every cached block that is free"),
    Operation(path="/admin/check", method="post", summary="Proves the allocators' invariants"),
    Operation(
        path="/admin/replicas/drain",
        summary="Takes a worker out, or back",
        method="post",
        bodies=(DrainRequest,),
    ),
)


def openapi_description() -> dict[str, Any]:
    """OpenAPI 3.1. Fields are described by type alone: docs/api.md says what they do."""
    kinds = dict.fromkeys(kind for operation in OPERATIONS for kind in operation.bodies)
    _, schemas = msgspec.json.schema_components(tuple(kinds), ref_template=_REF)
    paths: dict[str, Any] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Quire", "version": VERSION},
        "paths": paths,
        "components": {
            "schemas": schemas | {"OpenAIError": _OPENAI_ERROR, "TgiError": _TGI_ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


class OpenApiRoute:
    async def describe(self, request: Request) -> Response:
        return Response(_encoded(), media_type="application/json")


@functools.cache
def _encoded() -> bytes:
    """The description never changes while a process lives, and few ask for it."""
    return msgspec.json.encode(openapi_description())


def _operation(operation: Operation) -> dict[str, Any]:
    answer: dict[str, Any] = {"application/json": {}}
    if operation.path == "/metrics":
        answer = {"text/plain": {}}
    if operation.streams:
        answer["text/event-stream"] = {}
    error = _REF.format(name="TgiError" if operation.style == "tgi" else "OpenAIError")
    value: dict[str, Any] = {
        "summary": operation.summary,
        "responses": {
            "200": {"description": "The answer", "content": answer},
            "default": {
                "description": "What went wrong",
                "content": {"application/json": {"schema": {"$ref": error}}},
            },
        },
    }
    if operation.path.startswith(_OPEN):
        value["security"] = []
    if operation.parameter:
        parameter = {
            "name": operation.parameter,
            "in": "path",
            "required": True,
            "schema": {"type": "string"},
        }
        value["parameters"] = [parameter]
    if operation.bodies:
        references = [{"$ref": _REF.format(name=kind.__name__)} for kind in operation.bodies]
        schema = references[0] if len(references) == 1 else {"anyOf": references}
        value["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return value


_OPENAI_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_TGI_ERROR = {
    "type": "object",
    "required": ["error", "error_type"],
    "properties": {"error": {"type": "string"}, "error_type": {"type": "string"}},
}
