"""How much memory this process may still take on its host: of the machine, or of its container's limit.

Sources: /proc/meminfo (MemAvailable), cgroup v2 (memory.max, memory.current) and v1. In a container the
page cache counts as used, but gives way: `inactive_file` is added back, as container tools do.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_UNLIMITED = 1 << 60
"""cgroup v1 writes a huge number for no limit."""


@dataclass(frozen=True, slots=True)
class HostMemory:
    available: int
    """Bytes."""
    bound: str
    """What limits it, for people: "machine" or "container"."""


def host_memory(root: Path = Path("/")) -> HostMemory:
    """`root` is where proc and sys are looked for."""
    machine = _machine_available(root)
    container = _container_available(root)
    if container is not None and container < machine:
        return HostMemory(container, "container")
    return HostMemory(machine, "machine")


def _machine_available(root: Path) -> int:
    try:
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return _physical()


def _physical() -> int:
    """Not Linux: half of what is built in."""
    import os

    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    except (ValueError, OSError, AttributeError):
        return 4 << 30


def _container_available(root: Path) -> int | None:
    for folder, limit_name, usage_name in (
        (root / "sys/fs/cgroup", "memory.max", "memory.current"),
        (root / "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        limit, usage = _number(folder / limit_name), _number(folder / usage_name)
        if limit is None or usage is None or limit >= _UNLIMITED:
            continue
        return max(limit - usage + _inactive_file(folder / "memory.stat"), 0)
    return None


def _inactive_file(path: Path) -> int:
    try:
        for line in path.read_text().splitlines():
            name, _, value = line.partition(" ")
            if name in ("inactive_file", "total_inactive_file"):
                return int(value)
    except (OSError, ValueError):
        pass
    return 0


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        # Missing, or "max".
        return None
