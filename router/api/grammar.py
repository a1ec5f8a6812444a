"""What binds an answer's text, as a grammar for the workers: `response_format`, `structured_outputs` and
vLLM's older `guided_…` fields."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from proto.worker_pb2 import Grammar
from router.api.config import ApiConfig
from router.api.errors import invalid
from router.api.schema import GenerationRequest
from router.ipc.messages import GrammarSpec, ModelInfo

_KINDS = ("json", "regex", "choice", "grammar", "json_object")
"""Of `structured_outputs`; all but the last also exist as `guided_…`."""


def request_grammar(request: GenerationRequest, *, model: ModelInfo, limits: ApiConfig) -> GrammarSpec | None:
    """None for free text. Raises ApiError naming the field at fault."""
    found: list[GrammarSpec] = []
    spec = grammar_of(request.response_format, model=model)
    if spec is not None:
        found.append(spec)
    for path, kind, value in _constraints(request):
        if "grammar" not in model.features:
            raise _unavailable(path, model)
        found.append(_constraint(kind, value, path))
    if len(found) > 1:
        raise invalid(
            f"'{found[1].param}' and '{found[0].param}' both bind the answer's text; send one of them.",
            param=found[1].param,
        )
    if not found:
        return None
    check_grammar(found[0], limits=limits)
    return found[0]


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
        raise _unavailable("response_format", model)
    if kind == "json_object":
        return GrammarSpec(kind=Grammar.JSON_OBJECT, source="")
    path = "response_format.json_schema.schema"
    outer = response_format.get("json_schema")
    schema = outer.get("schema") if isinstance(outer, dict) else None
    if not isinstance(outer, dict) or not isinstance(schema, dict):
        raise invalid(f"Missing required field: '{path}' must be a JSON schema.", param=path)
    return GrammarSpec(
        kind=Grammar.JSON_SCHEMA, source=json.dumps(schema), strict=outer.get("strict") is True, param=path
    )


def check_grammar(spec: GrammarSpec, *, limits: ApiConfig) -> None:
    """Raises ApiError when it is longer or nested deeper than is allowed."""
    n_bytes = len(spec.source.encode())
    if n_bytes > limits.max_grammar_bytes:
        raise invalid(
            f"'{spec.param}' has {n_bytes} bytes; the limit is {limits.max_grammar_bytes}"
            " (max_grammar_bytes).",
            param=spec.param,
        )
    depth = _depth(spec.source, "{[" if spec.kind == Grammar.JSON_SCHEMA else "([{")
    if depth > limits.max_grammar_depth:
        raise invalid(
            f"'{spec.param}' is nested {depth} levels deep; the limit is {limits.max_grammar_depth}"
            " (max_grammar_depth).",
            param=spec.param,
        )


def _constraints(request: GenerationRequest) -> list[tuple[str, str, Any]]:
    """(path, kind, value) of every field that is set."""
    found: list[tuple[str, str, Any]] = []
    for kind in _KINDS[:4]:
        value = getattr(request, f"guided_{kind}")
        if value is not None:
            found.append((f"guided_{kind}", kind, value))
    for kind in _KINDS:
        value = (request.structured_outputs or {}).get(kind)
        if value is not None and value is not False:
            found.append((f"structured_outputs.{kind}", kind, value))
    return found


def _constraint(kind: str, value: Any, path: str) -> GrammarSpec:
    if kind == "json_object":
        if value is not True:
            raise _wrong(path, "expected true or false")
        return GrammarSpec(kind=Grammar.JSON_OBJECT, source="", param=path)
    if kind == "json":
        return GrammarSpec(kind=Grammar.JSON_SCHEMA, source=_schema(value, path), strict=True, param=path)
    if kind == "choice":
        if not isinstance(value, list) or not value:
            raise _wrong(path, "expected a list with at least one text")
        for i, choice in enumerate(value):
            if not isinstance(choice, str) or not choice:
                raise _wrong(f"{path}[{i}]", "expected a text with at least one character")
        return GrammarSpec(kind=Grammar.CHOICE, source=json.dumps(value), param=path)
    if not isinstance(value, str) or not value:
        raise _wrong(path, "expected a regular expression" if kind == "regex" else "expected a grammar")
    return GrammarSpec(kind=Grammar.REGEX if kind == "regex" else Grammar.EBNF, source=value, param=path)


def _schema(value: Any, path: str) -> str:
    """As an object, or as the text of one."""
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except (msgspec.DecodeError, RecursionError) as error:
            raise _wrong(path, f"not a JSON schema: {error}") from error
    if not isinstance(value, dict | bool):
        raise _wrong(path, "expected a JSON schema")
    return json.dumps(value)


def _depth(source: str, opening: str) -> int:
    """Deepest nesting of brackets. Those inside texts count too: none of them would nest so deep."""
    closing = opening.translate({ord("("): ")", ord("["): "]", ord("{"): "}"})
    depth = deepest = 0
    for char in source:
        if char in opening:
            depth += 1
            deepest = max(deepest, depth)
        elif char in closing:
            depth = max(0, depth - 1)
    return deepest


def _wrong(path: str, why: str) -> Exception:
    return invalid(f"Invalid value for '{path}': {why}.", param=path)


def _unavailable(path: str, model: ModelInfo) -> Exception:
    return invalid(
        f"'{path}' is not available: the workers of {model.model_id} can't constrain text to a grammar.",
        param=path,
        code="unsupported",
    )
