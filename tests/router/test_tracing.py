from __future__ import annotations

import pytest

from router.errors import UnavailableError
from tests.router.sim import Sim, text
from tests.router.spans import NOT_SAMPLED, SAMPLED, SPAN_ID, TRACE_ID, Spans, duration_s


class _Clock:
    def __init__(self) -> None:
        self.sim: Sim | None = None

    def __call__(self) -> float:
        return self.sim.now if self.sim is not None else 0.0


def traced_sim(**options: object) -> tuple[Sim, Spans]:
    clock = _Clock()
    spans = Spans(clock)
    sim = Sim(tracing=spans.tracing, **options)  # type: ignore[arg-type]  # named as Sim names them
    clock.sim = sim
    return sim, spans


def test_a_request_is_one_span_with_its_queue_prefill_and_decode() -> None:
    sim, spans = traced_sim()
    (first,) = sim.submit(text(20, seed=1), n_new=4, traceparent=SAMPLED, request_id="req-1")
    sim.now = 2.0
    sim.turn()
    sim.now = 5.0
    sim.run()
    sim.assert_right(first)
    whole = spans.one("generate")
    assert whole.parent is not None
    assert (whole.parent.trace_id, whole.parent.span_id) == (TRACE_ID, SPAN_ID)
    attributes = dict(whole.attributes or {})
    assert attributes["quire.request_id"] == "req-1"
    assert attributes["quire.prompt_tokens"] == 20
    assert attributes["quire.output_tokens"] == 4
    assert attributes["quire.outcome"] == "finished"
    parts = [spans.one(name) for name in ("queue", "prefill", "decode")]
    assert whole.context is not None
    assert {part.parent.span_id for part in parts if part.parent} == {whole.context.span_id}
    assert duration_s(parts[0]) == pytest.approx(2.0)
    assert sum(map(duration_s, parts)) == pytest.approx(duration_s(whole))


def test_the_admit_carries_the_spans_context_to_the_worker() -> None:
    sim, spans = traced_sim()
    sim.submit(text(20, seed=1), text(20, seed=2), traceparent=SAMPLED)
    sim.compose()
    carried = {admit.traceparent for admit in sim.replicas[0].sent[0].admits}
    sim.run()
    contexts = [span.context for span in spans.named("generate")]
    assert carried == {f"00-{TRACE_ID:032x}-{context.span_id:016x}-01" for context in contexts if context}


def test_migration_and_preemption_are_events() -> None:
    sim, spans = traced_sim(block_size=4, fake_n_blocks=40)
    sim.core.lengths._prior = 1  # it expects short answers, and so begins more than there is room for
    sim.submit(*(text(10, seed=i) for i in range(6)), n_new=60, traceparent=SAMPLED)
    while not sim.core.stats.n_preempted:
        assert sim.turn()
    sim.down(0)
    sim.up(1)
    sim.run()
    events = [event.name for span in spans.named("generate") for event in span.events]
    assert events.count("preempted") == sim.core.stats.n_preempted
    assert events.count("migrated") == sim.core.stats.n_migrated >= 1


def test_a_cancelled_and_a_failed_request_say_so() -> None:
    sim, spans = traced_sim()
    (first,) = sim.submit(text(20, seed=1), traceparent=SAMPLED)
    sim.cancel(first)
    sim.submit(text(20, seed=2), traceparent=SAMPLED)
    sim.turn()
    sim.core.abort_all(UnavailableError("the server was shut down"))
    cancelled, failed = spans.named("generate")
    assert dict(cancelled.attributes or {})["quire.outcome"] == "cancelled"
    assert cancelled.status.is_unset
    assert dict(failed.attributes or {})["quire.outcome"] == "failed"
    assert not failed.status.is_ok
    assert not failed.status.is_unset


@pytest.mark.parametrize("traceparent", ["", NOT_SAMPLED])
def test_what_is_not_sampled_leaves_no_span(traceparent: str) -> None:
    sim, spans = traced_sim()
    sim.submit(text(20, seed=1), traceparent=traceparent)
    sim.compose()
    assert sim.replicas[0].sent[0].admits[0].traceparent == ""
    sim.run()
    assert spans.ended == ()
