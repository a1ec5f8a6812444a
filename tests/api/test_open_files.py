from __future__ import annotations

import resource
from collections.abc import Iterator

import pytest

from router.api.open_files import raise_open_files


@pytest.fixture
def few_files() -> Iterator[int]:
    """The hard limit, while the soft one is low."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(before[1], 512), before[1]))
    yield before[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_as_many_connections_as_the_system_allows(few_files: int) -> None:
    raise_open_files()
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == few_files
