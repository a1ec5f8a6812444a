"""Calls that stand behind a marker, anywhere in the text."""

from __future__ import annotations

from collections.abc import Callable

from router.api.tools.parsed import Call, Parsed, plain

ReadCalls = Callable[[str, int], tuple[tuple[Call, ...], int | None]]
"""The calls behind a marker that ends at the index, and where they end; None while there may be more."""


def parse_tagged(text: str, *, begin: str, read: ReadCalls, final: bool) -> Parsed:
    """What follows a marker and can't be read as a call is content, the marker included."""
    content: list[str] = []
    calls: list[Call] = []
    at = 0
    while True:
        start = text.find(begin, at)
        if start < 0:
            tail = plain(text, at, markers=(begin,), final=final)
            content.append(tail.content)
            return Parsed(content="".join(content), calls=tuple(calls), rest=tail.rest)
        content.append(text[at:start].rstrip())
        found, end = read(text, start + len(begin))
        if end is None and not final:
            return Parsed(content="".join(content), calls=tuple(calls), rest=start, open=found)
        at = len(text) if end is None else end
        if found:
            calls += found
        else:
            content.append(text[start:at])
