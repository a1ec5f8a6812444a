"""Mistral: `[TOOL_CALLS]` and a list of objects, or (newer) `[TOOL_CALLS]name[ARGS]{…}` for each call."""

from __future__ import annotations

import re
from collections.abc import Set

from router.api.tools.json_calls import MalformedError, read_calls, value_end
from router.api.tools.parsed import Call, Parsed, plain

_BEGIN = "[TOOL_CALLS]"
MARKERS = (_BEGIN, "[ARGS]", "[CALL_ID]")
_NAMED = re.compile(r"\s*([\w.-]++)(?:\[CALL_ID\]\w++)?(?:\[ARGS\])?\s*(?=\{)")
_MAY_BE_NAMED = re.compile(r"\s*[\w.-]*+(?:\[[A-Z_]*\]?\w*)*\s*$")


def parse(text: str, *, names: Set[str], fresh: bool, final: bool) -> Parsed:
    """What follows the marker and can't be read as a call is content, the marker included."""
    content: list[str] = []
    calls: list[Call] = []
    at = 0
    while True:
        begin = text.find(_BEGIN, at)
        if begin < 0:
            tail = plain(text, at, markers=(_BEGIN,), final=final)
            content.append(tail.content)
            return Parsed(content="".join(content), calls=tuple(calls), rest=tail.rest)
        content.append(text[at:begin].rstrip())
        found, end = _read(text, begin + len(_BEGIN))
        if end is None and not final:
            return Parsed(content="".join(content), calls=tuple(calls), rest=begin, open=found)
        at = len(text) if end is None else end
        if found:
            calls += found
        else:
            content.append(text[begin:at])


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
