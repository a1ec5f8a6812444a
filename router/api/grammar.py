"""`response_format` as a grammar for the workers."""

from __future__ import annotations

import json
from typing import Any

from proto.worker_pb2 import Grammar
from router.api.errors import invalid
from router.ipc.messages import GrammarSpec, ModelInfo


def grammar_of(response_format: dict[str, Any] | None, *, model: ModelInfo) -> GrammarSpec | None:
    """None for free text. Raises ApiError for an unknown format, and if the workers can't constrain text."""
    if response_format is None:
        return None
    kind = response_format.get("type")
    if kind == "text":
        return None
    if kind not in ("json_object", "json_schema"):
        raise invalid(
            f"Invalid value for 'response_format.type': {str(kind)[:40]!r} is not one of text, json_object,"
            " json_schema.",
            param="response_format.type",
        )
    if "grammar" not in model.features:
        raise invalid(
            f"'response_format' of type '{kind}' is not available: the workers of {model.model_id} can't"
            " constrain text to a grammar.",
            param="response_format",
            code="unsupported",
        )
    if kind == "json_object":
        return GrammarSpec(kind=Grammar.JSON_OBJECT, source="")
    outer = response_format.get("json_schema")
    schema = outer.get("schema") if isinstance(outer, dict) else None
    if not isinstance(outer, dict) or not isinstance(schema, dict):
        raise invalid(
            "Missing required field: 'response_format.json_schema.schema' must be a JSON schema.",
            param="response_format.json_schema.schema",
        )
    return GrammarSpec(
        kind=Grammar.JSON_SCHEMA, source=json.dumps(schema), strict=outer.get("strict") is True
    )
