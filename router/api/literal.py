"""Control tokens that clients write into messages stay plain text.

A chat template's own control tokens (where a turn begins and ends) are tokens; the same characters inside a
message are what somebody wrote, and must not end a turn or begin one in the system's name. So each of them is
marked before the template is rendered, and cut there afterwards: what is tokenised in two parts is no token.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_MARKS = tuple(map(chr, range(0xFDD0, 0xFDF0)))
"""Code points that are no characters and that Unicode keeps for such uses."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt as text, in pieces that are tokenised one by one: a single one, mostly."""

    pieces: tuple[str, ...]

    @property
    def text(self) -> str:
        return "".join(self.pieces)


@dataclass(frozen=True, slots=True)
class Marked:
    """What goes into a template, and the mark that divides its output; empty when nothing was marked."""

    values: tuple[Any, ...]
    mark: str

    def divide(self, text: str) -> Rendered:
        return Rendered(tuple(text.split(self.mark)) if self.mark else (text,))


class ControlTokens:
    """The tokens of one model whose characters may not be taken for them inside messages."""

    def __init__(self, tokens: Iterable[str]) -> None:
        # A token of one character can't be cut.
        longer = sorted((token for token in tokens if len(token) > 1), key=len, reverse=True)
        self._first = frozenset(token[0] for token in longer)
        # They may overlap, so each place where one begins is found, and cut after its first character.
        self._begin = re.compile(f"(?=(?:{'|'.join(map(re.escape, longer)) or '(?!)'}))(.)", re.DOTALL)

    def mark(self, *values: Any) -> Marked:
        """Each value is JSON's kind of data, or None."""
        if not any(map(self._within, _texts(values))):
            return Marked(values, "")
        used = {char for text in _texts(values) for char in _MARKS if char in text}
        mark = next((char for char in _MARKS if char not in used), "")
        if not mark:  # somebody wrote all of them: there they stand for nothing
            mark = _MARKS[0]
            values = _replaced(values, re.compile(mark), "")
        return Marked(_replaced(values, self._begin, rf"\1{mark}"), mark)

    def _within(self, text: str) -> bool:
        return any(char in text for char in self._first) and self._begin.search(text) is not None


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield name
            yield from _texts(item)
    elif isinstance(value, Sequence):
        for item in value:
            yield from _texts(item)


def _replaced(value: Any, pattern: re.Pattern[str], by: str) -> Any:
    if isinstance(value, str):
        return pattern.sub(by, value)
    if isinstance(value, Mapping):
        return {pattern.sub(by, name): _replaced(item, pattern, by) for name, item in value.items()}
    if isinstance(value, tuple):
        return tuple(_replaced(item, pattern, by) for item in value)
    if isinstance(value, Sequence):
        return [_replaced(item, pattern, by) for item in value]
    return value
