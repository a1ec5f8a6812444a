"""One supervised process: its start, its output, its report of being ready, its end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from deploy.process import PARENT_ENV, READY, REPORT_ENV

_N_LAST_LINES = 20
_MAX_LINE = 1 << 20
_LAST_OUTPUT_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildSpec:
    """What to run and how patient to be with it."""

    name: str
    """As logs and messages call it: "worker 0"."""
    argv: tuple[str, ...]
    stage: int
    """Stages end in rising order: what takes requests ends before what computes them."""
    ready_limit_s: float
    grace_s: float
    """From SIGTERM until it is killed."""


class _Listener(asyncio.SubprocessProtocol):
    """Splits output into lines and notes the end. (asyncio's streams would tie the end of a process to the
    end of its output, which a grandchild may hold open.)"""

    def __init__(self, on_line: Callable[[str], None]) -> None:
        self.exited = asyncio.Event()
        self.output_ended = asyncio.Event()
        self._on_line = on_line
        self._rest = b""

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._emit(line)
        if len(self._rest) > _MAX_LINE:
            self._emit(self._rest)
            self._rest = b""

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        if self._rest:
            self._emit(self._rest)
        self.output_ended.set()

    def process_exited(self) -> None:
        self.exited.set()

    def _emit(self, line: bytes) -> None:
        self._on_line(line.decode("utf-8", errors="replace").rstrip())


class Child:
    """A running process in a session of its own, so that a terminal's Ctrl-C reaches the supervisor alone."""

    def __init__(self, spec: ChildSpec, *, say: Callable[[str], None]) -> None:
        self.spec = spec
        self.started_s = time.monotonic()
        self.ready = asyncio.Event()
        self._say = say
        self._last_lines: deque[str] = deque(maxlen=_N_LAST_LINES)
        self._listener = _Listener(self._on_line)
        self._transport: asyncio.SubprocessTransport
        self._report: asyncio.Task[None]

    @classmethod
    async def start(cls, spec: ChildSpec, *, env: Mapping[str, str], say: Callable[[str], None]) -> Child:
        """`say` hears each line of its output. Raises OSError when it can't be run."""
        child = cls(spec, say=say)
        reader, writer = os.pipe()
        try:
            child._transport, _ = await asyncio.get_running_loop().subprocess_exec(
                lambda: child._listener,
                *spec.argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={**env, PARENT_ENV: str(os.getpid()), REPORT_ENV: str(writer)},
                pass_fds=(writer,),
                start_new_session=True,
            )
        except BaseException:
            os.close(reader)
            raise
        finally:
            os.close(writer)
        child._report = asyncio.create_task(child._read_report(reader))
        return child

    @property
    def pid(self) -> int:
        return self._transport.get_pid()

    @property
    def running(self) -> bool:
        return not self._listener.exited.is_set()

    @property
    def lived_s(self) -> float:
        return time.monotonic() - self.started_s

    async def wait(self) -> int:
        """Until it has ended and its last output was read; its exit code (negative: the signal)."""
        await self._listener.exited.wait()
        self.kill()  # what it left behind in its session
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_OUTPUT_S):
                await self._listener.output_ended.wait()
        self._report.cancel()
        code = self._transport.get_returncode()
        self._transport.close()
        return code or 0

    async def stop(self) -> int:
        """SIGTERM, and SIGKILL after the grace time."""
        if self.running:
            self._transport.terminate()
            try:
                async with asyncio.timeout(self.spec.grace_s):
                    await self._listener.exited.wait()
            except TimeoutError:
                self._say(f"did not end within {self.spec.grace_s:g} s: killed")
                self.kill()
        return await self.wait()

    def kill(self) -> None:
        """SIGKILL to the whole session of the process."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def cause(self, code: int) -> str:
        """Why it ended, in its own words where it has any."""
        how = f"ended with code {code}" if code >= 0 else f"was killed by {_signal_name(-code)}"
        lines = [line for line in self._last_lines if line.strip()]
        words = [line for line in lines if line.lower().startswith("error:")] or lines
        return f"{how}: {words[-1].removeprefix('error:').strip()}" if words else how

    @property
    def last_words(self) -> str:
        return self._last_lines[-1].strip() if self._last_lines else "it has said nothing"

    def _on_line(self, line: str) -> None:
        self._last_lines.append(line)
        self._say(line)

    async def _read_report(self, fd: int) -> None:
        reader = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(fd, "rb", buffering=0)
        )
        try:
            if await reader.readline() == READY:
                self.ready.set()
        finally:
            transport.close()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
