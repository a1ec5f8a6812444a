from __future__ import annotations

from pathlib import Path

import pytest

from bench.tuning import GROUPS, into_page
from router.config import RouterConfig
from settings.load import settings_of

ROOT = Path(__file__).resolve().parents[2]


def test_the_tables_of_a_page_are_replaced_and_the_rest_stays() -> None:
    page = "before\n<!-- python -m bench.tuning -->\nold\n<!-- end -->\nafter\n"
    assert into_page(page, "new") == page.replace("old", "new")
    with pytest.raises(ValueError, match="has no lines"):
        into_page("a page", "new")


def test_the_operators_page_has_a_place_for_them() -> None:
    page = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    assert "TABLES" in into_page(page, "TABLES")


def test_every_batching_parameter_is_measured() -> None:
    used = {
        flag.partition("=")[0].replace("--no-", "--")
        for settings in GROUPS.values()
        for setting in settings
        for flag in setting.flags
    }
    assert used <= {setting.option for setting in settings_of(RouterConfig)}
    assert used == {
        "--decode-pause-ratio",
        "--max-batch-prefill-tokens",
        "--max-batch-size",
        "--max-batch-total-tokens",
        "--max-queue-passes",
        "--max-total-tokens",
        "--max-waiting-tokens",
        "--mixed-step-tokens",
        "--prefill-chunking",
        "--prefix-caching",
        "--waiting-served-ratio",
        "--window",
    }
