"""When requests are sent: closed loop (so many at a time) or open loop (so many a second)."""

from __future__ import annotations

import numpy as np


def poisson_arrivals_s(*, n: int, rate_per_s: float, seed: int) -> list[float]:
    """[n] send times in seconds from the start, rising. Gaps are exponential, then scaled so that the
    last request is sent at exactly n / rate, as `vllm bench serve` does: the offered load is exact."""
    if rate_per_s <= 0:
        raise ValueError(f"--rate {rate_per_s}: must be above 0 requests a second")
    times = np.cumsum(np.random.default_rng(seed).exponential(1 / rate_per_s, size=n))
    return [float(t) for t in times * (n / rate_per_s / times[-1])]
