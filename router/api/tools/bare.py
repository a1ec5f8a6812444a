"""Calls without tags around them: the answer begins with JSON that names one of the tools. Llama 3 writes
them so, and so do models that were told to in plain words (in a fenced block, often)."""

from __future__ import annotations

import itertools
import re
from collections.abc import Set

from router.api.tools.json_calls import read_calls
from router.api.tools.parsed import Call, Parsed, n_held, plain

_LLAMA_TAG = "<|python_tag|>"
LLAMA_MARKERS = (_LLAMA_TAG,)
_FENCES = ("```json", "```tool_call", "```")
_BETWEEN = re.compile(r"[\s,;]*+")
_FENCE_END = re.compile(r"\s*```")


def parse_llama(text: str, *, names: Set[str], fresh: bool, final: bool) -> Parsed:
    return _parse(text, names=names, fresh=fresh, final=final, openers=LLAMA_MARKERS)


def parse_json(text: str, *, names: Set[str], fresh: bool, final: bool) -> Parsed:
    return _parse(text, names=names, fresh=fresh, final=final, openers=_FENCES)


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
