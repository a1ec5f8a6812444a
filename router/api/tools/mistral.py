"""Mistral: `[TOOL_CALLS]` and a list of objects, or (newer) `[TOOL_CALLS]name[ARGS]{…}` for each call."""

from __future__ import annotations

import re
from collections.abc import Sequence, Set

from router.api.tools.formats import (
    Format,
    Marks,
    const,
    either,
    one_or_more,
    optional,
    regex,
    schema,
    sequence,
)
from router.api.tools.json_calls import MalformedError, read_calls, value_end
from router.api.tools.parsed import Call, Parsed
from router.api.tools.schemas import Function, bound_parameters, calls_schema, is_strict
from router.api.tools.tagged import parse_tagged

_BEGIN = "[TOOL_CALLS]"
_ARGS = "[ARGS]"
MARKERS = (_BEGIN, _ARGS, "[CALL_ID]")
_NAMED = re.compile(r"\s*([\w.-]++)(?:\[CALL_ID\]\w++)?(?:\[ARGS\])?\s*(?=\{)")
_MAY_BE_NAMED = re.compile(r"\s*[\w.-]*+(?:\[[A-Z_]*\]?\w*)*\s*$")


def parse(text: str, *, names: Set[str], fresh: bool, final: bool) -> Parsed:
    return parse_tagged(text, begin=_BEGIN, read=_read, final=final)


def calls(functions: Sequence[Function], *, marks: Marks, limit: int | None) -> Format:
    """The list."""
    array = calls_schema(functions, max_calls=limit, parameters=bound_parameters)
    return sequence(marks.one(_BEGIN), regex(" ?"), schema(array, strict=True))


def named_calls(functions: Sequence[Function], *, marks: Marks, limit: int | None) -> Format:
    """The newer form."""
    items = [
        sequence(
            marks.one(_BEGIN),
            const(function["name"]),
            marks.one(_ARGS),
            schema(bound_parameters(function), strict=is_strict(function)),
        )
        for function in functions
    ]
    return one_or_more(either(*items), separator="", limit=limit)


def free(functions: Sequence[Function], *, marks: Marks, limit: int | None) -> Format:
    """Text, and calls at its end."""
    return sequence(marks.text_without(_BEGIN), optional(calls(functions, marks=marks, limit=limit)))


def free_named(functions: Sequence[Function], *, marks: Marks, limit: int | None) -> Format:
    return sequence(marks.text_without(_BEGIN), optional(named_calls(functions, marks=marks, limit=limit)))


def _read(text: str, start: int) -> tuple[tuple[Call, ...], int | None]:
    """The calls after one marker, and where they end; None while there may be more of them."""
    named = _NAMED.match(text, start)
    if named is not None:
        try:
            end = value_end(text, named.end())
        except MalformedError as error:
            return (Call(named[1], text[named.end() : error.at]),), error.at
        return (Call(named[1], text[named.end() : end]),), end
    if _MAY_BE_NAMED.match(text, start):
        return (), None
    scan = read_calls(text, start)
    if scan.broken and not scan.calls:
        return (), start
    return scan.calls, scan.end if scan.complete or scan.broken else None
