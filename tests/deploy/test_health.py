from __future__ import annotations

import http.server
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from deploy.health import main, port_of
from proto import worker_pb2_grpc
from proto.worker_pb2 import HealthRequest, HealthResponse


class _Router(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        live = self.path == "/health/live"
        body = b"{}" if live else b'{"status": "unavailable", "reason": "no worker is connected"}'
        self.send_response(200 if live else 503)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        return


@pytest.fixture
def router() -> Iterator[str]:
    with http.server.HTTPServer(("127.0.0.1", 0), _Router) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield str(server.server_port)
        server.shutdown()
        thread.join()


class _Worker(worker_pb2_grpc.WorkerServicer):
    def __init__(self) -> None:
        self.answer = HealthResponse(ready=True)

    def Health(self, request: HealthRequest, context: Any) -> HealthResponse:  # type: ignore[override]  # noqa: N802 (synchronous server)
        return self.answer


@pytest.fixture
def worker() -> Iterator[tuple[_Worker, str]]:
    server = grpc.server(ThreadPoolExecutor(1))
    service = _Worker()
    worker_pb2_grpc.add_WorkerServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield service, str(port)
    server.stop(None).wait()


def test_a_router_without_workers_lives_but_is_not_ready(
    router: str, capsys: pytest.CaptureFixture[str]
) -> None:
    env = {"QUIRE_PORT": router, "http_proxy": "http://127.0.0.1:9"}
    assert main(["router", "--live"], env) == 0
    assert capsys.readouterr() == ("", "")
    assert main(["router"], env) == 1
    assert capsys.readouterr().err == "no worker is connected\n"


def test_a_worker_is_asked_over_grpc(worker: tuple[_Worker, str], capsys: pytest.CaptureFixture[str]) -> None:
    service, port = worker
    assert main(["worker"], {"QUIRE_PORT": port}) == 0
    service.answer = HealthResponse(ready=False, error="the device is lost")
    assert main(["worker"], {"QUIRE_PORT": port}) == 1
    assert capsys.readouterr().err == "the device is lost\n"


@pytest.mark.parametrize("part", ["router", "worker"])
def test_nothing_listens(part: str, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
    assert main([part], {"QUIRE_PORT": port}) == 1
    assert port in capsys.readouterr().err


def test_the_port_is_read_as_the_process_reads_it() -> None:
    assert port_of({}, default=8000) == 8000
    assert port_of({"QUIRE_PORT": ""}, default=8000) == 8000
    assert port_of({"QUIRE_PORT": "tcp://10.0.0.1:8000"}, default=8000) == 8000
    assert port_of({"QUIRE_PORT": "81"}, default=8000) == 81


def test_a_wrong_word_is_a_mistake() -> None:
    assert main(["rooter"], {}) == 2
