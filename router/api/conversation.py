"""Chat messages: checked, and brought into the form that templates expect."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import msgspec

from router.api.decode import is_too_deep
from router.api.errors import invalid

CALL_ID = "function0"
"""Calls of the older kind have no id, and templates want one; nine letters and digits suit all of them."""
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
_TEXT_PARTS = ("text", "input_text", "output_text", "refusal")


def normalise_messages(messages: Sequence[dict[str, Any]], *, path: str = "messages") -> list[dict[str, Any]]:
    """Text parts are joined; all else is handed on. Raises ApiError naming the message at fault."""
    if not messages:
        raise invalid(f"'{path}' must hold at least one message.", param=path)
    return [normalise_message(message, f"{path}[{i}]") for i, message in enumerate(messages)]


def normalise_message(message: dict[str, Any], path: str) -> dict[str, Any]:
    """Of one message; of its own result it changes nothing."""
    role = message.get("role")
    if not isinstance(role, str):
        what = "Missing required field" if role is None else "Invalid value for"
        raise invalid(f"{what}: '{path}.role' must be a string.", param=f"{path}.role")
    if role not in _ROLES:
        raise invalid(
            f"Invalid value for '{path}.role': {role[:40]!r} is not one of {', '.join(sorted(_ROLES))}.",
            param=f"{path}.role",
        )
    result = dict(message)
    if role == "developer":  # the newer name for what templates know as the system's words
        result["role"] = "system"
    if role == "function":  # the older name of a tool's result
        result |= {"role": "tool", "tool_call_id": CALL_ID}
    content = message.get("content")
    if content is None:
        if role != "assistant":
            raise invalid(f"Missing required field: '{path}.content'.", param=f"{path}.content")
        result["content"] = ""
    elif isinstance(content, list):
        result["content"] = "".join(
            _part_text(part, f"{path}.content[{i}]") for i, part in enumerate(content)
        )
    elif not isinstance(content, str):
        raise invalid(
            f"Invalid value for '{path}.content': expected a string or a list of parts, got"
            f" {type(content).__name__}.",
            param=f"{path}.content",
        )
    if role == "assistant" and result.get("function_call") and not result.get("tool_calls"):
        function = _function(result.pop("function_call"), f"{path}.function_call")
        result["tool_calls"] = [{"id": CALL_ID, "type": "function", "function": function}]
    elif role == "assistant" and result.get("tool_calls"):
        result["tool_calls"] = normalise_calls(result["tool_calls"], f"{path}.tool_calls")
    return result


def normalise_calls(calls: object, path: str) -> list[dict[str, Any]]:
    """Templates expect the arguments as an object, clients send them as JSON text."""
    if not isinstance(calls, list):
        raise invalid(f"Invalid value for '{path}': expected a list.", param=path)
    return [_call(call, f"{path}[{i}]") for i, call in enumerate(calls)]


def _call(call: object, path: str) -> dict[str, Any]:
    if not isinstance(call, dict):
        raise invalid(f"Missing required field: '{path}.function'.", param=f"{path}.function")
    return {**call, "function": _function(call.get("function"), f"{path}.function")}


def _function(function: object, path: str) -> dict[str, Any]:
    if not isinstance(function, dict):
        raise invalid(f"Missing required field: '{path}'.", param=path)
    if not isinstance(function.get("name"), str):
        raise invalid(f"Missing required field: '{path}.name' must be a string.", param=f"{path}.name")
    arguments = function.get("arguments")
    if isinstance(arguments, str) and not is_too_deep(arguments.encode(errors="replace")):
        # What a model wrote wrong it may see again.
        with contextlib.suppress(msgspec.DecodeError, RecursionError):
            arguments = msgspec.json.decode(arguments or "{}")
    return {**function, "arguments": {} if arguments is None else arguments}


def _part_text(part: object, path: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise invalid(f"Invalid value for '{path}': expected an object.", param=path)
    kind = part.get("type", "text")
    if kind not in _TEXT_PARTS:
        raise invalid(
            f"'{path}' has the type {str(kind)[:40]!r}: this model takes text only.", param=f"{path}.type"
        )
    text = part.get("refusal" if kind == "refusal" else "text")
    if not isinstance(text, str):
        raise invalid(f"Invalid value for '{path}.text': expected a string.", param=f"{path}.text")
    return text
