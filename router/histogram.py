"""A histogram that takes a whole step's values at once."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]

LATENCY_BUCKETS_S = (
    0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75,
    1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0,
)  # fmt: skip


class Histogram:
    """Counts per bucket (value <= bound), the sum and the number of values."""

    def __init__(self, bounds: Sequence[float] = LATENCY_BUCKETS_S) -> None:
        self.bounds: F64 = np.asarray(bounds, dtype=np.float64)
        self._bounds = tuple(self.bounds.tolist())
        self._counts: npt.NDArray[np.int64] = np.zeros(len(bounds) + 1, dtype=np.int64)
        self.sum = 0.0

    @property
    def count(self) -> int:
        return int(self._counts.sum())

    def add(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self.sum += value

    def add_many(self, values: F64) -> None:
        at = np.searchsorted(self.bounds, values, side="left")
        self._counts += np.bincount(at, minlength=len(self._counts))
        self.sum += float(values.sum())

    def cumulative(self) -> list[tuple[str, float]]:
        """(upper bound, values at most that) as Prometheus wants it, the last one +Inf."""
        totals = np.cumsum(self._counts).tolist()
        names = [repr(bound) for bound in self.bounds.tolist()] + ["+Inf"]
        return list(zip(names, map(float, totals), strict=True))
