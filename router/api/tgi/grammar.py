"""TGI's `grammar` parameter as a grammar for the workers."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from proto.worker_pb2 import Grammar
from router.api.config import ApiConfig
from router.api.errors import invalid
from router.api.grammar import check_grammar
from router.ipc.messages import GrammarSpec, ModelInfo


def tgi_grammar(grammar: dict[str, Any] | None, *, model: ModelInfo, limits: ApiConfig) -> GrammarSpec | None:
    """`{"type": …, "value": …}`: json (a schema, as an object or as text), regex, or json_schema (a schema
    with its name). Raises ApiError, also when the workers can't constrain text."""
    if grammar is None:
        return None
    spec = _spec(grammar.get("type"), grammar.get("value"))
    if "grammar" not in model.features:
        raise invalid(
            f"'grammar' is not available: the workers of {model.model_id} can't constrain text.",
            param="grammar",
            code="unsupported",
        )
    check_grammar(spec, limits=limits)
    return spec


def _spec(kind: object, value: object) -> GrammarSpec:
    if kind in ("json", "json_object", "json_schema"):
        source = json.dumps(_schema(value))
        return GrammarSpec(kind=Grammar.JSON_SCHEMA, source=source, strict=True, param="grammar")
    if kind != "regex":
        raise invalid(
            f"Invalid value for 'grammar.type': {str(kind)[:40]!r} is not one of json, json_schema, regex.",
            param="grammar.type",
        )
    if not isinstance(value, str) or not value:
        raise invalid(
            "Invalid value for 'grammar.value': expected a regular expression.", param="grammar.value"
        )
    return GrammarSpec(kind=Grammar.REGEX, source=value, param="grammar")


def _schema(value: object) -> dict[str, Any]:
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except (msgspec.DecodeError, RecursionError) as error:
            raise invalid(f"Invalid value for 'grammar.value': {error}.", param="grammar.value") from error
    if isinstance(value, dict) and isinstance(value.get("schema"), dict):
        value = value["schema"]
    if not isinstance(value, dict):
        raise invalid("Invalid value for 'grammar.value': expected a JSON schema.", param="grammar.value")
    return value
