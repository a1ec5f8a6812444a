from __future__ import annotations

import pytest

from bench.measures import RequestRecord, distribution_ms, median_summary, summarize


def record(start_s: float, *events_s: float, n_input: int = 10, n_output: int | None = None) -> RequestRecord:
    n = len(events_s) if n_output is None else n_output
    return RequestRecord(start_s=start_s, n_input=n_input, n_expected=n, event_s=list(events_s), n_output=n)


def test_times_of_one_request() -> None:
    one = record(1.0, 1.5, 1.7, 2.1)
    assert one.ttft_s == pytest.approx(0.5)
    assert one.tpot_s == pytest.approx(0.3)
    assert one.latency_s == pytest.approx(1.1)


def test_tpot_counts_tokens_not_events() -> None:
    """Two tokens in one event: the gap counts once for ITL, the token counts for TPOT."""
    one = record(0.0, 1.0, 2.0, n_output=5)
    assert one.tpot_s == pytest.approx(0.25)
    assert summarize([one]).itl_ms.p50 == pytest.approx(1000)


def test_a_single_token_has_no_tpot() -> None:
    assert record(0.0, 1.0).tpot_s is None
    summary = summarize([record(0.0, 1.0)])
    assert summary.tpot_ms.p50 is None
    assert summary.itl_ms.p99 is None


def test_throughput_spans_first_send_to_last_event() -> None:
    summary = summarize([record(0.0, 1.0, 2.0), record(1.0, 3.0, 4.0)])
    assert summary.duration_s == 4.0
    assert summary.output_tok_s == 1.0
    assert summary.total_tok_s == 6.0
    assert summary.request_s == 0.5


def test_failed_requests_count_as_errors_only() -> None:
    bad = RequestRecord(start_s=0.0, n_input=100, n_expected=4, error="HTTP 429")
    summary = summarize([record(0.0, 1.0), bad, bad])
    assert (summary.n_requests, summary.n_errors) == (3, 2)
    assert summary.input_tokens == 10
    assert summary.errors == ("HTTP 429",)


def test_short_answers_are_counted() -> None:
    short = record(0.0, 1.0, 2.0)
    short.n_expected = 3
    assert summarize([short, record(0.0, 1.0)]).n_short == 1


def test_nothing_measured() -> None:
    summary = summarize([])
    assert summary.output_tok_s == 0.0
    assert summary.ttft_ms.p50 is None


def test_percentiles_interpolate() -> None:
    d = distribution_ms([0.001, 0.002, 0.003, 0.004])
    assert d.p50 == pytest.approx(2.5)
    assert d.p99 == pytest.approx(3.97)
    assert d.max == pytest.approx(4.0)


def test_median_of_runs_takes_each_figure_and_the_worst_errors() -> None:
    runs = []
    for gap in (1.0, 3.0, 2.0):
        summary = summarize([record(0.0, gap, 2 * gap)]).as_dict()
        summary["n_errors"] = int(gap == 3.0)
        runs.append(summary)
    median = median_summary(runs)
    assert median["ttft_ms"]["p50"] == pytest.approx(2000)
    assert median["output_tok_s"] == pytest.approx(0.5)
    assert median["n_errors"] == 1
    assert median["n_requests"] == 1
