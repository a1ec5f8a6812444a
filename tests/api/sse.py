"""Reads server-sent events."""

from __future__ import annotations

import json
from typing import Any


def events(text: str) -> list[Any]:
    """The JSON of each event; the last must be [DONE]."""
    values = open_events(text)
    assert values.pop() == "[DONE]"
    return values


def open_events(text: str) -> list[Any]:
    """The JSON of each event, [DONE] as it stands."""
    blocks = text.split("\n\n")
    assert blocks.pop() == ""
    assert all(block.startswith("data: ") for block in blocks)
    data = [block.removeprefix("data: ") for block in blocks]
    return [item if item == "[DONE]" else json.loads(item) for item in data]
