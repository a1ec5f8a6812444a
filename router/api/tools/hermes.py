"""Hermes and Qwen: `<tool_call>{"name": …, "arguments": …}</tool_call>`, once for each call."""

from __future__ import annotations

import json
from collections.abc import Sequence, Set

from router.api.tools.formats import Format, Marks, const, either, one_or_more, schema, sequence
from router.api.tools.json_calls import read_calls
from router.api.tools.parsed import Call, Parsed
from router.api.tools.schemas import Function, bound_parameters, is_strict
from router.api.tools.tagged import parse_tagged

_BEGIN, _END = "<tool_call>", "</tool_call>"
MARKERS = (_BEGIN, _END)


def parse(text: str, *, names: Set[str], fresh: bool, final: bool) -> Parsed:
    return parse_tagged(text, begin=_BEGIN, read=_read, final=final)


def calls(functions: Sequence[Function], *, marks: Marks, limit: int | None) -> Format:
    items = [
        sequence(
            marks.one(_BEGIN),
            const(f'\n{{"name": {json.dumps(function["name"])}, "arguments": '),
            schema(bound_parameters(function), strict=is_strict(function)),
            const("}\n"),
            marks.one(_END),
        )
        for function in functions
    ]
    return one_or_more(either(*items), separator="\n", limit=limit)


def free(functions: Sequence[Function], *, marks: Marks, limit: int | None) -> Format:
    """Text, and calls anywhere in it."""
    item = calls(functions, marks=marks, limit=1)
    text = marks.text_without(_BEGIN)
    return sequence(text, {"type": "star", "content": sequence(item, text)})


def _read(text: str, start: int) -> tuple[tuple[Call, ...], int | None]:
    scan = read_calls(text, start)
    return scan.calls, _region_end(text, scan.end) if scan.complete or scan.broken else None


def _region_end(text: str, at: int) -> int | None:
    """Where the call's closing tag ends, or the next call begins: some models forget the tag."""
    end, begin = text.find(_END, at), text.find(_BEGIN, at)
    if begin >= 0 and (end < 0 or begin < end):
        return begin
    return end + len(_END) if end >= 0 else None
