"""What one request and one run of the load client measured, with definitions equal to `vllm bench serve`.

* TTFT: from sending the request to the first event that carries a choice.
* ITL: between two consecutive such events of one request. A server may put several tokens into one
  event; then that event counts once, as in `vllm bench serve`.
* TPOT: (time of the last event - time of the first) / (output tokens - 1), for answers of two tokens or more.
* output tok/s: output tokens of all successful requests / duration, first send to last event.
* total tok/s: the same with prompt tokens added.
* Percentiles interpolate linearly (numpy's default).

Output tokens are the server's `usage.completion_tokens`; without it, one token per event is assumed and
the run says so. Prompt tokens are the client's own count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np


@dataclass(slots=True)
class RequestRecord:
    """One request as the client saw it. Times are seconds of one monotonic clock."""

    start_s: float
    n_input: int
    n_expected: int
    event_s: list[float] = field(default_factory=list)
    """When each event that carries a choice arrived."""
    n_output: int = 0
    n_cached: int = 0
    """Prompt tokens that the server says it found in its cache."""
    counted_events: bool = False
    """The server told no usage: `n_output` is the number of events."""
    error: str | None = None

    @property
    def ok(self) -> bool:
        return self.error is None

    @property
    def ttft_s(self) -> float:
        return self.event_s[0] - self.start_s

    @property
    def latency_s(self) -> float:
        return self.event_s[-1] - self.start_s

    @property
    def tpot_s(self) -> float | None:
        if self.n_output < 2:
            return None
        return (self.event_s[-1] - self.event_s[0]) / (self.n_output - 1)


@dataclass(slots=True, frozen=True)
class Distribution:
    """Milliseconds; None when nothing was measured."""

    mean: float | None
    p50: float | None
    p90: float | None
    p99: float | None
    max: float | None


def distribution_ms(values_s: Sequence[float] | np.ndarray[Any, Any]) -> Distribution:
    """The distribution of durations given in seconds."""
    if len(values_s) == 0:
        return Distribution(None, None, None, None, None)
    ms = np.asarray(values_s, dtype=np.float64) * 1e3
    p50, p90, p99 = (float(v) for v in np.percentile(ms, (50, 90, 99)))
    return Distribution(mean=float(ms.mean()), p50=p50, p90=p90, p99=p99, max=float(ms.max()))


@dataclass(slots=True, frozen=True)
class Summary:
    """One run of one case."""

    n_requests: int
    n_errors: int
    n_short: int
    """Successful answers with fewer tokens than asked for."""
    duration_s: float
    input_tokens: int
    output_tokens: int
    cached_tokens: int
    n_events: int
    output_tok_s: float
    total_tok_s: float
    request_s: float
    ttft_ms: Distribution
    tpot_ms: Distribution
    itl_ms: Distribution
    latency_ms: Distribution
    counted_events: bool
    client_cpu: float
    """CPU of the load client over the run, in cores: it must stay well under one."""
    errors: tuple[str, ...]
    """The first few distinct ones."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def summarize(records: Sequence[RequestRecord], *, client_cpu_s: float = 0.0) -> Summary:
    """All requests of one run. Failed requests count as errors and nowhere else."""
    good = [r for r in records if r.ok]
    ends = [r.event_s[-1] for r in good]
    begin = min((r.start_s for r in records), default=0.0)
    duration = max(ends) - begin if ends else 0.0
    n_in = sum(r.n_input for r in good)
    n_out = sum(r.n_output for r in good)
    gaps = [np.diff(r.event_s) for r in good if len(r.event_s) > 1]
    return Summary(
        n_requests=len(records),
        n_errors=len(records) - len(good),
        n_short=sum(r.n_output < r.n_expected for r in good),
        duration_s=duration,
        input_tokens=n_in,
        output_tokens=n_out,
        cached_tokens=sum(r.n_cached for r in good),
        n_events=sum(len(r.event_s) for r in good),
        output_tok_s=n_out / duration if duration else 0.0,
        total_tok_s=(n_in + n_out) / duration if duration else 0.0,
        request_s=len(good) / duration if duration else 0.0,
        ttft_ms=distribution_ms([r.ttft_s for r in good]),
        tpot_ms=distribution_ms([t for r in good if (t := r.tpot_s) is not None]),
        itl_ms=distribution_ms(np.concatenate(gaps) if gaps else []),
        latency_ms=distribution_ms([r.latency_s for r in good]),
        counted_events=any(r.counted_events for r in good),
        client_cpu=client_cpu_s / duration if duration else 0.0,
        errors=tuple(dict.fromkeys(r.error for r in records if r.error is not None))[:5],
    )


def median_summary(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Field by field, the median of several runs of one case (`Summary.as_dict`); None where a run has none.

    Counts of errors and short answers are the worst of the runs, and error texts are joined.
    """
    out: dict[str, Any] = {}
    for key, first in runs[0].items():
        values = [run[key] for run in runs]
        if isinstance(first, dict):
            out[key] = median_summary(values)
        elif key in ("n_errors", "n_short"):
            out[key] = max(values)
        elif isinstance(first, bool):
            out[key] = any(values)
        elif isinstance(first, (list, tuple)):
            out[key] = list(dict.fromkeys(text for value in values for text in value))
        elif any(v is None for v in values):
            out[key] = None
        else:
            middle = float(np.median(values))
            out[key] = int(middle) if isinstance(first, int) and middle.is_integer() else middle
    return out
