"""Input items as chat messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from router.api.conversation import normalise_calls, normalise_message
from router.api.errors import invalid

_NOT_SHOWN = ("reasoning",)
"""Thoughts of earlier answers: templates leave them out too."""


def messages_of(given: str | Sequence[dict[str, Any]], *, instructions: str | None) -> list[dict[str, Any]]:
    """Raises ApiError naming the item at fault."""
    messages: list[dict[str, Any]] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    if isinstance(given, str):
        messages.append({"role": "user", "content": given})
        return messages
    if not given:
        raise invalid("'input' must hold at least one item.", param="input")
    for i, item in enumerate(given):
        _add(messages, item, f"input[{i}]")
    if not messages:
        raise invalid("'input' holds nothing that the model is shown.", param="input")
    return messages


def tools_of(tools: Sequence[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Function tools in chat's form, one level deeper; others are left for the check that names them."""
    if tools is None:
        return None
    return [
        {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}
        if tool.get("type") == "function" and "function" not in tool
        else tool
        for tool in tools
    ]


def response_format_of(format: dict[str, Any] | None) -> dict[str, Any] | None:
    """`text.format` in chat's form, where a schema is one level deeper. Raises ApiError naming its field."""
    if format is None:
        return None
    kind = format.get("type")
    if kind not in ("text", "json_object", "json_schema"):
        raise invalid(
            f"Invalid value for 'text.format.type': {str(kind)[:40]!r} is not one of text, json_object,"
            " json_schema.",
            param="text.format.type",
        )
    if kind != "json_schema":
        return format
    if not isinstance(format.get("schema"), dict):
        raise invalid(
            "Missing required field: 'text.format.schema' must be a JSON schema.", param="text.format.schema"
        )
    return {"type": "json_schema", "json_schema": {k: v for k, v in format.items() if k != "type"}}


def _add(messages: list[dict[str, Any]], item: dict[str, Any], path: str) -> None:
    kind = item.get("type", "message")
    if kind == "message":
        message = {name: value for name, value in item.items() if name in ("role", "content", "name")}
        messages.append(normalise_message(message, path))
    elif kind == "function_call":
        if not isinstance(item.get("name"), str):
            raise invalid(f"Missing required field: '{path}.name' must be a string.", param=f"{path}.name")
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id") or item.get("id"), "type": "function", "function": function}
        (call,) = normalise_calls([call], path)
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        messages[-1].setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        message = {"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")}
        messages.append(normalise_message(message, path))
    elif kind not in _NOT_SHOWN:
        raise invalid(
            f"Invalid value for '{path}.type': {str(kind)[:40]!r} is not one of message, function_call,"
            " function_call_output, reasoning.",
            param=f"{path}.type",
        )
