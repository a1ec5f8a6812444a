"""What scaling works with: containers on one side, what the router says of their workers on the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from deploy.errors import DeployError


class ScaleError(DeployError):
    """Scaling could not be done; the message says what is as it was and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """One worker container."""

    id: str
    name: str
    number: int
    """Its place in the service: 1, 2, …"""
    address: str
    """host:port as the router knows it; empty while it has no address."""
    running: bool
    status: str
    """The engine's word: running, restarting, exited …"""
    image: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """A worker as the router sees it."""

    address: str
    state: str
    reason: str = ""
    device: str = ""
    version: str = ""
    draining: bool = False
    n_running: int = 0
    n_rows: int = 0
    n_blocks: int = 0
    n_blocks_used: int = 0

    @property
    def live(self) -> bool:
        return self.state == "live"


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterState:
    ready: bool
    reason: str
    n_waiting: int
    oldest_wait_s: float
    """How long the first of the queue has waited; 0 with an empty queue."""
    loads: tuple[Load, ...]

    def at(self, address: str) -> Load | None:
        return next((load for load in self.loads if load.address == address), None)

    @classmethod
    def read(cls, value: Mapping[str, Any]) -> RouterState:
        """From `/admin/state`."""
        return cls(
            ready=value["ready"],
            reason=value["reason"],
            n_waiting=value["n_waiting"],
            oldest_wait_s=value["oldest_wait_s"],
            loads=tuple(_load(entry) for entry in value["replicas"]),
        )


class Engine(Protocol):
    """Worker containers of one deployment."""

    def workers(self) -> list[Worker]:
        """All of them, by number."""

    def start(self) -> Worker:
        """One more, like those that are there. Raises ScaleError."""

    def remove(self, worker: Worker) -> None:
        """Stops it in order and removes it."""

    def last_words(self, worker: Worker) -> str:
        """Why it ended, as far as its log tells."""

    def n_gpus(self) -> int | None:
        """GPUs that workers may claim; None when they compute on the CPU."""


class Router(Protocol):
    def state(self) -> RouterState:
        """Raises ScaleError."""

    def drain(self, address: str, *, on: bool) -> None:
        """Gives the worker nothing new any more (or again)."""


class Time(Protocol):
    def now_s(self) -> float: ...

    def wait(self, seconds: float) -> None: ...


def by_load(workers: Sequence[Worker], state: RouterState) -> list[Worker]:
    """The one to take away first: what is not in use, then the least loaded, then the youngest."""

    def key(worker: Worker) -> tuple[bool, int, int]:
        load = state.at(worker.address)
        live = load is not None and load.live
        return live, load.n_running if load is not None else 0, -worker.number

    return sorted(workers, key=key)


def _load(entry: Mapping[str, Any]) -> Load:
    blocks = entry.get("blocks") or {}
    return Load(
        address=entry["address"],
        state=entry["state"],
        reason=entry.get("reason", ""),
        device=entry.get("device", ""),
        version=entry.get("quire_version", ""),
        draining=entry.get("draining", False),
        n_running=entry.get("n_running", 0),
        n_rows=entry.get("max_rows", 0),
        n_blocks=max(0, blocks.get("n_blocks", 1) - 1),
        n_blocks_used=blocks.get("leased", 0),
    )
