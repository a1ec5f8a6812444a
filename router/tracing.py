"""What the scheduler tells a trace of a request: one span from its arrival to its end, its parts beneath it.

A request without a span costs one comparison at each of the few places that call this module.
"""

from __future__ import annotations

import enum

from router.request import Request, RequestState
from settings.tracing import Tracing


class TraceEvent(enum.StrEnum):
    """Why a request was put back into the queue after it had begun."""

    PREEMPTED = "preempted"
    """It gave its blocks to a request before it."""
    MIGRATED = "migrated"
    """Its replica was lost or taken away."""
    RECOMPUTED = "recomputed"
    """A block that it had read was damaged."""


def begin(request: Request, *, tracing: Tracing, traceparent: str) -> None:
    """Opens the span beneath the HTTP request's, if that one is sampled."""
    if traceparent:
        request.span = tracing.start(
            "generate",
            traceparent=traceparent,
            start_s=request.arrival_s,
            attributes={"quire.request_id": request.request_id, "quire.prompt_tokens": request.n_prompt},
        )


def put_back(request: Request, event: TraceEvent, *, replica_id: int) -> None:
    """It begins again from its `tokens`, perhaps elsewhere."""
    if request.span is not None:
        request.span.event(event.value, **{"quire.replica": replica_id})


def end(request: Request, state: RequestState, *, error: str = "") -> None:
    """Closes the span with the parts that the request came to: queue, prefill, decode."""
    span = request.span
    if span is None:
        return
    request.span = None
    now_s = span.now_s
    started_s, first_s = request.started_s, request.first_token_s
    span.child("queue", start_s=request.arrival_s, end_s=started_s if started_s >= 0 else now_s)
    if started_s >= 0:
        span.child(
            "prefill",
            start_s=started_s,
            end_s=first_s if first_s >= 0 else now_s,
            attributes={"quire.cached_tokens": request.n_cached},
        )
    n_output = len(request.tokens) - request.n_prompt
    if first_s >= 0:
        span.child("decode", start_s=first_s, end_s=now_s, attributes={"quire.output_tokens": n_output})
    span.end(
        attributes={
            "quire.output_tokens": n_output,
            "quire.outcome": state.name.lower(),
            "quire.preemptions": request.n_preempted,
        },
        error=error,
        at_s=now_s,
    )
