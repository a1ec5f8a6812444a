"""From a grammar as the protocol carries it to a compiled one. Pure, but for the time it takes."""

from __future__ import annotations

import json
import re
from typing import Any

import xgrammar

from proto.worker_pb2 import Grammar
from worker.grammar.json_schema import ANY_OBJECT, enforceable

MAX_WHITESPACE = 24
"""Blanks and line ends in a row between the parts of a JSON text. Without a limit small models fill a whole
answer with them."""


def compile_grammar(grammar: Grammar, compiler: xgrammar.GrammarCompiler) -> xgrammar.CompiledGrammar:
    """Raises ValueError with a message for the user when the grammar can't be used."""
    try:
        return _compile(grammar, compiler)
    except (RuntimeError, ValueError) as error:
        raise ValueError(_plain(str(error))) from error


def _compile(grammar: Grammar, compiler: xgrammar.GrammarCompiler) -> xgrammar.CompiledGrammar:
    kind, source = grammar.kind, grammar.source
    if kind == Grammar.JSON_OBJECT:
        return _json(json.dumps(ANY_OBJECT), compiler)
    if kind == Grammar.JSON_SCHEMA:
        return _json(enforceable(source, strict=grammar.strict), compiler)
    if kind == Grammar.REGEX:
        return compiler.compile_regex(source)
    if kind == Grammar.CHOICE:
        return compiler.compile_grammar(f"root ::= {' | '.join(map(_literal, _choices(source)))}")
    if kind == Grammar.EBNF:
        return compiler.compile_grammar(source)
    if kind == Grammar.STRUCTURAL_TAG:
        return compiler.compile_structural_tag(_tags(source, strict=grammar.strict))
    raise ValueError(f"unknown kind of grammar: {kind}")


def _json(schema: str, compiler: xgrammar.GrammarCompiler) -> xgrammar.CompiledGrammar:
    return compiler.compile_json_schema(schema, strict_mode=True, max_whitespace_cnt=MAX_WHITESPACE)


def _tags(source: str, *, strict: bool) -> str:
    """Each JSON schema within, wherever it stands, as the compiler can enforce it. It may say for itself
    whether it is `strict`."""
    return json.dumps(_enforceable_formats(json.loads(source), strict=strict))


def _enforceable_formats(value: Any, *, strict: bool) -> Any:
    if isinstance(value, list):
        return [_enforceable_formats(item, strict=strict) for item in value]
    if not isinstance(value, dict):
        return value
    if value.get("type") != "json_schema":
        return {name: _enforceable_formats(item, strict=strict) for name, item in value.items()}
    schema = json.dumps(value["json_schema"])
    return {
        "type": "json_schema",
        "json_schema": json.loads(enforceable(schema, strict=value.get("strict", strict))),
        "max_whitespace_cnt": MAX_WHITESPACE,
    }


def _choices(source: str) -> list[str]:
    choices = json.loads(source)
    if not isinstance(choices, list) or not choices:
        raise ValueError("a choice is a list with at least one string")
    for choice in choices:
        if not isinstance(choice, str) or not choice:
            raise ValueError("each choice must be a string with at least one character")
    return choices


def _literal(text: str) -> str:
    """A string of the grammar language: every character but the plainest as its code point."""
    plain = "".join(
        char if char.isascii() and (char.isalnum() or char == " ") else f"\\U{ord(char):08X}" for char in text
    )
    return f'"{plain}"'


def _plain(message: str) -> str:
    """The compiler's message without its clock, its file names and its checks."""
    message = re.sub(r"\[\d\d:\d\d:\d\d\] \S+?:\d+: ", "", message)
    message = re.sub(r"Check failed: \(.*?\) is false: ", "", message)
    return " ".join(message.split())[:500]
