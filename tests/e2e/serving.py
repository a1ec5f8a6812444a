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

from settings.ports import free_ports

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
        with contextlib.closing(_follow(self.log, self.process.pid)) as lines:
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
    arguments = [f"--model={model}", f"--workers={workers}", *flags]
    with _launched("serve", arguments, folder=folder, env=env) as server:
        if wait:
            server.wait_ready()
        yield server


@contextlib.contextmanager
def routing(folder: Path, *, replicas: Sequence[str], flags: Sequence[str] = ()) -> Iterator[Server]:
    """`quire router` for workers that run elsewhere, from the moment it listens."""
    arguments = [f"--replicas={','.join(replicas)}", *flags]
    with _launched("router", arguments, folder=folder, env=None) as server:
        server.wait_log("the router listens on port")
        yield server


@contextlib.contextmanager
def _launched(
    command: str, arguments: Sequence[str], *, folder: Path, env: Mapping[str, str] | None
) -> Iterator[Server]:
    port = free_ports(1)[0]
    log = folder / f"{command}-{port}.log"
    argv = [sys.executable, "-m", "deploy.cli", command, f"--port={port}", "--host=127.0.0.1", *arguments]
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
        yield server
    finally:
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.end()
        if process.poll() is None:
            process.kill()
            process.wait()
        server._stdout.close()


class Worker:
    """A `quire worker` process of its own, at a port that stays the same over `kill` and `start`."""

    def __init__(self, folder: Path, *, flags: Sequence[str], model: str) -> None:
        self.port = free_ports(1)[0]
        self.address = f"127.0.0.1:{self.port}"
        self._folder = folder
        self._arguments = [f"--model={model}", *flags]
        self._n_starts = 0
        self._process: subprocess.Popen[bytes] | None = None
        self.log = folder / "none"

    @property
    def pid(self) -> int:
        assert self._process is not None, "the worker is not running"
        return self._process.pid

    def start(self) -> None:
        """Returns when it is ready."""
        self._n_starts += 1
        self.log = self._folder / f"worker-{self.port}-{self._n_starts}.log"
        argv = [sys.executable, "-m", "deploy.cli", "worker", f"--port={self.port}", "--host=127.0.0.1"]
        with self.log.open("w") as stderr:
            self._process = subprocess.Popen(
                [*argv, *self._arguments], cwd=ROOT, stdin=subprocess.DEVNULL, stderr=stderr
            )
        with contextlib.closing(_follow(self.log, self.pid)) as lines:
            any("worker ready" in line for line in lines)

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def end(self, number: signal.Signals = signal.SIGKILL) -> int:
        """Its exit code; 0 when it does not run."""
        process, self._process = self._process, None
        if process is None:
            return 0
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGCONT)
            process.send_signal(number)
        return process.wait(END_WITHIN_S)


@contextlib.contextmanager
def worker_process(
    folder: Path, *, flags: Sequence[str] = (), model: str = "smollm2", start: bool = True
) -> Iterator[Worker]:
    worker = Worker(folder, flags=flags, model=model)
    try:
        if start:
            worker.start()
        yield worker
    finally:
        worker.end()


def _follow(path: Path, pid: int) -> Iterator[str]:
    """The lines that a child adds to a file, through `tail`, which waits on the kernel's word that it grew.
    Raises AssertionError when no more can come."""
    tail = subprocess.Popen(["tail", "-n", "+1", "-f", str(path)], stdout=subprocess.PIPE)
    assert tail.stdout is not None
    life = os.pidfd_open(pid)
    rest = b""
    try:
        while ready := select.select([tail.stdout, life], [], [], END_WITHIN_S)[0]:
            if tail.stdout not in ready:
                break  # the process is gone, and all that it wrote is read
            *lines, rest = (rest + os.read(tail.stdout.fileno(), 65536)).split(b"\n")
            yield from (line.decode(errors="replace") for line in lines)
        raise AssertionError(f"nothing more came:\n{path.read_text(errors='replace')[-4000:]}")
    finally:
        tail.kill()
        tail.wait()
        tail.stdout.close()
        os.close(life)
