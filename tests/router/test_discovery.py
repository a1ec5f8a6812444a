from __future__ import annotations

import pytest

from router.discovery import Discovery, Target, look_up
from settings.errors import ConfigError


@pytest.mark.parametrize(
    "text", ["", "host", "host:", "host:0", "host:99999", "host:²", "unix:", "dns:///name", "http://host:1"]
)
def test_entries_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match="--replicas has"):
        Target.parse(text)


def test_an_empty_list() -> None:
    with pytest.raises(ConfigError, match="--replicas is empty"):
        Discovery(())


async def test_lists_and_names_together() -> None:
    found = {"workers": ["10.0.0.1:50051", "10.0.0.2:50051"]}
    fails = False

    async def lookup(name: str, port: int) -> list[str]:
        if fails:
            raise OSError("no such name")
        return found[name]

    discovery = Discovery(["10.0.0.1:50051", "unix:/run/w.sock", "dns:///workers:50051"], lookup=lookup)
    assert not discovery.is_static
    first = await discovery.resolve()
    assert first == ["10.0.0.1:50051", "unix:/run/w.sock", "10.0.0.2:50051"]
    found["workers"] = ["10.0.0.3:50051"]
    assert await discovery.resolve() == ["10.0.0.1:50051", "unix:/run/w.sock", "10.0.0.3:50051"]
    fails = True  # a name server that fails for a moment takes no worker away
    assert await discovery.resolve() == ["10.0.0.1:50051", "unix:/run/w.sock", "10.0.0.3:50051"]


async def test_the_systems_own_resolver() -> None:
    assert "127.0.0.1:5" in await look_up("127.0.0.1", 5)
