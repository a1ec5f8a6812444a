"""What one API process counts itself; the scheduler's metrics are added when they are scraped."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from router.api.job import Job

_LATENCY_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_PER_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 2.5)


class ApiMetrics:
    """Its own registry, so that several may live in one process. Nothing is counted per token."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        self.requests = Counter(
            "quire_api_requests",
            "HTTP requests by route and status.",
            ("route", "status"),
            registry=registry,
        )
        self.running = Gauge("quire_api_running_answers", "Answers in progress.", registry=registry)
        self.disconnects = Counter(
            "quire_api_client_disconnects", "Answers that the client did not wait for.", registry=registry
        )
        self.prompt_tokens = Counter("quire_api_prompt_tokens", "Prompt tokens taken.", registry=registry)
        self.output_tokens = Counter("quire_api_output_tokens", "Tokens generated.", registry=registry)
        self.first_token_s = Histogram(
            "quire_api_time_to_first_token_seconds",
            "From the request's arrival to its first token, tokenising included.",
            buckets=_LATENCY_S,
            registry=registry,
        )
        self.per_token_s = Histogram(
            "quire_api_time_per_output_token_seconds",
            "Mean time between an answer's tokens, as seen by the API.",
            buckets=_PER_TOKEN_S,
            registry=registry,
        )
        self.duration_s = Histogram(
            "quire_api_request_duration_seconds",
            "From the request's arrival to its last token.",
            buckets=_LATENCY_S,
            registry=registry,
        )

    def observe_answer(self, job: Job, *, arrived_s: float, disconnected: bool) -> None:
        """Once, when an answer has ended."""
        n_output = job.n_output_tokens
        self.prompt_tokens.inc(job.n_prompt_tokens)
        self.output_tokens.inc(n_output)
        if disconnected:
            self.disconnects.inc()
        first_s, last_s = job.first_token_s, job.last_token_s
        if first_s is None or last_s is None:
            return
        self.first_token_s.observe(first_s - arrived_s)
        self.duration_s.observe(last_s - arrived_s)
        n_gaps = max(choice.n_tokens for choice in job.choices) - 1
        if n_gaps > 0:
            self.per_token_s.observe((last_s - first_s) / n_gaps)

    def exposition(self) -> bytes:
        """Prometheus text format."""
        return generate_latest(self.registry)
