"""What a worker tells a trace: for each row whose admit carried a context, how long its prompt and its answer
took on this device.

Owned by the engine's compute thread. Exists only with --otlp-endpoint; without traced rows it looks at a
step's admits and no further.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from proto.codec import unpack_i32
from proto.worker_pb2 import Admit, Step
from settings.tracing import Span, Tracing
from worker.runner import Sampled


@dataclass(slots=True)
class _Row:
    admit: Admit
    prefill: Span | None
    """Open until the first token is sampled."""
    context: str
    n_sampled: int = 0
    first_s: float = 0.0
    last_s: float = 0.0


class RowTraces:
    """Call `launched` and `collected` for every step in order, `reset` when the rows are forgotten."""

    def __init__(self, tracing: Tracing, *, device: str) -> None:
        self._tracing = tracing
        self._device = device
        self._rows: dict[int, _Row] = {}
        self._leaving: deque[tuple[int, _Row]] = deque()
        """(step, row): its last result comes with that step at the latest."""

    def launched(self, step: Step, *, now_s: float) -> None:
        if self._rows:
            for row in unpack_i32(step.evicts).tolist():
                if (traced := self._rows.pop(row, None)) is not None:
                    self._leaving.append((step.seq, traced))
        for admit in step.admits:
            if admit.traceparent:
                self._begin(admit, now_s)

    def collected(self, sampled: Sampled, *, now_s: float) -> None:
        """`sampled` is what the oldest launched step computed."""
        if self._rows or self._leaving:
            leaving = {traced.admit.row: traced for _, traced in self._leaving}
            for row, epoch in zip(sampled.rows.tolist(), sampled.epochs.tolist(), strict=True):
                for traced in (self._rows.get(row), leaving.get(row)):
                    if traced is not None and traced.admit.epoch == epoch:
                        self._sampled(traced, now_s)
        while self._leaving and self._leaving[0][0] <= sampled.seq:
            self._end(self._leaving.popleft()[1], now_s)

    def reset(self, *, now_s: float) -> None:
        for traced in (*(traced for _, traced in self._leaving), *self._rows.values()):
            self._end(traced, now_s)
        self._leaving.clear()
        self._rows.clear()

    def _begin(self, admit: Admit, now_s: float) -> None:
        span = self._tracing.start(
            "worker prefill",
            traceparent=admit.traceparent,
            start_s=now_s,
            attributes={
                "quire.device": self._device,
                "quire.tokens": len(admit.tokens) // 4,
                "quire.cached_tokens": admit.n_cached,
            },
        )
        if span is not None:
            self._rows[admit.row] = _Row(admit=admit, prefill=span, context=admit.traceparent)

    @staticmethod
    def _sampled(traced: _Row, now_s: float) -> None:
        traced.n_sampled += 1
        traced.last_s = now_s
        if traced.prefill is not None:
            traced.first_s = now_s
            traced.prefill.end(at_s=now_s)
            traced.prefill = None

    def _end(self, traced: _Row, now_s: float) -> None:
        if traced.prefill is not None:
            traced.prefill.end(attributes={"quire.outcome": "ended before its first token"}, at_s=now_s)
        elif traced.n_sampled > 1:
            span = self._tracing.start("worker decode", traceparent=traced.context, start_s=traced.first_s)
            if span is not None:
                n_more = traced.n_sampled - 1
                span.end(
                    attributes={"quire.device": self._device, "quire.output_tokens": n_more},
                    at_s=traced.last_s,
                )
