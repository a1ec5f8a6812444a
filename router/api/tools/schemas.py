"""JSON schemas that force calls: for `tool_choice` required."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Function = Mapping[str, Any]
"""One of a request's functions: name, parameters, strict."""

DEFINITIONS = ("$defs", "definitions")
"""Where a schema keeps what it refers to."""


def parameters_of(function: Function) -> dict[str, Any]:
    """Of a function that says nothing of its input: an object without fields."""
    given = function.get("parameters")
    return given if given else {"type": "object", "properties": {}, "additionalProperties": False}


def is_strict(function: Function) -> bool:
    return function.get("strict") is True


def bound_parameters(function: Function) -> dict[str, Any]:
    """Of a function that is not strict, any object."""
    return parameters_of(function) if is_strict(function) else {"type": "object"}


def calls_schema(
    functions: Sequence[Function],
    *,
    max_calls: int | None,
    parameters: Callable[[Function], dict[str, Any]] = parameters_of,
) -> dict[str, Any]:
    """A list of at least one object with `name` and `arguments`, each function with its own schema."""
    definitions: dict[str, Any] = {}
    variants = []
    for i, function in enumerate(functions):
        arguments, own = _lifted(parameters(function), prefix=f"f{i}_")
        definitions |= own
        variants.append(
            {
                "type": "object",
                "properties": {"name": {"const": function["name"]}, "arguments": arguments},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    items = variants[0] if len(variants) == 1 else {"anyOf": variants}
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": items}
    if max_calls is not None:
        schema["maxItems"] = max_calls
    if definitions:
        schema["$defs"] = definitions
    return schema


def _lifted(schema: dict[str, Any], *, prefix: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The schema as a part of a larger one: its definitions move to the root, under names of their own."""
    own = {
        f"{prefix}{name}": _renamed(value, prefix)
        for key in DEFINITIONS
        for name, value in schema.get(key, {}).items()
    }
    rest = {name: value for name, value in schema.items() if name not in DEFINITIONS}
    renamed: dict[str, Any] = _renamed(rest, prefix)
    return renamed, own


def _renamed(value: Any, prefix: str) -> Any:
    if isinstance(value, list):
        return [_renamed(item, prefix) for item in value]
    if not isinstance(value, dict):
        return value
    result = {name: _renamed(item, prefix) for name, item in value.items()}
    reference = value.get("$ref")
    if isinstance(reference, str):
        for key in DEFINITIONS:
            if reference.startswith(f"#/{key}/"):
                result["$ref"] = f"#/$defs/{prefix}{reference.removeprefix(f'#/{key}/')}"
    return result
