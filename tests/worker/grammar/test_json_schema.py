# ruff: noqa: E501
"""Schemas that the compiler would not enforce: rewritten, refused, or (not strict) left out."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from tests.worker.grammar.tiny import END, json_schema, text, write
from worker.grammar.json_schema import enforceable
from worker.grammar.rows import GrammarRows

TAGGED = {
    "oneOf": [
        {"type": "object", "properties": {"kind": {"const": kind}, kind: inner}, "required": ["kind", kind]}
        for kind, inner in (("a", {"type": "integer"}), ("b", {"type": "boolean"}))
    ]
}

ENFORCED: dict[str, Any] = {
    "bare object": {"type": "object"},
    "anything": {},
    "bounded strings": {"type": "array", "items": {"type": "string", "minLength": 2, "maxLength": 4}, "minItems": 3, "maxItems": 3},
    "a lower bound alone": {"type": "string", "minLength": 3},
    "an empty string": {"type": "string", "maxLength": 0},
    "string or null": {"type": ["string", "null"], "maxLength": 2},
    "pattern": {"type": "string", "pattern": "^[a-c]{2}-\\d+$"},
    "negated class": {"type": "string", "pattern": '^[^"\\\\a]{1,4}$'},
    "integer range": {"type": "integer", "minimum": -3, "exclusiveMaximum": 12},
    "a bound without a type": {"minimum": 5},
    "a length without a type": {"maxLength": 3},
    "multiples": {"type": "number", "multipleOf": 5.0},
    "required but not described": {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a", "z"]},
    "properties without a type": {"properties": {"a": {"type": "integer"}}, "required": ["a"]},
    "optional properties": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "boolean"}, "c": {"type": "null"}},
        "required": ["b"],
        "additionalProperties": False,
    },
    "enum of mixed types": {"type": "string", "enum": ["a", 1, None]},
    "const": {"const": {"a": [1, "ü"]}},
    "a list of one around a reference": {
        "$defs": {"size": {"enum": ["S", "M"]}},
        "type": "object",
        "properties": {"size": {"allOf": [{"$ref": "#/$defs/size"}], "description": "of the shirt"}},
        "required": ["size"],
    },
    "a reference with a description": {"$defs": {"s": {"type": "null"}}, "$ref": "#/$defs/s", "title": "x"},
    "recursion": {
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "value": {"type": "integer"},
                    "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
                },
                "required": ["value", "next"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/node",
    },
    "a tuple of old": {"type": "array", "items": [{"type": "integer"}, {"type": "boolean"}], "minItems": 2},
    "a tuple": {"type": "array", "prefixItems": [{"type": "null"}, {"type": "boolean"}], "items": False, "minItems": 2},
    "alternatives by type": {"oneOf": [{"type": "string", "maxLength": 3}, {"type": "integer"}, {"type": "null"}]},
    "alternatives by a constant": TAGGED,
    "alternatives by value": {"oneOf": [{"const": 1}, {"enum": [2, 3]}]},
    "type object beside anyOf": {"type": "object", "anyOf": TAGGED["oneOf"]},
    "names by pattern": {"type": "object", "patternProperties": {"^x[0-9]$": {"type": "integer"}}, "additionalProperties": False},
    "values of one type": {"type": "object", "additionalProperties": {"type": "boolean"}, "minProperties": 1, "maxProperties": 2},
}  # fmt: skip

REFUSED: dict[str, tuple[Any, str]] = {
    "not": ({"type": "string", "not": {"const": "a"}}, "$.not"),
    "unique": ({"properties": {"a": {"type": "array", "uniqueItems": True}}}, "$.properties.a.uniqueItems"),
    "contains": ({"type": "array", "contains": {"const": 1}}, "$.contains"),
    "conditions": ({"type": "object", "if": {}, "then": {}}, "$.if"),
    "dependent": ({"type": "object", "dependentRequired": {"a": ["b"]}}, "$.dependentRequired"),
    "all of two": ({"allOf": [{"type": "integer"}, {"minimum": 3}]}, "$.allOf"),
    "overlap": ({"items": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}, "$.items.oneOf"),
    "beside a reference": ({"$defs": {"s": {"type": "string"}}, "$ref": "#/$defs/s", "maxLength": 2}, "$.maxLength"),
    "beside anyOf": ({"properties": {"a": {}}, "anyOf": [{"required": ["a"]}]}, "$.properties"),
    "pattern and length": ({"type": "string", "pattern": "^a*$", "maxLength": 3}, "$.maxLength"),
    "a quotation mark": ({"type": "string", "pattern": '^"$'}, "$.pattern"),
    "a line end": ({"type": "string", "pattern": "^a\\nb$"}, "$.pattern"),
    "multiples in a range": ({"type": "integer", "multipleOf": 3, "minimum": 1}, "$.minimum"),
    "fractions": ({"type": "number", "multipleOf": 0.3}, "$.multipleOf"),
}  # fmt: skip

WRONG: dict[str, tuple[Any, str]] = {
    "no schema": ({"properties": {"a": 1}}, "$.properties.a"),
    "required": ({"required": "a"}, "$.required"),
    "required, nowhere described": ({"required": ["b"], "additionalProperties": False}, "'b' is required"),
    "enum": ({"enum": []}, "$.enum"),
    "enum of another type": ({"type": "integer", "enum": ["a"]}, "$.enum"),
    "length": ({"type": "string", "maxLength": -1}, "$.maxLength"),
    "lengths": ({"type": "string", "minLength": 3, "maxLength": 1}, "$.minLength"),
    "list": ({"anyOf": []}, "$.anyOf"),
}


@pytest.mark.parametrize("name", ENFORCED)
def test_every_answer_is_valid(rows: GrammarRows, name: str) -> None:
    schema = ENFORCED[name]
    validator = jsonschema.Draft202012Validator(schema)
    if name == "a tuple of old":
        validator = jsonschema.Draft7Validator(schema)  # type: ignore[assignment]  # the same protocol
    n_whole = 0
    for seed in range(12):
        rows.admit(0, json_schema(json.dumps(schema)), output=[])
        output = write(rows, 0, seed=seed)
        if output[-1] == END:
            n_whole += 1
            validator.validate(json.loads(text(output)))
    assert n_whole > 6


@pytest.mark.parametrize("name", REFUSED)
def test_what_can_not_be_enforced_is_refused_with_its_path(name: str) -> None:
    schema, path = REFUSED[name]
    with pytest.raises(ValueError, match=r"can.* be enforced") as raised:
        enforceable(json.dumps(schema), strict=True)
    assert str(raised.value).startswith(f"at {path}: ")


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_left_out_when_the_client_is_not_strict(rows: GrammarRows, name: str) -> None:
    rows.admit(0, json_schema(json.dumps(REFUSED[name][0]), strict=False), output=[])
    outputs = [text(write(rows, 0, seed=1))]
    assert [json.loads(output) for output in outputs]


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("strict", [True, False])
def test_a_wrong_schema_is_refused_with_its_path(name: str, strict: bool) -> None:
    schema, message = WRONG[name]
    with pytest.raises(ValueError, match=r"^at [$]") as raised:
        enforceable(json.dumps(schema), strict=strict)
    assert message in str(raised.value)


def test_too_deep() -> None:
    source = '{"items":' * 100_000 + "{}" + "}" * 100_000
    with pytest.raises(ValueError, match="too deeply"):
        enforceable(source, strict=True)
