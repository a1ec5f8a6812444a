"""Free TCP ports that stay usable by the process they are given to, also after it was started again."""

from __future__ import annotations

import contextlib
import random
import socket
from pathlib import Path

_LOWEST = 20_000
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_USUAL_EPHEMERAL = 32_768
_TRIES = 1_000


def free_ports(n: int, *, host: str = "127.0.0.1") -> list[int]:
    """`n` different ports that were free a moment ago, below those that the system gives to outgoing
    connections: a client that tries again and again to reach a closed port of that range can be given the
    same port for its own end, and then the server can't have it back. Raises OSError when none is free."""
    with contextlib.ExitStack() as held:
        ports: list[int] = []
        for _ in range(_TRIES):
            if len(ports) == n:
                return ports
            probe = held.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
            with contextlib.suppress(OSError):
                probe.bind((host, random.randrange(_LOWEST, _first_ephemeral())))
                ports.append(int(probe.getsockname()[1]))
        raise OSError(f"no {n} free ports on {host} between {_LOWEST} and {_first_ephemeral()}")


def _first_ephemeral() -> int:
    try:
        first = int(_EPHEMERAL.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return _USUAL_EPHEMERAL
    return first if first > _LOWEST + _TRIES else 65_536
