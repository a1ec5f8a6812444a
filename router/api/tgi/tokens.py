"""TGI's POST /tokenize (a body with `inputs`) and /chat_tokenize: tokens with their places in the text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from router.api.chat import render_request, tools_of
from router.api.context import ApiContext
from router.api.decode import read_body
from router.api.encoder import Span
from router.api.reply import json_reply
from router.api.schema import ChatRequest
from router.api.tgi.schema import InputsTokenizeRequest
from router.api.tools.legacy import with_tools


class TgiTokenRoutes:
    def __init__(self, context: ApiContext) -> None:
        self._context = context

    async def tokenize(self, body: bytes) -> Response:
        wanted = self._context.decoder.decode(body, InputsTokenizeRequest)
        spans = await self._context.text.encoder.encode_spans(wanted.inputs, special=True)
        return json_reply(_tokens(wanted.inputs, spans))

    async def chat_tokenize(self, request: Request) -> Response:
        context = self._context
        body = await read_body(request.receive, context.config)
        wanted, _ = with_tools(context.decoder.decode(body, ChatRequest))
        model = context.check_model(wanted.model)
        rendered = render_request(context, wanted, tools=tools_of(context, wanted, model=model).tools)
        spans = await context.text.encoder.encode_rendered_spans(rendered)
        text = rendered.text
        return json_reply({"tokenize_response": _tokens(text, spans), "templated_text": text})


def _tokens(text: str, spans: Sequence[Span]) -> list[dict[str, Any]]:
    return [
        {"id": token, "text": text[start:stop], "start": start, "stop": stop} for token, start, stop in spans
    ]
