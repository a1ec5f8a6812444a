"""Calls without tags around them: the answer begins with JSON that names one of the tools. Llama 3 writes
them so, and so do models that were told to in plain words (in a fenced block, often)."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence, Set

from router.api.tools.formats import (
    Format,
    Marks,
    const,
    either,
    one_or_more,
    optional,
    schema,
    sequence,
    text_not_beginning_with,
)
from router.api.tools.json_calls import read_calls
from router.api.tools.parsed import Call, Parsed, n_held, plain
from router.api.tools.schemas import Function, bound_parameters, is_strict

_LLAMA_TAG = "<|python_tag|>"
LLAMA_MARKERS = (_LLAMA_TAG,)
_FENCES = ("```json", "```tool_call", "```")
_BETWEEN = re.compile(r"[\s,;]*+")
_JSON_BEGINS = {"{", "[", ",", ";"}
"""The last two are skipped before a call."""
_FENCE_END = re.compile(r"\s*```")


def parse_llama(text: str, *, names: Set[str], fresh: bool, final: bool) -> Parsed:
    return _parse(text, names=names, fresh=fresh, final=final, openers=LLAMA_MARKERS)


def parse_json(text: str, *, names: Set[str], fresh: bool, final: bool) -> Parsed:
    return _parse(text, names=names, fresh=fresh, final=final, openers=_FENCES)


def llama_calls(functions: Sequence[Function], *, marks: Marks, limit: int | None) -> Format:
    items = _objects(functions, arguments="parameters")
    return sequence(optional(marks.one(_LLAMA_TAG)), one_or_more(either(*items), separator="; ", limit=limit))


def llama_free(functions: Sequence[Function], *, marks: Marks, limit: int | None) -> Format:
    """Calls, or text that could not be read as one."""
    tag = set() if _LLAMA_TAG in marks.special else {_LLAMA_TAG}
    text = text_not_beginning_with(_JSON_BEGINS | tag)
    return either(llama_calls(functions, marks=marks, limit=limit), text)


def json_calls(functions: Sequence[Function], *, marks: Marks, limit: int | None) -> Format:
    items = _objects(functions, arguments="arguments")
    return one_or_more(either(*items), separator="\n", limit=limit)


def json_free(functions: Sequence[Function], *, marks: Marks, limit: int | None) -> Format:
    fences = {f"```{after}" for after in ("json", "tool_call", "{", "[", " ", "\n", "\r", "\t")}
    text = text_not_beginning_with(_JSON_BEGINS | fences)
    return either(json_calls(functions, marks=marks, limit=limit), text)


def _objects(functions: Sequence[Function], *, arguments: str) -> list[Format]:
    return [
        sequence(
            const(f'{{"name": {json.dumps(function["name"])}, "{arguments}": '),
            schema(bound_parameters(function), strict=is_strict(function)),
            const("}"),
        )
        for function in functions
    ]


def _parse(text: str, *, names: Set[str], fresh: bool, final: bool, openers: tuple[str, ...]) -> Parsed:
    """Calls may stand only before all content: then everything else is content, however it looks."""
    if not fresh:
        return Parsed(content=text, rest=len(text))
    calls: list[Call] = []
    rest = 0
    while True:
        at = _skip(_BETWEEN, text, rest)
        if not final and n_held(text[at:], openers) == len(text) - at:
            # Nothing yet, or the beginning of an opener.
            return Parsed(content="", calls=tuple(calls), rest=rest)
        opener = next((opener for opener in openers if text.startswith(opener, at)), "")
        start = _skip(_BETWEEN, text, at + len(opener))
        if opener and start == len(text) and not final:
            return Parsed(content="", calls=tuple(calls), rest=rest)
        if text[start : start + 1] not in ("{", "["):
            return _with_content(text, rest, calls, final=final)
        scan = read_calls(text, start)
        known = tuple(itertools.takewhile(lambda call: call.name in names, scan.calls))
        broken = scan.broken or len(known) < len(scan.calls)
        if not known and (broken or final):
            return _with_content(text, rest, calls, final=final)
        if broken or not scan.complete:  # what follows a call and is none is dropped
            if not final:
                return Parsed(content="", calls=tuple(calls), rest=rest, open=known)
            return Parsed(content="", calls=(*calls, *known), rest=len(text))
        end = scan.end
        if opener.startswith("```"):
            closing = _FENCE_END.match(text, end)
            if closing is None and not final and n_held("\n" + text[end:].strip(), ("\n```",)):
                return Parsed(content="", calls=tuple(calls), rest=rest, open=scan.calls)
            end = closing.end() if closing else end
        calls += scan.calls
        rest = end


def _with_content(text: str, start: int, calls: list[Call], *, final: bool) -> Parsed:
    tail = plain(text, start, markers=("\0",), final=final)
    return Parsed(content=tail.content, calls=tuple(calls), rest=tail.rest)


def _skip(pattern: re.Pattern[str], text: str, at: int) -> int:
    match = pattern.match(text, at)
    return match.end() if match else at
