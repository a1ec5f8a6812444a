"""Prints the dependencies that pyproject.toml declares, so that an image can install them in a layer of their
own, which a change of code leaves alone.

    python requirements_of.py pyproject.toml [EXTRA ...]
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path


def requirements(pyproject: str, extras: Sequence[str]) -> list[str]:
    """Extras that name another extra of the same project are followed. Raises KeyError for an unknown one."""
    project = tomllib.loads(pyproject)["project"]
    optional: dict[str, list[str]] = project.get("optional-dependencies", {})
    found: list[str] = list(project["dependencies"])
    waiting = list(extras)
    while waiting:
        for line in optional[waiting.pop(0)]:
            name, bracket, rest = line.partition("[")
            if bracket and name == project["name"]:
                waiting += rest.rstrip("]").split(",")
            else:
                found.append(line)
    return found


if __name__ == "__main__":
    print("\n".join(requirements(Path(sys.argv[1]).read_text(encoding="utf-8"), sys.argv[2:])))
