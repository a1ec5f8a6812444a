from __future__ import annotations

from deploy.configuration_docs import PATH, configuration_docs


def test_the_page_is_what_the_settings_say() -> None:
    assert PATH.read_text(encoding="utf-8") == configuration_docs(), "run `make docs`"
