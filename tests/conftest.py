"""Fast tests run first, so that a mistake shows within the first minute."""

from __future__ import annotations

from pathlib import Path

import pytest

TESTS = Path(__file__).parent
SLOW_FOLDERS = tuple(
    TESTS / name for name in ("e2e", "gpu", "worker/grammar", "worker/model", "worker/native")
)
"""They start whole servers, load models or compile kernels; the fast suite has the fake worker."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(TESTS) and any(item.path.is_relative_to(f) for f in SLOW_FOLDERS):
            item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: item.get_closest_marker("slow") is not None)
