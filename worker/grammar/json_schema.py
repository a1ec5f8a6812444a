"""A JSON schema as the compiler can enforce it.

The compiler takes keywords that it does not enforce, and some that it enforces wrongly, without a word. Here
each schema is rewritten to an equal or narrower one that it does enforce. What has no such form is refused,
with its path; when the client did not ask for strictness, it is left out instead.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

Schema = Any
Path = tuple[str | int, ...]

ANY_OBJECT: dict[str, Any] = {"type": "object", "additionalProperties": True}

_ANNOTATIONS = frozenset(
    {
        "title",
        "description",
        "default",
        "examples",
        "example",
        "deprecated",
        "readOnly",
        "writeOnly",
        "nullable",
        "discriminator",
        "$schema",
        "$id",
        "$comment",
        "$anchor",
        "$defs",
        "definitions",
        "format",
        "contentEncoding",
        "contentMediaType",
    }
)
_NOT_ENFORCED = (
    "not",
    "if",
    "then",
    "else",
    "contains",
    "minContains",
    "maxContains",
    "dependentRequired",
    "dependentSchemas",
    "dependencies",
    "unevaluatedItems",
    "$dynamicRef",
    "$recursiveRef",
)
_IMPLIED_TYPE = {
    "properties": "object",
    "required": "object",
    "additionalProperties": "object",
    "patternProperties": "object",
    "propertyNames": "object",
    "minProperties": "object",
    "maxProperties": "object",
    "items": "array",
    "prefixItems": "array",
    "minItems": "array",
    "maxItems": "array",
    "uniqueItems": "array",
    "minLength": "string",
    "maxLength": "string",
    "pattern": "string",
    "minimum": "number",
    "maximum": "number",
    "exclusiveMinimum": "number",
    "exclusiveMaximum": "number",
    "multipleOf": "number",
}
_SCHEMA_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_SCHEMA_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SCHEMAS = ("items", "additionalProperties", "propertyNames")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_PLAIN_CHARACTER = r'[^"\\\u0000-\u001f]'


def enforceable(source: str, *, strict: bool) -> str:
    """The schema to compile. Raises ValueError, for the user, naming the keyword and its path."""
    try:
        schema = json.loads(source)
        if not isinstance(schema, dict | bool):
            raise ValueError(f"a JSON schema is an object, not {type(schema).__name__}")
        return json.dumps(_Adapter(strict=strict).adapt(schema, ()))
    except RecursionError:
        raise ValueError("the schema is nested too deeply") from None


class _Adapter:
    def __init__(self, *, strict: bool) -> None:
        self._strict = strict

    def adapt(self, schema: Schema, path: Path) -> Schema:
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise _error(path, f"a schema is an object or a boolean, not {type(schema).__name__}")
        schema = dict(schema)
        self._drop_unenforced(schema, path)
        self._unwrap_all_of(schema, path)
        self._settle_combination(schema, path)
        self._settle_values(schema, path)
        self._imply_type(schema)
        self._settle_object(schema, path)
        self._settle_array(schema, path)
        self._settle_string(schema, path)
        self._settle_number(schema, path)
        for key in _SCHEMA_MAPS:
            if key in schema:
                parts = _mapping(schema[key], (*path, key))
                schema[key] = {name: self.adapt(part, (*path, key, name)) for name, part in parts.items()}
        for key in _SCHEMA_LISTS:
            if key in schema:
                listed = schema[key]
                if not isinstance(listed, list) or not listed:
                    raise _error((*path, key), "it must be a list with at least one schema")
                schema[key] = [self.adapt(part, (*path, key, i)) for i, part in enumerate(listed)]
        for key in _SCHEMAS:
            if key in schema:
                schema[key] = self.adapt(schema[key], (*path, key))
        return schema

    def _cannot(self, path: Path, why: str) -> None:
        """Strict: refused. Otherwise the caller leaves the keyword out."""
        if self._strict:
            raise _error(path, why)

    def _drop_unenforced(self, schema: dict[str, Any], path: Path) -> None:
        for key in _NOT_ENFORCED:
            if key in schema:
                self._cannot((*path, key), f"'{key}' can't be enforced")
                del schema[key]
        if schema.get("uniqueItems") is True:
            self._cannot((*path, "uniqueItems"), "'uniqueItems' can't be enforced")
        schema.pop("uniqueItems", None)

    def _unwrap_all_of(self, schema: dict[str, Any], path: Path) -> None:
        """A list of one, as generators write it around a reference, is that one."""
        listed = schema.get("allOf")
        if listed is None:
            return
        if not isinstance(listed, list) or not listed:
            raise _error((*path, "allOf"), "it must be a list with at least one schema")
        others = [key for key in schema if key != "allOf" and key not in _ANNOTATIONS]
        if len(listed) == 1 and isinstance(listed[0], dict) and not others:
            del schema["allOf"]
            schema.update(listed[0])
            self._drop_unenforced(schema, (*path, "allOf", 0))
            self._unwrap_all_of(schema, (*path, "allOf", 0))
            return
        self._cannot((*path, "allOf"), "'allOf' of several schemas can't be enforced: write them as one")
        del schema["allOf"]

    def _settle_combination(self, schema: dict[str, Any], path: Path) -> None:
        """The compiler looks at one of these alone and at nothing beside it."""
        found = [key for key in ("$ref", "anyOf", "oneOf") if key in schema]
        if not found:
            return
        key = found[0]
        others = [k for k in schema if k != key and k not in _ANNOTATIONS]
        if key in ("anyOf", "oneOf") and others == ["type"] and schema["type"] == "object":
            others = []  # an innocent habit of generators
            del schema["type"]
        if others:
            self._cannot((*path, others[0]), f"'{others[0]}' beside '{key}' can't be enforced")
            for other in others:
                del schema[other]
        if key == "oneOf":
            if not _are_disjoint(schema["oneOf"]):
                self._cannot(
                    (*path, "oneOf"),
                    "'oneOf' can be enforced only where its schemas exclude each other by type or by a"
                    " required property with different constants; write 'anyOf' if any of them will do",
                )
            schema["anyOf"] = schema.pop("oneOf")

    def _settle_values(self, schema: dict[str, Any], path: Path) -> None:
        """`enum` and `const` stand alone for the compiler: values of another type leave."""
        if "enum" not in schema:
            return
        values = schema["enum"]
        if not isinstance(values, list) or not values:
            raise _error((*path, "enum"), "it must be a list with at least one value")
        types = _types(schema)
        if types:
            kept = [value for value in values if any(_is_of(value, name) for name in types)]
            if not kept:
                raise _error((*path, "enum"), f"no value is of type {', '.join(types)}")
            schema["enum"] = kept

    def _imply_type(self, schema: dict[str, Any]) -> None:
        """Without a type, keywords bind values of their own type alone; the answer is then of that type."""
        if any(key in schema for key in ("type", "$ref", "anyOf", "enum", "const")):
            return
        implied = next((name for key, name in _IMPLIED_TYPE.items() if key in schema), None)
        if implied is not None:
            schema["type"] = implied

    def _settle_object(self, schema: dict[str, Any], path: Path) -> None:
        required = schema.get("required")
        if required is None:
            return
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise _error((*path, "required"), "it must be a list of names")
        properties = dict(_mapping(schema.get("properties", {}), (*path, "properties")))
        missing = [name for name in required if name not in properties]
        if not missing:
            return
        rest = schema.get("additionalProperties", True)
        if rest is False or "patternProperties" in schema:
            raise _error(
                (*path, "required"), f"'{missing[0]}' is required, but 'properties' does not describe it"
            )
        for name in missing:
            properties[name] = rest
        schema["properties"] = properties

    def _settle_array(self, schema: dict[str, Any], path: Path) -> None:
        items = schema.get("items")
        if isinstance(items, list):
            if not items:
                del schema["items"]
                return
            schema["prefixItems"] = items
            rest = schema.pop("additionalItems", None)
            schema["items"] = rest if rest is not None else True

    def _settle_string(self, schema: dict[str, Any], path: Path) -> None:
        """The compiler's bounded strings let control characters through, which JSON forbids; its patterns
        don't, but hold plain characters alone."""
        low, high = schema.get("minLength"), schema.get("maxLength")
        for key, value in (("minLength", low), ("maxLength", high)):
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
                raise _error((*path, key), "it must be a whole number, 0 or above")
        pattern = schema.get("pattern")
        if pattern is not None:
            if not isinstance(pattern, str):
                raise _error((*path, "pattern"), "it must be a string")
            why = _why_no_pattern(pattern)
            if why:
                self._cannot((*path, "pattern"), why)
                del schema["pattern"]
                pattern = None
            elif low is not None or high is not None:
                key = "maxLength" if high is not None else "minLength"
                self._cannot(
                    (*path, key), f"'{key}' beside 'pattern' can't be enforced: say it in the pattern"
                )
        if pattern is None and (low is not None or high is not None) and "string" in _types(schema):
            if low is not None and high is not None and low > high:
                raise _error((*path, "minLength"), f"minLength {low} is above maxLength {high}")
            if low or high is not None:
                schema["pattern"] = f"^{_PLAIN_CHARACTER}{{{low or 0},{'' if high is None else high}}}$"
            schema.pop("format", None)
        schema.pop("minLength", None)
        schema.pop("maxLength", None)

    def _settle_number(self, schema: dict[str, Any], path: Path) -> None:
        step = schema.get("multipleOf")
        if step is None:
            return
        if not isinstance(step, int | float) or isinstance(step, bool) or step <= 0:
            raise _error((*path, "multipleOf"), "it must be a number above 0")
        if isinstance(step, float) and step.is_integer():
            schema["multipleOf"] = int(step)
        elif isinstance(step, float):
            self._cannot((*path, "multipleOf"), "'multipleOf' can be enforced for whole numbers only")
            del schema["multipleOf"]
            return
        if schema.get("type") == "number":
            schema["type"] = "integer"
        bounds = [key for key in schema if key in _BOUNDS]
        if bounds:
            self._cannot((*path, bounds[0]), f"'{bounds[0]}' beside 'multipleOf' can't be enforced")
            del schema["multipleOf"]


def _types(schema: dict[str, Any]) -> list[str]:
    value = schema.get("type")
    if isinstance(value, str):
        return [value]
    return [name for name in value if isinstance(name, str)] if isinstance(value, list) else []


def _is_of(value: object, name: str) -> bool:
    if isinstance(value, bool):
        return name == "boolean"
    if isinstance(value, int | float):
        return name == "number" or (name == "integer" and float(value).is_integer())
    names = {str: "string", type(None): "null", list: "array", dict: "object"}
    return names.get(type(value)) == name


def _are_disjoint(listed: object) -> bool:
    """Whether no value can be of two of the schemas, as far as that is plain to see."""
    if not isinstance(listed, list):
        return False
    return all(_exclude_each_other(one, other) for i, one in enumerate(listed) for other in listed[i + 1 :])


def _exclude_each_other(one: Schema, other: Schema) -> bool:
    if not isinstance(one, dict) or not isinstance(other, dict):
        return False
    first, second = _kinds(one), _kinds(other)
    if first and second and not first & second:
        return True
    for name in set(_required(one)) & set(_required(other)):
        values, others = _constants(one, name), _constants(other, name)
        if values is not None and others is not None and not values & others:
            return True
    values, others = _constants_of(one), _constants_of(other)
    return values is not None and others is not None and not values & others


def _kinds(schema: dict[str, Any]) -> set[str]:
    return {"number" if name == "integer" else name for name in _types(schema)}


def _required(schema: dict[str, Any]) -> list[str]:
    value = schema.get("required")
    return [name for name in value if isinstance(name, str)] if isinstance(value, list) else []


def _constants(schema: dict[str, Any], name: str) -> set[str] | None:
    properties = schema.get("properties")
    part = properties.get(name) if isinstance(properties, dict) else None
    return _constants_of(part) if isinstance(part, dict) else None


def _constants_of(schema: dict[str, Any]) -> set[str] | None:
    if "const" in schema:
        return {json.dumps(schema["const"], sort_keys=True)}
    values = schema.get("enum")
    return {json.dumps(value, sort_keys=True) for value in values} if isinstance(values, list) else None


def _why_no_pattern(pattern: str) -> str:
    """Inside a JSON string some characters have to be escaped, and the compiler writes them as they are."""
    without_negated = re.sub(r"\[\^(?:\\.|[^\]\\])*\]", "", pattern)
    if '"' in without_negated or re.search(r"\\\\", without_negated):
        return "a 'pattern' with a quotation mark or a backslash in the text can't be enforced"
    if re.search(r"\\[nrtfv0bc]|[\x00-\x1f]", without_negated.replace("\\\\", "")):
        return "a 'pattern' with control characters or word boundaries can't be enforced"
    return ""


def _mapping(value: object, path: Path) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _error(path, f"it must be an object, not {type(value).__name__}")
    return value


def _error(path: Sequence[str | int], why: str) -> ValueError:
    return ValueError(f"at {_spelled(path)}: {why}")


def _spelled(path: Sequence[str | int]) -> str:
    """`$.properties.a.items[0]`"""
    text = "$"
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return text[:200]
