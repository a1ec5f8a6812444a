from __future__ import annotations

import json
from datetime import UTC, datetime

import pytest

from deploy.log_lines import json_line, text_line

NOW = datetime(2030, 1, 2, 3, 4, 5, tzinfo=UTC)


def test_on_a_terminal_the_name_stands_before_the_line() -> None:
    assert text_line("worker 0", "ready") == " worker 0 | ready"


@pytest.mark.parametrize("line", ['{"event": "ready", "port": 1}', '{ "event": "ready", "port": 1}'])
def test_an_object_stays_one_and_learns_whose_it_is(line: str) -> None:
    written = json_line("api", line)
    assert json.loads(written) == {"process": "api", "event": "ready", "port": 1}
    assert "\n" not in written


def test_any_other_line_becomes_an_event() -> None:
    value = json.loads(json_line("worker 1", 'error: --model is "x" – no', now=lambda: NOW))
    assert value == {
        "process": "worker 1",
        "event": 'error: --model is "x" – no',
        "level": "error",
        "timestamp": "2030-01-02T03:04:05Z",
    }


@pytest.mark.parametrize("line", ["{", "{}x", "{nonsense}", "", "[1]", "Traceback (most recent call last):"])
def test_what_only_looks_like_an_object(line: str) -> None:
    assert json.loads(json_line("a", line))["event"] == line


def test_an_empty_object() -> None:
    assert json.loads(json_line('a"b', "{}")) == {"process": 'a"b'}
