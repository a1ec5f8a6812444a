"""POST /v1/responses: a chat in other words. Nothing is kept: each request brings its whole conversation."""

from __future__ import annotations

import re

import msgspec

from router.api.chat import prepare_chat
from router.api.errors import ApiError, invalid
from router.api.exchange import Exchange
from router.api.generation import AnswerFormat, GenerationEndpoint
from router.api.job import Job
from router.api.responses.format import ResponseFormat
from router.api.responses.input import messages_of, response_format_of, tools_of
from router.api.responses.schema import ResponsesRequest
from router.api.schema import ChatRequest

_LOGPROBS = "message.output_text.logprobs"
_OWN_FIELDS = {"messages": "input", "response_format.json_schema.schema": "text.format.schema"}
_UNSERVED = ("moderation", "context_management")
_NEEDS_MEMORY = ("previous_response_id", "conversation", "prompt", "background")


class ResponsesEndpoint(GenerationEndpoint):
    async def prepare(self, body: bytes, exchange: Exchange) -> tuple[Job, AnswerFormat]:
        context = self._context
        request = context.decoder.decode(body, ResponsesRequest)
        model = context.check_model(request.model)
        _refuse_unserved(request)
        chat = ChatRequest(
            model=request.model,
            messages=messages_of(request.input, instructions=request.instructions),
            stream=request.stream,
            temperature=request.temperature,
            top_p=request.top_p,
            tools=tools_of(request.tools),
            tool_choice=request.tool_choice,
            parallel_tool_calls=request.parallel_tool_calls,
            logprobs=bool(request.top_logprobs) or _LOGPROBS in (request.include or ()),
            top_logprobs=request.top_logprobs,
            response_format=response_format_of(None if request.text is None else request.text.format),
        )
        try:
            job, rules = await prepare_chat(
                context,
                chat,
                exchange,
                prefix="resp",
                max_tokens=request.max_output_tokens,
                max_tokens_field="max_output_tokens",
                messages_field="input",
            )
        except ApiError as error:
            raise _in_own_words(error) from error
        format = ResponseFormat(
            job, request=request, model=model.model_id, rules=rules, names=context.text.names
        )
        return job, format


def _in_own_words(error: ApiError) -> ApiError:
    """The same error, naming the field as this route has it."""
    now = error.info.param or ""
    field = re.sub(r"^(tools\[\d+\])\.function", r"\1", _OWN_FIELDS.get(now, now))
    message = error.info.message.replace(f"'{now}'", f"'{field}'") if now else error.info.message
    return ApiError(msgspec.structs.replace(error.info, param=field or None, message=message))


def _refuse_unserved(request: ResponsesRequest) -> None:
    for field in _NEEDS_MEMORY:
        if getattr(request, field):
            raise invalid(
                f"'{field}' is not available: this server keeps no responses; send the whole conversation as"
                " 'input'.",
                param=field,
                code="unsupported",
            )
    for field in _UNSERVED:
        if getattr(request, field):
            raise invalid(f"'{field}' is not available on this server.", param=field, code="unsupported")
    if request.truncation == "auto":
        raise invalid(
            "'truncation' \"auto\" is not available: nothing is cut out of a conversation here.",
            param="truncation",
            code="unsupported",
        )
