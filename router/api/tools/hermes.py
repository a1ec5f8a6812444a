"""Hermes and Qwen: `<tool_call>{"name": …, "arguments": …}</tool_call>`, once for each call."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence, Set
from typing import Any

from router.api.tools.json_calls import read_calls
from router.api.tools.parsed import Call, Parsed, plain
from router.api.tools.schemas import bound_parameters

_BEGIN, _END = "<tool_call>", "</tool_call>"
MARKERS = (_BEGIN, _END)


def parse(text: str, *, names: Set[str], fresh: bool, final: bool) -> Parsed:
    """What stands between the tags and can't be read as a call is content, tags included."""
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
        scan = read_calls(text, begin + len(_BEGIN))
        end = _region_end(text, scan.end) if scan.complete or scan.broken else None
        if end is None and not final:
            return Parsed(content="".join(content), calls=tuple(calls), rest=begin, open=scan.calls)
        at = len(text) if end is None else end
        if scan.calls:
            calls += scan.calls
        else:
            content.append(text[begin:at])


def strict_tags(functions: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A structural tag (xgrammar's) for free text in which calls are bound: to the functions' names, and to
    the schemas of those that are strict."""
    return {
        "type": "structural_tag",
        "format": {
            "type": "triggered_tags",
            "triggers": [_BEGIN],
            "tags": [
                {
                    "begin": f'{_BEGIN}\n{{"name": {json.dumps(function["name"])}, "arguments": ',
                    "content": {"type": "json_schema", "json_schema": bound_parameters(function)},
                    "end": "}\n" + _END,
                }
                for function in functions
            ],
        },
    }


def _region_end(text: str, at: int) -> int | None:
    """Where the call's closing tag ends, or the next call begins: some models forget the tag."""
    end, begin = text.find(_END, at), text.find(_BEGIN, at)
    if begin >= 0 and (end < 0 or begin < end):
        return begin
    return end + len(_END) if end >= 0 else None
