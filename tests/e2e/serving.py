"""Starts `quire serve` as a user does and looks at it from outside."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import httpx

from deploy.ports import free_ports

ROOT = Path(__file__).resolve().parents[2]
READY_WITHIN_S = 240.0
END_WITHIN_S = 60.0


class Server:
    """A running `quire serve` on a free port. `log` is all that its processes wrote to stderr."""

    def __init__(self, process: subprocess.Popen[bytes], *, port: int, log: Path) -> None:
        self.process = process
        self.port = port
        self.log = log
        self.url = f"http://127.0.0.1:{port}"
        self.banner = ""
        assert process.stdout is not None
        self._stdout = process.stdout

    def wait_ready(self) -> None:
        """Until it prints its curl line. Raises AssertionError with its log when it ends before."""
        while "Ctrl-C" not in self.banner:
            readable, _, _ = select.select([self._stdout], [], [], READY_WITHIN_S)
            part = os.read(self._stdout.fileno(), 65536) if readable else b""
            if not part:
                raise AssertionError(f"the server is not ready:\n{self.log_text()[-4000:]}")
            self.banner += part.decode()

    def log_text(self) -> str:
        return self.log.read_text(errors="replace")

    def pids(self, command: str = "") -> list[int]:
        """Its processes that run `quire <command>` ("worker", "scheduler", "api"); all of them when empty."""
        found = []
        for task in Path(f"/proc/{self.process.pid}/task").iterdir():
            for pid in (task / "children").read_text().split():
                with contextlib.suppress(OSError):
                    words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
                    if not command or command in words[:4]:
                        found.append(int(pid))
        return sorted(found)

    def busy_worker(self) -> int:
        """The process of a worker that is computing an answer now. Raises AssertionError when none is."""
        replicas = self.get("/admin/state").json()["replicas"]
        for replica in replicas:
            if replica["n_running"]:
                port = replica["address"].rpartition(":")[2]
                for pid in self.pids("worker"):
                    if f"--port={port}" in Path(f"/proc/{pid}/cmdline").read_text().split("\0"):
                        return pid
        raise AssertionError(f"no worker is busy: {replicas}")

    def wait_log(self, words: str, *, times: int = 1) -> None:
        """Until the log holds `words` so often. The log is a file: this watches it grow."""
        with contextlib.closing(_follow(self.log)) as lines:
            for line in lines:
                times -= words in line
                if times <= 0:
                    return

    def end(self, number: signal.Signals = signal.SIGINT) -> int:
        """Signals the launcher and waits; its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(END_WITHIN_S)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=30)

    def post(self, path: str, body: Mapping[str, object]) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=120)


StartServer = Callable[..., Server]


@contextlib.contextmanager
def serving(
    folder: Path,
    *,
    workers: int = 1,
    model: str = "smollm2",
    flags: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    wait: bool = True,
) -> Iterator[Server]:
    """`quire serve` with its log in `folder`; ended at the end, whatever happened."""
    port = free_ports(1)[0]
    log = folder / f"serve-{port}.log"
    argv = [sys.executable, "-m", "deploy.cli", "serve", f"--port={port}", "--host=127.0.0.1"]
    argv += [f"--model={model}", f"--workers={workers}", *flags]
    with log.open("w") as stderr:
        process = subprocess.Popen(
            argv,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env={**os.environ, **(env or {})},
        )
    server = Server(process, port=port, log=log)
    try:
        if wait:
            server.wait_ready()
        yield server
    finally:
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.end()
        if process.poll() is None:
            process.kill()
            process.wait()
        server._stdout.close()


def _follow(path: Path) -> Iterator[str]:
    """The lines of a growing file, through `tail`, which waits on the kernel's word that it grew."""
    tail = subprocess.Popen(["tail", "-n", "+1", "-f", str(path)], stdout=subprocess.PIPE)
    assert tail.stdout is not None
    rest = b""
    try:
        while select.select([tail.stdout], [], [], END_WITHIN_S)[0]:
            *lines, rest = (rest + os.read(tail.stdout.fileno(), 65536)).split(b"\n")
            yield from (line.decode(errors="replace") for line in lines)
        raise AssertionError(f"nothing more came:\n{path.read_text(errors='replace')[-4000:]}")
    finally:
        tail.kill()
        tail.wait()
        tail.stdout.close()
