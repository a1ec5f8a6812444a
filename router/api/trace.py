"""The span of an HTTP request that asks for an answer: what came, what went out."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from starlette.types import Scope

from router.api.exchange import Exchange
from settings.tracing import Tracing


@contextlib.contextmanager
def traced(tracing: Tracing | None, exchange: Exchange, scope: Scope) -> Iterator[None]:
    """Beneath the caller's own span when it sends `traceparent`. Nothing without `tracing`."""
    span = None
    if tracing is not None:
        method, path = scope["method"], scope["path"]
        given = dict(scope["headers"]).get(b"traceparent", b"").decode("latin-1")
        span = tracing.start(
            f"{method} {path}",
            traceparent=given,
            server=True,
            start_s=exchange.started_s,
            attributes={
                "http.request.method": method,
                "http.route": path,
                "quire.request_id": exchange.request_id,
            },
        )
    if span is None:
        yield
        return
    exchange.traceparent = span.traceparent
    try:
        yield
    finally:
        status = exchange.status if exchange.status is not None else 499
        attributes: dict[str, str | int | float | bool] = {"http.response.status_code": status}
        if exchange.n_prompt_tokens is not None:
            attributes["gen_ai.usage.input_tokens"] = exchange.n_prompt_tokens
        if exchange.n_output_tokens is not None:
            attributes["gen_ai.usage.output_tokens"] = exchange.n_output_tokens
        if exchange.disconnected:
            attributes["quire.disconnected"] = True
        failed = exchange.error_type is not None and status >= 500
        span.end(attributes=attributes, error=(exchange.error_type or "") if failed else "")
