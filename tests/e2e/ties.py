"""When are two greedy texts equal? In float32 the order of additions depends on the batch, so where the two
best tokens are closer than TIE, either is right, and the comparison ends there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

TIE = 1e-4


def assert_same(reference: dict[str, Any], tokens: Sequence[int]) -> None:
    """`reference`: a choice with token ids and `logprobs: 2`."""
    expected = reference["token_ids"]
    assert len(tokens) == len(expected)
    for i, (token, right) in enumerate(zip(tokens, expected, strict=True)):
        if token != right:
            best = sorted(reference["logprobs"]["top_logprobs"][i].values())[-2:]
            assert best[-1] - best[0] < TIE, f"token {i} is {token}, not {right} ({best})"
            return
