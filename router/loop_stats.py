"""What steps cost the scheduler's own process."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(slots=True)
class LoopStats:
    """CPU time of this thread between a result's arrival and its events' departure, gRPC's own left out."""

    n_steps: int = 0
    step_cpu_ns: int = 0
    worst_step_cpu_ns: int = 0

    @contextmanager
    def step(self) -> Iterator[None]:
        before = time.thread_time_ns()
        try:
            yield
        finally:
            took = time.thread_time_ns() - before
            self.n_steps += 1
            self.step_cpu_ns += took
            self.worst_step_cpu_ns = max(self.worst_step_cpu_ns, took)
