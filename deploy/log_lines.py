"""One stream of log lines out of several processes': readable on a terminal, else one JSON object a line."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime

Format = Callable[[str, str], str]
"""(name of the process, its line)."""


def text_line(process: str, line: str) -> str:
    return f"{process:>9} | {line}"


def json_line(process: str, line: str, *, now: Callable[[], datetime] = lambda: datetime.now(UTC)) -> str:
    """A line that is an object already gets the name of its process; any other becomes the event of one."""
    if line.startswith("{") and _is_object(line):
        rest = line[1:].lstrip()
        name = json.dumps(process)
        return f'{{"process": {name}}}' if rest == "}" else f'{{"process": {name}, {rest}'
    level = "error" if line.lower().startswith("error:") else "info"
    timestamp = now().isoformat().replace("+00:00", "Z")
    entry = {"process": process, "event": line, "level": level, "timestamp": timestamp}
    return json.dumps(entry, ensure_ascii=False)


def _is_object(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False
