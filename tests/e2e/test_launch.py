"""Starting and ending: what is left behind, what is said when it can't be done."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import httpx
import pytest

from tests.e2e.conftest import FAKE
from tests.e2e.serving import Server, StartServer

slow = pytest.mark.slow


def _gone(pids: list[int]) -> bool:
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=slow)])
def test_a_signal_ends_all_processes_with_exit_code_0(
    start_server: StartServer, number: signal.Signals
) -> None:
    server = start_server(workers=2, flags=FAKE)
    pids = server.pids()
    assert len(pids) == 4, "scheduler, api and two workers"
    assert server.end(number) == 0
    assert _gone(pids)
    assert "Traceback" not in server.log_text()


@slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_during_the_start_ends_it(start_server: StartServer, number: signal.Signals) -> None:
    server = start_server(wait=False)
    server.wait_log("starting scheduler")
    pids = server.pids()
    assert server.end(number) == 0
    assert _gone(pids)
    assert "Traceback" not in server.log_text()


@slow
def test_children_die_with_a_launcher_that_is_killed(start_server: StartServer) -> None:
    server = start_server(flags=FAKE)
    waits = [os.pidfd_open(pid) for pid in server.pids()]
    assert len(waits) == 3
    server.process.kill()
    server.process.wait()
    import select

    for fd in waits:
        assert select.select([fd], [], [], 10)[0], "a process outlived the launcher"
        os.close(fd)


@slow
def test_a_taken_port_is_told_before_anything_starts(start_server: StartServer) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = start_server(flags=(*FAKE, f"--port={port}"), wait=False)
        assert server.process.wait(30) == 1
    assert f"error: port {port} on 127.0.0.1 is taken by another program" in server.log_text()
    assert "starting" not in server.log_text()


@slow
@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        ({"model": "./no/such/model"}, 1, "error: no such model folder or file: ./no/such/model"),
        ({"model": "/dev/null/x.gguf"}, 1, "error: no such model folder or file"),
        ({"flags": ("--block-size=0",)}, 2, "error: --block-size is 0, but must be from 1 to 4096"),
        ({"flags": ("--start-timeout-s=0",)}, 2, "--start-timeout-s"),
        ({"flags": ("--start-timeout-s=1",)}, 1, "not ready within 1 s (--start-timeout-s)"),
    ],
)
def test_a_mistake_is_one_line(
    start_server: StartServer, options: dict[str, object], code: int, words: str
) -> None:
    server = start_server(wait=False, **options)
    assert server.process.wait(60) == code
    assert words in server.log_text()
    assert "Traceback" not in server.log_text()


@slow
def test_a_worker_that_cannot_start_fails_the_start_with_its_cause(start_server: StartServer) -> None:
    server = start_server(flags=(*FAKE, "--fake-n-blocks=2", "--block-size=1"), wait=False)
    # One block of one token holds no prompt and answer.
    code = server.process.wait(60)
    assert code != 0
    assert "error: " in server.log_text()
    assert "Traceback" not in server.log_text()


@slow
def test_a_worker_that_dies_is_started_again(start_server: StartServer) -> None:
    server = start_server(flags=FAKE)
    before = server.pids("worker")
    os.kill(before[0], signal.SIGKILL)
    server.wait_log("was killed by SIGKILL")
    # One Ready line per life: the second comes from the successor.
    server.wait_log("worker ready", times=2)
    after = server.pids("worker")
    assert len(after) == 1
    assert after != before
    answer = _complete(server)
    assert answer.status_code == 200, answer.text
    assert server.end() == 0


def _complete(server: Server) -> httpx.Response:
    return server.post("/v1/completions", {"model": "smollm2", "prompt": [5, 6, 7], "max_tokens": 4})
