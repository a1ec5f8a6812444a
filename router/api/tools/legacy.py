"""`functions` and `function_call`, which chats had before `tools`: the same, with one call at most."""

from __future__ import annotations

from typing import Any

import msgspec

from router.api.errors import ApiError, invalid
from router.api.schema import ChatRequest

_CHOICES = ("auto", "none")
_OLDER_CHOICE = {"tool_choice": "function_call", "tool_choice.function.name": "function_call.name"}


def with_tools(request: ChatRequest) -> tuple[ChatRequest, bool]:
    """The request in today's words, and whether its answer is wanted in the older ones."""
    if request.functions is None:
        if isinstance(request.function_call, dict):
            raise invalid(
                "'function_call' names a function, but there are no 'functions'.", param="function_call"
            )
        return request, False
    if request.tools is not None:
        raise invalid("'functions' is the older name of 'tools'; send one of them.", param="functions")
    if request.tool_choice is not None:
        raise invalid(
            "'tool_choice' goes with 'tools'; 'functions' have 'function_call'.", param="tool_choice"
        )
    tools = [{"type": "function", "function": function} for function in request.functions]
    changed = msgspec.structs.replace(
        request,
        tools=tools,
        tool_choice=_choice(request.function_call),
        parallel_tool_calls=False,
        functions=None,
        function_call=None,
    )
    return changed, True


def in_older_words(error: ApiError) -> ApiError:
    """The same error, naming the fields that the client sent."""
    info = error.info
    now = info.param or ""
    before = _OLDER_CHOICE.get(now, now)
    if now == "tools" or now.startswith("tools["):
        before = now.replace("tools", "functions", 1).replace("].function", "]", 1)
    message = info.message.replace(f"'{now}'", f"'{before}'") if now else info.message
    return ApiError(msgspec.structs.replace(info, param=before or None, message=message))


def _choice(given: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    if given is None or isinstance(given, str):
        if given is not None and given not in _CHOICES:
            raise invalid(
                f"Invalid value for 'function_call': {given[:40]!r} is not one of {', '.join(_CHOICES)}, or"
                " an object that names a function.",
                param="function_call",
            )
        return given
    name = given.get("name")
    if not isinstance(name, str):
        raise invalid("Missing required field: 'function_call.name'.", param="function_call.name")
    return {"type": "function", "function": {"name": name}}
