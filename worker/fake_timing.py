"""The device that the fake worker pretends to have: steps take time and queue up, as on a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from worker.fake_faults import FakeFaults
from worker.runner import Sampled


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeTiming:
    """How long a step takes on the device that the fake pretends to have."""

    step_s: float = 0.0
    row_s: float = 0.0
    prefill_token_s: float = 0.0
    clock: Callable[[], float] = time.monotonic
    wait: Callable[[float], None] = time.sleep
    """Waits that many seconds; tests pass their own, which need not wait at all."""

    def duration_s(self, *, n_rows: int, n_prefill_tokens: int) -> float:
        return self.step_s + self.row_s * n_rows + self.prefill_token_s * n_prefill_tokens


@dataclass(slots=True)
class FakePending:
    """A step on the pretended device: ends at `ready_at` of the runner's clock."""

    seq: int
    sampled: Sampled
    ready_at: float
    clock: Callable[[], float]
    faults: FakeFaults

    def done(self) -> bool:
        return self.clock() >= self.ready_at and not self.faults.hanging
