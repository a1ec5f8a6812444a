"""One supervised process: its start, its output, its report of being ready, its end."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from deploy.process import PARENT_ENV, READY, REPORT_ENV

_N_LAST_LINES = 20
_MAX_LINE = 1 << 20


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


class Child:
    """A running process in a session of its own, so that a terminal's Ctrl-C reaches the supervisor alone."""

    def __init__(
        self, spec: ChildSpec, process: asyncio.subprocess.Process, *, say: Callable[[str], None]
    ) -> None:
        self.spec = spec
        self.started_s = time.monotonic()
        self.ready = asyncio.Event()
        self._process = process
        self._say = say
        self._last_lines: deque[str] = deque(maxlen=_N_LAST_LINES)
        self._tasks = [asyncio.create_task(self._read_output())]

    @classmethod
    async def start(cls, spec: ChildSpec, *, env: Mapping[str, str], say: Callable[[str], None]) -> Child:
        """`say` hears each line of its output. Raises OSError when it can't be run."""
        reader, writer = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                *spec.argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env={**env, PARENT_ENV: str(os.getpid()), REPORT_ENV: str(writer)},
                pass_fds=(writer,),
                start_new_session=True,
                limit=_MAX_LINE,
            )
        except BaseException:
            os.close(reader)
            raise
        finally:
            os.close(writer)
        child = cls(spec, process, say=say)
        child._tasks.append(asyncio.create_task(child._read_report(reader)))
        return child

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.returncode is None

    @property
    def lived_s(self) -> float:
        return time.monotonic() - self.started_s

    async def wait(self) -> int:
        """Until it has ended and its last output was read; its exit code (negative: the signal)."""
        code = await self._process.wait()
        self.kill()  # what it left behind in its session
        await asyncio.wait(self._tasks, timeout=1.0)
        for task in self._tasks:
            task.cancel()
        return code

    async def stop(self) -> int:
        """SIGTERM, and SIGKILL after the grace time."""
        if self.running:
            self._process.send_signal(signal.SIGTERM)
            try:
                async with asyncio.timeout(self.spec.grace_s):
                    await self._process.wait()
            except TimeoutError:
                self._say(f"did not end within {self.spec.grace_s:g} s: killed")
                self.kill()
        return await self.wait()

    def kill(self) -> None:
        """SIGKILL to the whole session of the process."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            return

    def cause(self, code: int) -> str:
        """Why it ended, in its own words where it has any."""
        how = f"ended with code {code}" if code >= 0 else f"was killed by {_signal_name(-code)}"
        lines = [line for line in self._last_lines if line.strip()]
        words = [line for line in lines if line.lower().startswith("error:")] or lines
        return f"{how}: {words[-1].removeprefix('error:').strip()}" if words else how

    @property
    def last_words(self) -> str:
        return self._last_lines[-1].strip() if self._last_lines else "it has said nothing"

    async def _read_output(self) -> None:
        stream = self._process.stdout
        assert stream is not None
        while True:
            try:
                raw = await stream.readline()
            except ValueError:  # a line beyond the limit: it is skipped, not the process
                continue
            if not raw:
                return
            line = raw.decode("utf-8", errors="replace").rstrip()
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
