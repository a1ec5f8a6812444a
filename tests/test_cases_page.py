"""docs/cases.md names tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "cases.md"


def test_every_named_test_exists() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE.read_text())
    assert len(named) > 80
    missing = [f"{path}::{name}" for path, name in named if name not in _functions(ROOT / path)]
    assert not missing


def test_every_case_has_a_test_or_says_what_it_waits_for() -> None:
    rows = [line for line in PAGE.read_text().splitlines() if re.match(r"\| (?!report|---)", line)]
    assert len(rows) > 45
    assert all("::test_" in row or "later: needs" in row for row in rows)


def _functions(path: Path) -> set[str]:
    if not path.exists():
        return set()
    nodes = ast.walk(ast.parse(path.read_text()))
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
