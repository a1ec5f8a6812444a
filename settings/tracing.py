"""Traces of requests for a collector (OTLP over HTTP); off without an endpoint.

OpenTelemetry's packages are imported only when an endpoint is set. Sampling, headers and resource attributes
follow OpenTelemetry's own environment (OTEL_TRACES_SAMPLER, OTEL_EXPORTER_OTLP_HEADERS,
OTEL_RESOURCE_ATTRIBUTES). Spans leave in the background and are dropped when the collector does not take
them.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import time
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import structlog

from settings.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span as OtelSpan
    from opentelemetry.trace import SpanKind, Tracer

Attributes = Mapping[str, str | int | float | bool]

_EXPORT_S = 3.0
"""One delivery, its repetitions included; so long an end may wait for a collector that does not answer."""
_SAY_AGAIN_S = 60.0


def check_otlp_endpoint(endpoint: str) -> None:
    """Raises ConfigError for one that can't be used, the missing packages included. Empty is off."""
    if not endpoint:
        return
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(
            f"--otlp-endpoint is {endpoint!r}, but must be a URL such as http://collector:4318 (OTLP over "
            "HTTP)"
        )
    for name in ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http.trace_exporter"):
        try:
            found = importlib.util.find_spec(name) is not None
        except ModuleNotFoundError:
            found = False
        if not found:
            raise ConfigError(
                "--otlp-endpoint needs opentelemetry-sdk and opentelemetry-exporter-otlp-proto-http, which "
                "are not installed: pip install '.[otel]' in a checkout"
            )


class Span:
    """One span that is open. Times are those of the tracer's clock, in seconds."""

    __slots__ = ("_span", "_tracing", "traceparent")

    def __init__(self, span: OtelSpan, tracing: Tracing) -> None:
        self._span = span
        self._tracing = tracing
        context = span.get_span_context()
        self.traceparent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
        """For the next process (W3C Trace Context)."""

    @property
    def now_s(self) -> float:
        """The tracer's clock."""
        return self._tracing.clock()

    def event(self, name: str, **attributes: str | int | float | bool) -> None:
        """Something that happened now."""
        self._span.add_event(name, attributes, timestamp=self._tracing.wall_ns())

    def child(self, name: str, *, start_s: float, end_s: float, attributes: Attributes | None = None) -> None:
        """A part that has already ended."""
        self._tracing.past(name, parent=self._span, start_s=start_s, end_s=end_s, attributes=attributes)

    def end(
        self, *, attributes: Attributes | None = None, error: str = "", at_s: float | None = None
    ) -> None:
        from opentelemetry.trace import Status, StatusCode

        if attributes:
            self._span.set_attributes(attributes)
        if error:
            self._span.set_status(Status(StatusCode.ERROR, error))
        self._span.end(self._tracing.wall_ns(at_s))


class Tracing:
    """A process's spans and their way to the collector. Thread-safe; `close` sends what is left."""

    def __init__(self, provider: TracerProvider, *, clock: Callable[[], float]) -> None:
        self._provider = provider
        self._tracer: Tracer = provider.get_tracer("quire")
        self.clock = clock
        self._offset_ns = time.time_ns() - round(clock() * 1e9)

    def wall_ns(self, at_s: float | None = None) -> int:
        """The time of day for a time of the clock; None: now."""
        return round((self.clock() if at_s is None else at_s) * 1e9) + self._offset_ns

    def start(
        self,
        name: str,
        *,
        traceparent: str = "",
        server: bool = False,
        start_s: float | None = None,
        attributes: Attributes | None = None,
    ) -> Span | None:
        """A span beneath the caller's, or of a trace of its own without one. None when it is not sampled:
        then the request costs nothing further."""
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        parent = TraceContextTextMapPropagator().extract({"traceparent": traceparent})
        kind: SpanKind = SpanKind.SERVER if server else SpanKind.INTERNAL
        span = self._tracer.start_span(
            name, context=parent, kind=kind, attributes=attributes, start_time=self.wall_ns(start_s)
        )
        return Span(span, self) if span.is_recording() else None

    def past(
        self, name: str, *, parent: OtelSpan, start_s: float, end_s: float, attributes: Attributes | None
    ) -> None:
        from opentelemetry.trace import set_span_in_context

        span = self._tracer.start_span(
            name,
            context=set_span_in_context(parent),
            attributes=attributes,
            start_time=self.wall_ns(start_s),
        )
        span.end(self.wall_ns(end_s))

    def flush(self) -> None:
        """Blocks until what has ended is delivered or given up."""
        self._provider.force_flush()

    def close(self) -> None:
        """As `flush`; nothing is sent any more afterwards."""
        self._provider.shutdown()


def open_tracing(
    endpoint: str, *, service: str, clock: Callable[[], float] = time.monotonic
) -> Tracing | None:
    """None without an endpoint. `service` names the process, e.g. quire-worker. Raises ConfigError as
    `check_otlp_endpoint` does."""
    check_otlp_endpoint(endpoint)
    if not endpoint:
        return None
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    _speak_through_our_log()
    resource = Resource.create(
        {
            "service.name": service,
            "service.version": _quire_version(),
            "service.instance.id": f"{os.uname().nodename}/{os.getpid()}",
        }
    )
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    exporter = OTLPSpanExporter(endpoint=_traces_url(endpoint), timeout=_EXPORT_S)
    provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=1000))
    return Tracing(provider, clock=clock)


def _traces_url(endpoint: str) -> str:
    """A collector's address stands for its usual path."""
    return endpoint if urlsplit(endpoint).path.strip("/") else endpoint.rstrip("/") + "/v1/traces"


def _quire_version() -> str:
    try:
        return version("quire")
    except PackageNotFoundError:
        return "unknown"


class _Relay(logging.Handler):
    """The libraries report each failed delivery, with a traceback; one line a minute says it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(level=logging.WARNING)
        self._clock = clock
        self._said_s = -_SAY_AGAIN_S

    def emit(self, record: logging.LogRecord) -> None:
        now = self._clock()
        if now - self._said_s >= _SAY_AGAIN_S:
            self._said_s = now
            log = structlog.get_logger("quire.tracing")
            log.warning("traces are not delivered", cause=record.getMessage()[:300])


def _speak_through_our_log() -> None:
    for name in ("opentelemetry", "urllib3"):
        logger = logging.getLogger(name)
        logger.propagate = False
        if not any(isinstance(handler, _Relay) for handler in logger.handlers):
            logger.addHandler(_Relay())
