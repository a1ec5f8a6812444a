"""The default model, float32, against what transformers generates: every way of computing it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from checkpoint.checkpoint import Checkpoint
from checkpoint.resolve import resolve
from tests.worker.model.driver import Driver, Request
from tests.worker.model.tiny import make_runner

pytestmark = pytest.mark.slow

REFERENCE = Path(__file__).parents[2] / "e2e" / "reference" / "smollm2_greedy.json"
TOLERANCE = 1e-4
"""A difference is allowed where the reference's own two best logits are closer than this."""
SAMPLE = None if os.environ.get("QUIRE_TEST_FULL") else 16


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return resolve("smollm2")


@pytest.fixture(scope="module")
def cases() -> list[dict[str, Any]]:
    """All prompts, or an evenly spread sample of them."""
    rows: list[dict[str, Any]] = json.loads(REFERENCE.read_text())["rows"]
    return rows if SAMPLE is None else rows[:: max(len(rows) // SAMPLE, 1)]


@pytest.mark.parametrize(
    ("block_size", "chunk", "together"), [(16, 1 << 30, 32), (1, 1 << 30, 8), (16, 13, 16)]
)
def test_greedy_text_equals_transformers(
    checkpoint: Checkpoint, cases: list[dict[str, Any]], block_size: int, chunk: int, together: int
) -> None:
    runner = make_runner(
        checkpoint,
        block_size=block_size,
        max_batch_size=together,
        max_batch_prefill_tokens=8192,
        max_batch_total_tokens=40_000,
        threads=1,
    )
    for start in range(0, len(cases), together):
        part = cases[start : start + together]
        requests = [Request(list(c["prompt_ids"]), len(c["prompt_ids"]), len(c["tokens"])) for c in part]
        outputs = Driver(runner, chunk=chunk).run(requests)
        for case, output in zip(part, outputs, strict=True):
            assert_same(case, output)


def assert_same(case: dict[str, Any], output: list[int]) -> None:
    for place, (got, expected, gap) in enumerate(zip(output, case["tokens"], case["gaps"], strict=True)):
        if got != expected:
            assert gap < TOLERANCE, f"prompt {case['index']} differs at token {place} (gap {gap})"
            return
