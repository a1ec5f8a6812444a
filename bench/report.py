"""Results as files: JSON for machines, Markdown for people."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

COLUMNS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("output tok/s", ("output_tok_s",), ",.0f"),
    ("total tok/s", ("total_tok_s",), ",.0f"),
    ("TTFT p50 ms", ("ttft_ms", "p50"), ",.1f"),
    ("TTFT p99 ms", ("ttft_ms", "p99"), ",.1f"),
    ("TPOT p50 ms", ("tpot_ms", "p50"), ",.2f"),
    ("ITL p50 ms", ("itl_ms", "p50"), ",.2f"),
    ("ITL p99 ms", ("itl_ms", "p99"), ",.1f"),
    ("errors", ("n_errors",), "d"),
)


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose columns line up in plain text as well."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    lines = [head, ["-" * w for w in widths], *rows]
    return "\n".join(
        "| " + " | ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)) + " |"
        for line in lines
    )


def cell(summary: dict[str, Any], path: Sequence[str], spec: str) -> str:
    """One figure of a `Summary.as_dict`, or a dash where nothing was measured."""
    value: Any = summary
    for key in path:
        value = value[key]
    return "–" if value is None else format(value, spec)


def runs_table(rows: Sequence[tuple[str, dict[str, Any]]]) -> str:
    """One row per (name, `Summary.as_dict`)."""
    head = ["case", *(name for name, _, _ in COLUMNS)]
    body = [[name, *(cell(summary, path, spec) for _, path, spec in COLUMNS)] for name, summary in rows]
    return markdown_table(head, body)


def write_report(folder: Path, name: str, document: dict[str, Any], markdown: str) -> tuple[Path, Path]:
    """Writes `DATE-NAME.json` and `.md` into the folder; a second report of the same minute gets a number."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{datetime.now(UTC):%Y-%m-%d-%H%M}-{name}"
    n = 1
    while (folder / f"{stem}.json").exists():
        n += 1
        stem = f"{stem.removesuffix(f'-{n - 1}')}-{n}"
    as_json, as_markdown = folder / f"{stem}.json", folder / f"{stem}.md"
    as_json.write_text(json.dumps(document, indent=1) + "\n")
    as_markdown.write_text(markdown.rstrip() + "\n")
    return as_json, as_markdown
