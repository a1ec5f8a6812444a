"""Pieces of a structural tag: a grammar of text that is JSON here, free there, and a certain token elsewhere.

They are xgrammar's (https://xgrammar.mlc.ai/docs/), with a field of our own for the workers: whether a schema
is `strict`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

Format = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Marks:
    """How a model spells its markers: as text, or as a special token, which no text matches."""

    special: Mapping[str, int] = field(default_factory=dict)
    """Ids of special tokens by their text."""

    def one(self, marker: str) -> Format:
        if marker in self.special:
            return {"type": "token", "token": self.special[marker]}
        return const(marker)

    def text_without(self, marker: str) -> Format:
        """Any text up to the marker."""
        if marker in self.special:
            return {"type": "any_tokens", "exclude_tokens": [self.special[marker]]}
        return {"type": "any_text", "excludes": [marker]}

    def up_to(self, marker: str, *, begin: str = "") -> Format:
        """Any text from `begin` to the marker, the marker included."""
        return sequence(*([self.one(begin)] if begin else []), self.text_without(marker), self.one(marker))


def const(text: str) -> Format:
    return {"type": "const_string", "value": text}


def regex(pattern: str) -> Format:
    return {"type": "regex", "pattern": pattern}


def schema(value: Mapping[str, Any] | bool, *, strict: bool) -> Format:
    return {"type": "json_schema", "json_schema": value, "strict": strict}


def sequence(*elements: Format) -> Format:
    return {"type": "sequence", "elements": list(elements)}


def either(*elements: Format) -> Format:
    return elements[0] if len(elements) == 1 else {"type": "or", "elements": list(elements)}


def optional(content: Format) -> Format:
    return {"type": "optional", "content": content}


def one_or_more(item: Format, *, separator: str, limit: int | None) -> Format:
    """`limit`: 1 or None. The item stands there once, for schemas are long: a separator may end it too."""
    if limit == 1:
        return item
    content = sequence(item, optional(const(separator))) if separator else item
    return {"type": "plus", "content": content}


def text_not_beginning_with(words: Iterable[str]) -> Format:
    """Any text that begins with none of `words`, white space before them left out. The empty text too."""
    words = set(words)
    prefixes = {word[:n] for word in words for n in range(len(word))}
    patterns: list[str] = []
    for prefix in sorted(prefixes):
        if any(prefix.startswith(word) for word in words):
            continue
        following = {word[len(prefix)] for word in words if word.startswith(prefix) and word != prefix}
        excluded = "".join(map(_escaped, sorted(following))) + ("" if prefix else r"\s")
        patterns.append(f"{''.join(map(_escaped, prefix))}[^{excluded}]")
    return optional(sequence(regex(rf"\s{{0,8}}({'|'.join(patterns)})"), {"type": "any_text"}))


_ESCAPED = {"\n": r"\n", "\r": r"\r", "\t": r"\t"} | {char: f"\\{char}" for char in r"\^$.|?*+()[]{}-"}


def _escaped(char: str) -> str:
    return _ESCAPED.get(char, char)
