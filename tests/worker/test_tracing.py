from __future__ import annotations

import numpy as np
import pytest

from proto.codec import pack_i32
from proto.worker_pb2 import Admit, Step
from tests.router.spans import NOT_SAMPLED, SAMPLED, SPAN_ID, Spans, duration_s
from worker.runner import Sampled
from worker.tracing import RowTraces


def admit(row: int, *, epoch: int = 1, traceparent: str = SAMPLED) -> Admit:
    return Admit(row=row, epoch=epoch, tokens=pack_i32(range(8)), n_cached=4, traceparent=traceparent)


def sampled(seq: int, *rows: int, epoch: int = 1) -> Sampled:
    values = np.array(rows, dtype=np.int32)
    return Sampled(seq=seq, rows=values, epochs=np.full_like(values, epoch), tokens=values)


@pytest.fixture
def spans() -> Spans:
    return Spans(lambda: 0.0)


@pytest.fixture
def traces(spans: Spans) -> RowTraces:
    return RowTraces(spans.tracing, device="cuda:0")


def test_prefill_ends_with_the_first_token_and_decode_with_the_last(spans: Spans, traces: RowTraces) -> None:
    traces.launched(Step(seq=1, admits=[admit(3)]), now_s=1.0)
    traces.launched(Step(seq=2), now_s=2.0)
    traces.collected(sampled(1), now_s=2.5)  # a chunk of the prompt, no token yet
    assert spans.ended == ()
    traces.collected(sampled(2, 3), now_s=4.0)
    prefill = spans.one("worker prefill")
    assert duration_s(prefill) == pytest.approx(3.0)
    assert prefill.parent is not None
    assert prefill.parent.span_id == SPAN_ID
    assert dict(prefill.attributes or {}) == {
        "quire.device": "cuda:0",
        "quire.tokens": 8,
        "quire.cached_tokens": 4,
    }
    # The step that evicts the row goes out while the one with its last token still runs.
    traces.launched(Step(seq=3), now_s=4.0)
    traces.launched(Step(seq=4, evicts=pack_i32([3])), now_s=4.1)
    traces.collected(sampled(3, 3), now_s=6.0)
    traces.collected(sampled(4), now_s=9.0)
    decode = spans.one("worker decode")
    assert duration_s(decode) == pytest.approx(2.0)
    assert dict(decode.attributes or {})["quire.output_tokens"] == 1


def test_a_row_taken_again_in_the_same_step_is_told_apart(spans: Spans, traces: RowTraces) -> None:
    traces.launched(Step(seq=1, admits=[admit(0)]), now_s=0.0)
    traces.launched(Step(seq=2, evicts=pack_i32([0]), admits=[admit(0, epoch=2)]), now_s=1.0)
    traces.collected(sampled(1, 0), now_s=2.0)
    traces.collected(sampled(2, 0, epoch=2), now_s=5.0)
    assert [duration_s(span) for span in spans.named("worker prefill")] == pytest.approx([2.0, 4.0])


def test_the_end_of_a_run_ends_what_is_open(spans: Spans, traces: RowTraces) -> None:
    traces.launched(Step(seq=1, admits=[admit(0)]), now_s=0.0)
    traces.reset(now_s=3.0)
    assert (
        dict(spans.one("worker prefill").attributes or {})["quire.outcome"] == "ended before its first token"
    )
    traces.collected(sampled(1, 0), now_s=4.0)
    assert len(spans.ended) == 1


@pytest.mark.parametrize("traceparent", ["", NOT_SAMPLED])
def test_rows_without_a_sampled_context_leave_nothing(
    spans: Spans, traces: RowTraces, traceparent: str
) -> None:
    traces.launched(Step(seq=1, admits=[admit(0, traceparent=traceparent)]), now_s=0.0)
    traces.collected(sampled(1, 0), now_s=1.0)
    traces.reset(now_s=2.0)
    assert spans.ended == ()
