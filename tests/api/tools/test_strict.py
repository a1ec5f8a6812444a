"""Strict functions bind the arguments of calls that the model makes by itself, in every model line; an
answer's format, tools and thoughts go together."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import Any

import pytest
import xgrammar

from proto.worker_pb2 import Grammar
from router.api.binding import bound
from router.api.tools.formats import Marks
from router.api.tools.lines import HERMES, JSON, LLAMA, MISTRAL, MISTRAL_NAMED, ToolLine
from router.api.tools.message import MessageReader
from router.api.tools.request import ToolUse, tool_use
from router.ipc.messages import GrammarSpec
from tests.api.scripted import model_info
from worker.grammar.compile import compile_grammar

STRICT = {
    "type": "function",
    "function": {
        "name": "add",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}},
            "required": ["a"],
            "additionalProperties": False,
        },
    },
}
LOOSE = {"type": "function", "function": {"name": "say", "parameters": {"type": "object"}}}
MODEL = model_info(features=["grammar"])
EOS = 256
MARKERS = ("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "</think>")
SPECIAL = Marks({marker: EOS + 1 + i for i, marker in enumerate(MARKERS)})
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TEXT = Marks()
ANSWERS = {
    "schema": GrammarSpec(kind=Grammar.JSON_SCHEMA, source=json.dumps(CITY), param="response_format"),
    "object": GrammarSpec(kind=Grammar.JSON_OBJECT, source=""),
    "regex": GrammarSpec(kind=Grammar.REGEX, source="[ab]+"),
    "choice": GrammarSpec(kind=Grammar.CHOICE, source='["yes", "no"]'),
    "grammar": GrammarSpec(kind=Grammar.EBNF, source='root ::= "x" [0-9]'),
}
SAMPLES = {
    "schema": '{"city": "x"}',
    "object": '{"b": 1}',
    "regex": "abba",
    "choice": "yes",
    "grammar": "x5",
}


@functools.cache
def _compiler() -> xgrammar.GrammarCompiler:
    """A vocabulary of bytes and the markers, which no text spells."""
    vocabulary = [bytes([byte]) for byte in range(256)]
    vocabulary += [b"\xff\xff%d" % token for token in range(EOS, EOS + 1 + len(MARKERS))]
    info = xgrammar.TokenizerInfo(
        vocabulary, xgrammar.VocabType.RAW, vocab_size=len(vocabulary), stop_token_ids=[EOS]
    )
    return xgrammar.GrammarCompiler(info)


@functools.cache
def _compiled(kind: Grammar.Kind.ValueType, source: str, strict: bool) -> xgrammar.CompiledGrammar:
    return compile_grammar(Grammar(kind=kind, source=source, strict=strict), _compiler())


def _takes(spec: GrammarSpec | None, text: str, *, marks: Marks = TEXT) -> bool:
    """Whether it is a whole answer; markers that are special stand for their tokens."""
    assert spec is not None
    matcher = xgrammar.GrammarMatcher(_compiled(Grammar.Kind.ValueType(spec.kind), spec.source, spec.strict))
    return all(matcher.accept_token(token) for token in _tokens(text, marks)) and matcher.accept_token(EOS)


def _tokens(text: str, marks: Marks) -> list[int]:
    tokens: list[int] = []
    while text:
        marker = next((marker for marker in marks.special if text.startswith(marker)), None)
        if marker is not None:
            tokens.append(marks.special[marker])
            text = text.removeprefix(marker)
        else:
            tokens += text[0].encode()
            text = text[1:]
    return tokens


def _use(line: ToolLine, *, tools: Sequence[dict[str, Any]] = (STRICT, LOOSE), **fields: Any) -> ToolUse:
    return tool_use(list(tools), "auto", **{"parallel": True, "line": line, "model": MODEL, **fields})


def _bound(answer: GrammarSpec | None, use: ToolUse, **fields: Any) -> GrammarSpec | None:
    return bound(answer, use, **{"thinks": False, "opened": False, "marks": TEXT, **fields})


def _hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def _llama(name: str, arguments: str) -> str:
    return f'{{"name": "{name}", "parameters": {arguments}}}'


def _mistral(name: str, arguments: str) -> str:
    return f'[TOOL_CALLS] [{{"name": "{name}", "arguments": {arguments}}}]'


def _named(name: str, arguments: str) -> str:
    return f"[TOOL_CALLS]{name}[ARGS]{arguments}"


def _json(name: str, arguments: str) -> str:
    return f'{{"name": "{name}", "arguments": {arguments}}}'


LINES = [
    pytest.param(HERMES, _hermes, "\n", id="hermes"),
    pytest.param(LLAMA, _llama, "; ", id="llama3"),
    pytest.param(MISTRAL, _mistral, None, id="mistral"),
    pytest.param(MISTRAL_NAMED, _named, "", id="mistral-named"),
    pytest.param(JSON, _json, "\n", id="json"),
]


@pytest.mark.parametrize("marks", [TEXT, SPECIAL], ids=["text", "special"])
@pytest.mark.parametrize(("line", "call", "separator"), LINES)
def test_calls_of_every_line(line: ToolLine, call: Any, separator: str | None, marks: Marks) -> None:
    use = _use(line, marks=marks)
    spec = _bound(None, use, marks=marks)
    takes = functools.partial(_takes, spec, marks=marks)
    for text in ("Just words, 1 < 2.", "a `b` {c} [d]", "```python\nx = {}\n```", "Köln", ""):
        assert takes(text), text
    fitting = [call("add", '{"a": 1}'), call("say", '{"x": [true]}')]
    if separator is not None:
        fitting.append(separator.join(fitting))
    for text in fitting:
        assert takes(text), text
        reader = MessageReader(use.rules)
        reader.push(text, final=True)
        assert reader.n_calls >= 1, text
    for name, arguments in [("add", '{"b": 1}'), ("add", '{"a": "1"}'), ("add", "{}"), ("mul", '{"a": 1}')]:
        text = call(name, arguments)
        assert not takes(text), text


@pytest.mark.parametrize(
    ("line", "text"),
    [(HERMES, "Wait. {} done {}"), (MISTRAL, "Wait. {}"), (MISTRAL_NAMED, "Wait. {}")],
)
def test_calls_within_text(line: ToolLine, text: str) -> None:
    spec = _bound(None, _use(line))
    call = {HERMES.name: _hermes}.get(line.name, _named if line is MISTRAL_NAMED else _mistral)
    assert _takes(spec, text.replace("{}", call("add", '{"a": 1}')))
    assert not _takes(spec, text.replace("{}", call("add", "{}")))


@pytest.mark.parametrize("text", ["```json\n", "```\n{", "[", ' {"x": 1}', ", {", "<|python_tag|>"])
def test_what_would_be_read_as_a_call_can_not_begin_otherwise(text: str) -> None:
    line = LLAMA if text == "<|python_tag|>" else JSON
    assert not _takes(_bound(None, _use(line)), text + " and more")


@pytest.mark.parametrize("kind", ANSWERS)
@pytest.mark.parametrize(("line", "call", "separator"), LINES)
def test_format_of_the_answer_and_tools(line: ToolLine, call: Any, separator: str | None, kind: str) -> None:
    """The model chooses: calls, or an answer in the format, and nothing else."""
    spec = _bound(ANSWERS[kind], _use(line, tools=[LOOSE]))
    assert _takes(spec, SAMPLES[kind])
    assert _takes(spec, call("say", '{"x": 1}'))
    for text in ("words", "", f"{SAMPLES[kind]} words", f"words {call('say', '{}')}", call("mul", "{}")):
        assert (text.startswith("{") and kind == "object") or not _takes(spec, text), text


def test_one_call_when_parallel_calls_are_off() -> None:
    spec = _bound(None, _use(LLAMA, parallel=False))
    assert _takes(spec, _llama("add", '{"a": 1}'))
    assert not _takes(spec, "; ".join([_llama("add", '{"a": 1}')] * 2))


@pytest.mark.parametrize("marks", [TEXT, SPECIAL], ids=["text", "special"])
@pytest.mark.parametrize("kind", ANSWERS)
def test_thoughts_come_before_a_bound_answer(kind: str, marks: Marks) -> None:
    """A model that thinks was made to write the format into its thoughts otherwise, or could not think."""
    takes = functools.partial(_takes, marks=marks)
    opened = _bound(ANSWERS[kind], ToolUse(), thinks=True, opened=True, marks=marks)
    assert takes(opened, f"hm < {{}} </thin\n</think>\n\n{SAMPLES[kind]}")
    assert not takes(opened, SAMPLES[kind])
    free = _bound(ANSWERS[kind], ToolUse(), thinks=True, marks=marks)
    assert takes(free, f"<think>hm</think>{SAMPLES[kind]}")
    assert takes(free, SAMPLES[kind])
    assert not takes(free, "hm")


def test_thoughts_come_before_a_forced_call() -> None:
    use = tool_use([STRICT], "required", parallel=True, line=HERMES, model=MODEL)
    spec = _bound(None, use, thinks=True, opened=True)
    assert _takes(spec, 'which? </think>\n[{"name": "add", "arguments": {"a": 1}}]')
    assert not _takes(spec, 'which? </think>\n[{"name": "add", "arguments": {}}]')


def test_where_nothing_is_bound() -> None:
    assert _bound(None, _use(HERMES, tools=[LOOSE])) is None
    assert _bound(None, _use(HERMES, model=model_info())) is None
    assert _bound(None, ToolUse(), thinks=True, opened=True) is None


def test_what_needs_no_composing_stays_as_it_is() -> None:
    for answer in ANSWERS.values():
        assert _bound(answer, ToolUse()) is answer
