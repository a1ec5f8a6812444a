"""Calls written as JSON objects, read from text that may end anywhere.

An object names the function under `name` (or `function`) and its input under `arguments` (or `parameters`).
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from router.api.tools.parsed import Call

_STRING = re.compile(r'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
_STRUCTURE = re.compile(r'["{}\[\]<]')
_SCALAR = re.compile(r"[-+.\w]*+")
_SPACE = re.compile(r"\s*+")
_BETWEEN = re.compile(r"[\s,;]*+")
_NAME_KEYS = frozenset({"name", "function"})
_ARGUMENT_KEYS = frozenset({"arguments", "parameters"})
_OTHER_KEYS = frozenset({"id", "type"})


class MalformedError(Exception):
    """Not JSON from `at` on."""

    def __init__(self, at: int) -> None:
        super().__init__(at)
        self.at = at


@dataclass(frozen=True, slots=True)
class CallScan:
    call: Call | None
    """None while its name is not known, or if it is no call."""
    end: int | None
    """One past its closing brace; None while it is open, or broken."""
    broken: bool = False


@dataclass(frozen=True, slots=True)
class CallsScan:
    calls: tuple[Call, ...]
    end: int
    """Up to here everything is read; the last call is open when `complete` is false."""
    complete: bool
    broken: bool = False


def value_end(text: str, start: int) -> int | None:
    """One past the JSON value at `start`; None while it is unfinished. Raises MalformedError."""
    first = text[start : start + 1]
    if first == '"':
        match = _STRING.match(text, start)
        return match.end() if match else None
    if first not in ("{", "["):
        match = _SCALAR.match(text, start)
        end = match.end() if match else start
        if end == start:
            raise MalformedError(start)
        return end if end < len(text) else None
    depth, at = 0, start
    while True:
        found = _STRUCTURE.search(text, at)
        if found is None:
            return None
        char, at = found[0], found.end()
        if char == '"':
            match = _STRING.match(text, found.start())
            if match is None:
                return None
            at = match.end()
        elif char == "<":  # a closing tag inside an unfinished value
            raise MalformedError(found.start())
        elif char in "{[":
            depth += 1
        else:
            depth -= 1
            if depth == 0:
                return at


def read_call(text: str, start: int) -> CallScan:
    """The object whose `{` is at `start`."""
    name: str | None = None
    arguments: str | None = None
    at = start + 1
    while True:
        at = _after(_BETWEEN, text, at)
        if at == len(text):
            return CallScan(_call(name, arguments), None)
        if text[at] == "}":
            # An input may be left out when there is nothing to say.
            return CallScan(_call(name, "{}" if arguments is None else arguments), at + 1)
        match = _STRING.match(text, at)
        if match is None:
            return CallScan(_call(name, arguments), None, broken=text[at] != '"')
        key = _text_of(match[0])
        at = _after(_SPACE, text, match.end())
        if at < len(text) and text[at] != ":":
            return CallScan(_call(name, arguments), None, broken=True)
        at = _after(_SPACE, text, at + 1)
        if at >= len(text):
            known = key in _NAME_KEYS | _ARGUMENT_KEYS | _OTHER_KEYS
            return CallScan(_call(name, arguments), None, broken=name is None and not known)
        try:
            end = value_end(text, at)
        except MalformedError as error:
            if key in _ARGUMENT_KEYS and text[at] == "{":
                arguments = text[at : error.at] if arguments is None else arguments
            return CallScan(_call(name, arguments), None, broken=True)
        if key in _NAME_KEYS and text[at] == '"':
            if end is not None and name is None:
                name = _text_of(text[at:end])
        elif key in _ARGUMENT_KEYS:
            arguments = _arguments(text, at, end) if arguments is None else arguments
        elif key not in _OTHER_KEYS and name is None:
            return CallScan(None, None, broken=True)
        if end is None:
            return CallScan(_call(name, arguments), None)
        at = end


def read_calls(text: str, start: int) -> CallsScan:
    """One object, several with `,`, `;` or space between them, or a list of them."""
    at = _after(_SPACE, text, start)
    if at == len(text):
        return CallsScan((), start, complete=False)
    in_list = text[at] == "["
    end = at + 1 if in_list else at
    calls: list[Call] = []
    while True:
        at = _after(_BETWEEN, text, end)
        if at == len(text):
            return CallsScan(tuple(calls), end, complete=not in_list and bool(calls))
        if in_list and text[at] == "]":
            return CallsScan(tuple(calls), at + 1, complete=True, broken=not calls)
        if text[at] != "{":
            return CallsScan(tuple(calls), end, complete=not in_list, broken=in_list or not calls)
        scan = read_call(text, at)
        if scan.call is not None:
            calls.append(scan.call)
        if scan.end is None or scan.call is None:
            return CallsScan(tuple(calls), end, complete=False, broken=scan.broken or scan.end is not None)
        end = scan.end


def _call(name: str | None, arguments: str | None) -> Call | None:
    return None if name is None else Call(name, arguments or "")


def _arguments(text: str, start: int, end: int | None) -> str | None:
    """An object as it stands; a string is JSON inside JSON."""
    if text[start] == "{":
        return text[start:end]
    if end is None:
        return None
    if text[start] == '"':
        return _text_of(text[start:end])
    return "{}" if text[start:end] == "null" else text[start:end]


def _text_of(literal: str) -> str:
    try:
        return str(json.loads(literal, strict=False))
    except ValueError:
        return literal[1:-1]


def _after(pattern: re.Pattern[str], text: str, at: int) -> int:
    match = pattern.match(text, at)
    return match.end() if match else at
