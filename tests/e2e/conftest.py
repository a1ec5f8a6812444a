"""Servers for end-to-end tests: the real thing, started by the same command as a user's.

`start_server(workers=…, flags=(…), model=…, env=…)` gives a `Server` of one test's own; `real_server` and
`fake_server` are shared by a module's tests that leave no trace.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.serving import Server, StartServer, serving

FAKE = ("--attention=fake", "--fake-step-ms=2")


@pytest.fixture
def start_server(tmp_path: Path) -> Iterator[StartServer]:
    with contextlib.ExitStack() as stack:

        def start(**options: object) -> Server:
            return stack.enter_context(serving(tmp_path, **options))  # type: ignore[arg-type]  # as serving

        yield start


@pytest.fixture(scope="module")
def real_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One CPU worker with the default model."""
    with serving(tmp_path_factory.mktemp("real")) as server:
        yield server


@pytest.fixture(scope="module")
def fake_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One fake worker with the default model's tokenizer."""
    with serving(tmp_path_factory.mktemp("fake"), flags=FAKE) as server:
        yield server
