"""A deployment in memory: containers, a router that knows them, and a clock that is moved by waiting."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from deploy.scaler.model import Load, RouterState, ScaleError, Worker

ROWS, BLOCKS = 100, 1000


def worker(number: int) -> Worker:
    return Worker(
        id=f"id{number}-{id(object())}",
        name=f"quire-worker-{number}",
        number=number,
        address=f"10.0.0.{number}:50051",
        running=True,
        status="running",
        image="quire/worker-cpu:0.1.0",
    )


@dataclass
class World:
    """Implements `Engine`, `Router` and `Time`. `events` is what happened, in order."""

    gpus: int | None = None
    start_s: float = 5.0
    """From a container's start until its worker serves."""
    fails: Callable[[Worker], str] = lambda worker: ""
    """Why a new worker ends at once; empty: it does not."""
    finish_per_s: float = 1.0
    """Requests that a draining worker ends per second."""
    clock_s: float = 0.0
    n_waiting: int = 0
    oldest_wait_s: float = 0.0
    events: list[str] = field(default_factory=list)
    on_wait: Callable[[], None] = lambda: None
    _workers: dict[str, Worker] = field(default_factory=dict)
    _live_at: dict[str, float] = field(default_factory=dict)
    running: dict[str, float] = field(default_factory=dict)
    draining: set[str] = field(default_factory=set)
    refused: str = ""

    def with_workers(self, *numbers: int) -> World:
        for number in numbers:
            self._add(worker(number), live_at=0.0)
        return self

    def _add(self, new: Worker, *, live_at: float) -> None:
        self._workers[new.id] = new
        self._live_at[new.address] = live_at
        self.running.setdefault(new.address, 0.0)

    # Engine

    def workers(self) -> list[Worker]:
        return sorted(self._workers.values(), key=lambda w: w.number)

    def start(self) -> Worker:
        if not self._workers:
            raise ScaleError("none to take as a model")
        taken = {w.number for w in self._workers.values()}
        new = worker(next(i for i in range(1, 100) if i not in taken))
        if self.fails(new):
            new = replace(new, running=False, status="exited")
        self._add(new, live_at=self.clock_s + self.start_s)
        self.events.append(f"start {new.number}")
        return new

    def remove(self, worker: Worker) -> None:
        self.events.append(f"remove {worker.number} with {self.running.get(worker.address, 0):g} running")
        self._workers.pop(worker.id, None)
        self._live_at.pop(worker.address, None)
        self.draining.discard(worker.address)

    def last_words(self, worker: Worker) -> str:
        return self.fails(worker)

    def n_gpus(self) -> int | None:
        return self.gpus

    # Router

    def state(self) -> RouterState:
        loads = tuple(self._load(w) for w in self.workers())
        return RouterState(
            ready=any(load.live for load in loads),
            reason="",
            n_waiting=self.n_waiting,
            oldest_wait_s=self.oldest_wait_s,
            loads=loads,
        )

    def _load(self, w: Worker) -> Load:
        live = w.running and self._live_at[w.address] <= self.clock_s
        if live and self.refused and self._live_at[w.address] > 0:
            return Load(address=w.address, state="refused", reason=self.refused)
        return Load(
            address=w.address,
            state="live" if live else "waiting",
            device="cpu",
            draining=w.address in self.draining,
            n_running=int(self.running[w.address]),
            n_rows=ROWS,
            n_blocks=BLOCKS,
            n_blocks_used=int(self.running[w.address] * BLOCKS / ROWS),
        )

    def drain(self, address: str, *, on: bool) -> None:
        number = next(w.number for w in self.workers() if w.address == address)
        self.events.append(f"{'drain' if on else 'undrain'} {number}")
        (self.draining.add if on else self.draining.discard)(address)

    # Time

    def now_s(self) -> float:
        return self.clock_s

    def wait(self, seconds: float) -> None:
        self.clock_s += seconds
        for address in self.draining:
            self.running[address] = max(0.0, self.running[address] - seconds * self.finish_per_s)
        self.on_wait()
