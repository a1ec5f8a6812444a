"""Starts the server under test and stops it again."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import httpx

STOP_WITHIN_S = 30.0


class ServerError(Exception):
    """The server under test did not become ready; the message holds the end of its log."""


@dataclass(slots=True, frozen=True)
class ServerCommand:
    """How one server is started. `{port}` in an argument is replaced by the port to listen on."""

    argv: tuple[str, ...]
    ready_path: str = "/health"
    env: Mapping[str, str] | None = None
    """Added to the environment."""
    ready_within_s: float = 600.0

    def line(self) -> str:
        """What one would type, for reports: absolute paths by their last part alone."""
        env = [f"{name}={value}" for name, value in (self.env or {}).items() if name != "PATH"]
        return shown([*env, *self.argv])


def shown(words: Sequence[str]) -> str:
    """A command line without the folders of the machine it ran on."""
    return " ".join(Path(word).name if word.startswith("/") else word for word in words)


@dataclass(slots=True, frozen=True)
class RunningServer:
    url: str
    pid: int
    start_to_ready_s: float
    """From starting the process to the first 200 on its health path."""


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@contextlib.contextmanager
def spawned(command: ServerCommand, *, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The process, not waited for; stopped at the end (SIGINT, then SIGKILL after 30 s) with all its
    children. Raises ServerError when it can't be started."""
    with log.open("wb") as sink:
        try:
            process = subprocess.Popen(
                command.argv,
                stdout=sink,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **(command.env or {})},
                start_new_session=True,
            )
        except OSError as error:
            raise ServerError(f"can't start {command.argv[0]!r}: {error.strerror}") from error
        try:
            yield process
        finally:
            _stop(process)


@contextlib.contextmanager
def running(command: ServerCommand, *, log: Path) -> Iterator[RunningServer]:
    """The server, ready; stopped at the end. Raises ServerError when it exits or is not ready in time."""
    port = free_port()
    argv = tuple(argument.replace("{port}", str(port)) for argument in command.argv)
    begin_s = time.monotonic()
    with spawned(replace(command, argv=argv), log=log) as process:
        url = f"http://127.0.0.1:{port}"
        _wait_ready(process, url + command.ready_path, begin_s + command.ready_within_s, log)
        yield RunningServer(url=url, pid=process.pid, start_to_ready_s=time.monotonic() - begin_s)


def _wait_ready(process: subprocess.Popen[bytes], url: str, until_s: float, log: Path) -> None:
    with httpx.Client(timeout=5.0) as client:
        while True:
            if (code := process.poll()) is not None:
                raise ServerError(f"the server exited with {code} before it was ready:\n{log_tail(log)}")
            with contextlib.suppress(httpx.HTTPError):
                if client.get(url).status_code == 200:
                    return
            if time.monotonic() > until_s:
                raise ServerError(f"{url} was not ready in time; the end of the log:\n{log_tail(log)}")
            time.sleep(0.02)


def log_tail(log: Path, *, n_lines: int = 15) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-n_lines:])


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ends the whole session of the server: engines start workers of their own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=STOP_WITHIN_S)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def process_tree(pid: int) -> list[int]:
    """The process and all its descendants that live now (Linux)."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, IndexError):
                stat = (entry / "stat").read_text().rpartition(")")[2].split()
                parents.setdefault(int(stat[1]), []).append(int(entry.name))
    found, frontier = [pid], [pid]
    while frontier:
        frontier = [child for parent in frontier for child in parents.get(parent, [])]
        found += frontier
    return found


def cpu_s(pid: int) -> float:
    """CPU seconds that a process has used so far, all its living threads, user and system (Linux)."""
    total_ns = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            total_ns += int((task / "schedstat").read_text().split()[0])
    return total_ns / 1e9
