"""A collector for tests: takes traces over HTTP, as OTLP has it, and waits for what is to come."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

WITHIN_S = 60.0


class Collector:
    """`spans`: (service name, span) of everything that came."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, Span]] = []
        self.paths: set[str] = set()
        self.url = ""
        self._came = threading.Condition()

    def take(self, path: str, body: bytes) -> None:
        with self._came:
            self.paths.add(path)
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                names = {item.key: item.value.string_value for item in resource.resource.attributes}
                for scope in resource.scope_spans:
                    self.spans += [(names["service.name"], span) for span in scope.spans]
            self._came.notify_all()

    def wait(self, enough: Callable[[list[tuple[str, Span]]], bool]) -> list[tuple[str, Span]]:
        with self._came:
            assert self._came.wait_for(lambda: enough(self.spans), WITHIN_S), [
                (service, span.name) for service, span in self.spans
            ]
            return list(self.spans)


@contextlib.contextmanager
def collecting() -> Iterator[Collector]:
    """On a free port of this host."""
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            collector.take(self.path, self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
