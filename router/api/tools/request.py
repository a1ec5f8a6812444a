"""`tools` and `tool_choice` of a request, checked."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from proto.worker_pb2 import Grammar
from router.api.errors import invalid
from router.api.tools.forced import ParseNamed, parse_required
from router.api.tools.formats import Format, Marks
from router.api.tools.lines import JSON, ToolLine
from router.api.tools.message import MessageRules
from router.api.tools.schemas import DEFINITIONS, calls_schema, is_strict, parameters_of
from router.ipc.messages import GrammarSpec, ModelInfo

_NAME = re.compile(r"^[A-Za-z0-9_.:-]{1,128}$")
_NO_MARKS = Marks()
_CHOICES = ("auto", "none", "required")


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """What a request's tools mean for its prompt, its grammar and the reading of its answer."""

    tools: tuple[dict[str, Any], ...] = ()
    """For the prompt."""
    rules: MessageRules = field(default_factory=MessageRules)
    grammar: GrammarSpec | None = None
    """Forces a call."""
    calls: Format | None = None
    """Binds an answer of calls alone; None where the model makes none by itself, or nothing can be bound."""
    free: Format | None = None
    """Binds the calls in any answer: where a function is strict."""
    markers: tuple[str, ...] = ()


def tool_use(
    tools: Sequence[dict[str, Any]] | None,
    choice: str | dict[str, Any] | None,
    *,
    parallel: bool,
    line: ToolLine | None,
    model: ModelInfo,
    marks: Marks = _NO_MARKS,
) -> ToolUse:
    """Raises ApiError naming the field at fault, and when a call can't be forced."""
    functions = [_function(tool, f"tools[{i}]") for i, tool in enumerate(tools or ())]
    names = frozenset(function["name"] for function in functions)
    kind, named = _choice(choice, names=names)
    if not functions or kind == "none":
        return ToolUse()
    if kind == "auto" and line is None:
        raise invalid(
            "'tools' are not read on this server (--tool-parser none); leave them out, send tool_choice"
            ' "none" or "required", or name a function.',
            param="tools",
            code="unsupported",
        )
    max_calls = None if parallel else 1
    new_id = (line or JSON).new_id
    shown = tuple(tools or ())
    if kind == "auto" and line is not None:
        rules = MessageRules(parse=line.parse, names=names, new_id=new_id, max_calls=max_calls)
        use = ToolUse(tools=shown, rules=rules, markers=line.markers)
        if "grammar" not in model.features:
            return use
        calls = line.calls(functions, marks=marks, limit=max_calls)
        strict = any(map(is_strict, functions))
        return replace(
            use, calls=calls, free=line.free(functions, marks=marks, limit=max_calls) if strict else None
        )
    if "grammar" not in model.features:
        raise invalid(
            f"'tool_choice' can't force a call: the workers of {model.model_id} can't constrain text to a"
            ' grammar; send "auto".',
            param="tool_choice",
            code="unsupported",
        )
    if named is None:
        schema = calls_schema(functions, max_calls=max_calls)
        rules = MessageRules(parse=parse_required, names=names, new_id=new_id, max_calls=max_calls)
        grammar = _grammar(schema, strict=all(map(is_strict, functions)))
        return ToolUse(tools=shown, rules=rules, grammar=grammar)
    function = next(function for function in functions if function["name"] == named)
    rules = MessageRules(parse=ParseNamed(named), names=names, new_id=new_id, max_calls=1, tells_calls=False)
    grammar = _grammar(parameters_of(function), strict=is_strict(function))
    return ToolUse(tools=shown, rules=rules, grammar=grammar)


def _grammar(schema: dict[str, Any], *, strict: bool) -> GrammarSpec:
    return GrammarSpec(kind=Grammar.JSON_SCHEMA, source=json.dumps(schema), strict=strict, param="tools")


def _function(tool: dict[str, Any], path: str) -> dict[str, Any]:
    if tool.get("type", "function") != "function":
        raise invalid(
            f"Invalid value for '{path}.type': {str(tool.get('type'))[:40]!r} is not function, the only kind"
            " of tool here.",
            param=f"{path}.type",
        )
    function = tool.get("function")
    if not isinstance(function, dict):
        raise invalid(
            f"Missing required field: '{path}.function' must be an object.", param=f"{path}.function"
        )
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.match(name):
        raise invalid(
            f"Invalid value for '{path}.function.name': {str(name)[:40]!r} is not 1 to 128 letters, digits,"
            " '_', '-', '.' or ':'.",
            param=f"{path}.function.name",
        )
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise invalid(
            f"Invalid value for '{path}.function.parameters': expected a JSON schema.",
            param=f"{path}.function.parameters",
        )
    for key in DEFINITIONS:
        if not isinstance((parameters or {}).get(key, {}), dict):
            field = f"{path}.function.parameters.{key}"
            raise invalid(f"Invalid value for '{field}': expected an object.", param=field)
    return function


def _choice(choice: str | dict[str, Any] | None, *, names: frozenset[str]) -> tuple[str, str | None]:
    """(kind, name): auto, none, required, or named with the function's name."""
    if choice is None:
        return "auto", None
    if isinstance(choice, str):
        if choice not in _CHOICES:
            raise invalid(
                f"Invalid value for 'tool_choice': {choice[:40]!r} is not one of {', '.join(_CHOICES)}, or an"
                " object that names a function.",
                param="tool_choice",
            )
        if choice == "required" and not names:
            raise invalid("'tool_choice' \"required\" needs 'tools'.", param="tool_choice")
        return choice, None
    function = choice.get("function")
    name = function.get("name") if isinstance(function, dict) else choice.get("name")
    if choice.get("type", "function") != "function" or not isinstance(name, str):
        raise invalid(
            'Invalid value for \'tool_choice\': expected {"type": "function", "function": {"name": "…"}}.',
            param="tool_choice",
        )
    if name not in names:
        raise invalid(
            f"Invalid value for 'tool_choice': {name[:128]!r} is not one of the tools.",
            param="tool_choice.function.name",
        )
    return "named", name
