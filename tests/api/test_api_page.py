"""docs/api.md has every field of every request, once, and names tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from openai.types.chat.completion_create_params import CompletionCreateParams
from openai.types.completion_create_params import CompletionCreateParams as TextCreateParams
from openai.types.responses.response_create_params import ResponseCreateParams

from router.api.responses.schema import ResponsesRequest
from router.api.schema import ChatRequest, CompletionRequest, GenerationRequest
from router.api.tgi.schema import GenerateParameters

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
COMMON = set(GenerationRequest.__struct_fields__)
TABLES = [
    COMMON,
    set(ChatRequest.__struct_fields__) - COMMON,
    set(CompletionRequest.__struct_fields__) - COMMON,
    set(ResponsesRequest.__struct_fields__),
    set(GenerateParameters.__struct_fields__),
]


@pytest.mark.parametrize(
    ("params", "ours"),
    [
        (CompletionCreateParams, ChatRequest),
        (TextCreateParams, CompletionRequest),
        (ResponseCreateParams, ResponsesRequest),
    ],
    ids=["chat", "completions", "responses"],
)
def test_every_field_of_openai_s_client_is_known(params: Any, ours: Any) -> None:
    """Known here, they have a row (below)."""
    fields = {name for kind in get_args(params) for name in get_type_hints(kind)}
    assert len(fields) > 15
    assert fields <= set(ours.__struct_fields__)


def test_every_parameter_of_tgi_s_client_is_known() -> None:
    types = pytest.importorskip("text_generation.types")
    assert set(types.Parameters.model_fields) <= set(GenerateParameters.__struct_fields__)


def _tables() -> list[list[list[str]]]:
    """The cells of each table's rows, its head left out."""
    blocks = re.findall(r"\| field \|.*\n\|[-|]+\n((?:\|.*\n)+)", PAGE)
    return [
        [[cell.strip() for cell in line.split(" | ")] for line in block.strip().splitlines()]
        for block in blocks
    ]


@pytest.mark.parametrize("index", range(len(TABLES)))
def test_every_field_has_a_row(index: int) -> None:
    fields = [row[0].strip("| `") for row in _tables()[index]]
    assert len(fields) == len(set(fields))
    assert set(fields) == TABLES[index]


def test_every_row_says_what_happens_and_where_it_is_shown() -> None:
    tables = _tables()
    assert len(tables) == len(TABLES)
    for row in (row for table in tables for row in table):
        assert row[1] in ("supported", "ignored", "refused"), row
        assert "::test_" in row[3], row


def test_every_named_test_exists() -> None:
    named = set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE))
    assert len(named) > 40
    missing = [f"{path}::{name}" for path, name in sorted(named) if name not in _functions(ROOT / path)]
    assert not missing


def _functions(path: Path) -> set[str]:
    if not path.exists():
        return set()
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
