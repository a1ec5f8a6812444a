"""Parsers of tool calls: what they find, and that the pieces do not matter."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.api.tools.forced import ParseNamed, parse_required
from router.api.tools.lines import HERMES, JSON, LINES, LLAMA, MISTRAL, choose_line
from router.api.tools.message import MessageReader, MessageRules
from router.api.tools.parsed import Parse

NAMES = frozenset({"weather", "add"})
A = '{"city": "Köln \\"am\\" Rhein </tool_call> ]}", "days": [1, {"x": 2}]}'
B = '{"a": 1.5, "b": null}'
PARSERS: dict[str, Parse] = {line.name: line.parse for line in LINES.values()} | {
    "required": parse_required,
    "named": ParseNamed("add"),
}

Case = tuple[str, str, str, list[tuple[str, str]]]
CASES: list[Case] = [
    ("hermes", "Just words, 1 < 2 and a <tool.", "Just words, 1 < 2 and a <tool.", []),
    ("hermes", f'<tool_call>\n{{"name": "weather", "arguments": {A}}}\n</tool_call>', "", [("weather", A)]),
    (
        "hermes",
        f'Let me see.\n\n<tool_call>{{"name": "weather", "arguments": {A}}}</tool_call>\n'
        f'<tool_call>{{"name": "add", "arguments": {B}}}</tool_call>',
        "Let me see.",
        [("weather", A), ("add", B)],
    ),
    ("hermes", f'<tool_call>{{"arguments": {B}, "name": "add"}}</tool_call> done', " done", [("add", B)]),
    (
        "hermes",
        f'<tool_call>[{{"name": "add", "arguments": {B}}}, {{"name": "weather", "arguments": {A}}}]\n'
        "</tool_call>",
        "",
        [("add", B), ("weather", A)],
    ),
    ("hermes", '<tool_call>{"name": "now"}</tool_call>', "", [("now", "{}")]),
    ("hermes", '<tool_call>{"name": "now", "arguments": null}</tool_call>', "", [("now", "{}")]),
    (
        "hermes",
        '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>',
        "",
        [("add", '{"a": 1}')],
    ),
    ("hermes", "<tool_call>not json</tool_call>", "<tool_call>not json</tool_call>", []),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1', "", [("add", '{"a": 1')]),
    ("hermes", '<tool_call>{"na', '<tool_call>{"na', []),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1 </tool_call>x', "x", [("add", '{"a": 1 ')]),
    (
        "hermes",
        f'<tool_call>{{"name": "add", "arguments": {B}}}<tool_call>{{"name": "add", "arguments": {B}}}',
        "",
        [("add", B), ("add", B)],
    ),
    (
        "hermes",
        f'<tool_call>{{"name": "add", "arguments": {B}, "why": "because"}}</tool_call>',
        "",
        [("add", B)],
    ),
    ("llama3", f'{{"name": "weather", "parameters": {A}}}', "", [("weather", A)]),
    ("llama3", f'<|python_tag|>{{"type": "function", "name": "add", "parameters": {B}}}', "", [("add", B)]),
    (
        "llama3",
        f'{{"name": "add", "parameters": {B}}}; {{"name": "weather", "parameters": {A}}}',
        "",
        [("add", B), ("weather", A)],
    ),
    ("llama3", '{"name": "Bob", "parameters": 3}', '{"name": "Bob", "parameters": 3}', []),
    ("llama3", '{"answer": 42}', '{"answer": 42}', []),
    (
        "llama3",
        f'Sure: {{"name": "add", "parameters": {B}}}',
        f'Sure: {{"name": "add", "parameters": {B}}}',
        [],
    ),
    ("llama3", f'{{"name": "add", "parameters": {B}}}\nThere.', "\nThere.", [("add", B)]),
    ("llama3", '{"name": "add", "parameters": {"a": 1', "", [("add", '{"a": 1')]),
    ("llama3", "<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
    ("json", f'```json\n{{"name": "add", "arguments": {B}}}\n```', "", [("add", B)]),
    ("json", f'```\n[{{"name": "add", "arguments": {B}}}]\n```\nSo.', "\nSo.", [("add", B)]),
    ("json", f'{{"function": "weather", "arguments": {A}}}', "", [("weather", A)]),
    ("json", "```python\nprint()\n```", "```python\nprint()\n```", []),
    ("json", "[a link](x) {", "[a link](x) {", []),
    ("json", "", "", []),
    ("mistral", f'[TOOL_CALLS] [{{"name": "weather", "arguments": {A}}}]', "", [("weather", A)]),
    (
        "mistral",
        f'[TOOL_CALLS][{{"name": "add", "arguments": {B}}}, {{"name": "weather", "arguments": {A}}}]',
        "",
        [("add", B), ("weather", A)],
    ),
    (
        "mistral",
        f"Well.[TOOL_CALLS]weather[ARGS]{A}[TOOL_CALLS]add[CALL_ID]abc123XYZ[ARGS]{B}",
        "Well.",
        [("weather", A), ("add", B)],
    ),
    ("mistral", f"[TOOL_CALLS]add{B}", "", [("add", B)]),
    ("mistral", "[TOOL_CALLS] what?", "[TOOL_CALLS] what?", []),
    ("mistral", "a [list] of [TOOL", "a [list] of [TOOL", []),
    ("required", f'[{{"name": "add", "parameters": {B}}}]', "", [("add", B)]),
    ("required", f'[{{"name": "add", "parameters": {B}}}, {{"name": "wea', "", [("add", B)]),
    ("named", f" {A}\n", "", [("add", A)]),
]


def _joined(parser: str, pieces: list[str], **changes: Any) -> tuple[str, list[tuple[str, str]]]:
    counter = itertools.count()
    rules = MessageRules(parse=PARSERS[parser], names=NAMES, new_id=lambda: f"id{next(counter)}", **changes)
    reader = MessageReader(rules)
    content = ""
    calls: list[list[str]] = []
    for piece in [*pieces, None]:
        delta = reader.push(piece or "", final=piece is None)
        content += delta.content
        for call in delta.calls:
            if call.id is not None:
                assert call.index == len(calls)
                assert call.name is not None
                calls.append([call.name, ""])
            calls[call.index][1] += call.arguments
    assert reader.n_calls == len(calls)
    return content, [(name, arguments) for name, arguments in calls]


@pytest.mark.parametrize(("parser", "text", "content", "calls"), CASES)
def test_whole(parser: str, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert _joined(parser, [text]) == (content, calls)


@pytest.mark.parametrize(("parser", "text", "content", "calls"), CASES)
def test_any_pieces_join_to_the_same(
    parser: str, text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    """vLLM #9693."""
    for size in range(1, 21):
        pieces = [text[i : i + size] for i in range(0, len(text), size)]
        assert _joined(parser, pieces) == (content, calls), size


_FRAGMENTS = [
    "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "```json", "```", "\n", " ",
    '{"name": "add"', ', "arguments": ', ', "parameters": ', '{"a": "x', '"', "}", "{", "[", "]", "<",
    "weather", ";", "add", "text", "null", "1", "\\", ":", ",", '{"name": "weather", "arguments": {"b": 2}}',
]  # fmt: skip


@pytest.mark.parametrize("parser", list(PARSERS))
@given(
    parts=st.lists(st.sampled_from(_FRAGMENTS), max_size=12), cuts=st.lists(st.integers(1, 9), max_size=40)
)
def test_broken_text_in_any_pieces(parser: str, parts: list[str], cuts: list[int]) -> None:
    text = "".join(parts)
    pieces, at = [], 0
    for cut in cuts:
        pieces.append(text[at : at + cut])
        at += cut
    pieces.append(text[at:])
    assert _joined(parser, pieces) == _joined(parser, [text])


def test_arguments_stream_as_they_come() -> None:
    reader = MessageReader(MessageRules(parse=HERMES.parse, names=NAMES, new_id=lambda: "id"))
    told = []
    for char in f'<tool_call>{{"name": "add", "arguments": {B}}}</tool_call>':
        told += [call.arguments for call in reader.push(char).calls if call.arguments]
    assert told == list(B)


def test_a_long_call_is_read_in_linear_time() -> None:
    calls = 0

    def counted(text: str, **options: Any) -> Any:
        nonlocal calls
        calls += len(text)
        return HERMES.parse(text, **options)

    reader = MessageReader(MessageRules(parse=counted, names=NAMES, new_id=lambda: "id"))
    head = '<tool_call>{"name": "add", "arguments": {"a": "'
    for char in head + "x" * 60_000:
        reader.push(char)
    assert calls < 60_000 * 2000
    assert reader.push('"}}', final=True).calls


def test_one_call_alone() -> None:
    two = "".join(f'<tool_call>{{"name": "add", "arguments": {B}}}</tool_call>' for _ in range(2))
    for size in (1, 7, len(two)):
        pieces = [two[i : i + size] for i in range(0, len(two), size)]
        assert _joined("hermes", pieces, max_calls=1) == ("", [("add", B)])


def test_ids_fit_the_model_line() -> None:
    assert HERMES.new_id().startswith("call_")
    assert len(MISTRAL.new_id()) == 9
    assert MISTRAL.new_id().isalnum()
    assert HERMES.new_id() != HERMES.new_id()


def test_line_by_template() -> None:
    assert choose_line("auto", template="... <tool_call> ...") is HERMES
    assert choose_line("auto", template="[AVAILABLE_TOOLS] [TOOL_CALLS]") is MISTRAL
    assert choose_line("auto", template="<|start_header_id|>user") is LLAMA
    assert choose_line("auto", template="<|im_start|>") is JSON
    assert choose_line("none", template="<tool_call>") is None
    assert choose_line("mistral", template="<tool_call>") is MISTRAL


def test_cases_hold_valid_json() -> None:
    assert json.loads(A)
    assert json.loads(B)
