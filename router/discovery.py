"""Which addresses the configured replicas stand for."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import structlog

from settings.errors import ConfigError

Lookup = Callable[[str, int], Awaitable[list[str]]]
"""(name, port) → all addresses as host:port. Raises OSError when the name can't be resolved."""

log = structlog.get_logger("router.discovery")


@dataclass(frozen=True, slots=True)
class Target:
    """One entry of `--replicas`."""

    text: str
    is_name: bool
    """`dns:` entries stand for every address of the name."""
    host: str = ""
    port: int = 0

    @classmethod
    def parse(cls, text: str) -> Target:
        """Raises ConfigError."""
        wrong = ConfigError(
            f"--replicas has {text!r}, but an entry must be host:port, unix:/path or dns:///name:port"
        )
        if text.startswith("unix:"):
            if len(text) <= len("unix:"):
                raise wrong
            return cls(text=text, is_name=False)
        is_name = text.startswith("dns:")
        host, _, port = text.removeprefix("dns:").lstrip("/").rpartition(":")
        if not host or "/" in host or not port.isdecimal() or not 0 < int(port) <= 65535:
            raise wrong
        return cls(text=text, is_name=is_name, host=host.strip("[]"), port=int(port))


async def look_up(name: str, port: int) -> list[str]:
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    addresses = {
        f"[{entry[4][0]}]:{port}" if entry[0] == socket.AF_INET6 else f"{entry[4][0]}:{port}"
        for entry in found
    }
    return sorted(addresses)


class Discovery:
    """Resolves all targets. A name that can't be resolved for the moment keeps its last addresses."""

    def __init__(self, replicas: Sequence[str], *, lookup: Lookup = look_up) -> None:
        if not replicas:
            raise ConfigError("--replicas is empty: name at least one worker, e.g. 127.0.0.1:50051")
        self._targets = [Target.parse(text) for text in replicas]
        self._lookup = lookup
        self._last: dict[str, list[str]] = {}
        self._failing: set[str] = set()

    @property
    def is_static(self) -> bool:
        return not any(target.is_name for target in self._targets)

    async def resolve(self) -> list[str]:
        """All addresses, each once, in the order of the configuration."""
        found: dict[str, None] = {}
        for target in self._targets:
            if not target.is_name:
                found[target.text] = None
                continue
            try:
                self._last[target.text] = await self._lookup(target.host, target.port)
                self._failing.discard(target.text)
            except OSError as error:
                if target.text not in self._failing:
                    log.warning("name can't be resolved", replicas=target.text, cause=str(error))
                    self._failing.add(target.text)
            found.update(dict.fromkeys(self._last.get(target.text, [])))
        return list(found)
