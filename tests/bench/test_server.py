from __future__ import annotations

import os
import select
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from bench.server import ServerCommand, ServerError, cpu_s, process_tree, running

HTTP = (sys.executable, "-m", "http.server", "{port}", "--bind", "127.0.0.1", "--directory")


def test_a_server_is_started_waited_for_and_ended(tmp_path: Path) -> None:
    command = ServerCommand((*HTTP, str(tmp_path)), ready_path="/", ready_within_s=30.0)
    with running(command, log=tmp_path / "log") as server:
        assert httpx.get(server.url).status_code == 200
        assert server.start_to_ready_s > 0
        assert server.pid in process_tree(os.getpid())
        assert cpu_s(server.pid) > 0
    with pytest.raises(httpx.ConnectError):
        httpx.get(server.url)


def test_children_of_the_server_end_with_it(tmp_path: Path) -> None:
    """Engines start workers of their own; none may outlive the measurement."""
    script = f"{sys.executable} -c 'import time; time.sleep(600)' & exec {' '.join(HTTP)} {tmp_path}"
    command = ServerCommand(("sh", "-c", script), ready_path="/", ready_within_s=30.0)
    with running(command, log=tmp_path / "log") as server:
        pids = process_tree(server.pid)
        assert len(pids) == 2
    assert all(_ends(pid) for pid in pids)


def _ends(pid: int) -> bool:
    """Waits until the process is no more, or only waits to be reaped."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([fd], [], [], 10.0)[0])
    finally:
        os.close(fd)


def test_an_early_exit_shows_the_log(tmp_path: Path) -> None:
    command = ServerCommand((sys.executable, "-c", "raise SystemExit('no such model')"))
    why = "exited with 1 before it was ready:\nno such model"
    with pytest.raises(ServerError, match=why), running(command, log=tmp_path / "log"):
        pass


def test_a_missing_command_is_named(tmp_path: Path) -> None:
    command = ServerCommand(("no-such-server",))
    why = "can't start 'no-such-server'"
    with pytest.raises(ServerError, match=why), running(command, log=tmp_path / "log"):
        pass


def test_a_server_that_never_is_ready(tmp_path: Path) -> None:
    command = ServerCommand((*HTTP, str(tmp_path)), ready_path="/missing", ready_within_s=0.0)
    with pytest.raises(ServerError, match="not ready in time"), running(command, log=tmp_path / "log"):
        pass


def test_the_suite_refuses_unknown_names() -> None:
    answer = subprocess.run(
        [sys.executable, "-m", "bench", "nothing"], capture_output=True, text=True, check=False
    )
    assert answer.returncode == 2
    assert "choose among allocator" in answer.stderr


def test_reports_show_no_folders_of_the_machine() -> None:
    command = ServerCommand(
        ("/opt/x/python", "-m", "quire", "--model", "/data/m.gguf"), env={"PATH": "/x", "A": "1"}
    )
    assert command.line() == "A=1 python -m quire --model m.gguf"
