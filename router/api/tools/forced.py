"""Calls that a grammar forces: the text is JSON and nothing else, whatever the model line."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from router.api.tools.json_calls import read_calls
from router.api.tools.parsed import Call, Parsed


def parse_required(text: str, *, names: Set[str], fresh: bool, final: bool) -> Parsed:
    """A list of calls."""
    scan = read_calls(text, 0)
    if final:
        content = "" if scan.calls else text
        return Parsed(content=content, calls=scan.calls, rest=len(text))
    return Parsed(content="", rest=0, open=scan.calls)


@dataclass(frozen=True, slots=True)
class ParseNamed:
    """The arguments of the one function."""

    name: str

    def __call__(self, text: str, *, names: Set[str], fresh: bool, final: bool) -> Parsed:
        call = (Call(self.name, text.strip() if final else text.lstrip()),)
        if final:
            return Parsed(content="", calls=call, rest=len(text))
        trimmed = Call(self.name, call[0].arguments.rstrip())
        return Parsed(content="", rest=0, open=(trimmed,))
