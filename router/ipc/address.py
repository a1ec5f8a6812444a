"""Where scheduler and API meet: `unix:/path` or `host:port`."""

from __future__ import annotations

from dataclasses import dataclass

from settings.errors import ConfigError


@dataclass(frozen=True, slots=True)
class IpcAddress:
    path: str = ""
    """Of a unix socket; empty: TCP."""
    host: str = ""
    port: int = 0

    @classmethod
    def parse(cls, text: str) -> IpcAddress:
        """Raises ConfigError."""
        if text.startswith("unix:"):
            path = text.removeprefix("unix:")
            if not path:
                raise ConfigError(f"--scheduler-address is {text!r}, but names no path")
            return cls(path=path)
        host, _, port = text.rpartition(":")
        if not host or not port.isdecimal() or not 0 <= int(port) <= 65535:
            raise ConfigError(f"--scheduler-address is {text!r}, but must be unix:/path or host:port")
        return cls(host=host.strip("[]"), port=int(port))

    def __str__(self) -> str:
        return f"unix:{self.path}" if self.path else f"{self.host}:{self.port}"
