"""What a parser finds in the text of an answer."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Call:
    name: str
    arguments: str
    """JSON as the model wrote it; as far as it is there while the call is unfinished."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed:
    """`text[:rest]` is settled: it is `content` and `calls`. From `rest` on the parser must look again when
    there is more text; `open` are the calls that begin there, the last of them perhaps unfinished."""

    content: str
    calls: tuple[Call, ...] = ()
    rest: int
    open: tuple[Call, ...] = ()


class Parse(Protocol):
    """A pure function of the text since the last settled place. Whatever the pieces in which the text
    arrives, the joined result is the same: content only grows, so do an open call's arguments, and its name
    is known before it is told."""

    def __call__(self, text: str, *, names: Set[str], fresh: bool, final: bool) -> Parsed:
        """`names`: of the tools. `fresh`: no content came before. `final`: there is no more text, so
        everything is settled."""
        ...


def n_held(text: str, markers: tuple[str, ...]) -> int:
    """Characters at the end of `text` that may be the beginning of a marker."""
    longest = max(map(len, markers))
    for start in range(max(0, len(text) - longest + 1), len(text)):
        tail = text[start:]
        if any(marker.startswith(tail) for marker in markers):
            return len(text) - start
    return 0


def plain(text: str, start: int, *, markers: tuple[str, ...], final: bool) -> Parsed:
    """Content from `start` on. White space at the end waits: before a call it is no content."""
    if final:
        return Parsed(content=text[start:], rest=len(text))
    certain = len(text) - n_held(text[start:], markers)
    rest = start + len(text[start:certain].rstrip())
    return Parsed(content=text[start:rest], rest=rest)
