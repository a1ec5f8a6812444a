"""A worker killed under load: what the clients saw, second by second, and when its share was back."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bench.load import Load, Target
from bench.measures import RequestRecord, Summary, summarize
from bench.scaling.clients import clients
from bench.scaling.fleet import kill_worker
from bench.scaling.observe import Counts, Observer, grown
from bench.scaling.sizes import Prompts
from bench.scenarios import Case
from bench.server import ServerError

SAMPLE_S = 0.5


@dataclass(frozen=True, slots=True)
class Phases:
    """Seconds under load before the kill, after the worker's return, and the longest wait for that."""

    before_s: float
    after_s: float
    back_within_s: float


@dataclass(frozen=True, slots=True)
class LossRun:
    """Times in seconds since the load began."""

    load: str
    replica: str
    killed_s: float
    back_s: float
    """The router had the worker's stream again."""
    summary: Summary
    output_per_s: tuple[float, ...]
    """Tokens that reached clients in each second."""
    share_per_s: tuple[tuple[float, float], ...]
    """(until when, the killed replica's part of the tokens sampled since the entry before)."""
    fair_share: float

    @property
    def n_failed(self) -> int:
        return self.summary.n_errors + self.summary.n_short

    @property
    def share_back_s(self) -> float | None:
        """From its return until its part of the tokens had 80 % of a fair share for the first time."""
        times = [t for t, share in self.share_per_s if t > self.back_s and share >= 0.8 * self.fair_share]
        return times[0] - self.back_s if times else None

    @property
    def silent_s(self) -> float:
        """Between the kill and the return, the longest time in which no client got a token, in seconds."""
        longest = now = 0
        for n in self.output_per_s[int(self.killed_s) : int(self.back_s) + 1]:
            now = now + 1 if n == 0 else 0
            longest = max(longest, now)
        return float(longest)

    def mean_tok_s(self, begin_s: float, end_s: float) -> float:
        part = self.output_per_s[round(begin_s) : round(end_s)]
        return sum(part) / len(part) if part else 0.0

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "share_back_s": self.share_back_s, "silent_s": self.silent_s}


def measure_loss(
    target: Target, case: Case, prompts: Prompts, *, server_pid: int, phases: Phases, n_processes: int
) -> LossRun:
    """Raises ServerError, also when the worker does not come back in time."""
    assert case.concurrency is not None
    load = Load(n_requests=len(prompts), n_output=case.n_output, concurrency=case.concurrency)
    n_input = case.shape.n_tokens
    with (
        Observer(target.url) as observer,
        clients(target, prompts, load, n_input=n_input, n_processes=n_processes, endless=True) as started,
    ):
        n_replicas = observer.counts().n_live
        victim = observer.replicas()[-1]["address"]
        samples: list[Counts] = []
        begin_s = started.go()
        _sample(observer, samples, until_s=begin_s + phases.before_s)
        kill_worker(server_pid, victim)
        killed_s = time.perf_counter()
        _sample(observer, samples, until_s=killed_s + phases.back_within_s, lost=True, n_replicas=n_replicas)
        if samples[-1].n_live < n_replicas:
            raise ServerError(
                f"worker {victim} was not back within {phases.back_within_s:g} s after the kill"
            )
        back_s = samples[-1].at_s
        _sample(observer, samples, until_s=back_s + phases.after_s)
        started.stop()
        joined = started.join()
    return LossRun(
        load=f"{case.describe().rsplit(', ', 2)[0]}, {case.concurrency} at a time, without end",
        replica=victim,
        killed_s=killed_s - begin_s,
        back_s=back_s - begin_s,
        summary=summarize(joined.records, client_cpu_s=joined.client_cpu_s),
        output_per_s=per_second(joined.records, begin_s=begin_s),
        share_per_s=shares(samples, victim, begin_s=begin_s),
        fair_share=1 / n_replicas,
    )


def _sample(
    observer: Observer, samples: list[Counts], *, until_s: float, lost: bool = False, n_replicas: int = 0
) -> None:
    """Until then; with `lost`, until the number of live replicas has fallen and risen again."""
    seen_lost = False
    while True:
        samples.append(observer.counts())
        seen_lost |= samples[-1].n_live < n_replicas
        if lost and seen_lost and samples[-1].n_live >= n_replicas:
            return
        left_s = until_s - time.perf_counter()
        if left_s <= 0:
            return
        time.sleep(min(SAMPLE_S, left_s))


def per_second(records: Sequence[RequestRecord], *, begin_s: float) -> tuple[float, ...]:
    """Tokens that arrived in each second. An event stands for its part of the answer's tokens."""
    good = [r for r in records if r.ok]
    if not good:
        return ()
    seconds = [0.0] * (int(max(r.event_s[-1] for r in good) - begin_s) + 1)
    for record in good:
        weight = record.n_output / len(record.event_s)
        for at_s in record.event_s:
            seconds[int(at_s - begin_s)] += weight
    return tuple(round(n, 1) for n in seconds)


def shares(samples: Sequence[Counts], replica: str, *, begin_s: float) -> tuple[tuple[float, float], ...]:
    """Of about a second each."""
    found = []
    before = samples[0]
    for now in samples[1:]:
        if now.at_s - before.at_s < 2 * SAMPLE_S * 0.9:
            continue
        parts = {name: grown(before.output.get(name, 0.0), n) for name, n in now.output.items()}
        total = sum(parts.values())
        if total:
            found.append((round(now.at_s - begin_s, 2), round(parts.get(replica, 0.0) / total, 3)))
        before = now
    return tuple(found)
