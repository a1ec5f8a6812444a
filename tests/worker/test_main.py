"""A worker as a process: port file, exit codes, signals, what it says to its user."""

from __future__ import annotations

import errno
import io
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
import structlog

from proto.codec import unpack_i32
from proto.status import RUN_END_KEY
from proto.worker_pb2 import DescribeRequest, HealthRequest
from proto.worker_pb2_grpc import WorkerStub
from settings.logs import configure_logs
from tests.worker.steps import admit, opening, step
from worker.config import WorkerConfig
from worker.main import ExitCode, run_worker, write_port_file

WAIT_S = 30.0
_CHILD = """
import sys
from dataclasses import replace
from worker.config import WorkerConfig
from settings.logs import configure_logs
from worker.main import run_worker
config = WorkerConfig(model="", attention="fake", **eval(sys.argv[1]))
def ready():
    print("ready", flush=True)
sys.exit(run_worker(config, on_ready=ready))
"""


class Child:
    def __init__(self, folder: Path, **settings: object) -> None:
        self.port_file = folder / "port"
        self.process = subprocess.Popen(
            [sys.executable, "-c", _CHILD, repr({**settings, "port_file": str(self.port_file)})],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def wait_ready(self) -> str:
        assert self.process.stdout is not None
        readable, _, _ = select.select([self.process.stdout], [], [], WAIT_S)
        assert readable, "the worker did not become ready"
        assert self.process.stdout.readline() == "ready\n"
        return f"127.0.0.1:{int(self.port_file.read_text())}"

    def end(self) -> tuple[int, str]:
        """Exit code and what it wrote to stderr."""
        _, errors = self.process.communicate(timeout=WAIT_S)
        return self.process.returncode, errors


@pytest.fixture
def start(tmp_path: Path) -> Iterator[type[Child]]:
    children: list[Child] = []

    class Started(Child):
        def __init__(self, **settings: object) -> None:
            super().__init__(tmp_path, **settings)
            children.append(self)

    yield Started  # type: ignore[misc]
    for child in children:
        child.process.kill()
        child.process.communicate()


def test_sigterm_ends_the_running_step_and_tells_the_router(start: type[Child]) -> None:
    child = start(fake_step_ms=300)  # type: ignore[call-arg]
    with grpc.insecure_channel(child.wait_ready()) as channel:
        stub = WorkerStub(channel)
        assert stub.Describe(DescribeRequest(), timeout=WAIT_S).attention == "fake"
        steps = [opening(), step(1, admits=[admit(0, range(3), [1])], chunks=[(0, 3)])]
        call = stub.Run(_then_wait(steps))
        assert next(call).seq == 0
        while stub.Health(HealthRequest(), timeout=WAIT_S).stalled_us == 0:
            pass
        child.process.send_signal(signal.SIGTERM)
        assert len(unpack_i32(next(call).tokens)) == 1
        assert next(call).run_end == "shutdown"
        with pytest.raises(grpc.RpcError):
            next(call)
        assert call.code() is grpc.StatusCode.UNAVAILABLE
        assert dict(call.trailing_metadata())[RUN_END_KEY] == "shutdown"
    code, errors = child.end()
    assert code == ExitCode.OK
    assert "Traceback" not in errors


def test_a_lost_device_ends_the_process_with_its_code(start: type[Child]) -> None:
    child = start(fake_device_error_at=1)  # type: ignore[call-arg]
    with grpc.insecure_channel(child.wait_ready()) as channel:
        call = WorkerStub(channel).Run(_then_wait([opening(), step(1)]))
        with pytest.raises(grpc.RpcError):
            list(call)
        assert call.code() is grpc.StatusCode.INTERNAL
        assert dict(call.trailing_metadata())[RUN_END_KEY] == "device"
    code, errors = child.end()
    assert code == ExitCode.DEVICE
    assert "injected device error at step 1" in errors
    assert "Traceback" not in errors


def test_a_taken_port_is_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        config = WorkerConfig(model="", attention="fake", port=port)
        assert _run_here(config) == ExitCode.USAGE
    error = capsys.readouterr().err.strip()
    assert error == f"error: cannot listen on 127.0.0.1:{port} (--host, --port): Address already in use"


def test_an_unknown_model_is_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert _run_here(WorkerConfig(model="/no/such/folder", attention="fake")) == ExitCode.USAGE
    error = capsys.readouterr().err.strip()
    assert error.startswith("error: ")
    assert "/no/such/folder" in error
    assert len(error.splitlines()) == 1


def test_the_port_file_is_written_in_one_piece(tmp_path: Path) -> None:
    write_port_file(tmp_path / "port", 4711)
    assert (tmp_path / "port").read_text() == "4711\n"
    assert list(tmp_path.iterdir()) == [tmp_path / "port"]


def test_the_port_file_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "port")
    write_port_file(tmp_path / "link", 4711)
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "port").read_text() == "4711\n"


def test_a_port_file_that_cannot_be_written_is_one_line_and_exit_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(self: Path, text: str) -> int:
        self.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    target = tmp_path / "port"
    config = WorkerConfig(model="", attention="fake", port_file=str(target))
    assert _run_here(config) == ExitCode.USAGE
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert lines == [f"error: can't write the port to {target} (--port-file): No space left on device"]
    assert list(tmp_path.iterdir()) == []


def test_a_log_that_nobody_can_read_any_more_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    configure_logs(log_format="json", log_level="info")
    try:
        log = structlog.get_logger()
        closed = io.StringIO()
        closed.close()
        monkeypatch.setattr(sys, "stderr", closed)
        log.info("lost")
        heard = io.StringIO()
        monkeypatch.setattr(sys, "stderr", heard)
        log.info("found", n=1)
    finally:
        structlog.reset_defaults()
    line = json.loads(heard.getvalue())
    assert (line["event"], line["n"], line["level"]) == ("found", 1, "info")


def _run_here(config: WorkerConfig) -> int:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        return run_worker(config)
    finally:
        structlog.reset_defaults()
        for number, handler in before.items():
            signal.signal(number, handler)


def _then_wait(steps: list[object]) -> Iterator[object]:
    """The router's side stays open: a stream that has no more requests would end the Run."""
    yield from steps
    threading.Event().wait(WAIT_S)
