"""One compiler for all: its library and its trial process take a second or two to come up."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from proto.worker_pb2 import Grammar
from tests.worker.grammar.tiny import make_compiler
from worker.grammar.compiler import GrammarCompiler
from worker.grammar.rows import GrammarRows


@pytest.fixture(scope="session")
def compiler() -> Iterator[GrammarCompiler]:
    compiler = make_compiler()
    compiler.submit(Grammar(kind=Grammar.JSON_OBJECT)).result()
    yield compiler
    compiler.close()


@pytest.fixture
def rows(compiler: GrammarCompiler) -> GrammarRows:
    return GrammarRows(compiler, n_threads=2)
