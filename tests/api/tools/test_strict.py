"""Strict functions bind the arguments of calls that the model makes by itself."""

from __future__ import annotations

import pytest
import xgrammar

from proto.worker_pb2 import Grammar
from router.api.tools.lines import HERMES, LLAMA
from router.api.tools.request import tool_use
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


@pytest.fixture(scope="module")
def compiled() -> xgrammar.CompiledGrammar:
    use = tool_use([STRICT, LOOSE], "auto", parallel=True, line=HERMES, model=MODEL)
    assert use.grammar is not None
    assert not use.forced
    vocabulary = [bytes([byte]) for byte in range(256)] + [b""]
    info = xgrammar.TokenizerInfo(
        vocabulary, xgrammar.VocabType.RAW, vocab_size=len(vocabulary), stop_token_ids=[EOS]
    )
    grammar = Grammar(kind=use.grammar.kind, source=use.grammar.source, strict=use.grammar.strict)
    return compile_grammar(grammar, xgrammar.GrammarCompiler(info))


def _call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ("Just words, 1 < 2, <tool", True),
        (_call("add", '{"a": 1}'), True),
        (_call("add", '{"a": 1}') + "\n" + _call("say", '{"x": [true]}') + " done", True),
        (_call("add", '{"b": 1}'), False),
        (_call("add", '{"a": "1"}'), False),
        (_call("add", "{}"), False),
        (_call("mul", '{"a": 1}'), False),
    ],
)
def test_what_the_grammar_allows(compiled: xgrammar.CompiledGrammar, text: str, fits: bool) -> None:
    matcher = xgrammar.GrammarMatcher(compiled)
    taken = all(matcher.accept_token(byte) for byte in text.encode())
    assert (taken and matcher.accept_token(EOS)) is fits


def test_where_nothing_is_bound() -> None:
    plain = model_info()
    assert tool_use([STRICT], None, parallel=True, line=HERMES, model=plain).grammar is None
    assert tool_use([LOOSE], None, parallel=True, line=HERMES, model=MODEL).grammar is None
    assert tool_use([STRICT], None, parallel=True, line=LLAMA, model=MODEL).grammar is None
    special = frozenset({"<tool_call>"})
    use = tool_use([STRICT], None, parallel=True, line=HERMES, model=MODEL, special_tokens=special)
    assert use.grammar is None
