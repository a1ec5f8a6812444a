"""TGI's `grammar` parameter as a grammar for the workers."""

from __future__ import annotations

from typing import Any

import msgspec

from proto.worker_pb2 import Grammar
from router.api.errors import invalid
from router.api.grammar import grammar_of
from router.ipc.messages import GrammarSpec, ModelInfo


def tgi_grammar(grammar: dict[str, Any] | None, *, model: ModelInfo) -> GrammarSpec | None:
    """`{"type": …, "value": …}`: json (a schema, as an object or as text), regex, or json_schema (a schema
    with its name). Raises ApiError, also when the workers can't constrain text."""
    if grammar is None:
        return None
    kind, value = grammar.get("type"), grammar.get("value")
    if kind in ("json", "json_object", "json_schema"):
        schema = _schema(kind, value)
        outer = {"name": "grammar", "schema": schema, "strict": True}
        return grammar_of({"type": "json_schema", "json_schema": outer}, model=model)
    if kind != "regex":
        raise invalid(
            f"Invalid value for 'grammar.type': {str(kind)[:40]!r} is not one of json, json_schema, regex.",
            param="grammar.type",
        )
    if not isinstance(value, str) or not value:
        raise invalid(
            "Invalid value for 'grammar.value': expected a regular expression.", param="grammar.value"
        )
    if "grammar" not in model.features:
        raise invalid(
            f"'grammar' is not available: the workers of {model.model_id} can't constrain text.",
            param="grammar",
            code="unsupported",
        )
    return GrammarSpec(kind=Grammar.REGEX, source=value)


def _schema(kind: str, value: object) -> dict[str, Any]:
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except msgspec.DecodeError as error:
            raise invalid(f"Invalid value for 'grammar.value': {error}.", param="grammar.value") from error
    if kind == "json_schema" and isinstance(value, dict) and isinstance(value.get("schema"), dict):
        value = value["schema"]
    if not isinstance(value, dict):
        raise invalid("Invalid value for 'grammar.value': expected a JSON schema.", param="grammar.value")
    return value
