"""One trace of a request over all processes, as a collector sees it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import httpx
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from settings.errors import ConfigError
from settings.tracing import check_otlp_endpoint, open_tracing
from tests.e2e.clients import connected, start
from tests.e2e.conftest import FAKE
from tests.e2e.otlp import Collector, collecting
from tests.e2e.serving import StartServer

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
CALLER = "b7ad6b7169203331"
PARTS = {
    ("quire-api", "POST /v1/completions"),
    ("quire-scheduler", "generate"),
    ("quire-scheduler", "queue"),
    ("quire-scheduler", "prefill"),
    ("quire-scheduler", "decode"),
    ("quire-worker", "worker prefill"),
    ("quire-worker", "worker decode"),
}


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as running:
        yield running


def _of_trace(spans: list[tuple[str, Span]]) -> dict[tuple[str, str], Span]:
    return {(service, span.name): span for service, span in spans if span.trace_id.hex() == TRACE_ID}


@pytest.mark.slow
def test_one_trace_over_api_scheduler_and_worker(collector: Collector, start_server: StartServer) -> None:
    server = start_server(flags=(*FAKE, f"--otlp-endpoint={collector.url}"))
    body = {"model": "smollm2", "prompt": "Once", "max_tokens": 20, "ignore_eos": True}
    headers = {"traceparent": f"00-{TRACE_ID}-{CALLER}-01", "x-request-id": "req-of-the-test"}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=60)
    assert answer.status_code == 200
    # A worker hears that a row has left with its next step.
    assert server.post("/v1/completions", body).status_code == 200
    found = _of_trace(collector.wait(lambda spans: set(_of_trace(spans)) == PARTS))
    assert collector.paths == {"/v1/traces"}
    api, generate = found["quire-api", "POST /v1/completions"], found["quire-scheduler", "generate"]
    assert api.parent_span_id.hex() == CALLER
    assert api.kind == Span.SPAN_KIND_SERVER
    assert generate.parent_span_id == api.span_id
    inner = [span for span in found.values() if span not in (api, generate)]
    assert {span.parent_span_id for span in inner} == {generate.span_id}
    facts = {item.key: item.value for item in api.attributes}
    assert facts["http.response.status_code"].int_value == 200
    assert facts["gen_ai.usage.output_tokens"].int_value == 20
    assert facts["quire.request_id"].string_value == "req-of-the-test"
    queue, prefill, decode = (found["quire-scheduler", name] for name in ("queue", "prefill", "decode"))
    assert queue.end_time_unix_nano == prefill.start_time_unix_nano
    assert prefill.end_time_unix_nano == decode.start_time_unix_nano
    assert 0 < api.start_time_unix_nano <= queue.start_time_unix_nano
    assert abs(api.start_time_unix_nano - time.time_ns()) < 600e9
    assert server.end() == 0


@pytest.mark.slow
async def test_a_lost_worker_is_an_event_of_the_trace(
    collector: Collector, start_server: StartServer
) -> None:
    flags = (*FAKE, f"--otlp-endpoint={collector.url}")
    server = await asyncio.to_thread(start_server, workers=2, flags=flags)
    async with connected(server) as client:
        stream, task = start(client, {"prompt": "Once", "max_tokens": 400, "ignore_eos": True})
        await stream.has(3)
        os.kill(server.busy_worker(), signal.SIGKILL)
        await task
        assert stream.error is None
    spans = await asyncio.to_thread(
        collector.wait, lambda spans: any(span.name == "generate" for _, span in spans)
    )
    (generate,) = (span for _, span in spans if span.name == "generate")
    assert [event.name for event in generate.events] == ["migrated"]


@pytest.mark.slow
def test_a_collector_that_does_not_answer_costs_no_request_and_no_end() -> None:
    tracing = open_tracing("http://127.0.0.1:9", service="test")  # nobody listens on "discard"
    assert tracing is not None
    span = tracing.start("request")
    assert span is not None
    span.end()
    tracing.close()


def test_off_imports_nothing() -> None:
    script = (
        "import sys, router.main_scheduler, router.api.main, worker.main, settings.tracing as t;"
        "assert t.open_tracing('', service='x') is None;"
        "print([name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("endpoint", ["collector:4318", "grpc://collector:4317", "http://"])
def test_what_is_no_address_is_refused_with_an_example(endpoint: str) -> None:
    with pytest.raises(ConfigError, match=r"--otlp-endpoint is .*http://collector:4318"):
        check_otlp_endpoint(endpoint)


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"opentelemetry-sdk .*pip install '\.\[otel\]'"):
        check_otlp_endpoint("http://collector:4318")
