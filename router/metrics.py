"""The scheduler's numbers in Prometheus' form. Gathered when asked for, nothing is kept here: a replica that
is lost is simply not there any more."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector, CollectorRegistry

from router.histogram import Histogram
from router.replica import LinkState

if TYPE_CHECKING:
    from router.scheduler import Scheduler


class SchedulerCollector(Collector):
    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def exposition(self) -> str:
        return generate_latest(self._registry).decode()

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        yield from self._latencies()
        yield from self._counters()
        yield from self._server()
        yield from self._replicas()

    def _latencies(self) -> Iterator[Metric]:
        stats = self._scheduler.stats
        yield _histogram(
            "quire_time_to_first_token_seconds", "From arrival to the first token.", stats.first_token_s
        )
        yield _histogram(
            "quire_inter_token_seconds", "Between two tokens of one answer.", stats.inter_token_s
        )
        yield _histogram(
            "quire_request_queue_seconds", "From arrival until the request meets a replica.", stats.queue_s
        )
        yield _histogram(
            "quire_request_prefill_seconds", "From meeting a replica to the first token.", stats.prefill_s
        )
        yield _histogram("quire_request_decode_seconds", "From the first token to the last.", stats.decode_s)
        yield _histogram("quire_request_seconds", "From arrival to the last token.", stats.e2e_s)
        yield _histogram("quire_worker_step_seconds", "Time of a step on its worker.", stats.worker_step_s)
        yield _histogram("quire_step_rows", "Rows that sampled a token in a step.", stats.batch_rows)
        yield _histogram(
            "quire_request_prompt_tokens", "Prompt length of finished requests.", stats.prompt_tokens
        )
        yield _histogram(
            "quire_request_output_tokens", "Answer length of finished requests.", stats.output_tokens
        )

    def _counters(self) -> Iterator[Metric]:
        stats = self._scheduler.stats
        loop = self._scheduler.loop_stats
        for name, text, value in (
            ("quire_requests", "Requests accepted (each choice counts).", stats.n_submitted),
            ("quire_preemptions", "Requests put back for lack of KV blocks.", stats.n_preempted),
            ("quire_migrations", "Requests put back because their replica was lost.", stats.n_migrated),
            ("quire_replicas_lost", "Replicas lost.", stats.n_replicas_lost),
            ("quire_steps", "Steps computed.", stats.n_steps),
            (
                "quire_prefill_tokens",
                "Prompt tokens computed, recomputed ones included.",
                stats.n_prompt_tokens,
            ),
            ("quire_output_tokens", "Tokens sampled for requests.", stats.n_output_tokens),
            ("quire_wasted_tokens", "Tokens sampled after their answer's end.", stats.n_wasted_tokens),
            ("quire_cache_hit_tokens", "Prompt tokens found in the prefix cache.", stats.hit_tokens),
            ("quire_cache_asked_tokens", "Prompt tokens looked for in the prefix cache.", stats.asked_tokens),
            ("quire_scheduler_steps", "Results handled by the scheduler.", loop.n_steps),
            (
                "quire_scheduler_step_cpu_seconds",
                "CPU time of the scheduler from a result to its events, gRPC left out.",
                loop.step_cpu_ns * 1e-9,
            ),
        ):
            yield CounterMetricFamily(name, text, value=value)
        finished = CounterMetricFamily("quire_requests_finished", "Requests ended.", labels=["reason"])
        finished.add_metric(["stop"], stats.n_stopped)
        finished.add_metric(["length"], stats.n_ended_by_length)
        finished.add_metric(["cancelled"], stats.n_cancelled)
        yield finished
        failed = CounterMetricFamily(
            "quire_requests_failed", "Requests ended with an error.", labels=["code"]
        )
        for code, n in stats.n_failed.items():
            failed.add_metric([code], n)
        yield failed
        refused = CounterMetricFamily("quire_requests_refused", "Requests not accepted.", labels=["status"])
        for status, n in stats.n_refused.items():
            refused.add_metric([str(status)], n)
        yield refused

    def _server(self) -> Iterator[Metric]:
        scheduler = self._scheduler
        core = scheduler.core
        n_requests = core.n_requests if core is not None else 0
        n_waiting = len(core.queue) if core is not None else 0
        states = [link.state for link in scheduler.fleet.links.values()]
        for name, text, value in (
            ("quire_ready", "1 when requests are served.", int(scheduler.state.ready)),
            ("quire_requests_waiting", "Requests in the queue.", n_waiting),
            ("quire_requests_in_server", "Requests queued or running.", n_requests),
            ("quire_replicas_live", "Replicas connected.", states.count(LinkState.LIVE)),
            ("quire_replicas_known", "Replicas in the address list.", len(states)),
        ):
            yield GaugeMetricFamily(name, text, value=value)

    def _replicas(self) -> Iterator[Metric]:
        core = self._scheduler.core
        if core is None:
            return
        gauges = {
            name: GaugeMetricFamily(name, text, labels=["replica"])
            for name, text in (
                ("quire_requests_running", "Requests running."),
                ("quire_kv_blocks", "KV blocks, the reserved one left out."),
                ("quire_kv_blocks_used", "KV blocks held by running requests (shared ones once)."),
                ("quire_kv_blocks_cached", "KV blocks kept for prompts to come, free at need."),
                ("quire_kv_blocks_free", "KV blocks that hold nothing."),
                ("quire_steps_in_flight", "Steps sent and not answered."),
                ("quire_worker_idle_seconds", "Idle time of the device before the last step."),
            )
        }
        counters = {
            name: CounterMetricFamily(name, text, labels=["replica"])
            for name, text in (
                ("quire_kv_blocks_evicted", "Cached blocks given up."),
                ("quire_replica_prefill_tokens", "Prompt tokens computed, since it was connected."),
                ("quire_worker_steady_seconds", "Time that decode steps behind decode steps took."),
                ("quire_worker_steady_idle_seconds", "Idle time of the device between those steps."),
                ("quire_replica_output_tokens", "Tokens sampled for requests, since it was connected."),
            )
        }
        for replica_id, rs in core.replicas.items():
            label = [self._scheduler.fleet.links[replica_id].address]
            stats = rs.allocator.stats()
            gauges["quire_requests_running"].add_metric(label, rs.n_running)
            gauges["quire_kv_blocks"].add_metric(label, stats.n_blocks - 1)
            gauges["quire_kv_blocks_used"].add_metric(label, stats.leased)
            gauges["quire_kv_blocks_cached"].add_metric(label, stats.cached)
            gauges["quire_kv_blocks_free"].add_metric(label, stats.free)
            gauges["quire_steps_in_flight"].add_metric(label, len(rs.in_flight))
            gauges["quire_worker_idle_seconds"].add_metric(label, rs.idle_us * 1e-6)
            counters["quire_kv_blocks_evicted"].add_metric(label, stats.evicted_blocks)
            counters["quire_worker_steady_seconds"].add_metric(label, rs.steady_us * 1e-6)
            counters["quire_worker_steady_idle_seconds"].add_metric(label, rs.steady_idle_us * 1e-6)
            counters["quire_replica_prefill_tokens"].add_metric(label, rs.n_prefill_tokens)
            counters["quire_replica_output_tokens"].add_metric(label, rs.n_output_tokens)
        yield from gauges.values()
        yield from counters.values()


def _histogram(name: str, text: str, histogram: Histogram) -> Metric:
    return HistogramMetricFamily(name, text, buckets=histogram.cumulative(), sum_value=histogram.sum)
