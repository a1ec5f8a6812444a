"""One load against one server, with what each replica did for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bench.load import Target
from bench.measures import RequestRecord, Summary, summarize
from bench.scaling.clients import run_clients
from bench.scaling.observe import Observer
from bench.scaling.sizes import Prefixed, Prompts
from bench.scenarios import Case


@dataclass(frozen=True, slots=True)
class Run:
    """`tokens`: by replica, prompt tokens computed and tokens sampled."""

    load: str
    summary: Summary
    tokens: dict[str, tuple[float, float]]

    @property
    def n_failed(self) -> int:
        """Requests that failed or ended early."""
        return self.summary.n_errors + self.summary.n_short

    @property
    def imbalance(self) -> float:
        """(most - least) / mean of the tokens (computed and sampled) of a replica."""
        return spread([sum(pair) for pair in self.tokens.values()])

    def as_dict(self) -> dict[str, Any]:
        tokens = {name: {"prefill": pre, "output": out} for name, (pre, out) in self.tokens.items()}
        return {
            "load": self.load,
            "summary": self.summary.as_dict(),
            "replica_tokens": tokens,
            "imbalance": self.imbalance,
        }


@dataclass(frozen=True, slots=True)
class PrefixedRun:
    """How often each prefix was computed, and the share of all prompt tokens that was found cached."""

    run: Run
    hit_rate: float
    computed: tuple[int, ...]
    """Per prefix: on so many replicas, as long as none had to give it up."""

    def as_dict(self) -> dict[str, Any]:
        return {**self.run.as_dict(), "hit_rate": self.hit_rate, "computed": list(self.computed)}


def spread(values: Sequence[float]) -> float:
    mean = sum(values) / len(values) if values else 0.0
    return (max(values) - min(values)) / mean if mean else 0.0


def measure(target: Target, case: Case, prompts: Prompts, *, seed: int, n_processes: int) -> Run:
    """Raises ServerError."""
    run, _ = _measure(target, case, prompts, seed=seed, n_processes=n_processes)
    return run


def measure_prefixed(
    target: Target, case: Case, prefixed: Prefixed, *, seed: int, n_processes: int
) -> PrefixedRun:
    """Raises ServerError."""
    run, records = _measure(target, case, prefixed.prompts, seed=seed, n_processes=n_processes)
    n_input = sum(r.n_input for r in records)
    return PrefixedRun(
        run=run,
        hit_rate=sum(r.n_cached for r in records) / n_input if n_input else 0.0,
        computed=times_computed(records, prefixed.prefix_of, n_prefix=case.n_prefix),
    )


def times_computed(
    records: Sequence[RequestRecord], prefix_of: Sequence[int], *, n_prefix: int
) -> tuple[int, ...]:
    """Per prefix, the requests that found less than half of it cached."""
    found = [0] * (max(prefix_of) + 1)
    for record, prefix in zip(records, prefix_of, strict=True):
        found[prefix] += record.n_cached < n_prefix / 2
    return tuple(found)


def _measure(
    target: Target, case: Case, prompts: Prompts, *, seed: int, n_processes: int
) -> tuple[Run, list[RequestRecord]]:
    with Observer(target.url) as observer:
        before = observer.counts()
        joined = run_clients(
            target, prompts, case.load(seed), n_input=case.shape.n_tokens, n_processes=n_processes
        )
        after = observer.counts()
    summary = summarize(joined.records, client_cpu_s=joined.client_cpu_s)
    return Run(load=case.describe(), summary=summary, tokens=after.since(before)), joined.records


def run_line(name: str, run: Run) -> str:
    """For the terminal."""
    s = run.summary
    return (
        f"{name}: {s.output_tok_s:,.0f} output tok/s, TTFT p50 {s.ttft_ms.p50 or 0:,.0f} ms, "
        f"TPOT p50 {s.tpot_ms.p50 or 0:,.1f} ms, {s.n_errors} errors, {s.n_short} short, "
        f"imbalance {run.imbalance:.1%}, clients {s.client_cpu:.2f} cores"
    )
