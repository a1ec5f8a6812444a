# ruff: noqa: E501
"""Bounded JSON schemas of varied shapes: a fixed dozen, and as many random ones as asked for."""

from __future__ import annotations

import random
from typing import Any

Schema = dict[str, Any]


def _object(properties: dict[str, Any], *, required: list[str] | None = None, **more: Any) -> Schema:
    names = list(properties) if required is None else required
    return {
        "type": "object",
        "properties": properties,
        "required": names,
        "additionalProperties": False,
        **more,
    }


SHORT = {"type": "string", "maxLength": 8}
DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}

DOZEN: dict[str, Schema] = {
    "person": _object({"name": SHORT, "age": {"type": "integer", "minimum": 0, "maximum": 120}}),
    "optional": _object({"a": DIGIT, "b": {"type": "boolean"}, "c": SHORT}, required=["b"]),
    "nested": _object({"outer": _object({"middle": _object({"inner": DIGIT})}), "ok": {"type": "boolean"}}),
    "array": {"type": "array", "items": DIGIT, "minItems": 2, "maxItems": 4},
    "array of objects": {"type": "array", "items": _object({"x": DIGIT, "y": DIGIT}), "minItems": 1, "maxItems": 2},
    "tuple": {"type": "array", "prefixItems": [DIGIT, {"type": "boolean"}], "items": False, "minItems": 2},
    "enum": _object({"colour": {"enum": ["red", "green", 3, None]}, "size": {"type": "string", "enum": ["S", "M"]}}),
    "const": _object({"version": {"const": 2}, "kind": {"const": "größe"}}),
    "union": _object({"id": {"anyOf": [DIGIT, {"type": "string", "pattern": "^[a-f]{4}$"}, {"type": "null"}]}}),
    "tagged": {
        "oneOf": [
            _object({"shape": {"const": "circle"}, "radius": DIGIT}),
            _object({"shape": {"const": "square"}, "side": DIGIT}),
        ]
    },
    "references": _object(
        {"from": {"$ref": "#/$defs/point"}, "to": {"$ref": "#/$defs/point"}},
        **{"$defs": {"point": _object({"x": DIGIT, "y": DIGIT})}},
    ),
    "pattern": _object({"date": {"type": "string", "pattern": "^20[0-9]{2}-(0[1-9]|1[0-2])$"}}),
    "number range": _object({"n": {"type": "integer", "exclusiveMinimum": 10, "maximum": 12}}),
    "map": {"type": "object", "additionalProperties": DIGIT, "propertyNames": {"pattern": "^[a-z]{1,3}$"}, "minProperties": 1, "maxProperties": 3},
    "string": {"type": "string", "minLength": 2, "maxLength": 6},
}  # fmt: skip


def random_schema(seed: int) -> Schema:
    """Its longest answer has a few hundred tokens at most."""
    return _random(random.Random(seed), depth=3, top=True)


def _random(rng: random.Random, *, depth: int, top: bool = False) -> Schema:
    leaves = ["string", "integer", "boolean", "null", "enum", "const", "pattern", "nullable"]
    inner = ["object", "array", "tuple", "anyOf"]
    kind = rng.choice(inner if top else (leaves + inner if depth > 0 else leaves))
    if kind == "object":
        names = rng.sample(["id", "name", "größe", "a b", "x-1", "tags", "value"], rng.randint(1, 3))
        properties = {name: _random(rng, depth=depth - 1) for name in names}
        return _object(properties, required=rng.sample(names, rng.randint(0, len(names))))
    if kind == "array":
        low = rng.randint(0, 2)
        items = _random(rng, depth=depth - 1)
        return {"type": "array", "items": items, "minItems": low, "maxItems": low + rng.randint(0, 1)}
    if kind == "tuple":
        parts = [_random(rng, depth=depth - 1) for _ in range(rng.randint(1, 2))]
        return {"type": "array", "prefixItems": parts, "items": False, "minItems": len(parts)}
    if kind == "anyOf":
        return {"anyOf": [_random(rng, depth=depth - 1) for _ in range(rng.randint(2, 3))]}
    if kind == "string":
        low = rng.randint(0, 3)
        return {"type": "string", "minLength": low, "maxLength": low + rng.randint(0, 5)}
    if kind == "integer":
        low = rng.randint(-100, 100)
        return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 1000)}
    if kind == "enum":
        return {
            "enum": rng.sample(["a", "b c", 1, 2.5, True, None, ["x"], {"k": 1}, 'q"'], rng.randint(1, 4))
        }
    if kind == "const":
        return {"const": rng.choice(["fixed", 0, False, {"a": [1, None]}])}
    if kind == "pattern":
        return {"type": "string", "pattern": rng.choice(["^[a-z]{1,5}$", r"^\d{2}-\d{2}$", "^(yes|no)$"])}
    if kind == "nullable":
        return {"type": [rng.choice(["integer", "boolean"]), "null"], "maximum": 9, "minimum": 0}
    return {"type": kind}
